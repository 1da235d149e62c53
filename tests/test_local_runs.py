"""Runs that are killed and go on from their machines' own folders (`checkpoint.local`), by the real
command."""

import contextlib
import pathlib
import shutil

import pytest
from support import train_runs as runs
from support.train_runs import assert_same_trajectory, settings

from jaxtrain.launch import free_port
from jaxtrain.run.goodput import Goodput, read_goodput

STEPS = 14
NEVER = settings(train__steps=STEPS, checkpoint__every=0, checkpoint__minutes=0)
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("local_runs")]


@pytest.fixture(scope="module")
def whole(folder):
    """The losses of a run that is never stopped."""
    runs.train(folder / "whole", *NEVER)
    return runs.losses(folder / "whole")


def local_to(machine: pathlib.Path, every: int = 2) -> list[str]:
    return settings(checkpoint__local=machine, checkpoint__local_every=every)


def kill_at(workdir: pathlib.Path, step: int, *flags: str) -> None:
    with runs.running(workdir.parent, *runs.training(workdir, *flags)) as command:
        command.wait_for(lambda: runs.last_step(workdir) >= step, f"step {step}")
        command.kill()


def test_a_killed_run_goes_on_from_its_own_machine(folder, whole):
    """Twice, with the same losses bit for bit; a persistent checkpoint that is newer is taken;
    nothing is left in the end."""
    workdir, machine = folder / "run", folder / "machine"
    flags = [*NEVER, *local_to(machine)]
    kill_at(workdir, 6, *flags)
    kill_at(workdir, 11, *flags)
    assert runs.checkpoints(workdir) == [], "nothing was saved for good"
    done = runs.train(workdir, *flags)
    (line,) = [line for line in done.out.splitlines() if line.startswith("continuing from step ")]
    assert (
        read_goodput(workdir)[-1].start == 3
        and Goodput(read_goodput(workdir)).starts[-1].redone_s == 0
    )
    assert (
        int(line.split()[3].rstrip(",")) in (8, 10, 12)
        and f"which this machine still has in {machine}/run-" in line
    )
    assert runs.losses(workdir) == whole
    assert runs.checkpoints(workdir) == [STEPS] and list(machine.iterdir()) == []


@pytest.mark.parametrize("name, every, local_every", [("local", 5, 3), ("persistent", 6, 5)])
def test_the_newer_of_both_is_taken(folder, whole, name, every, local_every):
    """Killed with steps 5 and 6 there, one of them on its machine and the other for good, and
    nothing newer."""
    workdir, machine = folder / f"newer-{name}", folder / f"machine-{name}"
    flags = [*NEVER, *local_to(machine, local_every)]

    def both() -> bool:
        whole_steps = [
            path.parent for path in (workdir / "checkpoints").glob("[0-9]*/manifest.json")
        ]
        return {"5", "6"} <= {path.name for path in (*whole_steps, *machine.glob("*/*/[0-9]*"))}

    with runs.running(
        folder, *runs.training(workdir, *flags, *settings(checkpoint__every=every))
    ) as command:
        command.wait_for(both, "both")
        command.kill()
    for path in [*(workdir / "checkpoints").glob("[0-9]*"), *machine.glob("*/*/[0-9]*")]:
        if path.name.isdigit() and int(path.name) > 6:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = runs.train(workdir, *flags)
    (line,) = [line for line in done.out.splitlines() if line.startswith("continuing from step 6")]
    assert ("which this machine still has" in line) == (name == "local")
    assert runs.losses(workdir) == whole


def test_a_run_whose_checkpoints_were_deleted_begins_anew(folder, whole):
    workdir, machine = folder / "anew", folder / "anew-machine"
    kill_at(workdir, 6, *NEVER, *local_to(machine))
    shutil.rmtree(workdir / "checkpoints")
    done = runs.train(workdir, *NEVER, *local_to(machine))
    assert "starting: weights from seed 0" in done.out
    assert runs.losses(workdir) == whole


def of_two(workdir: pathlib.Path, *flags: str) -> list[list[str]]:
    """The words of two processes of one device each, each on a machine of its own."""
    port = free_port()
    job = [f"--coordinator=localhost:{port}", "--processes=2"]
    return [
        runs.training(
            workdir,
            *flags,
            *job,
            f"--process_id={i}",
            *local_to(workdir.parent / f"{workdir.name}-machine-{i}"),
            devices=1,
        )
        for i in range(2)
    ]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_machine_that_is_replaced(folder, whole, zero):
    """With copies over data it gets its part from the other; where ZeRO scatters the moments both
    go back to the persistent checkpoint."""
    workdir = folder / f"replaced-{zero}"
    flags = [
        *NEVER,
        *settings(checkpoint__every=5, mesh__stage=1, mesh__data=2, parallel__zero=zero),
    ]
    with contextlib.ExitStack() as both:
        commands = [
            both.enter_context(runs.running(folder, *words)) for words in of_two(workdir, *flags)
        ]
        commands[0].wait_for(
            lambda: (
                runs.last_step(workdir) >= 9 and list(workdir.glob("checkpoints/5/manifest.json"))
            ),
            "step 9",
        )
        for command in commands:
            command.process.kill()
    assert runs.checkpoints(workdir) == [5]
    shutil.rmtree(folder / f"{workdir.name}-machine-1")
    with contextlib.ExitStack() as both:
        commands = [
            both.enter_context(runs.running(folder, *words)) for words in of_two(workdir, *flags)
        ]
        done, _ = [command.end() for command in commands]
    if zero:
        assert "is not used: no machine has" in done.out and "for process 1" in done.out
        assert "continuing from step 5\n" in done.out
    else:
        assert (
            "which the machines still have in" in done.out
            and "bytes of it came from other processes" in done.out
        )
    assert list(runs.losses(workdir)) == list(range(1, STEPS + 1))
    assert_same_trajectory(runs.losses(workdir), whole)
    assert all(list((folder / f"{workdir.name}-machine-{i}").iterdir()) == [] for i in range(2))
