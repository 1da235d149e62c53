"""Sources in a store: as files of fsspec's memory in place of one, and, against a real
S3-compatible server behind a proxy that delays and fails, by the full suite."""

import concurrent.futures
import gzip
import hashlib
import io
import itertools
import json
import pathlib
import random
import shutil
import threading
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.token_files import write_pair

from jaxtrain import config as configs
from jaxtrain.config import ConfigError, addresses
from jaxtrain.config.phases import spans
from jaxtrain.data import corpus as corpus_module, document_packing, order
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.corpora import prepare_all
from jaxtrain.data.errors import StoreAwayError, StoreError
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.stores import blocks, filesystem, listing, ranges
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run import watchdog

STORE = "memory://bucket"
TEXTS = [f"document {n}: {'word ' * (n % 40)}" for n in range(300)]


@pytest.fixture
def store(monkeypatch):
    """A store in this process's memory. Its requests are counted, and fail while `problem` is
    set."""
    monkeypatch.setitem(addresses.PACKAGES, "memory", "fsspec")
    monkeypatch.setattr(filesystem, "WAITS_S", (0.01,))
    memory = filesystem.filesystem(STORE)
    memory.store.clear()
    cat_file, find = memory.cat_file, memory.find
    memory.problem, memory.asked = None, []
    filesystem.given_up.clear()  # as a loader does that begins

    def asked(function):
        def ask(path, **options):
            memory.asked.append((path, options))
            if memory.problem:
                raise memory.problem
            return function(path, **options)

        return ask

    monkeypatch.setattr(memory, "cat_file", asked(cat_file), raising=False)
    monkeypatch.setattr(memory, "find", asked(find), raising=False)
    yield memory
    memory.store.clear()


def put(store, name: str, content: bytes | str) -> str:
    content = content.encode() if isinstance(content, str) else content
    store.pipe_file(f"{STORE}/{name}", content)
    return f"{STORE}/{name}"


def write_formats(folder: pathlib.Path) -> None:
    """The texts in each format, half of them in each file."""
    folder.mkdir()
    for number, texts in enumerate((TEXTS[:150], TEXTS[150:])):
        lines = "".join(f"{json.dumps({'text': text, 'n': 1})}\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(lines)
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        table = pyarrow.table({"text": texts, "other": ["x" * 1000] * 150})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=50)


def test_texts_of_a_store_are_those_of_a_folder(config, store, tmp_path):
    write_formats(tmp_path / "texts")
    for path in (tmp_path / "texts").iterdir():
        put(store, f"texts/{path.name}", path.read_bytes())
    put(store, "texts/_SUCCESS", "")
    for pattern in ("*.jsonl", "*.jsonl.gz", "*.parquet", "0.*"):
        near = prepare(config(source=str(tmp_path / "texts" / pattern)), 257, progress=False)
        far = prepare(config(source=f"{STORE}/texts/{pattern}"), 257, progress=False)
        assert far.checksum == near.checksum and len(far.documents) == len(near.documents)
    count = len(store.asked)
    again = prepare(config(source=f"{STORE}/texts/*.jsonl"), 257, progress=False)
    # it is listed, and not read again
    assert again.folder.exists() and all("detail" in each for _, each in store.asked[count:])


def test_files_of_a_store(store):
    for name in ("a/x/1.jsonl", "a/2.txt", "a/_SUCCESS", "a/.hidden/3.txt", "b.txt"):
        put(store, name, name)
    source = listing.find(f"{STORE}/a/")
    assert [file.path for file in source.files] == [f"{STORE}/a/2.txt", f"{STORE}/a/x/1.jsonl"]
    assert [(file.format, file.size) for file in source.files] == [("text", 7), ("jsonl", 11)]
    assert len(source.passed_over) == 2 and "passed over" in source.lines()[0]
    assert [file.path for file in listing.find(f"{STORE}/**/*.jsonl").files] == [
        f"{STORE}/a/x/1.jsonl"
    ]
    single = listing.find(f"{STORE}/b.txt")
    assert [file.path for file in single.files] == [f"{STORE}/b.txt"] and single.lines() == []
    for name, rule in {
        f"{STORE}/c": "holds no files",
        f"{STORE}/*.npy": "matches no files; below memory://bucket are 3 .txt",
        "s4://bucket/x": "is in an unknown store",
        "s3:///x": "is not the address of a store",
        "s3://": "is not the address of a store",
    }.items():
        with pytest.raises(ConfigError, match=rule):
            listing.find(name)
    store.problem = PermissionError("Access Denied")
    with pytest.raises(
        StoreError, match=r"^data.source=memory://bucket/a cannot be read \(Acc.*\)$"
    ):
        listing.find(f"{STORE}/a")
    store.problem = TimeoutError("no answer")
    with pytest.raises(StoreAwayError):
        listing.find(f"{STORE}/a")


@pytest.mark.parametrize("form", ["bin", "npy", "bin.gz"])
def test_token_files_are_read_in_place(config, store, tmp_path, monkeypatch, form):
    monkeypatch.setattr(ranges, "BLOCK", 1000)
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    ids = np.random.default_rng(0).integers(0, 257, 20_000).astype("<u2")
    buffer = io.BytesIO()
    np.save(buffer, ids)
    content = {
        "bin": ids.tobytes(),
        "npy": buffer.getvalue(),
        "bin.gz": gzip.compress(ids.tobytes()),
    }[form]
    (tmp_path / f"a.{form}").write_bytes(content)
    near = prepare(config(source=str(tmp_path / f"a.{form}")), 257, progress=False)
    settings = {"source": put(store, f"a.{form}", content), "store_cache_gb": 20e-6}
    far = prepare(config(**settings), 257, progress=False)
    assert far.checksum == near.checksum and np.array_equal(far.documents, near.documents)
    draw = random.Random(1)
    for _ in range(100):
        first = draw.randrange(len(ids))
        last = first + draw.randrange(3000)
        assert np.array_equal(far.tokens[first:last], ids[first:last])
        kept = list(far.folder.parent.rglob("blocks/*/*"))
        assert sum(path.stat().st_size for path in kept) <= 20e3
    if form != "bin.gz":
        far.tokens.prefetch(0, 2000, is_needed=False)
        stored, end = far.tokens._file, time.monotonic() + 20
        while not all(stored._cache.has(stored._id, block) for block in range(4)):
            assert time.monotonic() < end, "nothing is read ahead"
        store.pipe_file(f"{STORE}/a.{form}", content[::-1])
        monkeypatch.setattr(ranges, "CHECK_S", 0.0)
        with pytest.raises(StoreError, match=r"has changed since this run began: put it back"):
            for first in itertools.count(0, 5000):
                assert len(far.tokens[first : first + 2000])


def test_megatron_files_and_several_token_files(config, store, tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    sequences = [[1, 2, 3], [4], [5, 6]]
    write_pair(folder / "a", sequences, [0, 2, 3], "<u2", 8)
    write_pair(folder / "b", sequences[::-1], [0, 1, 2, 3], "<u2", 8)
    for path in folder.iterdir():
        put(store, f"tokens/{path.name}", path.read_bytes())
    near = prepare(config(source=str(folder)), 257, progress=False)
    far = prepare(config(source=f"{STORE}/tokens"), 257, progress=False)
    assert far.checksum == near.checksum and far.documents.tolist() == near.documents.tolist()
    assert far.tokens[2:9].tolist() == near.tokens[2:9].tolist() == [3, 4, 5, 6, 5, 6, 4]
    far.prefetch([(0, 12)])
    for name in ("a.bin", "a.idx"):  # one file has its index, too
        one = prepare(config(source=f"{STORE}/tokens/{name}"), 257, progress=False)
        assert one.documents.tolist() == [0, 4, 6]
    # both tokens.bin have the same version, and are two files of the cache all the same
    assert sorted(path.name for path in far.folder.iterdir()) == ["corpus.json", "documents.bin"]


def test_adjacent_blocks_are_one_request(store, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "BLOCK", 100)
    monkeypatch.setattr(blocks, "BLOCK", 100)
    content = random.Random(0).randbytes(1550)
    (file,) = listing.find(put(store, "a.bin", content)).files
    monkeypatch.setattr(ranges, "TOGETHER", 4)
    stored = ranges.StoreFile(file, blocks.BlockCache(tmp_path, 1e6))
    assert stored.read(120, 180) == content[120:180]
    store.asked.clear()
    assert stored.read(20, 1550) == content[20:]
    asked = sorted((each["start"], each["end"]) for _, each in store.asked)
    assert asked == [(0, 100), (200, 600), (600, 1000), (1000, 1400), (1400, 1550)]


def test_windows_are_read_ahead(store, tmp_path, monkeypatch):
    """Batches are those of a local file; few bytes are requested twice where two windows fit, and a
    cache that is too small for that has a note."""
    for module, name, value in (
        (ranges, "BLOCK", 128),
        (blocks, "BLOCK", 128),
        (document_packing, "GROUP", 256),
        (order, "WINDOW", 4),
        (corpus_module, "NEAR", 16),
    ):
        monkeypatch.setattr(module, name, value)
    ids = np.random.default_rng(0).integers(0, 250, 30_000).astype("<u2")
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    url = put(store, "a.bin", ids.tobytes())
    changes = {
        "data.tokenizer": "none",
        "data.cache": str(tmp_path / "cache"),
        "data.sequence_length": 32,
        "data.store_cache_gb": 25e-6,
    }

    def batches(**more) -> TrainingBatches:
        names = {name.replace("__", "."): value for name, value in more.items()}
        c = configs.replace(configs.Config(), changes | names)
        return TrainingBatches(prepare_all(c.data, 257, progress=False), spans(c))

    near, far = batches(data__source=str(tmp_path / "a.bin")), batches(data__source=url)
    (note,) = far.remarks()
    assert note.startswith("data.store_cache_gb=2.5e-05 is little for data.source=memory://buc")
    assert near.remarks() == [] == batches(data__source=url, data__store_cache_gb=1.0).remarks()
    store.asked.clear()
    for batch in range(55):  # nearly an epoch
        draws = [far.draw(batch, place) for place in range(16)]
        for draw in draws:
            draw.sequences.corpus.prefetch(draw.ranges)
        far.read_ahead(draws)
        for place, draw in enumerate(draws):
            expected = near.draw(batch, place).arrays()
            assert all(np.array_equal(draw.arrays()[name], expected[name]) for name in expected)
    filesystem.given_up.set()
    asked = sum(each["end"] - each["start"] for _, each in store.asked if "start" in each)
    assert asked < 1.5 * ids.nbytes


def test_what_no_wait_mends():
    class HttpError(Exception):
        __module__, code = "gcsfs.retry", 401

    lasting = (
        PermissionError("Access Denied"),
        OSError("Forbidden: b/bucket/o\nno access"),  # as gcsfs raises them
        ValueError("Bad Request: b/bucket/o\ninvalid"),
        HttpError("Invalid Credentials, 401"),
    )
    for error in lasting:
        assert type(filesystem.refusal("gs://bucket/a", error)) is StoreError
    HttpError.code = 503
    for error in (HttpError("Backend Error, 503"), TimeoutError()):
        assert type(filesystem.refusal("gs://bucket/a", error)) is StoreAwayError
    assert filesystem.refusal("gs://bucket/a", ValueError("a fault of ours")) is None


def test_an_outage_is_waited_out(store, tmp_path, capsys):
    content = random.Random(0).randbytes(5000)
    (file,) = listing.find(put(store, "a.bin", content)).files
    stored = ranges.StoreFile(file, blocks.BlockCache(tmp_path, 1e9))
    store.problem, excused = ConnectionError("no route to the store"), []

    def end() -> None:
        excused.extend(watchdog._excused)
        store.problem = None

    timer = threading.Timer(0.3, end)
    timer.start()
    assert stored.read(0, 10) == content[:10]
    lines = capsys.readouterr()
    told = (lines.err + lines.out).splitlines()
    assert len(told) == 2 and told[0].startswith(
        f"warning: {file.path} cannot be read (no route to the store): it is tried again"
    )
    assert told[1].startswith("the store has answered, after ") and excused == [file.path]
    assert not watchdog._excused
    timer.join()


def test_nobody_waits_for_a_store_at_the_end(store, tmp_path, monkeypatch):
    """A loader that is closed in an outage would wait for its threads, as long as the outage."""
    (file,) = listing.find(put(store, "a.bin", b"content")).files
    stored = ranges.StoreFile(file, blocks.BlockCache(tmp_path, 1e9))
    monkeypatch.setattr(filesystem, "WAITS_S", (60.0,))
    store.problem = ConnectionError("no route to the store")
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading, end = threads.submit(stored.read, 0, 7), time.monotonic() + 20
        while not watchdog._excused:
            assert time.monotonic() < end, "nothing waits"
            time.sleep(0.01)
        began = time.monotonic()
        filesystem.given_up.set()
        with pytest.raises(StoreAwayError):
            reading.result()
    assert time.monotonic() - began < 20
    store.problem = None
    assert stored.read(0, 7) == b"content"


def test_streams(store):
    content = random.Random(0).randbytes(30_000)
    address = put(store, "a", content)
    assert hashlib.sha256(io.BufferedReader(ranges.StoreStream(address), 4096).read()).digest()
    for ahead in (0, 1 << 14):
        with ranges.StoreStream(address, ahead) as stream:
            assert stream.read(10) == content[:10] and stream.seek(-5, io.SEEK_END) == 29_995
            assert stream.read() == content[-5:] and stream.read(3) == b""
            stream.seek(100)
            assert io.BufferedReader(stream, 1 << 16).read() == content[100:]


@pytest.mark.parametrize("place", ["folder", "store"])
def test_a_prepared_corpus_is_a_source(config, store, tmp_path, place):
    """Its tokens are read in place, its checksum is that of the corpus, and it has its own mask."""
    lines = [json.dumps({"prompt": f"question {n}?", "text": f" {n * n}."}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    settings = {"text_fields": ("prompt", "text"), "loss_mask": ("prompt",)}
    first = prepare(config(source=str(tmp_path / "a.jsonl"), **settings), 257, progress=False)
    copy = tmp_path / "copy"
    shutil.copytree(first.folder, copy)
    name = str(copy)
    if place == "store":
        for path in copy.iterdir():
            put(store, f"copy/{path.name}", path.read_bytes())
        name = f"{STORE}/copy"
    other = {"cache": tmp_path / "other"}
    corpus = prepare(config(source=name, **other), 257, progress=False)
    assert corpus.checksum == first.checksum and corpus.folder.parent == tmp_path / "other"
    assert sorted(path.name for path in corpus.folder.iterdir()) == ["corpus.json", "documents.bin"]
    for array, expected in ((corpus.tokens, first.tokens), (corpus.mask, first.mask)):
        assert np.array_equal(array[10:500], expected[10:500]) and len(array) == len(expected)
    assert corpus.in_store == (place == "store")
    again = prepare(config(source=name, **other), 257, progress=False)
    assert again.prepared == corpus.prepared

    info = json.loads((first.folder / "corpus.json").read_text())
    with pytest.raises(DataError, match="data.tokenizer=none is not the tokenizer with which"):
        prepare(config(source=name, tokenizer="none", **other), 257, progress=False)
    for file, content, message in (
        ("tokens.bin", b"12", "tokens.bin: has 2 bytes, and by corpus.json"),
        ("documents.bin", b"1" * 8 * len(first.documents), "documents.bin: damaged: its checksum"),
        ("corpus.json", b"[]", "corpus.json: not the description of a prepared corpus"),
        *(
            ("corpus.json", json.dumps(info | changes).encode(), "corpus.json: not the description")
            for changes in ({"tokenizer": {}}, {"tokens": [1]}, {"documents": float("inf")})
        ),
    ):
        if place == "store":
            put(store, f"copy/{file}", content)
        else:
            (copy / file).write_bytes(content)
        with pytest.raises(DataError, match=message):
            prepare(config(source=name, cache=tmp_path / "third"), 257, progress=False)
        (copy / file).write_bytes((first.folder / file).read_bytes())
        put(store, f"copy/{file}", (first.folder / file).read_bytes())
