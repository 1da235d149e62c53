#!/usr/bin/env python
"""A rehearsal of slurm.sbatch under a real Slurm on this machine: failures, requeues by exit
status, and the end.

    sudo .venv/bin/python tests/by_hand/rehearse_slurm.py [--install] [--python=PYTHON]

It needs root, Debian or Ubuntu, and the packages slurmctld, slurmd, slurm-client and munge:
--install installs them by apt-get. Two slurmd with names, ports and folders of their own are two
nodes; the files of all daemons are in a temporary folder, and no system service is touched. A
node's name is an address of this machine (127.0.0.1, 127.0.0.2), so that jax finds the coordinator
by it.

Each line of what it prints is something that was seen. The exit status is 1 where something was not
seen, and the folder stays then.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxtrain.run.exit_status import ExitStatus  # noqa: E402 (the path comes first)

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "munged")
NODES = ("127.0.0.1", "127.0.0.2")
PATIENCE = 300.0  # seconds that nothing here should take
GENTLE = 30  # seconds for a daemon to end by itself

CONFIGURATION = """
ClusterName=rehearsal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
MinJobAge=3600
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# As small as a pipeline can be. The number of steps is read at each start, so that a run that was
# disturbed often enough can end.
RECIPE = """
import pathlib

from jaxtrain.config import *


def get_config():
    return Config(
        model=ModelConfig(
            layers=2, width=32, heads=4, mlp_width=64,
            activation="gelu", tied_embeddings=True, init_std=0.1,
        ),
        data=DataConfig(
            source=str(pathlib.Path(__file__).with_name("corpus.txt")),
            sequence_length=32, batch_size=16,
        ),
        mesh=MeshConfig(stage=2),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=4, schedule="constant"),
        precision=PrecisionConfig(compute="float32"),
        train=TrainConfig(
            steps=int(pathlib.Path(__file__).with_name("steps").read_text()),
            eval_batches=2, sample_tokens=0,
        ),
        checkpoint=CheckpointConfig(every=10, keep=2),
        metrics=MetricsConfig(log_every=1, tensorboard=False),
    )
"""
FOR_EVER, EXTRA_STEPS = 1_000_000, 15


class NotSeen(Exception):
    """Something that should have happened did not, in one line."""


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Returns when the condition is true. Raises NotSeen after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise NotSeen(f"not seen within {PATIENCE:.0f} s: {what}")
        time.sleep(0.2)


def seen(text: str) -> None:
    """Prints what was seen, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- the cluster ----------------------------------------------------------------------------------


def free_ports(number: int) -> list[int]:
    """TCP ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def cluster(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes, its files in `folder`; what its commands need in the environment. Its
    daemons end with the block."""
    for name in ("state", "munge"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge").chmod(0o711)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    control, *ports = free_ports(1 + len(NODES))
    host = socket.gethostname()
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=1 RealMemory=1000"
        for node, port in zip(NODES, ports)
    ]
    text = (
        CONFIGURATION.format(folder=folder, host=host, port=control).lstrip()
        + "\n".join(nodes)
        + "\n"
    )
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    munge = {
        name: f"--{name}={folder}/munge/{name}"
        for name in ("socket", "pid-file", "log-file", "seed-file")
    }
    commands = [["munged", "--foreground", f"--key-file={key}", *munge.values()]]
    commands += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    daemons: list[subprocess.Popen] = []
    with contextlib.ExitStack() as files:
        try:
            for number, command in enumerate(commands):
                out = files.enter_context((folder / f"daemon-{number}.out").open("w"))
                daemons.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
                )
                if command[0] == "munged":
                    wait_for((folder / "munge" / "socket").exists, "munged's socket")

            def idle() -> bool:
                said = subprocess.run(
                    ["sinfo", "--noheader", "-N", "-o", "%T"],
                    env=environment,
                    capture_output=True,
                    text=True,
                ).stdout
                return said.split() == ["idle"] * len(NODES)

            wait_for(idle, "idle nodes")
            version = subprocess.run(
                ["sinfo", "--version"], env=environment, capture_output=True, text=True
            ).stdout.strip()
            seen(f"{version}: {len(NODES)} nodes are idle")
            yield environment
        finally:
            for daemon in reversed(daemons):  # munged last: the others say good-bye through it
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(timeout=GENTLE)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


# --- a job ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of slurm.sbatch, in a folder from which it was submitted."""

    number: str
    folder: pathlib.Path
    workdir: str
    environment: dict[str, str]

    def show(self) -> dict[str, str]:
        """What Slurm says about it: JobState, Restarts, ExitCode, …"""
        said = self._run("scontrol", "show", "job", "--oneliner", self.number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def log(self) -> str:
        path = self.folder / f"jaxtrain-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def trained(self) -> list[dict]:
        """The records of its training steps."""
        path = self.folder / self.workdir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            record
            for record in map(json.loads, lines[:-1] if self.is_running() else lines)
            if "loss" in record
        ]

    def is_running(self) -> bool:
        return self.show()["JobState"] == "RUNNING"

    def checkpoint(self) -> int:
        """The newest finished checkpoint, 0 if there is none."""
        folder = self.folder / self.workdir / "checkpoints"
        return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)

    def processes(self) -> list[int]:
        """The training processes: of the shells and sruns that hold the same words, none."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().decode().split("\0")
                if words[1:3] == ["-m", "jaxtrain.train"] and os.readlink(path / "cwd") == str(
                    self.folder
                ):
                    found.append(int(path.name))
        return sorted(found)

    def wait_for_requeue(self, restarts: int) -> None:
        """Waits until the job is in the queue for its Nth restart, and lets it begin in 5 s: Slurm
        would wait 2 minutes.

        Not at once: a node refuses a job whose last credential it revoked in the same second.
        """
        wait_for(lambda: self.show()["Restarts"] == str(restarts), f"restart {restarts}")
        wait_for(lambda: self.show()["JobState"] in ("PENDING", "RUNNING"), "the job in the queue")
        seen(f"the job is in the queue, Restarts={restarts}: {self.last_line('requeued')}")
        with contextlib.suppress(subprocess.CalledProcessError):  # it runs already
            self._run("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")

    def wait_for_end(self, state: str, exit_code: str) -> None:
        wait_for(
            lambda: self.show()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"),
            f"the end of job {self.number}",
        )
        shown = self.show()
        if (shown["JobState"], shown["ExitCode"]) != (state, exit_code):
            raise NotSeen(
                f"job {self.number} ended as {shown['JobState']} {shown['ExitCode']}, not "
                f"{state} {exit_code}"
            )

    def signal(self, *words: str) -> None:
        self._run("scancel", *words, self.number)

    def last_line(self, word: str) -> str:
        """The last line of its log with this word. NotSeen if there is none."""
        lines = [line for line in self.log().splitlines() if word in line]
        if not lines:
            raise NotSeen(f"no line of job {self.number}'s log has {word!r}")
        return lines[-1]

    def _run(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        ).stdout


def submit(folder: pathlib.Path, workdir: str, environment: dict[str, str], *flags: str) -> Job:
    """Submits slurm.sbatch as a user would, but for the GPUs."""
    command = ["sbatch", "--parsable", "--gpus-per-node=0", "--ntasks-per-node=1"]
    command += ["scripts/launch/slurm.sbatch"]
    command += ["--config=recipe.py", f"--workdir={workdir}", "--cpu_devices=1", *flags]
    said = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return Job(said.strip(), folder, workdir, environment)


# --- what is rehearsed ----------------------------------------------------------------------------


def disturbed_run(folder: pathlib.Path, environment: dict[str, str]) -> Job:
    """A run that is killed, preempted and comes to its time limit, and that goes on by itself each
    time until its last step."""
    (folder / "steps").write_text(f"{FOR_EVER}\n")
    job = submit(folder, "run", environment)
    wait_for(lambda: job.checkpoint() > 0 and len(job.processes()) == len(NODES), "a checkpoint")
    seen(
        f"job {job.number} runs on {job.show()['NodeList']}; its first checkpoint is step "
        f"{job.checkpoint()}"
    )

    victim = job.processes()[-1]
    os.kill(victim, signal.SIGKILL)
    seen(f"kill -9 of process {victim}")
    goes_on_after(job, restarts=1, status=128 + signal.SIGKILL)
    seen(f"of that the other task had said: {job.last_line('has gone without a word')}")

    job.signal("--signal=TERM")
    seen("SIGTERM to the tasks, as a preemption sends it")
    goes_on_after(job, restarts=2, status=ExitStatus.STOPPED)

    job.signal("--batch", "--signal=TERM")
    seen("SIGTERM to the batch script, as --signal=B:TERM@300 sends it before the time limit")
    last = goes_on_after(job, restarts=3, status=ExitStatus.STOPPED, steps_left=EXTRA_STEPS)
    job.wait_for_end("COMPLETED", "0:0")
    steps = [record["step"] for record in job.trained()]
    if steps != list(range(1, last + 1)):
        raise NotSeen(f"steps 1 to {last} of metrics.jsonl, each once: {steps[:3]} … {steps[-3:]}")
    seen(
        "the job is COMPLETED with status 0 after 3 restarts; metrics.jsonl has each of "
        f"{last} steps once"
    )
    return job


def goes_on_after(job: Job, restarts: int, status: int, steps_left: int | None = None) -> int:
    """Waits for a requeue by this status, and until the run has saved a further step; with
    `steps_left` only until it has begun.

    Gives the last step.
    """
    job.wait_for_requeue(restarts)
    if f"status {int(status)}: requeued, restart {restarts}" != job.last_line("requeued"):
        raise NotSeen(f"a requeue by status {int(status)}")
    saved = job.checkpoint()
    last = saved + steps_left if steps_left else FOR_EVER
    (job.folder / "steps").write_text(f"{last}\n")
    wait_for(lambda: f"continuing from step {saved}" in job.log(), f"continuing from step {saved}")
    if not steps_left:
        wait_for(
            lambda: job.checkpoint() > saved and len(job.processes()) == len(NODES),
            "a checkpoint after it",
        )
        seen(f"it continues from step {saved} and has saved step {job.checkpoint()}")
    return last


def same_losses(disturbed: Job, folder: pathlib.Path, environment: dict[str, str]) -> None:
    """An undisturbed run of as many steps has the same losses, bit for bit."""
    job = submit(folder, "undisturbed", environment)
    job.wait_for_end("COMPLETED", "0:0")
    pairs = [
        [(record["step"], record["loss"]) for record in run.trained()] for run in (disturbed, job)
    ]
    if not pairs[0] or pairs[0] != pairs[1]:
        raise NotSeen("the losses of an undisturbed run")
    seen(f"an undisturbed run has the same {len(pairs[0])} losses, bit for bit")


def not_requeued(folder: pathlib.Path, environment: dict[str, str]) -> None:
    """A bad config and a cancelled job end for good."""
    job = submit(folder, "bad", environment, "--config.mesh.stage=3")
    job.wait_for_end("FAILED", f"{int(ExitStatus.BAD_CONFIG)}:0")
    if job.show()["Restarts"] != "0" or "requeued" in job.log():
        raise NotSeen("a bad config that is not requeued")
    seen(f"a bad config is not requeued, status 2: {job.last_line('error: mesh.stage')}")

    (folder / "steps").write_text(f"{FOR_EVER}\n")
    job = submit(folder, "cancelled", environment)
    wait_for(lambda: len(job.trained()) > 2, "a step")
    job.signal()
    wait_for(
        lambda: job.show()["JobState"] == "CANCELLED" and not job.processes(), "a cancelled job"
    )
    wait_for(lambda: "not requeued" in job.log() or "DUE TO" in job.log(), "the end of its script")
    if job.show()["JobState"] != "CANCELLED" or job.show()["Restarts"] != "0":
        raise NotSeen("a cancelled job that is not requeued")
    seen("a cancelled job is not requeued")


def prepare(folder: pathlib.Path) -> None:
    """What a user's shared folder would hold: the scripts, a recipe, a corpus."""
    folder.mkdir()
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "corpus.txt").write_text((ROOT / "jaxtrain" / "launch.py").read_text() * 4)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help=f"apt-get install what is missing of {', '.join(PACKAGES)}",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that trains (this one)"
    )
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("error: slurmd starts tasks as root: use sudo", file=sys.stderr)
        return 2
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing and not arguments.install:
        print(
            f"error: {', '.join(missing)} missing: use --install, or apt-get install "
            f"{' '.join(PACKAGES)}",
            file=sys.stderr,
        )
        return 2
    if missing:
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES],
            env=quiet,
            check=True,
        )

    scratch = pathlib.Path(tempfile.mkdtemp(prefix="jaxtrain-slurm-"))
    try:
        with cluster(scratch) as environment:
            clean = {
                k: v for k, v in environment.items() if not re.match(r"JAX|XLA_|SLURM_(?!CONF)", k)
            }
            jobs = {
                "PYTHON": arguments.python,
                "PYTHONPATH": str(ROOT),
                "JAXTRAIN_CACHE": str(scratch / "cache"),
                "JAX_PLATFORMS": "cpu",
            }
            folder = scratch / "shared"
            prepare(folder)
            run = disturbed_run(folder, clean | jobs)
            same_losses(run, folder, clean | jobs)
            not_requeued(folder, clean | jobs)
    except NotSeen as error:
        print(f"error: {error}; all logs are in {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    seen("all daemons have ended, their files are gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
