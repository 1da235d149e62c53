"""python -m support.lock_loser LOSS: a run that loses the lock of the folder `run` at its first
start, and finishes at its second.

LOSS is `gone` (somebody removes the lock) or `taken` (another run takes it over). Further flags, as
of a launcher, are ignored.
"""

import pathlib
import sys
import time

from jaxtrain.run import run_lock
from jaxtrain.run.run_lock import Holder, Process, RunLock


def main(loss: str) -> int:
    run_lock.BEAT_S = 0.05
    folder = pathlib.Path("run")
    lock = RunLock(folder)
    lock.take()
    if (folder / "started").exists():
        lock.release()
        return 0
    (folder / "started").touch()
    if loss == "gone":
        (folder / run_lock.NAME).unlink()
    else:
        (folder / run_lock.NAME).write_bytes(
            Holder(Process("elsewhere", "", "", 7, 70), "then", "0123", 1.0).line(5)
        )
    time.sleep(60)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
