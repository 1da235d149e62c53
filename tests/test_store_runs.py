"""Runs whose checkpoints or sources lie in an object store, by the real commands: killed and
continued, with the store away for a while."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from support import object_store, slow_proxy, train_runs as runs
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


def test_a_fork_of_a_run_in_the_store(folder, server):
    """Its origin is an address with a step, and it ends as the straight run."""
    url, environment = f"s3://{server.bucket}/origin", in_store(server)
    origin = settings(train__steps=3, checkpoint__every=1, checkpoint__directory=url)
    runs.train(folder / "origin", *origin, environment=environment)
    flags = settings(train__steps=4, train__fork_from=f"{url}@2")
    runs.train(folder / "fork", *flags, environment=environment)
    runs.train(folder / "straight", *settings(train__steps=4))
    assert runs.losses(folder / "fork").items() <= runs.losses(folder / "straight").items()
    assert [*runs.losses(folder / "fork")] == [3, 4]
    flags = settings(train__steps=4, train__fork_from=f"{url}@7")
    done = runs.train(folder / "refused", *flags, environment=environment, status=2)
    assert f"is no complete step: use --config.train.fork_from={url}@3" in done.err


def test_a_store_without_the_bucket_is_told_at_the_start(folder, server):
    flags = [*FLAGS, *settings(checkpoint__directory="s3://nobody/run")]
    done = runs.train(
        folder / "never", *flags, environment=in_store(server), status=ExitStatus.STORAGE
    )
    assert done.err.splitlines()[-1].startswith(
        "error: checkpoint.directory='s3://nobody/run' cannot be written (The specified bucket"
    )
    assert "compiled in" not in done.out and "Traceback" not in done.err


@pytest.fixture(scope="module")
def proxy(server):
    """A proxy in front of the store."""
    with slow_proxy.SlowProxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def test_training_from_a_store(folder, server, proxy):
    """More is read than the cache has; the store goes away for longer than a hang may last."""
    ids = np.random.default_rng(0).integers(1, 250, 4_000_000).astype("<u2")
    (folder / "ids.bin").write_bytes(ids.tobytes())
    url = f"s3://{server.bucket}/ids.bin"
    environment = in_store(server) | {"AWS_ENDPOINT_URL": proxy.endpoint}
    upload = "import sys, s3fs; s3fs.S3FileSystem().put_file('ids.bin', sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", upload, url], env=os.environ | environment, cwd=folder, check=True
    )
    data = {"data__tokenizer": "none", "data__store_cache_gb": 0.006, "model__vocab_size": 256}
    common = settings(**data, train__hang_after=4, train__sample_tokens=0, checkpoint__every=1000)
    runs.train(folder / "near", *common, *settings(data__source="ids.bin", train__steps=40))
    flags = [*common, *settings(data__source=url, train__steps=40)]
    workdir, cache = folder / "far", folder / "cache"
    with runs.running(folder, *runs.training(workdir, *flags), environment=environment) as command:
        command.wait_for(lambda: runs.last_step(workdir) >= 5, "step 5")
        proxy.failing = "closed"
        time.sleep(25)
        stopped_at = runs.last_step(workdir)
        assert stopped_at < 40
        proxy.failing = ""
        command.wait_for(lambda: runs.last_step(workdir) > stopped_at, "a step after the outage")
        kept = sum(path.stat().st_size for path in cache.rglob("blocks/*/*"))
        assert 0 < kept <= 0.006 * 1e9
        done = command.end()
    assert done.err.count("it is tried again until the store answers") == 1
    assert "the store has answered, after " in done.out
    assert runs.losses(workdir) == runs.losses(folder / "near")

    for changes, status, why in (
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, ExitStatus.BAD_CONFIG, "The request signature we"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ExitStatus.STORAGE, "Could not connect to"),
    ):
        done = runs.train(
            folder / "never", *flags, environment=environment | changes, status=status
        )
        error = f"error: data.source={url} cannot be read ({why}"
        assert done.err.splitlines()[-1].startswith(error) and "compiled in" not in done.out
        assert not (folder / "never").exists()
