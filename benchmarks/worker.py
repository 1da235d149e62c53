"""Workers: parts of a benchmark that run in a process of their own. Standard library only.

A worker prints one line, `RESULT` and a JSON object, or `FAILED` and the reason as a JSON string of
one line. Its other output goes to a log.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "MemoryError")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a worker.

    result:  the worker's JSON object; None if it failed
    failure: the reason, in one line; "" without a failure
    seconds: those that its process took
    """

    result: dict | None
    failure: str
    seconds: float


def report_result(work: Callable[[], dict]) -> None:
    """Runs a worker's work and prints its result or its failure."""
    try:
        print("RESULT " + json.dumps(work()), flush=True)
    except Exception as error:  # whatever it is, the benchmark's other parts go on
        print("FAILED " + json.dumps(one_line(f"{type(error).__name__}: {error}")), flush=True)
        raise


def one_line(error: str) -> str:
    """An error's text for a table: "out of memory", or the first line of any other error."""
    if any(words in error for words in OUT_OF_MEMORY):
        return "out of memory"
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= 200 else line[:199] + "…"


def run_worker(
    command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path, limit: float
) -> Outcome:
    """Runs a worker for at most `limit` seconds; all that it prints goes to the file `log`."""
    began = time.monotonic()
    with log.open("w") as output:
        # A group of its own, so that what it has started (compilers) ends with it.
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit)
        except BaseException as error:  # Ctrl-C too: nothing is left running
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return Outcome(None, "stopped: the time is up", time.monotonic() - began)
            raise
    seconds = time.monotonic() - began
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        word, _, text = line.partition(" ")
        if word == "RESULT":
            return Outcome(json.loads(text), "", seconds)
        if word == "FAILED":
            return Outcome(None, json.loads(text), seconds)
    last = one_line(lines[-1]) if lines else "nothing was printed"
    return Outcome(None, f"ended with status {process.returncode}: {last}", seconds)
