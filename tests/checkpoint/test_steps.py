"""Which entries in a folder of checkpoints are complete steps, without jax: damage of every kind to
one made by hand."""

import errno
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zlib

import pytest
import tensorstore as ts
from etils import epath
from support import ROOT

from jaxtrain import config as configs
from jaxtrain.checkpoint import manifest, steps
from jaxtrain.checkpoint.manifest import DatabaseError, read_database
from jaxtrain.checkpoint.steps import (
    TO_TRAIN,
    CheckpointError,
    Meta,
    UnrecognizedEntry,
    choose,
    read_meta,
)

SHAPES = {"params/embed/table": (13, 8), "params/layers/mlp/w": (7, 8, 16), "step": ()}


def meta_of(step: int) -> dict:
    tokenizer = {"kind": "bytes"}
    meta = {
        "config": configs.to_dict(configs.Config().to_store()),
        "step": step,
        "checksum": "12" * 32,
        "tokenizer": tokenizer,
    }
    return json.loads(json.dumps(meta))


def describe(shape, piece) -> str:
    grid = {"chunk_grid": {"configuration": {"chunk_shape": piece}}}
    return json.dumps({"shape": shape, "zarr_format": 3} | grid)


def write_state(folder: pathlib.Path, without: str = "") -> None:
    """A database with a tree of several levels; most values are in a file of their own."""
    sizes = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 200}
    database = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{folder}/", "config": sizes}
    ).result()
    with ts.Transaction() as transaction:
        for name, shape in SHAPES.items():
            key, piece = name.replace("/", "."), (1, *shape[1:])[: len(shape)]
            database.with_transaction(transaction)[f"{key}/zarr.json"] = describe(shape, piece)
            for row in range(shape[0]) if shape else [()]:
                index = (row, 0, 0)[: len(shape)] if shape else ()
                at = "/".join([f"{key}/c", *map(str, index)])
                if at != without:
                    database.with_transaction(transaction)[at] = bytes(8 * math.prod(piece) + 4)


def write_step(folder: pathlib.Path, step: int) -> pathlib.Path:
    (folder / str(step) / "meta").mkdir(parents=True)
    (folder / str(step) / "meta" / "metadata").write_text(json.dumps(meta_of(step)))
    (folder / str(step) / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {}}')
    write_state(folder / str(step) / "state")
    manifest.write(epath.Path(folder / str(step)))
    return folder / str(step)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    for step in (9, 12):
        write_step(folder, step)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """Steps 9 and 12, both complete."""
    shutil.copytree(original, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_the_newest_by_number(folder):
    choice = choose(folder, TO_TRAIN)
    assert (choice.step, choice.meta, choice.steps, choice.unrecognized) == (
        12,
        Meta.from_json(meta_of(12)),
        (9, 12),
        (),
    )
    assert read_meta(folder, 9) == meta_of(9)
    assert read_database(epath.Path(folder / "12" / "state")).shapes == SHAPES
    assert choose(folder / "none", TO_TRAIN).step is None


def test_the_newest_before_a_step(folder):
    assert choose(folder, TO_TRAIN, before=13).step == 12
    assert (
        choose(folder, TO_TRAIN, before=12).step,
        choose(folder, TO_TRAIN, before=12).steps,
    ) == (9, (9,))
    assert choose(folder, TO_TRAIN, before=9).step is None


def test_what_is_no_step(folder):
    """Named, but for what a kill leaves, what was set aside before, and what is hidden."""
    for name in (
        "100",
        "notes",
        "07",
        "12.orbax-checkpoint-tmp",
        "12.orbax-checkpoint-tmp-3",
        "50.broken-1",
        ".nfs01",
        "１３",
    ):
        (folder / name).mkdir()
    (folder / "200").write_text("")
    (folder / "list.txt").write_text("")
    (folder / "300").symlink_to(folder / "nowhere")
    choice = choose(folder, TO_TRAIN)
    assert choice.step == 12
    assert str(choice) == (
        "100 (an empty folder), 200 (a file), 300 (a link to nothing), "
        "07 (no step's name), list.txt (no step's name), notes (no step's name), １３ (no "
        "step's name)"
    )
    assert not any(s.holds_data for s in choice.unrecognized)
    assert [s.step for s in choice.unrecognized] == [100, 200, 300, None, None, None, None]


def metadata(text: str):
    return lambda step: (step / "meta" / "metadata").write_text(text)


def changed(**values):
    """A meta with other values; None removes the key."""
    new = {k: v for k, v in (meta_of(12) | values).items() if v is not None}
    return metadata(json.dumps(new))


def files(step: pathlib.Path) -> list[pathlib.Path]:
    return sorted((step / "state" / "d").iterdir())


def cut(step: pathlib.Path) -> None:
    for file in files(step):
        os.truncate(file, file.stat().st_size - 1)


BROKEN = {
    "it has no meta": lambda step: shutil.rmtree(step / "meta"),
    "it has no meta ": lambda step: (step / "meta" / "metadata").unlink(),
    "it has no state": lambda step: shutil.rmtree(step / "state"),
    "its meta is no JSON": metadata('{"config": {"model"'),
    "its meta is no JSON ": metadata(""),
    "its meta is no JSON object": metadata("[1, 2]"),
    "its meta has no 'checksum'": changed(checksum=None),
    "its meta has no 'config'": changed(config=None),
    "its meta's 'config' is not an object": changed(config="tiny"),
    "its meta's 'step' is not an integer": changed(step="12"),
    "its meta is of step 9": changed(step=9),
    "its meta's config has no 'model'": changed(config={"data": {"seed": 1}}),
    "in its meta's config model.depth=3 is an unknown setting": changed(
        config={"model": {"depth": 3}, "data": {"seed": 1}}
    ),
    "in its meta's config model=3 is a group of settings, not a value": changed(
        config={"model": 3, "data": {"seed": 1}}
    ),
    "it has no manifest.json": lambda step: (step / "manifest.json").unlink(),
    "manifest.json is damaged": lambda step: (step / "manifest.json").write_text("{}"),
    "_CHECKPOINT_METADATA has 2 bytes of 21": lambda step: (
        step / "_CHECKPOINT_METADATA"
    ).write_text("[]"),
    "state/manifest.ocdbt is missing": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "state/d/": lambda step: shutil.rmtree(step / "state" / "d"),
    "state/manifest.ocdbt has 20 bytes of ": lambda step: os.truncate(
        step / "state" / "manifest.ocdbt", 20
    ),
    "state/d/ ": cut,
}

# of the database by itself, whose manifest has not been written yet
BROKEN_DATABASE = {
    "has no manifest.ocdbt": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "has no d": lambda step: shutil.rmtree(step / "state" / "d"),
    "is damaged": lambda step: os.truncate(step / "state" / "manifest.ocdbt", 20),
    "is damaged ": cut,
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_step_that_is_not_complete_is_passed_over(folder, why):
    BROKEN[why](folder / "12")
    choice = choose(folder, TO_TRAIN)
    assert (choice.step, choice.meta, choice.steps) == (9, Meta.from_json(meta_of(9)), (9,))
    (found,) = choice.unrecognized
    assert (found.name, found.step, found.holds_data) == ("12", 12, True)
    assert found.why.startswith(why.strip()), found.why
    assert "\n" not in str(choice)


def test_a_state_that_lacks_pieces_is_not_complete(folder, monkeypatch):
    """One of the processes has written elsewhere: no manifest is written; and a step that has one
    all the same is passed over."""
    shutil.rmtree(folder / "12" / "state")
    write_state(folder / "12" / "state", without="params.layers.mlp.w/c/6/0/0")
    with pytest.raises(DatabaseError, match=r"^lacks pieces of params\.layers\.mlp\.w$"):
        manifest.write(epath.Path(folder / "12"))
    with monkeypatch.context() as earlier:
        earlier.setattr(manifest, "shapes_of", lambda values: {})
        manifest.write(epath.Path(folder / "12"))
    choice = choose(folder, TO_TRAIN)
    assert str(choice) == "12 (its state lacks pieces of params.layers.mlp.w)" and choice.step == 9


def resealed(step: pathlib.Path, **files: manifest.StoredFile) -> None:
    """Adds files to a step's manifest, whose checksum is right."""
    listed = manifest.read(epath.Path(step))
    (step / "manifest.json").write_bytes(manifest._encode({**listed, **files}))


def linked(step: pathlib.Path, name: str, target) -> None:
    shutil.rmtree(step / name) if (step / name).is_dir() else (step / name).unlink()
    (step / name).symlink_to(target)


def listing(path: str):
    text = pathlib.Path(path).read_bytes() if os.path.isabs(path) else b"beside"
    return lambda step: (
        (step.parent / "beside").write_bytes(b"beside"),
        resealed(step, **{path: manifest.StoredFile(len(text), zlib.crc32(text), False)}),
    )


OUTSIDE = {
    "/etc/passwd cannot be read: it lies outside of ": listing("/etc/passwd"),
    "../beside cannot be read: it lies outside of ": listing("../beside"),
    "its meta cannot be read: it is a link to ": lambda step: linked(
        step, "meta/metadata", step.parent / "9/meta/metadata"
    ),
    "its meta cannot be read: it is a link to": lambda step: linked(step, "meta", "../9/meta"),
    "state/d/": lambda step: linked(step, "state", "../9/state"),
    "manifest.json cannot be read: it is a link to '/dev/zero', outside": lambda step: linked(
        step, "manifest.json", "/dev/zero"
    ),
    "manifest.json cannot be read: it is a FIFO, not a file": lambda step: (
        (step / "manifest.json").unlink(),
        os.mkfifo(step / "manifest.json"),
    ),
    "manifest.json cannot be read: it has more than": lambda step: os.truncate(
        step / "manifest.json", 10**12
    ),
    "_CHECKPOINT_METADATA cannot be read: it is a FIFO": lambda step: (
        (step / "_CHECKPOINT_METADATA").unlink(),
        os.mkfifo(step / "_CHECKPOINT_METADATA"),
    ),
    "manifest.json is damaged": lambda step: resealed(step, x=manifest.StoredFile("1", 2, False)),
    "manifest.json is damaged ": lambda step: resealed(
        step, **{"no\0name": manifest.StoredFile(1, 2, False)}
    ),
    " manifest.json is damaged": lambda step: resealed(
        step, **{"no\ud800name": manifest.StoredFile(1, 2, False)}
    ),
}


@pytest.mark.parametrize("why", OUTSIDE)
def test_nothing_outside_of_a_step_is_read_and_no_device(folder, why):
    OUTSIDE[why](folder / "12")
    choice = choose(folder, TO_TRAIN)
    assert choice.step == 9 and choice.unrecognized[0].why.startswith(why.strip()), str(choice)
    assert "outside of the folder" in str(choice) or not re.search("outside|link", why)


def test_a_step_in_a_hub_s_cache_is_complete(folder, tmp_path):
    """Each of its files is a link to a blob of that cache, and to no other one."""
    step = tmp_path / "models--a--b/snapshots/1f/checkpoints/12"
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    files = [path for path in (folder / "12").rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        link = step / file.relative_to(folder / "12")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(shutil.copy(file, blobs / str(number)))
    assert steps.fault(epath.Path(step)) == ""
    blobs.rename(tmp_path / "blobs")
    blobs.symlink_to(tmp_path / "blobs")
    assert "outside" in steps.fault(epath.Path(step))


def test_the_names_in_a_database_stay_in_its_step(folder, monkeypatch):
    dump = manifest.ts.ocdbt.dump

    class Dumped:
        def __init__(self, value):
            self.value = value

        def result(self):
            if "entries" not in self.value:
                return self.value
            entries = [
                entry | {"indirect_value": "value::../../9/state/manifest.ocdbt:0:4"}
                if "indirect_value" in entry
                else entry
                for entry in self.value["entries"]
            ]
            return self.value | {"entries": entries}

    monkeypatch.setattr(manifest.ts.ocdbt, "dump", lambda *a, **k: Dumped(dump(*a, **k).result()))
    with pytest.raises(DatabaseError, match="cannot be read: it lies outside of the folder$"):
        read_database(epath.Path(folder / "12" / "state"))


def test_links_inside_of_a_step_are_followed(folder):
    step = folder / "12"
    os.rename(step / "meta", step / "state" / "kept")
    (step / "meta").symlink_to("state/kept")
    (step / "manifest.json").unlink()
    manifest.write(epath.Path(step))
    assert choose(folder, TO_TRAIN).step == 12


def test_a_shape_without_bound_takes_no_memory():
    for shape, piece in (((10**15, 8), (1, 8)), ((2**40,), (2**40,))):
        values = [
            manifest.DatabaseValue("a/zarr.json", describe(shape, piece).encode()),
            manifest.DatabaseValue(f"a/c/0{'/0' * (len(shape) - 1)}", bytes(300)),
        ]
        with pytest.raises(DatabaseError, match="lacks pieces of a"):
            manifest.shapes_of(values)


@pytest.mark.parametrize("why", BROKEN_DATABASE)
def test_a_damaged_database_is_known_without_reading_numbers(folder, why):
    BROKEN_DATABASE[why](folder / "12")
    with pytest.raises(DatabaseError, match=f"^{why.strip()}"):
        read_database(epath.Path(folder / "12" / "state"))


def test_the_caller_s_own_check_is_asked_from_the_newest_on(folder):
    asked = []

    def wrong(meta, shapes):
        asked.append((meta.step, shapes))
        return "of another model" if meta.step == 12 else ""

    choice = choose(folder, TO_TRAIN, wrong)
    assert asked == [(12, SHAPES), (9, SHAPES)]
    assert choice.step == 9 and choice.unrecognized == (
        UnrecognizedEntry("12", "of another model", 12, holds_data=True),
    )


def test_nothing_complete(folder):
    for step in (9, 12):
        (folder / str(step) / "meta" / "metadata").unlink()
    choice = choose(folder, TO_TRAIN)
    assert (choice.step, choice.meta, choice.steps) == (None, Meta(), ()) and all(
        s.holds_data for s in choice.unrecognized
    )
    assert [entry.name for entry in choice.unrecognized] == ["9", "12"]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"checkpoints cannot be read \(Not a directory\): .* or use another --workdir",
    ):
        choose(tmp_path / "checkpoints", TO_TRAIN)


def test_what_may_not_be_read(folder, monkeypatch):
    listdir = os.listdir

    def refusing(path):
        if str(path).endswith("/12"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)  # root may read everything
    choice = choose(folder, TO_TRAIN)
    assert str(choice) == "12 (it cannot be read: Permission denied)" and choice.step == 9


def test_no_jax():
    program = "import sys, jaxtrain.checkpoint.steps; assert 'jax' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
