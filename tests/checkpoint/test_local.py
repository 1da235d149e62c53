"""Checkpoints in machines' own folders: the files, what damage does, what is kept; restoring in one
process. Several: at the end."""

import errno
import math
import pathlib
import shutil
import zlib

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec as P
from support.checkpoint_processes import run_together
from support.checkpoint_state import Layout, assert_same, shards_of, state

from jaxtrain.checkpoint import local
from jaxtrain.checkpoint.local import (
    DamagedError,
    LocalCheckpointer,
    files_of,
    read_index,
    read_shard,
    run_name,
)
from jaxtrain.checkpoint.local_restore import LocalFiles, Restored, give_copies
from jaxtrain.checkpoint.regions import Leaf

LAYOUT = Layout(7, stages=2, chunks=2, data=2, model=2)


def saver(
    folder: pathlib.Path, after: int = 0, said: list | None = None, process: int = 0
) -> LocalCheckpointer:
    say = (lambda line: pytest.fail(line)) if said is None else said.append
    return LocalCheckpointer(folder, shards_of(LAYOUT), "start", after, say, process)


def save(folder: pathlib.Path, *steps: int, **arguments) -> None:
    c = saver(folder, **arguments)
    for step in steps:
        c.save(step, state(LAYOUT), {"step": step})
    c.close()


def run_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder on the machine of the run whose own folder is beside the machine's."""
    run = folder / "run"
    return folder / "machine" / run_name(run, epath.Path(run / "checkpoints"))


def save_in_run(folder: pathlib.Path, *steps: int) -> None:
    save(run_folder(folder), *steps)


def restored(
    folder: pathlib.Path, layout: Layout = LAYOUT, after: int = 0, before: int = 100
) -> Restored | None:
    files = LocalFiles(run_folder(folder), shards_of(layout))
    with jax.set_mesh(layout.mesh):
        return files.restore(files.candidates(after, before, lambda meta: ""))


def assert_is_the_state(found: Restored) -> None:
    expected = state(LAYOUT)
    assert_same(jax.tree.unflatten(jax.tree.structure(expected), found.leaves), expected)


def machine_files(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """step → its file, of the one run and process."""
    (run,) = (folder / "machine").iterdir()
    return {step: path for path, step in files_of(run)}


def test_a_file_has_each_shard_once(tmp_path):
    save(tmp_path, 5)
    ((path, step),) = files_of(tmp_path)
    index, shards = read_index(path), shards_of(LAYOUT)
    assert (step, index.start, index.meta) == (5, "start", {"step": 5})
    assert set(index.places) == set(shards.devices)
    numbers = sum(
        math.prod(shard.shape) * shards.dtype(shard.leaf).itemsize for shard in shards.devices
    )
    assert sum(place.size for place in index.places.values()) == numbers
    assert numbers < path.stat().st_size < numbers + 200 * len(index.places) + 1000
    for shard, place in index.places.items():
        leaf = jax.tree.leaves(state(LAYOUT))[shard.leaf]
        expected = np.asarray(leaf)[tuple(slice(*b) for b in shard.bounds)]
        assert read_shard(place, shard, shards.dtype(shard.leaf)).tobytes() == expected.tobytes()


def test_the_newest_two_are_kept_beside_the_one_that_is_written(tmp_path, monkeypatch):
    """Those of other processes, of earlier starts, go when they are older than all of these."""
    save(tmp_path, 1, process=3)
    seen, write = [], local._write_file

    def writing(*arguments):
        seen.append(
            sorted(
                int(path.name) for path in (tmp_path / "process-0").iterdir() if path.name.isdigit()
            )
        )
        write(*arguments)

    monkeypatch.setattr(local, "_write_file", writing)
    c = saver(tmp_path, after=1)
    for step in range(5, 30, 5):
        c.save(step, state(LAYOUT), {})
    c.close()
    assert seen == [[], [5], [5, 10], [10, 15], [15, 20]]
    assert [step for _, step in files_of(tmp_path)] == [15, 20, 25]


@pytest.mark.parametrize("linked", ["", "process-0", "process-3"])
def test_nothing_is_written_or_removed_through_a_link(tmp_path, linked):
    """A link in place of the run's folder on a machine, or of a process's."""
    other, run = tmp_path / "other", tmp_path / "run"
    save(other, 5, 30, process=int(linked[-1:] or 0))
    target = other / linked
    (run / linked).parent.mkdir(exist_ok=True)
    (run / linked).symlink_to(target)
    before = sorted(other.rglob("*"))
    c = saver(run, after=10)
    for step in (15, 20, 25):
        c.save(step, state(LAYOUT), {})
    c.give_up(20)
    c.close()
    assert sorted(other.rglob("*")) == before
    assert [step for _, step in files_of(run)] == [15, 20]


@pytest.mark.parametrize("index", [b"[" * 10**5, b'{"places": 1' + b"0" * 400 + b"}", b"[]", b"{}"])
def test_an_index_that_jaxtrain_does_not_write(tmp_path, index):
    """Its checksum is right."""
    path = tmp_path / "5"
    path.write_bytes(index + local._TAIL.pack(len(index), zlib.crc32(index), local.MAGIC))
    with pytest.raises(DamagedError, match="has an index that jaxtrain does not write"):
        read_index(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DamagedError, match="it is a device, not a file"):
        read_index(path)


def test_what_a_start_does_not_go_on_from_is_removed(tmp_path):
    save(tmp_path, 5, 10, 15)
    (tmp_path / "process-0" / ".20").write_bytes(b"half")
    c = saver(tmp_path, after=10)
    assert [step for _, step in files_of(tmp_path)] == [5, 10] and len(
        list((tmp_path / "process-0").iterdir())
    ) == 2
    c.give_up(5)
    assert [step for _, step in files_of(tmp_path)] == [5]
    c.forget()
    assert not tmp_path.exists()
    c.close()


def test_a_save_copies_before_it_returns(tmp_path, monkeypatch):
    """The arrays may be donated while the file is written."""
    write = local._write_file
    numbers = state(LAYOUT)

    def writing(*arguments):
        jax.tree.map(lambda array: array.delete(), numbers)
        write(*arguments)

    monkeypatch.setattr(local, "_write_file", writing)
    c = saver(tmp_path)
    c.save(5, numbers, {})
    c.close()
    assert read_index(files_of(tmp_path)[0][0]).places


def test_a_full_disk_costs_a_line_and_nothing_else(tmp_path, monkeypatch):
    """Said once for as long as it lasts; what was saved before stays."""
    save(tmp_path, 5)
    said, write, full = [], local._write_file, [True]

    def writing(*arguments):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(local, "_write_file", writing)
    c = saver(tmp_path, after=5, said=said)
    for step in (10, 15, 20):
        if step == 20:
            c.wait()
            full.clear()
        c.save(step, state(LAYOUT), {})
    c.close()
    assert len(said) == 1 and said[0].startswith(
        "warning: local checkpoint 10 is not written (No space left on device; "
    )
    assert [step for _, step in files_of(tmp_path)] == [5, 20]
    assert all(path.name.isdigit() for path in (tmp_path / "process-0").iterdir())


# --- restoring ------------------------------------------------------------------------------------


def test_the_newest_within_bounds_is_restored(tmp_path, capsys):
    save_in_run(tmp_path, 5, 10, 15)
    for bounds, step in [((0, 100), 15), ((0, 15), 10), ((14, 16), 15)]:
        found = restored(tmp_path, after=bounds[0], before=bounds[1])
        assert (found.step, found.meta.step) == (step, step)
        assert_is_the_state(found)
    assert f"which this machine still has in {tmp_path}/machine/run-" in found.source
    for bounds in [(15, 100), (0, 5)]:
        assert restored(tmp_path, after=bounds[0], before=bounds[1]) is None
    assert capsys.readouterr().err == ""


def test_every_damage_is_found_and_the_one_before_restored(tmp_path, capsys):
    """A byte at each of many places, cut at many lengths, gone, empty. Nothing damaged is ever
    restored."""
    save_in_run(tmp_path, 10, 15)
    path = machine_files(tmp_path)[15]
    whole = path.read_bytes()
    places = np.linspace(0, len(whole) - 1, 23).astype(int)
    flipped = [whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :] for at in places]
    for content in [*flipped, *(whole[:at] for at in places[::4]), b"", None]:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        found = restored(tmp_path)
        output = capsys.readouterr()
        assert found.step == 10
        assert_is_the_state(found)
        assert (str(path) in output.err) == (content is not None)
    path.write_bytes(whole)
    assert restored(tmp_path).step == 15
    with pytest.raises(DamagedError, match="cannot be read"):
        read_index(path.with_name("99"))


def test_another_layout_or_run_restores_nothing(tmp_path, capsys):
    save_in_run(tmp_path, 5)
    assert (
        restored(tmp_path, Layout(7, stages=2, chunks=2, data=2, model=2, scatters=False)) is None
    )
    line = "the local checkpoint of step 5 is not used: it is of another mesh or model\n"
    assert capsys.readouterr().out == line
    shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    shutil.copytree(tmp_path / "machine", tmp_path / "other" / "machine")
    assert restored(tmp_path / "other") is None, "a copy of a run is another run"
    assert restored(tmp_path).step == 5
    shutil.rmtree(tmp_path / "run")
    assert restored(tmp_path) is None, "its checkpoints were deleted: it begins anew"
    assert len(list((tmp_path / "machine").iterdir())) == 1, "what other runs have left stays"


def test_a_reason_not_to_go_on_is_said(tmp_path, capsys):
    save_in_run(tmp_path, 5, 10)
    files = LocalFiles(run_folder(tmp_path), shards_of(LAYOUT))
    candidates = files.candidates(
        0, 100, lambda meta: "its data have changed" if meta.step == 10 else ""
    )
    assert [saved.step for saved in candidates] == [5]
    assert (
        capsys.readouterr().out
        == "the local checkpoint of step 10 is not used: its data have changed\n"
    )


SHARDINGS = [
    ((4, 6), P("data"), np.float32),
    ((8, 2), P("stage", "model"), np.int32),
    ((), P(), np.int32),
    ((4,), P(None), "bfloat16"),
]


@pytest.mark.parametrize("shape, spec, dtype", SHARDINGS, ids=lambda value: str(value))
def test_copies_are_given_bit_for_bit(shape, spec, dtype):
    """Devices that lost their shard get the numbers of the first that has it, not-a-numbers and
    negative zeros too."""
    mesh = Layout(7, stages=2, data=2, model=2).mesh
    sharding, dtype = NamedSharding(mesh, spec), jax.numpy.dtype(dtype)
    chance = np.random.default_rng(0)
    numbers = np.frombuffer(chance.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    whole = jax.device_put(numbers, sharding)
    groups: dict = {}
    for shard in whole.addressable_shards:
        groups.setdefault(str(shard.index), []).append(shard)
    kept = {shard.device: shard.data for shards in groups.values() for shard in shards[1:]}
    leaf = Leaf(0, None, shape, sharding)
    given = give_copies(leaf, dtype, kept, {shards[1].device for shards in groups.values()})
    assert given.sharding == sharding and given.dtype == dtype
    for shard in given.addressable_shards:
        assert (
            np.asarray(shard.data).tobytes() == np.ascontiguousarray(numbers[shard.index]).tobytes()
        )


# --- several processes ----------------------------------------------------------------------------


# layers, stages, chunks, data, model, padded, replicas, scatters
COPIED, SCATTERED = (7, 1, 1, 2, 1, 16, 1, 0), (7, 1, 1, 2, 1, 16, 1, 1)


def run_processes(folder: pathlib.Path, mishap: str, layout: tuple[int, ...]) -> list[str]:
    """The output of two processes, each a machine with one device, that save, have a mishap and
    restore."""
    return run_together(folder, ["locally", mishap], 2, *layout, devices=1)


def test_a_replaced_machine_gets_its_shards_from_the_other(tmp_path):
    main, other = run_processes(tmp_path, "loss-1", COPIED)
    assert "the local checkpoint of step 15 is not used: it is odd" in main.splitlines()
    for output in (main, other):
        assert (
            "restored step 10, which the machines still have in" in output
            and "bytes of it came from other processes" in output
        )


@pytest.mark.full
@pytest.mark.parametrize("gone", [0, 1])
def test_what_nobody_has_is_not_restored(tmp_path, gone):
    outputs = run_processes(tmp_path, f"loss-{gone}", SCATTERED)
    for step in (5, 10, 15):
        assert f"the local checkpoint of step {step} is not used: no machine has" in outputs[0]
    assert f"for process {gone}" in outputs[0]
    assert all("restored nothing" in output for output in outputs)


@pytest.mark.full
def test_nothing_moves_where_nothing_is_lost(tmp_path):
    for output in run_processes(tmp_path, "none", SCATTERED):
        assert "restored step 10" in output and "came from other processes" not in output


@pytest.mark.full
def test_machines_may_be_numbered_anew(tmp_path):
    """A file is of whoever finds it. Where moments are scattered each machine then has what the
    other one needs, and nothing is used."""
    for output in run_processes(tmp_path, "swap", COPIED):
        assert "restored step 10" in output and "came from other processes" not in output


@pytest.mark.full
def test_a_damaged_shard_comes_from_the_other_machine(tmp_path):
    main, other = run_processes(tmp_path, "damage-1", COPIED)
    assert "passed over: " in other and "is damaged at bytes" in other
    assert "restored step 10" in main and "came from other processes" in main
