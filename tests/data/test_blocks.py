"""The cache of blocks of files in stores."""

import multiprocessing
import os
import pathlib
import random

import pytest

from jaxtrain.data.stores import blocks
from jaxtrain.data.stores.blocks import RECORD, BlockCache


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1000)


def content(file: int, block: int) -> bytes:
    return random.Random(f"{file}.{block}").randbytes(1000 if block % 7 else 10)


def cache(folder: pathlib.Path, slots: int) -> BlockCache:
    return BlockCache(folder, slots * (1000 + RECORD.itemsize))


def size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def put(stored: BlockCache, file: int, *numbers: int) -> None:
    assert stored.claim(file, numbers) == [*numbers]
    for number in numbers:
        stored.store(file, number, content(file, number))


def test_least_recently_used_blocks_go_first(tmp_path):
    stored = cache(tmp_path, 3)
    put(stored, 1, 1, 2, 3)
    assert stored.read(1, 1, 5, 20) == content(1, 1)[5:20]
    assert stored.claim(1, [1, 2, 3]) == []
    put(stored, 2, 1)
    assert [stored.read(1, number, 0, 9) for number in (1, 2, 3)] == [
        content(1, 1)[:9],
        None,
        content(1, 3)[:9],
    ]
    assert stored.read(2, 1, 0, 1000) == content(2, 1)
    assert size(tmp_path) <= 3 * (1000 + RECORD.itemsize)
    for number in range(20):
        put(stored, 3, number)
        assert stored.read(3, number, 0, 9) and len(stored._checked) <= 4


def test_another_start_finds_them_and_a_smaller_bound_is_kept(tmp_path):
    put(cache(tmp_path, 8), 1, *range(1, 7))
    again = cache(tmp_path, 8)
    assert again.claim(1, range(1, 7)) == []
    assert all(again.read(1, number, 0, 1000) == content(1, number) for number in range(1, 7))
    fewer = cache(tmp_path, 2)
    assert [fewer.read(1, n, 0, 1) is None for n in range(1, 7)].count(False) == 2
    assert size(tmp_path) == 2 * 1000 + 8 * RECORD.itemsize
    # the process with more slots finds that blocks are gone, and goes on
    missing = [number for number in range(1, 7) if again.read(1, number, 0, 9) is None]
    assert len(missing) == 4 and again.claim(1, missing) == missing
    assert cache(tmp_path / "none", 0).claim(3, [1]) == [1]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_blocks_are_missing(tmp_path, damage):
    put(cache(tmp_path, 3), 1, 1, 2, 3)
    (path,) = tmp_path.rglob("blocks")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:2500] if damage == "cut" else data[:-1] + b"?")
    again = cache(tmp_path, 3)
    whole = [number for number in (1, 2, 3) if again.read(1, number, 0, 5) is not None]
    assert len(whole) == (0 if damage == "gone" else 2)
    assert sorted([*again.claim(1, (1, 2, 3)), *whole]) == [1, 2, 3]


def test_a_claim_ends(tmp_path, monkeypatch):
    first, second = cache(tmp_path, 4), cache(tmp_path, 4)
    assert first.claim(1, [1, 2]) == [1, 2] and second.claim(1, [1, 2, 3]) == [3]
    first.give_up(1, [1])
    assert second.claim(1, [1, 2]) == [1] and second.read(1, 1, 0, 1) is None
    monkeypatch.setattr(blocks, "CLAIM_S", 0.0)  # its process was killed
    assert second.claim(1, [2]) == [2]


def _work(folder: str, seed: int) -> None:
    blocks.BLOCK = 1000
    stored, draw = cache(pathlib.Path(folder), 6), random.Random(seed)
    for _ in range(400):
        file, number = draw.choice((1, 2)), draw.randrange(8)
        got = stored.read(file, number, 0, 10)
        assert got in (None, content(file, number)[:10])
        for claimed in stored.claim(file, [number]):
            stored.store(file, claimed, content(file, claimed))
        assert size(pathlib.Path(folder)) <= 6 * (1000 + RECORD.itemsize)


def test_several_processes(tmp_path):
    """Blocks of two files in fewer slots than there are blocks: what is read is right, and the
    bound is kept at any moment."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_work, args=(str(tmp_path), seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert os.path.exists(next(tmp_path.rglob("index")))
