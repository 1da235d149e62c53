"""The object store that tests of URLs stand on is a real one: it keeps what it has, refuses
strangers, and goes down and comes back."""

import urllib.error
import urllib.request

import pytest

from support.object_store import ObjectStore, needed

pytestmark = needed


def test_it_refuses_strangers_and_comes_back(tmp_path):
    store = ObjectStore(tmp_path)
    with store:
        url = f"{store.endpoint}/{store.bucket}/key"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url)
        assert store.environment["AWS_ENDPOINT_URL"] == store.endpoint
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url)
    with store, pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url)
