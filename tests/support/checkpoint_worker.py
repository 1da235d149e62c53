"""One process of the checkpoint tests that need processes of their own. Not a test: see
test_checkpoint_processes.py.

python checkpoint_worker.py FOLDER kill WHEN
    save step 2 and be killed during it
python checkpoint_worker.py FOLDER failing PROCESSES INDEX PORT LAYOUT…
    save steps 1 and 2, of which the last process fails some
python checkpoint_worker.py FOLDER next PROCESSES INDEX PORT STEP LAYOUT…
    restore STEP, compare, save STEP + 1
python checkpoint_worker.py FOLDER locally MISHAP PROCESSES INDEX PORT LAYOUT…
    save steps 5, 10 and 15 in FOLDER/machine-INDEX, have a mishap, restore the newest but 15,
    compare, say which
"""

import errno
import os
import pathlib
import shutil
import signal
import sys

import jax
from etils import epath

from jaxtrain.checkpoint import saving, storage
from jaxtrain.checkpoint.local import LocalCheckpointer, run_name
from jaxtrain.checkpoint.local_restore import LocalFiles
from jaxtrain.checkpoint.steps import CheckpointError, read_meta
from jaxtrain.devices import cluster
from support.checkpoint_state import (
    Layout,
    assert_same,
    checkpointer,
    latest_step,
    meta_of,
    restored,
    shards_of,
    state,
)


def kill(folder: str, when: str):
    """Begins to save step 2, and dies half way through the files, when they are written, or at
    once."""
    layout = Layout(7, stages=2, chunks=2, data=2, model=2)
    write = storage._write

    async def dying(values, infos):
        if when == "during":
            await write(values[: len(values) // 2], infos[: len(values) // 2])
        else:
            await write(values, infos)
        if when != "unfinished":
            os.kill(os.getpid(), signal.SIGKILL)

    storage._write = dying
    c = checkpointer(folder, layout)
    c.save(2, state(layout), meta_of(2))
    if when == "unfinished":
        os._exit(9)
    c.wait()


def next_step(folder: str, processes: str, index: str, port: str, step: str, *layout: str):
    """Restores a step with several processes, compares it, and saves the next one."""
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    layout = Layout(*map(int, layout))
    c = checkpointer(folder, layout)
    assert latest_step(folder) == int(step)
    assert read_meta(folder, int(step)) == {"step": int(step)}
    numbers = restored(folder, int(step), layout)
    assert_same(numbers, state(layout))
    assert c.save(int(step) + 1, numbers, {"step": int(step) + 1})
    c.close()
    assert latest_step(folder) == int(step) + 1


def locally(folder: str, mishap: str, processes: str, index: str, port: str, *layout: str):
    """Each process is a machine of its own. mishap: "none", "swap" of the two machines' folders,
    "damage-I" to step 10 of, or "loss-I"."""
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    laid_out, run, machine = (
        Layout(*map(int, layout)),
        pathlib.Path(folder) / "run",
        pathlib.Path(folder) / f"machine-{index}",
    )

    name = cluster.from_main(
        lambda: run_name(run, epath.Path(run / "checkpoints")), CheckpointError
    )
    shards = shards_of(laid_out)
    local = LocalCheckpointer(machine / name, shards, "start", 0, print)
    for step in (5, 10, 15):
        local.save(step, state(laid_out), {"step": step})
    local.close()
    cluster.barrier("saved")
    if mishap == f"loss-{index}":
        shutil.rmtree(machine)
    elif mishap == f"damage-{index}":
        (path,) = machine.rglob("10")
        with path.open("r+b") as file:
            file.seek(100)
            file.write(bytes(10))
    elif mishap == "swap" and index == "0":
        for old, new in [
            ("machine-0", "aside"),
            ("machine-1", "machine-0"),
            ("aside", "machine-1"),
        ]:
            (machine.parent / old).rename(machine.parent / new)
    cluster.barrier("after the mishap")

    files = LocalFiles(machine / name, shards)
    with jax.set_mesh(laid_out.mesh):
        found = files.restore(
            files.candidates(0, 100, lambda meta: "it is odd" if meta.step == 15 else "")
        )
    if found is None:
        print("restored nothing")
        return
    expected = state(laid_out)
    assert_same(jax.tree.unflatten(jax.tree.structure(expected), found.leaves), expected)
    assert found.meta.step == found.step
    print(f"restored step {found.step}, {found.source}")


def failing(folder: str, processes: str, index: str, port: str, *layout: str):
    """The last process cannot write at its first two attempts, and then not at all any more once
    step 1 is saved."""
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    saving.RETRY_WAITS_S = (0.01, 0.01, 0.01)
    write, attempts = storage._write, []

    async def some(values, infos):
        attempts.append(1)
        if int(index) == int(processes) - 1 and len(attempts) != 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        await write(values, infos)

    storage._write = some
    layout, said = Layout(*map(int, layout)), []
    c = checkpointer(folder, layout, log=said.append)
    assert c.save(1, state(layout), {"step": 1})
    c.wait()
    assert c.save(2, state(layout), {"step": 2})
    try:
        c.wait()
    except CheckpointError as error:
        assert str(error).startswith(
            "step 2, the last of this run, is not saved: No space left on device (4 attempts in "
        ), error
    else:
        raise AssertionError("nobody was told")
    c.close()
    assert len(attempts) == 3 + 4 and not said
    assert latest_step(folder) == 1


if __name__ == "__main__":
    {"kill": kill, "failing": failing, "next": next_step, "locally": locally}[sys.argv[2]](
        sys.argv[1], *sys.argv[3:]
    )
