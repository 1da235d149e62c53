"""`jaxtrain page RUN`: a run's folder as one HTML file, or served on the loopback address while the
run goes on. jax is imported for the schedule's picture alone, without a device.

`page_data` has what it shows, the template page.html how. The page's own content security policy
allows no request; a page that is served may ask for itself again, for newer data.
"""

import contextlib
import dataclasses
import html
import http.server
import json
import math
import pathlib
import re
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain import cli
from jaxtrain.config import Config, UsageError, fields, get, setting_of, value_text
from jaxtrain.config.flags import Flag
from jaxtrain.config.phases import spans
from jaxtrain.experiments.run_folder import RunFolder, read_run
from jaxtrain.pipeline.step_picture import step_picture
from jaxtrain.run import streams
from jaxtrain.run.files import SAMPLES_FILE, STARTS_FILE, read_json_lines
from jaxtrain.run.goodput import TITLES, Goodput, read_goodput
from jaxtrain.run.metrics import METRICS, ROLLED_BACK_FILE, host, read_metrics
from jaxtrain.run.run_lock import NAME as LOCK, SILENCE_S
from jaxtrain.schedule.drawing import STARTS

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
POINTS = 800  # of a curve
LISTED = 40  # starts, the last ones
SAMPLES = 3


@cli.command
def main(argv: Sequence[str]) -> None:
    """The command. What cannot work ends it with one line and status 2, Ctrl-C with 130."""
    argv = [f"--serve={PORT}" if word == "--serve" else word for word in argv]
    flags = cli.checked_flags(argv, DESCRIPTION, FLAGS, lambda flags: flags, words=True)
    if len(flags.words) != 1:
        raise UsageError(f"page is about one folder, not {len(flags.words)}: jaxtrain page RUN")
    cli.check_output("out", flags.out, FILE)
    folder = pathlib.Path(flags.words[0])
    content = page(folder)
    if flags.out or not flags.serve:
        out = flags.out or str(folder / FILE)
        cli.write_output(out, content)
        print(f"{out}: {len(content) / 1000:,.0f} kB")
    if flags.serve:
        with PageServer(folder, flags.serve) as server:
            print(f"http://{ADDRESS}:{flags.serve}/ until Ctrl-C", flush=True)
            server.serve_forever()


def page(folder: pathlib.Path, *, is_live: bool = False) -> bytes:
    """The page of the run in a folder. Raises UsageError for a folder that is no run's or cannot be
    read. is_live: it asks for newer data where it came from"""
    try:
        data = page_data(read_run(folder))
    except OSError as error:
        raise UsageError(f"{str(folder)!r} cannot be read: {error}") from None
    # numbers of a damaged file that are not finite become null, as in metrics.jsonl
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    texts = {
        "nonce": secrets.token_urlsafe(),  # marks the one script that may run
        "policy": "; connect-src 'self'" * is_live,
        "title": html.escape(data["name"]),
        "live": json.dumps(is_live),
        "data": json.dumps(finite).replace("<", "\\u003c"),  # it stands in a script element
    }
    template = pathlib.Path(__file__).with_name("page.html").read_text("utf-8")
    return re.sub(r"<!-- (\w+) -->", lambda mark: texts[mark[1]], template).encode(errors="replace")


# --- its data -------------------------------------------------------------------------------------


def page_data(run: RunFolder) -> dict[str, Any]:
    """All that the page of a run shows: curves of all numbers of its records, its starts, rollbacks
    and phases, goodput by parts, samples, schedule and settings."""
    goodput = Goodput(read_goodput(run.folder))
    names = dict.fromkeys(name for record in run.records for name in record)
    return {
        "name": run.name,
        "written": time.time(),
        "is_running": _is_running(run),
        "metrics": {
            name: {"title": each.title, "unit": each.unit, "meaning": each.meaning}
            | {"is_host": each.combine is host}
            for name, each in METRICS.items()
        },
        "curves": {name: points for name in names if (points := curve(run.records, name))},
        "discarded": curve(read_metrics(run.folder, ROLLED_BACK_FILE), "loss"),
        "rollbacks": [record for record in run.records if "rolled_back_from" in record],
        "phases": {span.phase: span.begin for span in reversed(spans(run.config))},
        "goodput": [
            dataclasses.asdict(start.last) | {"parts": start.parts()}
            for start in goodput.starts[-LISTED:]
        ],
        "parts": goodput.parts(),
        "titles": TITLES,
        "colours": STARTS,
        "starts": [*read_json_lines(run.folder / STARTS_FILE)][-LISTED:],
        "samples": [*read_json_lines(run.folder / SAMPLES_FILE)][-SAMPLES:],
        "schedule": _schedule(run.config),
        "settings": [
            [path, value_text(get(run.config, path)), value_text(field.default)]
            + [setting_of(field).doc]
            for path, field in fields().items()
        ],
    }


def curve(records: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float, float]]:
    """Steps, wall seconds and values of the records that have this number: all, or the least and
    the greatest of each of POINTS / 2 parts, in order, so that no spike is lost; and the last."""
    points = [
        (record["step"], record.get("wall_s", 0.0), float(f"{value:.7g}"))
        for record in records
        if isinstance(value := record.get(name), (int, float)) and math.isfinite(value)
    ]
    if len(points) <= POINTS:
        return points
    values = np.array([value for _, _, value in points])
    parts = np.array_split(np.arange(len(points)), POINTS // 2)
    ends = {part[index(values[part])] for part in parts for index in (np.argmin, np.argmax)}
    return [points[i] for i in sorted({*ends, len(points) - 1})]


def _is_running(run: RunFolder) -> bool | None:
    """True while a run holds the folder's lock; False if it died with it; None without one."""
    with contextlib.suppress(OSError):
        return time.time() - (run.folder / LOCK).stat().st_mtime < SILENCE_S
    return None


def _schedule(config: Config) -> tuple[str, str]:
    """A line about the table of a step, and its picture, "" if there is none."""
    try:
        return step_picture(config.resolve())
    except (ValueError, OSError) as error:
        return f"no picture: {error}", ""


# --- the server -----------------------------------------------------------------------------------


class PageServer(http.server.ThreadingHTTPServer):
    """The server of the page of the run in a folder, on the loopback address. port: 0 for a free
    one. Raises UsageError for a port that cannot be used."""

    def __init__(self, folder: pathlib.Path, port: int):
        self.folder, self.reading = folder, threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"--serve={port} cannot be used ({error.strerror})",
                {"serve": min(port + 1, 65535)},
            ) from None


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0  # seconds that a client may be silent

    def do_GET(self) -> None:
        # A page of a stranger's, whose host name leads to this address, could read this one.
        is_own = self.headers.get("Host", "").partition(":")[0] in (ADDRESS, "localhost")
        if not is_own or self.path != "/":
            return self.send_error(404)
        try:
            with self.server.reading:  # long runs take long, and memory
                content = page(self.server.folder, is_live=True)
        except UsageError as error:
            return self.send_error(503, explain=str(error))
        with contextlib.suppress(ConnectionError):  # the reader has gone
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Requests are not logged."""


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
