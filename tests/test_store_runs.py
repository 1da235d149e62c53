"""A run whose checkpoints lie in an object store, by the real commands: killed and continued, with
the store away for a while."""

import os
import time

import pytest
from support import object_store, train_runs as runs
from support.train_runs import settings

from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import read_metrics

pytestmark = object_store.needed
STEPS = 12
FLAGS = settings(train__steps=STEPS, checkpoint__every=1, checkpoint__minutes=0)


@pytest.fixture(scope="module")
def server(folder):
    with object_store.ObjectStore(folder / "store") as server:
        yield server


def in_store(server: object_store.ObjectStore) -> dict[str, str]:
    """The environment of a command that reaches the store."""
    return server.environment | {
        "PYTHONPATH": os.pathsep.join([str(object_store.ROOT), str(object_store.PACKAGES)])
    }


def saves(workdir) -> int:
    """How many saves the log has seen end."""
    return sum("save_s" in record for record in read_metrics(workdir))


def test_killed_continued_and_used(folder, server):
    """The losses are those of a run that was never stopped; the store goes away and comes back
    while it trains."""
    runs.train(folder / "whole", *FLAGS)
    url, workdir, environment = f"s3://{server.bucket}/run", folder / "run", in_store(server)
    flags = [*FLAGS, *settings(checkpoint__directory=url)]
    with runs.running(folder, *runs.training(workdir, *flags), environment=environment) as command:
        command.wait_for(lambda: runs.last_step(workdir) >= 8, "step 8")
        command.kill()
    before = saves(workdir)
    with runs.running(folder, *runs.training(workdir, *flags), environment=environment) as command:
        command.wait_for(lambda: saves(workdir) > before, "a save of this start")
        server.stop()
        time.sleep(30)  # errors for so long
        server.start()
        done = command.end()
    assert "continuing from step " in done.out
    assert (
        runs.losses(workdir) == runs.losses(folder / "whole")
        and not (workdir / "checkpoints").exists()
    )
    for place in ("run", url):
        with runs.running(
            folder, "jaxtrain.checkpoint", "verify", place, environment=environment
        ) as command:
            assert f"{STEPS}: complete" in command.end().out
        words = ["jaxtrain.generate", f"--workdir={place}", "--prompt=the", "--tokens=4"]
        with runs.running(folder, *words, environment=environment) as command:
            assert command.end().out.startswith("the")


def test_a_store_without_the_bucket_is_told_at_the_start(folder, server):
    flags = [*FLAGS, *settings(checkpoint__directory="s3://nobody/run")]
    done = runs.train(
        folder / "never", *flags, environment=in_store(server), status=ExitStatus.STORAGE
    )
    assert done.err.splitlines()[-1].startswith(
        "error: checkpoint.directory='s3://nobody/run' cannot be written (The specified bucket"
    )
    assert "compiled in" not in done.out and "Traceback" not in done.err
