"""tests/by_hand/fuzz_published.py: what it draws is hostile, and what it judges as a fault is
one. The script itself runs the real commands."""

import random
import shutil

import pytest
from support.hf_models import write_llama

from by_hand import fuzz_published
from by_hand.fuzz_published import MODEL, OUTSIDE, SECRET, Ended

GOOD = Ended(0, "ab\nstopped: at --tokens=3\n", 0.5, 2.0, False, [])


def test_every_case_differs_from_the_model(tmp_path):
    """Each changes a file, and a seed gives the same case again."""
    write_llama(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / OUTSIDE).mkdir()
    (tmp_path / OUTSIDE / "secret").write_text(SECRET)
    files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    kinds = set()
    for seed in range(60):
        said = []
        for _ in range(2):
            folder = tmp_path / MODEL
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / "base", folder)
            said.append(fuzz_published.spoil(random.Random(seed), folder, 1))
        name, _, what = said[0].partition(": ")
        assert said[0] == said[1] and name in files
        path = folder / name
        is_plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 10**8
        assert not is_plain or path.read_bytes() != files[name] or "other bytes" in what, said
        kinds.add(what)
    assert len(kinds) > 30


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"status": 2, "output": "error: config.json: hidden_size=-1 is below 1\n"}, ""),
        ({"status": 1}, "status 1, 0 lines of error"),
        ({"status": 2, "output": "error: a\nerror: b\n"}, "2 lines of error"),
        ({"status": 2, "output": "error: " + "x" * 2000}, "a line of 2007 characters"),
        ({"output": "Traceback (most recent call last):\n"}, "a traceback"),
        ({"output": f"the text is {SECRET}\n"}, "the secret in its output"),
        ({"gb": 2.5}, "2.5 GB"),
        ({"cpu_s": 30.0}, "30 s of CPU"),
        ({"outside": ["/x/outside/config.json"]}, "read ['/x/outside/config.json']"),
    ],
)
def test_faults(changes, fault):
    assert fuzz_published.dataclasses.replace(GOOD, **changes).fault() == fault
