"""The processes that send a run's records to its trackers while it trains (track.py), one each, so
that one that hangs stops no other.

They are sessions of their own, which Ctrl-C does not reach, and end after the run, whatever ends
it, because their standard input ends then.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jaxtrain.config import is_choice
from jaxtrain.run.files import fresh, warned

FOLDER = "trackers"  # in the run's folder; NAME.log there is what a tracker prints
LAST_S = 30  # seconds in which a tracker has to take the rest when the run has ended


def fault_of(name: str) -> str:
    """The reason why an item of metrics.trackers cannot work, in words that follow it; "" if there
    is none. A file of one's own is not looked at."""
    if not is_choice("metrics.trackers", name):
        return "is none of wandb, trackio, mlflow and FILE.py:CLASS"
    is_here = ":" in name or importlib.util.find_spec(name) is not None
    return "" if is_here else f"needs a package that is not installed: pip install {name}"


class Followers:
    """The processes of a run's trackers.

    Args:
      folder: the run's, with its config.json.
      names: metrics.trackers; () in the processes that keep no log.
      log: gets a line when a tracker has ended before it had everything.
    """

    def __init__(self, folder: pathlib.Path, names: Sequence[str], log: Callable[[str], object]):
        self._running: list[tuple[subprocess.Popen, threading.Thread]] = []
        # as this process finds its modules, whatever is in the present folder
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        for name in names:
            output = folder / FOLDER / f"{name.replace('/', '_')}.log"
            with warned(output, log):
                output.parent.mkdir(exist_ok=True)
                with open(fresh(output), "wb") as file:
                    process = subprocess.Popen(
                        [
                            *(sys.executable, "-P", "-m", "jaxtrain.experiments.track"),
                            *(str(folder), f"--to={name}", "--follow"),
                        ],
                        stdin=subprocess.PIPE,
                        stdout=file,
                        stderr=file,
                        env=os.environ | {"PYTHONPATH": path},
                        start_new_session=True,
                    )
                thread = threading.Thread(
                    target=_attend, args=(process, name, output, log), daemon=True
                )
                thread.start()
                self._running.append((process, thread))

    def close(self) -> None:
        """Lets the trackers take the rest, in LAST_S seconds."""
        for process, _ in self._running:
            process.stdin.close()  # type: ignore[union-attr]
        end = time.monotonic() + LAST_S
        for process, thread in self._running:
            thread.join(max(0.0, end - time.monotonic()))
            process.kill()
            thread.join()


def _attend(
    process: subprocess.Popen, name: str, output: pathlib.Path, log: Callable[[str], object]
) -> None:
    """Waits for the end of a tracker's process, and says why it has ended."""
    if status := process.wait():
        said = output.read_text(errors="replace").strip().rpartition("\n")[2]
        why = said.removeprefix("error: ") if status > 0 else f"by signal {-status}"
        log(
            f"warning: the tracker {name} has ended ({why}): jaxtrain track {output.parents[1]} "
            f"--to={name} sends it the rest"
        )
