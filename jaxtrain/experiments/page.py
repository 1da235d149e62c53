"""`jaxtrain page RUN`: a run's folder as one HTML file, or served on the loopback address while the
run goes on. No jax.

page_data.py has what it shows, the template page.html how. The page's own content security policy
allows no request; what is served may ask its server for newer data.
"""

import base64
import hashlib
import html
import http.server
import json
import pathlib
import re
import sys
import threading
import time
import types
from collections.abc import Sequence

from jaxtrain import cli
from jaxtrain.config import UsageError
from jaxtrain.config.flags import Flag
from jaxtrain.experiments.page_data import page_data
from jaxtrain.experiments.run_folder import read_run
from jaxtrain.run import streams

DESCRIPTION = """
Writes the page of a run: losses and validation sets, speed, goodput by part, experts, the
schedule's picture, memory, samples, settings, and what each start has changed. It is one HTML file,
which asks nobody for anything. RUN is the folder of a run in any state.

usage: jaxtrain page RUN [--out=FILE.html]
       jaxtrain page RUN --serve[=PORT]     on this machine alone; the page follows the run until
                                            Ctrl-C
"""
ADDRESS, PORT, FILE = "127.0.0.1", 8790, "page.html"
FLAGS = (
    Flag("out", "", f"the file; empty: RUN/{FILE}"),
    Flag("serve", 0, f"serve it on this port of {ADDRESS}; --serve alone: {PORT}", 1, 65535),
)
# A folder is read again after so many seconds, and so many times what it takes.
FRESH_S, REST = 3.0, 10.0


@cli.command
def main(argv: Sequence[str]) -> None:
    """The command. What cannot work ends it with one line and status 2, Ctrl-C with 130."""
    argv = [f"--serve={PORT}" if word == "--serve" else word for word in argv]
    folder, flags = cli.checked_flags(argv, DESCRIPTION, FLAGS, check_flags, words=True)
    if flags.serve:
        with PageServer(folder, flags.serve) as server:
            print(f"http://{ADDRESS}:{flags.serve}/ until Ctrl-C", flush=True)
            server.serve_forever()
    else:
        content, out = page(read_data(folder)), flags.out or str(folder / FILE)
        cli.write_output(out, content)
        print(f"{out}: {len(content) / 1000:,.0f} kB")


def check_flags(flags: types.SimpleNamespace) -> tuple[pathlib.Path, types.SimpleNamespace]:
    """The folder, which is not read yet, and the flags. Raises UsageError for those that cannot
    work."""
    if len(flags.words) != 1:
        rule = f"page is about one folder, not {len(flags.words)}"
        raise UsageError(rule, advice="jaxtrain page RUN")
    if flags.serve and flags.out:
        raise UsageError(f"--serve={flags.serve} writes no --out={flags.out!r}", {"out": ""})
    cli.check_output("out", flags.out, FILE)
    return pathlib.Path(flags.words[0]), flags


def read_data(folder: pathlib.Path) -> str:
    """The data of a run's page, as JSON that may stand in a script element. Raises UsageError for
    a folder that is no run's or cannot be read."""
    try:
        data = page_data(read_run(folder))
    except OSError as error:
        rule = f"{error.filename!r} cannot be read ({error.strerror})"
        raise UsageError(rule, advice="the folder of a run") from None
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def page(data: str, *, is_live: bool = False) -> bytes:
    """The page. data: as of `read_data`; is_live: it asks for newer data where it came from"""
    template = pathlib.Path(__file__).with_name("page.html").read_text("utf-8")
    (script,) = re.findall("<script>(.*?)</script>", template, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    texts = {
        "policy": f"script-src 'sha256-{digest}'" + "; connect-src 'self'" * is_live,
        "title": html.escape(json.loads(data)["name"]),
        "live": json.dumps(is_live),
        "data": data,
    }
    filled = re.sub(r"<!-- (\w+) -->", lambda mark: texts[mark[1]], template)
    return filled.encode(errors="replace")


class PageServer(http.server.ThreadingHTTPServer):
    """The server of the page of the run in a folder, on the loopback address. port: 0 for a free
    one. Raises UsageError for a port that cannot be used, and as `read_data`."""

    daemon_threads = True

    def __init__(self, folder: pathlib.Path, port: int):
        self._folder, self._reading = folder, threading.Lock()
        self._data, self._until = "", 0.0
        self.data()  # a folder that cannot be read is no run's
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            rule = f"--serve={port} cannot be used ({error.strerror})"
            raise UsageError(rule, {"serve": min(port + 1, 65535)}) from None

    def data(self) -> str:
        """The run's data, some seconds old at most. Raises UsageError as `read_data`."""
        with self._reading:
            if (begin := time.monotonic()) > self._until:
                self._data = read_data(self._folder)
                took = time.monotonic() - begin
                self._until = begin + max(FRESH_S, REST * took)
            return self._data


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0  # seconds that a client may be silent

    def do_GET(self) -> None:
        # A page of a stranger's, whose host name leads to this address, could read this one.
        if self.headers.get("Host", "").partition(":")[0] not in (ADDRESS, "localhost"):
            return self.send_error(403)
        if self.path not in ("/", "/data.json"):
            return self.send_error(404)
        try:
            data = self.server.data()
        except UsageError as error:
            return self.send_error(503, explain=str(error))
        content = page(data, is_live=True) if self.path == "/" else data.encode()
        self.send_response(200)
        kind = "text/html" if self.path == "/" else "application/json"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Requests are not logged."""


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
