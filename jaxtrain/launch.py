"""`python -m jaxtrain.launch`: one run of several processes on this machine, started as on a
cluster.

    launcher ─┬─ [0] python -m jaxtrain.train … --coordinator=localhost:PORT --processes=2
              │          --process_id=0
              ├─ [1] python -m jaxtrain.train … --process_id=1
              └─ guard: kills both if the launcher is gone

The launcher prints every line of a process after the process's number, on the stream of the
process, an error that several processes end with once, and no line of gloo's that a group is
connected. When a process fails, the launcher stops the others and prints the last lines of the
failed one at the end, unless its error stands there already. No process outlives the launcher,
however it ends. With --restarts it starts all processes again if their exit status says that this
helps, like a cluster's engine. No jax.
"""

import collections
import contextlib
import difflib
import importlib.util
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import IO, TextIO

from jaxtrain import cli
from jaxtrain.config import UsageError, shown
from jaxtrain.config.flags import MOST_CPU_DEVICES, Flag, read_flags
from jaxtrain.devices import cluster_environment
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus

DESCRIPTION = """\
usage: jaxtrain launch [flags] -- [flags of the command]      (or python -m jaxtrain.launch …)

Runs a command as several processes of one run on this machine, such as
  jaxtrain launch --processes=2 --devices_per_process=4 -- --config=tiny --workdir=runs/two"""
MOST_PROCESSES = 1024  # on one machine, some 300 MB each
COMMANDS = tuple(
    f"jaxtrain.{name}" for name in ("train", "generate", "plan", "schedule", "checkpoint")
)
FLAGS = (
    Flag("processes", 2, "number of processes", 1, MOST_PROCESSES),
    Flag(
        "devices_per_process",
        0,
        "simulated CPU devices of each process; 0: an equal share of the machine's GPUs, or of 8 "
        "CPU devices",
        0,
        MOST_CPU_DEVICES,
    ),
    Flag(
        "restarts",
        0,
        "number of times to start the run again if it can continue: it was stopped or killed, "
        "has hung, or its storage failed",
        at_least=0,
    ),
    Flag("module", "jaxtrain.train", "module that each process runs, with `python -m`"),
)
ON_REQUEST = (ExitStatus.STOPPED, ExitStatus.INTERRUPTED)
LAST_LINES = 20  # lines repeated of the process that failed first
# printed for each device and group of devices, by C++ code that knows no level of its log
CONNECTED = re.compile(
    r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. "
    r"Expected number of connected peer ranks is : \1"
)
# seconds between a process's end and the killing of the others
FAILED_GRACE, SIGNALLED_GRACE = 5.0, 120.0
# The guard learns of the processes' groups by lines on its stdin. Its end without "done" means that
# the launcher died.
GUARD = """
groups=
while read -r word; do [ "$word" = done ] && exit 0; groups="$groups -$word"; done
for group in $groups; do kill -s KILL -- "$group"; done
"""


class Job:
    """The running processes, their output and their exit statuses."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[dict[str, str]],
        write: Callable[[str, TextIO], object] = lambda text, to: print(text, file=to, flush=True),
    ):
        """Starts one process per command, each the leader of a group of its own: a Ctrl-C of the
        terminal reaches the launcher alone. write: gets each line, and the stream that it is for"""
        self.write = write
        # number of the process, line, stream to print it on
        self.output: queue.Queue[tuple[int, str, TextIO]] = queue.Queue()
        self.tails = [
            {
                stream: collections.deque[str](maxlen=LAST_LINES)
                for stream in (sys.stdout, sys.stderr)
            }
            for _ in commands
        ]
        self.guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []
        self.ended: list[int] = []  # numbers of processes in the order of their ends
        self.errors: dict[str, int] = {}  # each error and the process that said it first
        self.last = ""  # the last line that was printed, if it is an error
        for number, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
                errors="replace",
            )
            self.processes.append(process)
            self._tell_guard(str(process.pid))
            for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                read = threading.Thread(target=self._read, args=(number, pipe, stream), daemon=True)
                self.readers.append(read)
                read.start()
            threading.Thread(target=self._wait, args=(number,), daemon=True).start()

    def send(self, number: int) -> None:
        """Sends a signal to every process's group, also to children that a dead process left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def statuses(self) -> list[int | None]:
        """Exit statuses by process, None where it runs; 128 + n for one that signal n ended."""
        codes = (process.poll() for process in self.processes)
        return [128 - code if code is not None and code < 0 else code for code in codes]

    def show(self, seconds: float) -> None:
        """Prints lines of the processes as they come, for some seconds; an error once, however
        many processes end with it."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (remaining := end - time.monotonic()) > 0:
                number, line, stream = self.output.get(timeout=remaining)
                if CONNECTED.fullmatch(line):
                    continue
                self.tails[number][stream].append(line)
                is_error = line.startswith("error: ")
                if is_error and self.errors.setdefault(line, number) != number:
                    continue  # it is about what processes share
                self.last = line if is_error else ""
                self.write(f"[{number}] {line}", stream)

    def last_lines(self, number: int) -> list[str]:
        """The last lines of a process, those of standard error after those of standard output,
        whichever came first."""
        return [line for tail in self.tails[number].values() for line in tail][-LAST_LINES:]

    def kill_and_show_rest(self) -> None:
        """Kills what still runs, and prints the remaining lines."""
        self.send(signal.SIGKILL)
        for reader in self.readers:
            reader.join(timeout=1)
        while not self.output.empty():
            self.show(seconds=0.05)

    def close(self) -> None:
        """Kills what still runs, and ends the guard."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self._tell_guard("done")
        self.guard.wait()

    def _read(self, number: int, pipe: IO[str], stream: TextIO) -> None:
        for line in pipe:
            self.output.put((number, line.rstrip("\n"), stream))

    def _wait(self, number: int) -> None:
        self.processes[number].wait()
        self.ended.append(number)

    def _tell_guard(self, word: str) -> None:
        assert self.guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.guard.stdin.write(word + "\n")
            self.guard.stdin.flush()


def watch(job: Job, signals: list[int]) -> int:
    """Prints the processes' lines until all have ended, and returns the status of the run: 0, or
    that of the first process that failed.

    signals: the numbers of the signals received so far; the first is passed on to the processes, so
    that they can save and stop, and a second one kills them. SIGHUP is passed on and never kills: a
    closed terminal sends it along with others.
    """
    passed_on, failed, deadline = 0, None, float("inf")
    while True:
        job.show(seconds=0.05)
        running = len(job.ended) < len(job.processes)
        statuses = job.statuses()
        if len(signals) > passed_on:
            passed_on += 1
            ends = sum(number != signal.SIGHUP for number in signals[:passed_on])
            job.send(signal.SIGKILL if ends > 1 else signals[passed_on - 1])
        if failed is None:
            ended = [(number, statuses[number]) for number in list(job.ended)]
            # One that stops on request has told the others to stop.
            if deadline == float("inf") and any(status in ON_REQUEST for _, status in ended):
                deadline = time.monotonic() + SIGNALLED_GRACE
            failures = (number for number, status in ended if status not in (0, *ON_REQUEST))
            failed = next(failures, None)
            if failed is not None:
                deadline = time.monotonic() + (SIGNALLED_GRACE if signals else FAILED_GRACE)
                if not signals:
                    job.send(signal.SIGTERM)
        if not running or time.monotonic() > deadline:
            break
    job.kill_and_show_rest()
    if failed is None:
        return max(filter(None, job.statuses()), default=ExitStatus.FINISHED)
    status = job.statuses()[failed] or ExitStatus.FAULT
    if not signals:
        lines = job.last_lines(failed)
        if status > 128:  # a killed process says nothing, but the others report that it is gone
            others = [line for n in range(len(job.tails)) for line in job.last_lines(n)]
            lines += [line for line in others if line.startswith("error: ")][-1:]
        title = f"process {failed} failed with status {status}"
        if not job.last or lines[-1:] != [job.last]:
            title = "\n".join([f"{title}; its last lines:", *lines])
        job.write(title, sys.stderr)
    return status


def received_signals() -> list[int]:
    """The numbers of the signals that ask this process to stop, added as they come from now on."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda received, frame: signals.append(received))
    return signals


def goes_on(status: int) -> bool:
    """Returns True for an exit status after which the run may get further when it is started again;
    also for that of a signal that killed it."""
    known = {int(known) for known in ExitStatus}
    return ExitStatus(status).goes_on if status in known else status > 128


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def commands(
    module: str, arguments: Sequence[str], processes: int, devices: int, port: int
) -> list[list[str]]:
    """The command line of each process. devices: simulated CPU devices of each; 0: the platform's
    devices.
    """
    common = [
        *python(module),
        *arguments,
        f"--coordinator=localhost:{port}",
        f"--processes={processes}",
    ]
    if devices:
        common.append(f"--cpu_devices={devices}")
    return [[*common, f"--process_id={number}"] for number in range(processes)]


def python(module: str) -> list[str]:
    """The words of a command line that runs a module.

    If this folder is not on the launcher's path (as with the installed `jaxtrain launch`), it is
    not on theirs: otherwise a folder called jaxtrain would hide the package.
    """
    on_path = any(os.path.abspath(path) == os.getcwd() for path in sys.path)
    safe = ["-P"] if module.startswith("jaxtrain.") and not on_path else []
    return [sys.executable, *safe, "-m", module]


def environments(
    processes: int, gpus: Sequence[object], variable: str = "JAX_LOCAL_DEVICE_IDS"
) -> list[dict[str, str]]:
    """The environment of each process: its share of the GPUs, if there is at least one for each, in
    a variable, and unbuffered output. gpus: their numbers or names"""
    # huge pages, as in scripts/train.sh
    common = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ, "PYTHONUNBUFFERED": "1"}
    if len(gpus) < processes:
        return [dict(common) for _ in range(processes)]
    share = len(gpus) // processes
    return [
        common | {variable: ",".join(map(str, gpus[first : first + share]))}
        for first in range(0, share * processes, share)
    ]


def check_flags(flags: types.SimpleNamespace) -> types.SimpleNamespace:
    """The flags. Raises UsageError for a module that `python -m` does not find."""
    try:
        is_name = all(part.isidentifier() for part in flags.module.split("."))
        spec = importlib.util.find_spec(flags.module) if is_name else None
        # a package, or a folder that looks like one
        if spec and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{flags.module}.__main__")
    except (ImportError, ValueError):
        spec = None
    if not spec:
        near = difflib.get_close_matches(flags.module, COMMANDS, n=1) or COMMANDS
        raise UsageError(
            f"--module={shown(flags.module)} is no Python module here", {"module": near[0]}
        )
    return flags


@cli.command
def main(argv: Sequence[str]) -> int:
    """Runs the command that the arguments after "--" are for, and returns its exit status."""
    split = list(argv).index("--") if "--" in argv else len(argv)
    try:
        reading = read_flags(argv[:split], DESCRIPTION, FLAGS, with_config=False)
        namespace = cli.checked(reading, lambda reading: check_flags(reading.namespace))
    except cli.FlagsError as error:
        in_front = "--" in argv and ": use --" in str(error)
        raise cli.FlagsError(f"{error}{' (in front of --)' * in_front}") from None
    devices = namespace.devices_per_process
    gpus = 0 if devices else cluster_environment.visible_gpus(os.environ)
    if not devices and gpus < namespace.processes:
        devices = max(cluster_environment.SIMULATED_DEVICES // namespace.processes, 1)
    streams.outlive()
    signals = received_signals()
    for start in range(namespace.restarts + 1):
        lines = commands(
            namespace.module, argv[split + 1 :], namespace.processes, devices, free_port()
        )
        job = Job(lines, environments(namespace.processes, range(gpus)))
        try:
            status = watch(job, signals)
        finally:
            job.close()
        if signals or not goes_on(status) or start == namespace.restarts:
            break
        print(
            f"restart {start + 1} of {namespace.restarts}: the run ended with status {status}",
            file=sys.stderr,
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
