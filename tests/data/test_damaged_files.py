"""Damaged files of all formats, each of which ends in one line that names the file, or in a corpus:
no traceback, no crash, no hang, and no memory above a gigabyte."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.parametrize(
    "seed, count",
    [(0, 60), *(pytest.param(seed, 500, marks=pytest.mark.full) for seed in range(1, 3))],
)
def test_damaged_files(tmp_path, seed, count):
    """Names of files, damages and what is said are in `lines`, the last one too if it crashed."""
    script = ROOT / "tests" / "support" / "read_damaged.py"
    words = [sys.executable, str(script), str(tmp_path), str(seed), str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-3000:])
    intact = [line[3] for line in lines if line[1] == "none"]
    assert intact and all(said.endswith(" tokens") for said in intact)
    *outcomes, (_, _, _, peak) = [line for line in lines if len(line) == 4 and line[1] != "none"]
    assert len(outcomes) == 2 * count and int(peak.split()[0]) < 1 << 30
    refused = 0
    for name, damage, bad_records, said in outcomes:
        if said.endswith(" tokens"):
            continue
        status, _, message = said.partition(" ")
        refused += 1
        number, _, file = name.partition(" ")
        is_text = file.startswith("a.json")  # bad records have another status
        is_whole = message.endswith("all of its text is empty") or ": no field " in message
        of_records = is_text or is_whole or bad_records == "skip"
        assert status == "2" or (status == "65" and of_records), said
        assert "\n" not in message and len(message) < 1000, (name, damage, message)
        assert f"{tmp_path}/{number}/{file.partition('.')[0]}" in message, (name, damage, message)
    assert refused > count / 2
