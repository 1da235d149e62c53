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
        self._folder, self._log = folder, log
        self._running: dict[str, tuple[subprocess.Popen, threading.Thread]] = {}
        for name in names:
            self._start(name)

    def _start(self, name: str) -> None:
        output = self._folder / FOLDER / f"{name.replace('/', '_')}.log"
        words = ["jaxtrain.experiments.track", str(self._folder), f"--to={name}", "--follow"]
        # as this process finds its modules, whatever is in the present folder
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        with warned(output, self._log):
            output.parent.mkdir(exist_ok=True)
            with open(fresh(output), "wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *words],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    env=os.environ | {"PYTHONPATH": path},
                    start_new_session=True,
                )
            attend = (name, process, output)
            thread = threading.Thread(target=self._attend, args=attend, daemon=True)
            thread.start()
            self._running[name] = process, thread

    def _attend(self, name: str, process: subprocess.Popen, output: pathlib.Path) -> None:
        if status := process.wait():
            said = output.read_text(errors="replace").strip().rpartition("\n")[2]
            why = said.removeprefix("error: ") if status > 0 else f"by signal {-status}"
            rest = f"jaxtrain track {self._folder} --to={name} sends it the rest"
            self._log(f"warning: the tracker {name} has ended ({why}): {rest}")

    def close(self) -> None:
        """Lets the trackers take the rest, in LAST_S seconds and a few. One that has ended begins
        again."""
        for name, (process, _) in list(self._running.items()):
            if process.poll():
                self._start(name)
        for process, _ in self._running.values():
            process.stdin.close()  # type: ignore[union-attr]
        end = time.monotonic() + LAST_S + 2
        for process, thread in self._running.values():
            thread.join(max(0.0, end - time.monotonic()))
            process.kill()
            thread.join()
