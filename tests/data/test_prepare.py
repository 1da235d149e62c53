"""Prepared corpora: content, checksum, key, errors, and what a kill or a race leaves."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import shutil
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest
import tokenizers

from jaxtrain.config.sources import Source
from jaxtrain.data import corpus as corpora
from jaxtrain.data.corpus import bigram_entropy
from jaxtrain.data.preparing import cache as caches, encode, index_tokens, prepare as tokens
from jaxtrain.data.preparing.corpus_writer import CorpusWriter
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.reading import compressed, documents, json_text
from jaxtrain.data.reading.records import File
from jaxtrain.data.tokenizer import ByteTokenizer, DataError, tokenizer_from
from jaxtrain.run.exit_status import ExitStatus

END = 256


def documents_of(corpus):
    bounds = corpus.documents.tolist()
    return [
        corpus.tokens[first:last].tolist() for first, last in zip(bounds, bounds[1:], strict=False)
    ]


def folders(config):
    """The prepared folders in the cache, and those that are being made."""
    path = pathlib.Path(config.cache)
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    return sorted(name for name in names if name != tokens.KNOWN)


def failure(config, vocab_size=257):
    before = folders(config)
    with pytest.raises(DataError) as caught:
        prepare(config, vocab_size, progress=False)
    assert "\n" not in str(caught.value)
    assert folders(config) == before
    return str(caught.value)


def test_documents_end_with_their_id(config, write):
    path = write("a.jsonl", '{"text": "ab"}\n{"text": "漢"}\n')
    corpus = prepare(config(source=path), 257, progress=False)
    assert documents_of(corpus) == [[97, 98, END], [*"漢".encode(), END]]
    assert (
        corpus.tokens.dtype == np.uint16
        and corpus.documents.dtype == np.int64
        and corpus.mask is None
    )
    assert isinstance(corpus.tokens, np.memmap)


def test_mask(config, write):
    path = write("a.jsonl", '{"q": "ab", "a": "c"}\n{"q": "d", "a": "ef"}\n')
    corpus = prepare(
        config(source=path, text_fields=("q", "a"), loss_mask=("q",)), 257, progress=False
    )
    assert corpus.tokens.tolist() == [97, 98, 99, END, 100, 101, 102, END]
    assert corpus.mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    corpus = prepare(
        config(source=path, text_fields=("a", "q"), loss_mask=("q",)), 257, progress=False
    )
    assert corpus.mask.tolist() == [1, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("batch", [1, 100, 1 << 20])
def test_batches_do_not_show(config, write, monkeypatch, batch):
    texts = [f"document {i} " * (i % 7) + "x" for i in range(50)]
    path = write("a.jsonl", "".join(json.dumps({"q": "Q", "a": text}) + "\n" for text in texts))
    monkeypatch.setattr(encode, "TASK", batch)
    corpus = prepare(
        config(source=path, text_fields=("q", "a"), loss_mask=("q",)), 257, progress=False
    )
    assert documents_of(corpus) == [[*b"Q", *text.encode(), END] for text in texts]
    assert np.array_equal(
        corpus.mask, np.concatenate([[0] + [1] * (len(text) + 1) for text in texts])
    )


def test_tokenizers_file(config, write, tokenizer_file):
    path, file = write("a.jsonl", '{"text": "the quick fox"}\n{"text": "dog"}\n'), tokenizer_file()
    corpus = prepare(config(source=path, tokenizer=file), 5000, progress=False)
    end = corpus.tokenizer.end_of_document
    assert [document[-1] for document in documents_of(corpus)] == [end, end]
    assert [corpus.tokenizer.decode(document) for document in documents_of(corpus)] == [
        "the quick fox",
        "dog",
    ]
    assert (corpus.folder / "tokenizer.json").read_bytes() == file.read_bytes()
    assert bigram_entropy(corpus) is None
    found = tokenizer_from(json.loads((corpus.folder / "corpus.json").read_text())["tokenizer"])
    assert found.decode(documents_of(corpus)[1]) == "dog"


def test_large_vocabulary_takes_four_bytes(config, write, tokenizer_file):
    file = tokenizer_file()
    content = json.loads(file.read_text())
    content["model"] = {
        "type": "WordLevel",
        "vocab": {str(i): i for i in range(70_000)} | {"<|endoftext|>": 1},
        "unk_token": "0",
    }
    file.write_text(json.dumps(content))
    corpus = prepare(config(source=write("a.txt", "69999"), tokenizer=file), 80_000, progress=False)
    assert corpus.tokens.dtype == np.uint32 and corpus.tokens.tolist() == [69_999, 1]


# ---- token files


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_raw_token_file(config, write, dtype, monkeypatch):
    ids = [1, 2, END, 3, END, 4, 5, 6, END, 9]
    monkeypatch.setattr(index_tokens, "CHUNK", 4)
    path = write("a.bin", np.array(ids, "<" + np.dtype(dtype).str[1:]).tobytes())
    corpus = prepare(config(source=path, token_dtype=dtype), 257, progress=False)
    assert documents_of(corpus) == [[1, 2, END], [3, END], [4, 5, 6, END], [9]]
    assert not (corpus.folder / "tokens.bin").exists()  # it stays where it is


@pytest.mark.parametrize("order", ["<", ">"])
def test_npy_token_file(config, tmp_path, order):
    np.save(tmp_path / "a.NPY", np.array([1, 2, END, 3], order + "u2"))
    (tmp_path / "a.NPY.npy").rename(tmp_path / "a.NPY")
    corpus = prepare(config(source=tmp_path / "a.NPY"), 257, progress=False)
    assert documents_of(corpus) == [[1, 2, END], [3]]


def test_token_file_without_tokenizer(config, tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, END, 999], np.int32))
    corpus = prepare(config(source=tmp_path / "a.npy", tokenizer="none"), 1000, progress=False)
    assert documents_of(corpus) == [[1, 2, END, 999]]
    # prepared for another vocabulary before
    message = failure(config(source=tmp_path / "a.npy", tokenizer="none"), 999)
    rule = "token 999 at position 3 is not below model.vocab_size=999 and at least 0"
    assert message == f"{tmp_path}/a.npy: {rule}: use --config.model.vocab_size=1000"
    np.save(tmp_path / "a.npy", np.array([1, -2, END, 999], np.int32))
    assert "token -2 at position 1 is not below" in failure(
        config(source=tmp_path / "a.npy", tokenizer="none"), 1000
    )


@pytest.mark.parametrize(
    "ids, dtype, read_as, says",
    [
        ([1, 2, END, 999], "<u2", "uint32", "use --config.data.token_dtype=uint16"),
        # their halves, and the zeros between them, are ids, too
        ([1, 2, END, 999], "<u4", "int64", "use --config.data.token_dtype=uint32"),
        ([1, 2, 4000, 999], "<u2", "uint16", "use --config.model.vocab_size=4001"),
        (
            [1, 2**31, 2, 3],
            "<u4",
            "uint32",
            "and no tokenizer makes it: the file holds what no data.token_dtype for 1000 ids reads "
            "as ids",
        ),
        (
            [1, 2**40],
            "npy",
            "uint16",
            "and no tokenizer makes it: the file holds int64 numbers, not ids",
        ),
    ],
)
def test_ids_beyond_the_vocabulary_name_what_reads_them(
    config, write, tmp_path, ids, dtype, read_as, says
):
    """A suggestion works; none is made where none does."""
    if dtype == "npy":
        np.save(path := tmp_path / "a.npy", np.array(ids))
    else:
        path = write("a.bin", np.array(ids, dtype).tobytes())
    settings = {"source": path, "tokenizer": "none", "token_dtype": read_as}
    message = failure(config(**settings), 1000)
    assert says in message
    if "token_dtype=" in says:
        assert documents_of(
            prepare(config(**settings | {"token_dtype": says[-6:]}), 1000, progress=False)
        ) == [ids]


@pytest.mark.parametrize("tokenizer", ["none", "file"])
def test_a_vocabulary_that_uint16_cannot_hold(config, write, tmp_path, tokenizer):
    """Refused before the file is read, with the flag that reads it; where none does, it says what
    the file would have to be. Types that hold the vocabulary are as they were."""
    ids = np.random.default_rng(0).integers(0, 128_256, 1000)
    if tokenizer == "file":
        words = {f"w{i}": i for i in range(128_255)} | {"</s>": 128_255}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(f"{tmp_path}/t.json")
        tokenizer = f"{tmp_path}/t.json"
    whose = "model.vocab_size" if tokenizer == "none" else "data.tokenizer"
    rule = f"data.token_dtype=uint16 has 65,536 ids, and {whose} has 128,256: "
    for name, content in (("a.bin", ids.astype("<u4").tobytes()), ("a.bin.gz", None)):
        path = write(name, content or gzip.compress(ids.astype("<u4").tobytes()))
        settings = {"source": path, "tokenizer": tokenizer}
        assert failure(config(**settings), 128_256) == (
            f"{rule}use --config.data.token_dtype=uint32"
        )
        corpus = prepare(config(**settings, token_dtype="uint32"), 128_256, progress=False)
        assert corpus.tokens.tolist() == ids.tolist()
    for count in (1000, 1001):  # an even number could be read as uint32, and an odd one not
        path = write("b.bin", ids[:count].astype("<u2").tobytes() + b"ab" * (count - 1000))
        settings = {"source": path, "tokenizer": tokenizer}
        assert failure(config(**settings), 128_256) == (
            f"{rule}write {path} as uint32, and use --config.data.token_dtype=uint32"
        )
    assert "no data.token_dtype for 128256 ids" in failure(
        config(source=write("b.bin", (ids % 65_536).astype("<u2").tobytes()), tokenizer=tokenizer,
               token_dtype="uint32"), 128_256
    )  # fmt: skip


def test_token_file_errors(config, write, tmp_path, monkeypatch):
    monkeypatch.setattr(index_tokens, "CHUNK", 4)
    ids = np.arange(10, dtype=np.int64)
    for bad in (257, -1, 1 << 40):
        ids[7] = bad
        np.save(tmp_path / "a.npy", ids)
        assert failure(config(source=tmp_path / "a.npy")).startswith(
            f"{tmp_path}/a.npy: token {bad} at position 7 is beyond the 257 ids of data.to"
        )
    path = write("a.bin", b"123")
    assert (
        failure(config(source=path))
        == f"{path}: 3 bytes are no whole number of tokens of data.token_dtype=uint16"
    )
    for array in (
        np.zeros((2, 2), np.uint16),
        np.zeros(3),
        np.zeros(0, np.uint16),
        np.array([None, {}]),
    ):
        np.save(tmp_path / "b.npy", array, allow_pickle=True)
        assert failure(config(source=tmp_path / "b.npy")).startswith(f"{tmp_path}/b.npy:1: ")
    # a header of 4 GB, an unknown version, and too many ids
    content = bytearray((tmp_path / "a.npy").read_bytes())
    huge = b"\x93NUMPY\2\0\xff\xff\xff\xff" + content[10:]
    for damaged in (b"no array", huge, content.replace(b"NUMPY\1", b"NUMPY\7")):
        path = write("c.npy", bytes(damaged))
        assert failure(config(source=path)).startswith(f"{path}:1: not an .npy file")
    path = write("c.npy", bytes(content.replace(b"(10,), ", b"(1000,)")))
    assert failure(config(source=path)).startswith(f"{path}: 208 bytes, which are too few for its ")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_token_files(config, write, tmp_path, compress):
    """Decompressed into the cache, and memory-mapped there."""
    np.save(tmp_path / "a.npy", np.array([1, 2, END, 3], np.uint16))
    for name, content in (
        ("a.npy.gz", (tmp_path / "a.npy").read_bytes()),
        ("b.bin.zst", np.array([1, 2, END, 3], "<u2").tobytes()),
    ):
        path = write(name, compress(content))
        for _ in range(2):
            corpus = prepare(config(source=path), 257, progress=False)
            assert documents_of(corpus) == [[1, 2, END], [3]] and isinstance(
                corpus.tokens, np.memmap
            )
        (corpus.folder / f"source.{name[2:5]}").unlink()
        assert documents_of(prepare(config(source=path), 257, progress=False)) == [[1, 2, END], [3]]
    path = write("c.bin.gz", compress(np.array([1, 2, END, 3], "<u2").tobytes())[:-4])
    assert failure(config(source=path)).startswith(f"{path}: damaged or cut short: ")
    path = write("d.bin.gz", compress(b""))
    assert failure(config(source=path)).startswith(f"{path}: 0 bytes are no whole number of tokens")


def test_compressed_text_is_the_same_corpus(config, write):
    lines = "".join(json.dumps({"text": f"document {i} " * (i % 50)}) + "\n" for i in range(2000))
    text = "a line of text\n" * 200_000
    for name, content in (("a.jsonl", lines), ("b.txt", text)):
        plain = prepare(config(source=write(name, content)), 257, progress=False)
        packed = prepare(
            config(source=write(f"{name}.xz", lzma.compress(content.encode(), preset=0))),
            257,
            progress=False,
        )
        assert packed.checksum == plain.checksum and packed.folder != plain.folder


# ---- bad records


def test_progress_is_on_a_terminal_and_the_result_in_the_log(config, write, capsys, monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    prepare(config(source=write("a.txt", "words " * 100)), 257)
    assert re.fullmatch(
        r"\rpreparing a.txt: 100% of 0.6 kB, [\d.,]+ [kM]B/s\x1b\[K\r\x1b\[K"
        r"\rjoining a.txt: 100% of 1.2 kB, [\d.,]+ [kM]B/s\x1b\[K\r\x1b\[K",
        screen.getvalue(),
    )
    marks, prepared = capsys.readouterr().out.splitlines()
    assert marks == "documents: no id begins one, id 256 ends it"
    assert re.match(r"prepared a.txt: 0.6 kB, 1 documents, 601 tokens in ", prepared)


def test_bad_records_are_counted_and_said_again(config, write, capsys):
    path = write("a.jsonl", '{"text": "a"}\n' + "oops\n" * 7 + '{"text": "b"}\n')
    assert failure(config(source=path)).startswith(f"{path}:2: not valid JSON: ")
    for _ in range(2):  # prepared, then found in the cache
        corpus = prepare(config(source=path, bad_records="skip"), 257)
        assert documents_of(corpus) == [[97, END], [98, END]]
        assert corpus.skipped.count == 7
        said = capsys.readouterr().out
        assert (
            f"data.bad_records=skip: 7 bad records of data.source={path} left out:\n  "
            f"{path}:2: not valid JSON" in said
        )
        stored = corpus.folder / tokens.INFO
        assert f"\n  and 2 more, which are in {stored}\n" in said
        assert all(f"{path}:{line}: not valid" in stored.read_text() for line in range(2, 9))
    # the corpus without them is not that of bad_records=stop
    assert "not valid JSON" in failure(config(source=path))
    write("a.jsonl", "oops\n")
    assert re.match(
        f"{path}:1: no documents in .*: 1 bad records were left out, first {path}:1: not",
        failure(config(source=path, bad_records="skip")),
    )


def test_a_prepared_corpus_keeps_its_bad_records(config, write, tmp_path):
    """Those of a file whose number is above that of the corpus's own files, too."""
    for i in range(8):
        path = write(f"texts/{i}.jsonl", '{"text": "a"}\n')
    path.write_text('{"text": "a"}\noops\n')
    first = prepare(config(source=path.parent, bad_records="skip"), 257, progress=False)
    (place,) = first.skipped.places
    assert place.startswith(f"{path}:2: not valid JSON: ")
    shutil.copytree(first.folder, tmp_path / "copy")
    for _ in range(2):  # prepared, then found in the cache
        corpus = prepare(config(source=tmp_path / "copy"), 257, progress=False)
        assert corpus.checksum == first.checksum and corpus.skipped == first.skipped


def test_nothing_bad_is_the_same_corpus(config, write):
    path = write("a.jsonl", '{"text": "a"}\n')
    checksums = {
        prepare(config(source=path, bad_records=way), 257, progress=False).checksum
        for way in ("stop", "skip")
    }
    assert len(checksums) == 1


def test_what_was_prepared_before_still_counts(config, write):
    """The key and what is stored of a corpus without bad records are as they were: what took hours
    is not done again."""
    path = write("a.txt", "golden\n")
    os.utime(path, ns=(1, 1))
    corpus = prepare(config(source=path), 257, progress=False)
    info = json.loads((corpus.folder / "corpus.json").read_text())
    assert info.keys() == {
        *("dtype", "tokens", "documents", "masked", "checksum", "tokenizer"),
        *("of", "parts", "prepared", "text", "encoded", "documents_by_file", "left_out"),
    }
    for format, key in (("text", "1e5387a3c3989869"), ("jsonl", "84293e0dc347b5cc")):
        source = Source("a", path, (File(str(path), format, 7, 1),))
        assert tokens._key(config(), source, ByteTokenizer(), tokens._content) == key


# ---- what does not fit


def test_errors_leave_nothing(config, write, tmp_path):
    lines = write("a.jsonl", '{"text": "fine"}\n{"text": 3}\n')
    assert failure(config(source=lines)) == (
        f"{lines}:2: field 'text' is a number, not text: use --config.data.bad_records=skip "
        "to leave out what cannot be read"
    )
    assert not pathlib.Path(config().cache).exists()
    assert failure(config(source=write("b.jsonl", '{"text": ""}\n\n'))).startswith(
        f"{tmp_path}/b.jsonl:1: no documents"
    )
    text = write("a.txt", "a")
    assert failure(config(source=text), vocab_size=100).startswith("model.vocab_size=100")
    assert failure(config(source=text, tokenizer="none")).startswith(
        "data.tokenizer=none is for token files"
    )
    assert failure(config(source=text, loss_mask=("text",))).startswith(
        "data.loss_mask=text names fields of JSON, JSONL, Parquet, Arrow, ArrayRecord, and "
    )
    write("d/a.txt", "a")
    assert "would become part of it" in failure(
        config(source=tmp_path / "d", cache=str(tmp_path / "d" / "cache"))
    )
    prepare(
        config(source=tmp_path / "d", cache=str(tmp_path / "d" / ".cache")), 257, progress=False
    )


def test_cache_that_cannot_be_written(config, write):
    path = write("a.txt", "a")
    for cache in (path, path / "below"):
        message = (
            f"^data.cache={cache} cannot be written: {path}.*: (File exists|Not a directory): use "
            "--config.data.cache=/"
        )
        with pytest.raises(DataError, match=message) as error:
            prepare(config(source=path, cache=cache), 257, progress=False)
        assert error.value.status == ExitStatus.BAD_CONFIG


# The content is no part of the test's name: gzip writes the second into it, and workers must find
# the same tests.
@pytest.mark.parametrize(
    "name, content",
    [("a.txt", "some text\n" * 10_000), ("a.bin.gz", gzip.compress(bytes(100_000)))],
    ids=["text", "gzip"],
)
def test_full_cache_is_named(config, write, start_python, name, content):
    """Neither the corpus, nor a file of the cache; and nothing half-written stays."""
    path, cache = write(name, content), config().cache
    process = start_python(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n" + PREPARE,
        path,
        cache,
        "go",
    )
    _, said = process.communicate(timeout=60)
    full = rf"{caches.FullCacheError.__module__}.FullCacheError: data.cache={cache} is full: "
    full += "File too large"
    assert re.match(
        rf"{full}: (use --config.data.cache=\S+ \(or another folder|name a folder) with more room",
        said.splitlines()[-1],
    )
    assert not pathlib.Path(cache).exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(config, write, monkeypatch, error):
    """Some file systems have no room only when what was written goes to the disk."""

    def full(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(tokens.os, "fsync", full)
    message = failure(config(source=write("a.jsonl", '{"text": "some text"}\n' * 100)))
    assert (
        message.startswith(f"data.cache={config().cache} is full: {os.strerror(error)}: ")
        and "--config.data.cache" in message
    )


def test_errors_of_the_source_name_the_source(config, write, monkeypatch):
    path = write("a.txt", "a")

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    monkeypatch.setattr(documents, "pieces", broken)
    assert failure(config(source=path)) == f"{path}: Input/output error"


LINES = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(300))
SOURCES = {
    "a.txt": LINES.encode(),
    "a.jsonl": LINES.encode(),
    "a.json": LINES.encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode(), 0),
}


def replace(path):
    beside = path.with_name(".beside")
    beside.write_bytes(path.read_bytes()[::-1])
    beside.replace(path)


CHANGES = {
    "grows": lambda path: path.open("ab").write(b'{"text": "more"}\n') and os.utime(path),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2 + 3),
    "emptied": lambda path: os.truncate(path, 0),
    "replaced": replace,
    "deleted": pathlib.Path.unlink,
    "another file": lambda path: path.with_name("b.txt").write_text("more"),
    "folder deleted": lambda path: shutil.rmtree(path.parent),
    "folder moved": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*SOURCES, "a.parquet", "a.npy", "a.bin", "a.bin.gz"])
@pytest.mark.parametrize("bad_records", ["stop", pytest.param("skip", marks=pytest.mark.full)])
def test_source_that_changes_while_it_is_read(
    config, write, monkeypatch, tmp_path, name, change, bad_records
):
    """One line that says so, whatever could not be read; nothing of it stays, and when it is back
    the same command works."""
    folder = tmp_path / "texts"
    ids = np.arange(2000, dtype="<u2") % 257
    if name == "a.parquet":
        import pyarrow
        import pyarrow.parquet

        folder.mkdir()
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [f"document {i}" for i in range(300)]}),
            folder / name,
            row_group_size=10,
        )
    elif name == "a.npy":
        folder.mkdir()
        np.save(folder / name, ids)
    else:
        write(
            f"texts/{name}",
            {"a.bin": ids.tobytes(), "a.bin.gz": gzip.compress(ids.tobytes(), 0)}.get(name)
            or SOURCES[name],
        )
    tokens_alone = name.startswith(("a.npy", "a.bin"))
    before, given = (
        (folder / name).read_bytes(),
        config(source=folder / name if tokens_alone else folder, bad_records=bad_records),
    )
    for module, size in (
        (encode, "TASK"),
        (index_tokens, "CHUNK"),
        (compressed, "BLOCK"),
        (documents, "BLOCK"),
        (json_text, "BLOCK"),
    ):
        monkeypatch.setattr(module, size, 100)
    append, calls = CorpusWriter.append, []

    def change_then_append(*arguments, **named):
        calls.append(None)
        if len(calls) == 3:
            CHANGES[change](folder / name)
        append(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(CorpusWriter, "append", change_then_append)
        if change == "another file" and tokens_alone:
            assert len(prepare(given, 257, progress=False).tokens) == 2000
            return
        assert (
            failure(given)
            == f"data.source={given.source} changed while it was read: try again when it is "
            "complete"
        )
    assert len(calls) >= 3
    assert not pathlib.Path(given.cache).exists()
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(before)
    assert len(prepare(given, 257, progress=False).tokens) >= 2000


@pytest.mark.parametrize("name", ["a.bin", "a.npy", "a.txt"])
def test_tokens_that_are_cut_short_while_they_are_used(config, tmp_path, name):
    """A line in place of the signal that ends a process which reads behind the end of a mapped
    file. One that is deleted is there still."""
    path = tmp_path / name
    ids = np.arange(50_000, dtype="<u2") % 257
    if name == "a.npy":
        np.save(path, ids)
    else:
        path.write_bytes(ids.tobytes() if name == "a.bin" else bytes(100_000))
    corpus = prepare(config(source=path), 257, progress=False)
    corpus.check_whole()
    file = corpus.folder / "tokens.bin" if name == "a.txt" else path
    os.truncate(file, 5000)
    with pytest.raises(
        DataError,
        match=f"^{file}: the file was cut short while it was in use, and 5,000 bytes are left: put "
        "it back",
    ):
        corpus.check_whole()
    with pytest.raises(DataError, match="was cut short while it was in use"):
        bigram_entropy(corpus)
    if name == "a.npy":
        few = f"{path}: 5,000 bytes, which are too few for its 50,000 uint16 ids: it is cut short"
        assert failure(config(source=path)).startswith(few)
        np.save(path, ids)
    again = prepare(config(source=path), 257, progress=False)
    assert (again.folder == corpus.folder) == (name != "a.bin")  # the others are as they were
    (again.folder / "tokens.bin" if name == "a.txt" else path).unlink()
    again.check_whole()
    assert int(np.sum(again.tokens, dtype=np.int64)) >= 0


# ---- checksum and key


def test_checksum_is_of_content(config, write, tmp_path):
    def checksum(name, text, **fields):
        return prepare(config(source=write(name, text), **fields), 257, progress=False).checksum

    first = checksum("a.jsonl", '{"text": "ab", "q": "c"}\n')
    assert (
        checksum("other/b.jsonl", '{"q": "c", "text": "ab"}\n\n', cache=str(tmp_path / "elsewhere"))
        == first
    )
    assert checksum("b.txt", "ab") == first
    others = [
        checksum("c.txt", "ac"),
        checksum("d.jsonl", '{"text": "a"}\n{"text": "b"}\n'),
        checksum("e.jsonl", '{"text": "ab", "q": "c"}\n', text_fields=("q", "text")),
        checksum("f.jsonl", '{"text": "ab"}\n', loss_mask=("text",)),
    ]
    assert len({first, *others}) == 5


def as_folder(path, content):
    path.mkdir()
    for i, name in enumerate(("b.txt", "a/c d.jsonl", "a/[x].md")):
        (path / name).parent.mkdir(exist_ok=True)
        part = content[i * 1000 : (i + 1) * 1000]
        (path / name).write_bytes(
            json.dumps({"text": part.decode()}).encode() if name.endswith("l") else part
        )


# How 3,000 bytes of text are written at a path, by its name.
PLACES = {
    "folder": as_folder,
    "a.txt": lambda path, content: path.write_bytes(content),
    "a.jsonl": lambda path, content: path.write_text(json.dumps({"text": content.decode()})),
    "a.jsonl.gz": lambda path, content: path.write_bytes(
        gzip.compress(json.dumps({"text": content.decode()}).encode())
    ),
    "a.JSON.xz": lambda path, content: path.write_bytes(
        lzma.compress(json.dumps([{"text": content.decode()}]).encode())
    ),
    "a.bin": lambda path, content: path.write_bytes(
        np.frombuffer(content, np.uint8).astype("<u2").tobytes()
    ),
    "a.bin.bz2": lambda path, content: path.write_bytes(
        bz2.compress(np.frombuffer(content, np.uint8).astype("<u2").tobytes())
    ),
    "a.npy": lambda path, content: np.save(path, np.frombuffer(content, np.uint8)),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("same_cache", [True, False])
def test_the_same_corpus_at_another_path(config, tmp_path, name, same_cache):
    """It has the same checksum, from a cache that knows it or not; with one byte changed it has
    another, even if sizes and times are the same."""
    text = b"the quick brown fox jumps over the lazy dog. " * 100
    (tmp_path / "old").mkdir()
    PLACES[name](tmp_path / "old" / name, text)
    before = prepare(config(source=tmp_path / "old" / name), 257, progress=False)
    cache = config().cache if same_cache else str(tmp_path / "new cache")
    copy = tmp_path / "new" / f"copy of {name}"
    if (tmp_path / "old" / name).is_dir():
        shutil.copytree(tmp_path / "old" / name, copy)
    else:
        copy.parent.mkdir()
        shutil.copy2(tmp_path / "old" / name, copy)
    after = prepare(config(source=copy, cache=cache), 257, progress=False)
    assert after.checksum == before.checksum and np.array_equal(after.tokens, before.tokens)
    if copy.is_dir():
        pattern = prepare(config(source=copy / "**", cache=cache), 257, progress=False)
        assert pattern.checksum == before.checksum and pattern.folder == after.folder
    other = tmp_path / "other" / name
    other.parent.mkdir()
    PLACES[name](other, text.replace(b"fox", b"fax", 1))
    times = os.stat(tmp_path / "old" / name)
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = prepare(config(source=other, cache=cache), 257, progress=False)
    assert changed.checksum != before.checksum and len(changed.tokens) == len(before.tokens)


def test_golden_checksum(config, write):
    """What a checkpoint remembers of its data: it may change only with the format, and then old
    runs cannot go on."""
    corpus = prepare(config(source=write("a.txt", "golden\n")), 257, progress=False)
    assert corpus.checksum == "27ec8e16cc99d577cc103ac844ec21dff81ebc86a5d648525b7a0811ae08d6f9"


def test_prepared_once(config, write, monkeypatch):
    path = write("a.txt", "abc")
    first = prepare(config(source=path), 257, progress=False)
    monkeypatch.setattr(tokens, "encode_part", None)
    again = prepare(
        config(source=path, sequence_length=99, seed=5, validation_fraction=0.5),
        300,
        progress=False,
    )
    assert again.folder == first.folder and again.checksum == first.checksum
    assert len(folders(config())) == 1


def test_prepared_again_when_something_changes(config, write, tokenizer_file):
    path = write("a.jsonl", '{"text": "abc", "q": "d"}\n')
    file = tokenizer_file()
    made = [
        prepare(config(source=path, **fields), 5000, progress=False).folder
        for fields in ({}, {"text_fields": ("q",)}, {"loss_mask": ("text",)}, {"tokenizer": file})
    ]
    write("a.jsonl", '{"text": "abd", "q": "d"}\n')
    os.utime(path, ns=(1, 1))  # the same size
    made.append(prepare(config(source=path), 257, progress=False).folder)
    assert len(set(made)) == len(made)
    moved = file.rename(file.with_name("moved.json"))
    assert (
        prepare(config(source=path, tokenizer=moved), 5000, progress=False).folder not in made[:3]
    )


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.bin.gz", "folder/a.txt"])
def test_content_decides(config, write, name, capsys, monkeypatch):
    """Another content of the same size and time counts; the same content at another time is not
    prepared again, and not read again at the start after that. A line says what is taken."""
    time.sleep(0.01)
    made = {}
    for letter in "xyx":
        content = np.full(50, ord(letter), "<u2").tobytes() if "bin" in name else letter * 100
        path = write(name, gzip.compress(content, mtime=0) if name.endswith("gz") else content)
        os.utime(path, ns=(1, 1))
        source = path.parent if "/" in name else path
        corpus = prepare(config(source=source), 257)
        assert chr(corpus.tokens[0]) == letter and made.setdefault(letter, corpus.folder)
        assert corpus.folder == made[letter]
        os.utime(path, ns=(1, 1))
    lines = capsys.readouterr().out.splitlines()
    taken = r"\S+ is taken from the cache, prepared at 20\d\d-\S+ [\d:]+: "
    said = [bool(re.match(taken + str(made["x"]), line)) for line in lines if "prepared " in line]
    assert said == [False, False, True]
    monkeypatch.setattr(tokens, "encode_part", None)
    monkeypatch.setattr(tokens, "index_tokens", None)
    for _ in range(2):
        assert prepare(config(source=source), 257, progress=False).folder == made["x"]
        monkeypatch.setattr(tokens, "_content", None)


def test_a_cache_that_may_not_be_written_has_what_it_has(config, write, monkeypatch):
    """As in an image, whose files have new times in each container."""
    path = write("a.txt", "abc" * 100)
    corpus = prepare(config(source=path), 257, progress=False)
    os.utime(path, ns=(1, 1))

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    monkeypatch.setattr(caches, "open", refuse, raising=False)
    assert prepare(config(source=path), 257, progress=False).folder == corpus.folder
    path.write_text("abd" * 100)
    assert "cannot be written: " in failure(config(source=path))


@pytest.mark.parametrize("damage", ["cut", "flip", "swap", "swap infos", "swap notes", "gone"])
def test_damaged_corpus_is_made_again(config, write, damage):
    """Nothing of it is taken: the tokens are those of the text."""
    paths = [write(f"{letter}.jsonl", json.dumps({"text": letter * 99})) for letter in "ab"]
    given = [config(source=path, loss_mask=("text",)) for path in paths]
    corpora = [prepare(each, 257, progress=False) for each in given]
    for name in ("tokens.bin", "documents.bin", "mask.bin", tokens.INFO):
        if damage == "swap notes":
            files = sorted((corpora[0].folder.parent / tokens.KNOWN).glob("*/*"))
        else:
            files = [corpus.folder / name for corpus in corpora]
        content = bytearray(files[0].read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
        if damage.startswith("swap") and (name == tokens.INFO) == (damage == "swap infos"):
            beside = files[0].rename(files[0].with_suffix(".beside"))  # with its times
            files[1].rename(files[0])
            beside.rename(files[1])
        elif damage == "gone":
            files[0].unlink()
        else:
            files[0].write_bytes(content[: 20 if damage == "cut" else None])
        again = [prepare(each, 257, progress=False) for each in given]
        assert [corpus.checksum for corpus in again] == [corpus.checksum for corpus in corpora]
        texts = [bytes(corpus.tokens[:-1].astype("u1")) for corpus in again]
        assert texts == [b"a" * 99, b"b" * 99]
        assert all(corpus.mask.sum() == 0 and len(corpus.documents) == 2 for corpus in again)


def test_a_copied_cache_is_compared_once(config, write, tmp_path, monkeypatch):
    path = write("a.txt", "abc" * 100)
    corpus = prepare(config(source=path), 257, progress=False)
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", copy_function=shutil.copy)
    info = tmp_path / "copy" / corpus.folder.name / tokens.INFO
    os.utime(info, ns=(1, 1))
    monkeypatch.setattr(tokens, "encode_part", None)
    times = []
    (tmp_path / "copy" / corpus.folder.name / "tokens.bin").write_bytes(bytes(602))
    with pytest.raises(TypeError, match="NoneType"):  # it would be prepared
        prepare(config(source=path, cache=tmp_path / "copy"), 257, progress=False)
    shutil.copy(corpus.folder / "tokens.bin", info.parent)
    for _ in range(2):
        copy = prepare(config(source=path, cache=tmp_path / "copy"), 257, progress=False)
        times.append(info.stat().st_mtime_ns)
        assert copy.checksum == corpus.checksum
    assert times[0] == times[1] > 1


# ---- kills and races

PREPARE = """
import sys, time, types
from jaxtrain.data.preparing import encode, prepare as tokens
from jaxtrain.data.reading import documents
config = types.SimpleNamespace(
    source=sys.argv[1], cache=sys.argv[2], tokenizer="bytes", text_fields=("text",), loss_mask=(),
    bad_records="stop", token_dtype="uint16", validation_fraction=0.1, filter="",
    duplicates="keep",
)
if sys.argv[3] == "hang":
    encode.TASK, pieces = 1, documents.pieces
    def endless(*arguments):
        yield from pieces(*arguments)
        print("read", flush=True)
        time.sleep(600)
    documents.pieces = endless
print(tokens.prepare(config, 257, progress=False).checksum)
"""


def test_killed_process_leaves_nothing_that_counts(config, write, start_python):
    path = write("a.jsonl", '{"text": "some text"}\n' * 100)
    process = start_python(PREPARE, path, config().cache, "hang")
    assert process.stdout.readline() == "read\n"
    assert any(".tmp-" in name for name in folders(config()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(".tmp-" in name for name in folders(config()))
    corpus = prepare(config(source=path), 257, progress=False)
    assert len(corpus.documents) == 101
    assert folders(config()) == [corpus.folder.name]


def test_waits_for_the_process_that_prepares(config, write, capsys, start_python):
    """A second process neither takes the half-made corpus nor removes it, and makes its own when
    the first dies."""
    path = write("a.jsonl", '{"text": "some text"}\n' * 100)
    process = start_python(PREPARE, path, config().cache, "hang")
    assert process.stdout.readline() == "read\n"
    done = []
    thread = threading.Thread(
        target=lambda: done.append(prepare(config(source=path), 257, progress=True))
    )
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive() and not done and any(".tmp-" in name for name in folders(config()))
    process.kill()
    process.wait()
    thread.join(30)
    assert folders(config()) == [done[0].folder.name]
    assert "waiting for another process that prepares" in capsys.readouterr().out


def test_several_processes_at_once(config, write, start_python):
    path = write("a.jsonl", '{"text": "some text"}\n' * 20000)
    processes = [start_python(PREPARE, path, config().cache, "go") for _ in range(3)]
    checksums = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(checksums)) == 1 and len(checksums[0]) == 64
    assert len(folders(config())) == 1


# ---- entropy


def brute_force_entropy(ids):
    pairs, first = Counter(zip(ids, ids[1:], strict=False)), Counter(ids[:-1])
    return sum(n * np.log(first[a] / n) for (a, _), n in pairs.items()) / (len(ids) - 1)


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_bigram_entropy(config, write, monkeypatch, chunk):
    rng = np.random.default_rng(0)
    lines = [
        bytes(rng.choice(list(b"abcd "), rng.integers(1, 30)).tolist()).decode() for _ in range(60)
    ]
    path = write("a.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in lines))
    corpus = prepare(config(source=path), 257, progress=False)
    ids = corpus.train.read(np.asarray(corpus.tokens), 0, len(corpus.train)).tolist()
    assert len(ids) < len(corpus.tokens)  # the held-out documents are not in it
    monkeypatch.setattr(tokens, "CHUNK", chunk)
    assert bigram_entropy(corpus) == pytest.approx(brute_force_entropy(ids), rel=1e-12)
    monkeypatch.setattr(np, "bincount", None)
    # from the folder
    assert bigram_entropy(corpus) == pytest.approx(brute_force_entropy(ids), rel=1e-12)


def test_bigram_entropy_of_a_large_corpus_is_sampled(config, write, monkeypatch):
    rng = np.random.default_rng(0)
    path = write("a.txt", bytes(rng.choice(list(b"ab"), 100_000, p=[0.8, 0.2]).tolist()))
    corpus = prepare(config(source=path), 257, progress=False)
    monkeypatch.setattr(corpora, "CHUNK", 1000)
    monkeypatch.setattr(corpora, "BIGRAMS", 20_000)
    assert bigram_entropy(corpus) == pytest.approx(-0.8 * np.log(0.8) - 0.2 * np.log(0.2), rel=0.02)


def test_stdlib(config, capsys):
    begin = time.monotonic()
    corpus = prepare(config(), 257)
    assert "\nprepared Python's source code: " in capsys.readouterr().out
    assert time.monotonic() - begin < 30  # a second or so on an idle machine
    assert len(corpus.tokens) > 1_000_000 and len(corpus.documents) > 100
    assert 1.5 < bigram_entropy(corpus) < 3.5
    assert "def " in corpus.tokenizer.decode(corpus.tokens[:10_000])


def test_imports_are_light(start_python):
    """Start-up: neither jax nor what only some sources need."""
    code = (
        "import sys, jaxtrain.data.document_packing; "
        "print(*sorted({'jax', 'grain', 'pyarrow', 'absl'} & "
        "set(sys.modules)))"
    )
    process = start_python(code)
    assert process.communicate(timeout=60)[0] == "\n" and process.returncode == 0
