"""Which tests a run of the suite takes, in which order, and what its files cost: for
conftest.py."""

import argparse
import collections
import pathlib
import zlib
from collections.abc import Iterable
from typing import Any

from support import ROOMS, ROOT

SLOWEST = 20  # files that are named at the end


def parse_part(text: str) -> tuple[int, int]:
    """ "2/4" → (2, 4): the second of four parts. ArgumentTypeError for what is none."""
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is no part such as 2/4")
    return int(number), int(parts)


def in_part(nodeid: str, part: tuple[int, int]) -> bool:
    """Whether a test belongs to a part. Each test is in one, and in the same one whatever other
    tests there are."""
    number, parts = part
    return zlib.crc32(nodeid.encode()) % parts == number - 1


def turn(path: pathlib.Path) -> int:
    """When a test file's turn comes: whole runs first, then the rooms from the uppermost down. Long
    ones would run alone at the end."""
    folder, rooms = str(path.parent.relative_to(ROOT / "tests")), [".", *ROOMS[::-1]]
    return rooms.index(folder) if folder in rooms else len(rooms)


def slowest_files(reports: Iterable[Any], workers: int) -> list[str]:
    """Lines on the files whose tests took longest, with their setup and teardown, of pytest's
    reports."""
    seconds: collections.Counter = collections.Counter()
    tests: dict[str, set[str]] = collections.defaultdict(set)
    for report in reports:
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        tests[file].add(report.nodeid)
    lines = [
        f"{time:7.1f} s  {len(tests[file]):4} tests  {file}"
        for file, time in seconds.most_common(SLOWEST)
    ]
    return [
        f"{sum(seconds.values()):7.1f} s in all, by {workers} workers; the slowest files:",
        *lines,
    ]
