"""`jaxtrain page RUN`: a run's folder as one HTML file, or served on the loopback address while the
run goes on. No jax.

page_data.py has what it shows, the template page.html how. The page's own content security policy
allows no request; a page that is served may ask for itself again, for newer data.
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
from jaxtrain.config import UsageError, own_code
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
        content, out = page(folder), flags.out or str(folder / FILE)
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


def page(folder: pathlib.Path, *, is_live: bool = False) -> bytes:
    """The page of the run in a folder. Raises UsageError for a folder that is no run's or cannot be
    read. is_live: it asks for newer data where it came from"""
    own_code.distrust(str(folder))  # a stranger's, of which no file is run
    try:
        data = page_data(read_run(folder))
    except OSError as error:
        rule = f"{error.filename!r} cannot be read ({error.strerror})"
        raise UsageError(rule, advice="the folder of a run") from None
    # numbers of a damaged file that are not finite become null, as in metrics.jsonl
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    template = pathlib.Path(__file__).with_name("page.html").read_text("utf-8")
    (script,) = re.findall("<script>(.*?)</script>", template, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    texts = {
        "policy": f"script-src 'sha256-{digest}'" + "; connect-src 'self'" * is_live,
        "title": html.escape(data["name"]),
        "live": json.dumps(is_live),
        "data": json.dumps(finite).replace("<", "\\u003c"),  # it stands in a script element
    }
    filled = re.sub(r"<!-- (\w+) -->", lambda mark: texts[mark[1]], template)
    return filled.encode(errors="replace")


class PageServer(http.server.ThreadingHTTPServer):
    """The server of the page of the run in a folder, on the loopback address. port: 0 for a free
    one. Raises UsageError for a port that cannot be used, and as `page`."""

    daemon_threads = True

    def __init__(self, folder: pathlib.Path, port: int):
        self._folder, self._reading, self._until = folder, threading.Lock(), 0.0
        self.content()  # a folder that cannot be read is no run's
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            rule = f"--serve={port} cannot be used ({error.strerror})"
            raise UsageError(rule, {"serve": min(port + 1, 65535)}) from None

    def content(self) -> bytes:
        """The page, some seconds old at most. Raises UsageError as `page`."""
        with self._reading:
            if (begin := time.monotonic()) > self._until:
                self._content = page(self._folder, is_live=True)
                self._until = begin + max(FRESH_S, REST * (time.monotonic() - begin))
            return self._content


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0  # seconds that a client may be silent

    def do_GET(self) -> None:
        # A page of a stranger's, whose host name leads to this address, could read this one.
        is_own = self.headers.get("Host", "").partition(":")[0] in (ADDRESS, "localhost")
        if not is_own or self.path != "/":
            return self.send_error(404)
        try:
            content = self.server.content()
        except UsageError as error:
            return self.send_error(503, explain=str(error))
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Requests are not logged."""


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
