"""A folder with recipe and corpus, for the runs of a file."""

import pytest
from support import train_runs as runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    runs.write_inputs(folder)
    return folder
