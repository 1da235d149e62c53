"""Checkpoints in object stores: what TensorStore and Orbax are told, and, against a real
S3-compatible server, saving and failing."""

import json
import os
import sys
import time

import pytest
from support import object_store
from support.checkpoint_state import (
    Layout,
    assert_same,
    checkpointer,
    latest_step,
    meta_of,
    restored,
    state,
)

from jaxtrain import generate_command as generate
from jaxtrain.checkpoint import __main__ as command, manifest, saving, steps, stores
from jaxtrain.checkpoint.steps import CheckpointError, choose, step_numbers
from jaxtrain.config import addresses

LAYOUT, OTHER = Layout(7, stages=2, chunks=2, data=2, model=2), Layout(7, stages=4, data=2)


def test_a_folder_or_a_place_in_a_store(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    assert stores.kvstore("/a/b") == {"driver": "file", "path": "/a/b/"}
    google, amazon = stores.kvstore("gs://bucket/a/b"), stores.kvstore("s3://bucket/a/b/")
    assert [google[name] for name in ("driver", "bucket", "path")] == ["gcs", "bucket", "a/b/"]
    assert [amazon[name] for name in ("driver", "bucket", "path")] == ["s3", "bucket", "a/b/"]
    assert "endpoint" not in amazon and "aws_credentials" not in amazon
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    amazon = stores.kvstore("s3://bucket/a")
    assert (amazon["endpoint"], amazon["aws_region"], amazon["aws_credentials"]) == (
        "http://here:1",
        "eu-1",
        {"type": "environment"},
    )
    assert [stores.scheme_of(path) for path in ("s3://a", "gs://a/b", "/a", "a:/b")] == [
        "s3",
        "gs",
        "",
        "",
    ]


def test_orbax_knows_s3():
    """In all the ways that it builds specs: to write, to join what processes have written, to
    read."""
    from orbax.checkpoint._src.serialization import tensorstore_utils as orbax

    stores._teach_orbax()
    stores._teach_orbax()
    place = stores.kvstore("s3://bucket/run/5/state")
    spec = orbax.build_kvstore_tspec("s3://bucket/run/5/state", use_ocdbt=True)
    assert (
        spec["driver"] == "ocdbt" and spec["base"] == place and spec.get("manifest", place) == place
    )
    spec = orbax.build_kvstore_tspec(
        "s3://bucket/run/5/state", "a.b", use_ocdbt=True, ocdbt_process_spec=None
    )
    assert spec["path"] == "a.b" and spec["base"] == place
    assert "s3" not in str(orbax.build_kvstore_tspec("/run/5/state", use_ocdbt=True))


class Listing:
    """A folder of a store whose listing is what a function gives; its library says that it is no
    folder."""

    def __init__(self, names):
        self.iterdir = names

    def __fspath__(self) -> str:
        return "gs://bucket/run"

    def is_dir(self) -> bool:
        return False


def forbidden():
    raise PermissionError("Forbidden: b/bucket/o")


def absent():
    raise FileNotFoundError("bucket/run")


def test_a_store_that_does_not_say_what_is_there_is_no_empty_one():
    assert stores.is_folder(Listing(lambda: iter(["5"]))) and not stores.is_folder(Listing(absent))
    with pytest.raises(
        CheckpointError, match=r"^gs://bucket/run cannot be read \(Forbidden: b/bucket/o\)$"
    ):
        with steps.read_errors("gs://bucket/run"):
            stores.is_folder(Listing(forbidden))


NEEDS = "needs the package s3fs, which is not installed: pip install 'jaxtrain[s3]'"
# what is not the address of a store, or one whose package is not installed → what every command
# says of it
ADDRESSES = {
    "foo://x": "is in an unknown store",
    "http://bucket/run": "is in an unknown store",
    "file:///x/run": "is not the address of a store: use PLACE/x/run",
    "S3://bucket/run": "is not the address of a store",
    "s3:/bucket/run": "is not the address of a store",
    "s3://": "is not a folder in a bucket",
    "s3://bucket": "is not a folder in a bucket",
    "s3://bucket/run": NEEDS,
}


@pytest.mark.parametrize("place", ADDRESSES)
def test_an_address_that_cannot_be_used(place, monkeypatch, capsys, tmp_path):
    """One line and status 2, in the same words from every command. Training: tests/config and
    tests/test_places.py."""
    monkeypatch.setattr(addresses, "_is_installed", lambda store: False)
    monkeypatch.chdir(tmp_path)
    rule = ADDRESSES[place]
    for name in ("ls", "verify", "show", "diff", "prune"):
        argv = [
            name,
            place,
            *(["elsewhere"] if name == "diff" else []),
            *(["--keep=1"] if name == "prune" else []),
        ]
        assert command.main(argv) == 2
        assert capsys.readouterr() == ("", f"error: {place!r} {rule.replace('PLACE', '')}\n")
    assert generate.main([f"--workdir={place}"]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: --workdir={place!r} {rule.replace('PLACE', '--workdir=')}\n",
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"checkpoint": {"directory": place}}))
    assert (
        command.main(["ls", "run"]) == 2
        and f"error: {place!r} {rule}".replace("PLACE", "") in capsys.readouterr().err
    )


# --- with a server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(object_store.PACKAGES))
        with object_store.ObjectStore(tmp_path_factory.mktemp("store")) as store:
            for name, value in store.environment.items():
                patch.setenv(name, value)
            yield store
        for name in [name for name in sys.modules if name.partition(".")[0] == "s3fs"]:
            del sys.modules[name]


@pytest.fixture
def directory(server, request):
    return f"s3://{server.bucket}/{request.node.name}"


def with_marks(test):
    for mark in object_store.needed:
        test = mark(test)
    return test


@with_marks
def test_save_restore_keep_and_set_aside(directory):
    """What a kill has left of a save is no step and nobody's loss; what is damaged gets another
    name."""
    trial = stores.folder(directory) / ".trial"
    manifest.try_step(trial)
    assert not any((trial / name).exists() for name in (manifest.FILE, "meta/metadata"))
    assert step_numbers(directory) == []
    folder, said = stores.folder(directory), []
    (folder / "2" / "meta" / "metadata").write_text("{}")  # a save that did not end
    assert step_numbers(directory) == [] and choose(directory, {}).unrecognized == ()
    c = checkpointer(directory, LAYOUT, keep=2, log=said.append)
    for step in (1, 2, 3):
        assert c.save(step, state(LAYOUT), meta_of(step))
    c.wait()
    c.close()
    assert (step_numbers(directory), latest_step(directory), said) == ([2, 3], 3, [])
    assert_same(restored(directory, 3, OTHER), state(OTHER))

    path = folder / "3" / "meta" / "metadata"
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    assert latest_step(directory) == 2
    broken = choose(directory, {}).unrecognized
    assert [(s.name, s.why) for s in broken] == [("3", "its meta is no JSON")]
    c = checkpointer(directory, LAYOUT, keep=5, broken=broken, log=said.append)
    c.save(4, state(LAYOUT), {"step": 4})
    c.close()
    assert (
        step_numbers(directory) == [2, 4]
        and len(said) == 1
        and "3 (its meta is no JSON) is now 3.broken-1" in said[0]
    )
    assert (folder / "3.broken-1" / "manifest.json").exists()


@with_marks
def test_a_store_that_fails_for_a_while(server, directory, monkeypatch):
    """A save that is under way ends well when the store is back; one that cannot says so, and the
    next succeeds."""
    monkeypatch.setattr(
        stores, "_RETRIES", {"max_retries": 1, "initial_delay": "100ms", "max_delay": "200ms"}
    )
    said: list[str] = []
    c = checkpointer(directory, LAYOUT, log=said.append)
    c.save(1, state(LAYOUT), {"step": 1})
    c.wait()
    server.stop()
    c.save(2, state(LAYOUT), {"step": 2})
    time.sleep(2)  # some attempts fail
    assert c.busy
    server.start()
    c.wait()
    assert step_numbers(directory) == [1, 2] and said == []

    server.stop()
    monkeypatch.setattr(saving, "RETRY_WAITS_S", (0.1,))
    c.save(3, state(LAYOUT), {"step": 3})
    while c.busy:
        time.sleep(0.1)
    assert (
        len(said) == 1
        and said[0].startswith("warning: step 3 is not saved: ")
        and "the newest checkpoint is 2 in s3://" in said[0]
    )
    server.start()
    c.save(4, state(LAYOUT), {"step": 4})
    c.wait()
    c.close()
    assert step_numbers(directory) == [1, 2, 4]

    server.stop()  # before the first save of another start
    other = checkpointer(directory, LAYOUT, log=said.append)
    assert not other.save(5, state(LAYOUT), {"step": 5})
    assert len(said) == 2 and said[1].startswith(
        "warning: step 5 is not saved: Could not connect to the endpoint URL"
    )
    with pytest.raises(
        CheckpointError, match="step 5, the last of this run, is not saved: Could not connect"
    ):
        other.wait()
    server.start()
    assert other.save(6, state(LAYOUT), {"step": 6})
    other.wait()
    assert_same(restored(directory, 4, LAYOUT), state(LAYOUT))


@with_marks
def test_a_store_that_cannot_be_used_is_told(server):
    with pytest.raises(Exception, match="The specified bucket does not exist") as raised:
        manifest.try_step(stores.folder("s3://nobody/run") / "trial")
    assert stores.failure(raised.value)
    server.stop()
    try:
        with pytest.raises(Exception, match="Could not connect to the endpoint URL") as raised:
            manifest.try_step(stores.folder(f"s3://{server.bucket}/run") / "trial")
        assert stores.failure(raised.value)
    finally:
        server.start()
