"""One process of the checkpoint tests that need processes of their own. Not a test: see test_checkpoint_processes.py.

python checkpoint_worker.py FOLDER kill WHEN                  save step 2 and be killed during it
python checkpoint_worker.py FOLDER next PROCESSES INDEX PORT STEP LAYOUT…    restore STEP, compare, save STEP + 1
"""

import os
import signal
import sys

import jax

from jaxtrain.checkpoint import storage
from jaxtrain.checkpoint.manager import Checkpointer
from support.checkpoint_state import Layout, abstract_state, assert_same, state, stored_shapes


def kill(folder: str, when: str):
    """Begins to save step 2, and dies half way through the files, when they are written, or at once."""
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
    c = Checkpointer(folder, layout.placement, stored_shapes(layout))
    c.save(2, state(layout), {})
    if when == "unfinished":
        os._exit(9)
    c.wait()


def next_step(folder: str, processes: str, index: str, port: str, step: str, *layout: str):
    """Restores a step with several processes, compares it, and saves the next one."""
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    layout = Layout(*map(int, layout))
    c = Checkpointer(folder, layout.placement, stored_shapes(layout))
    assert c.latest_step() == int(step)
    assert c.read_meta(int(step)) == {"step": int(step)}
    restored = c.restore(int(step), abstract_state(layout))
    assert_same(restored, state(layout))
    assert c.save(int(step) + 1, restored, {"step": int(step) + 1})
    c.close()
    assert c.latest_step() == int(step) + 1


if __name__ == "__main__":
    {"kill": kill, "next": next_step}[sys.argv[2]](sys.argv[1], *sys.argv[3:])
