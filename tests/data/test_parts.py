"""Parts of a source: their division, their extents of files, shards, and the corpus that is joined
from them."""

import fcntl
import gzip
import itertools
import json
import pathlib
import random
import re
import shutil
import subprocess

import numpy as np
import pytest

from jaxtrain.config import sources
from jaxtrain.data.preparing import parts as parts_module, prepare as tokens
from jaxtrain.data.preparing.parts import divide
from jaxtrain.data.preparing.prepare import prepare, prepare_shard
from jaxtrain.data.reading import documents, extents
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.tokenizer import DataError


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 1,000 bytes, so that a small source has many."""
    monkeypatch.setattr(parts_module, "PART", 1000)
    monkeypatch.setattr(extents, "BLOCK", 64)


def lines(count, begin=0):
    return "".join(
        json.dumps({"text": f"document {i} " * (i % 5)}) + "\n" for i in range(begin, begin + count)
    )


@pytest.fixture
def mixed(write, tmp_path):
    """A folder with each kind of files, some larger than a part."""
    import pyarrow
    import pyarrow.parquet

    for i in range(7):
        write(f"d/a{i}.txt", f"text {i} " * 20)
    write("d/b.jsonl", lines(150))
    write("d/c.jsonl.gz", gzip.compress(lines(150, 150).encode()))
    write("d/d.json", json.dumps([{"text": f"item {i}"} for i in range(200)]))
    rows = pyarrow.table({"text": [f"row {i} " * (i % 9) for i in range(300)]})
    pyarrow.parquet.write_table(rows, tmp_path / "d/e.parquet", row_group_size=20)
    write("d/f.jsonl", lines(3, 400))
    return tmp_path / "d"


def content(corpus):
    names = ("tokens.bin", "documents.bin", "mask.bin")
    return {
        name: (corpus.folder / name).read_bytes()
        for name in names
        if (corpus.folder / name).exists()
    } | {"checksum": corpus.checksum}


def in_shards(config, count):
    """The corpus of so many shards, the last of which joins it."""
    for i in reversed(range(count)):
        report = prepare_shard(config, 257, (i, count), progress=False)
        assert (report.corpus is None) == bool(report.missing)
        assert {part % count for part in report.missing} <= set(range(i))
    return report.corpus


def test_parts_depend_on_the_files_alone(mixed, small_parts):
    source = sources.find(str(mixed))
    divided = divide(source)
    assert len(divided) > 12 and [part.number for part in divided] == [*range(len(divided))]
    assert all(part.size <= 1300 or len(part.source.files) == 1 for part in divided)
    assert abs(sum(part.size for part in divided) - sum(file.size for file in source.files)) < 20
    names = [(part.first_file, part.source.files[0].path) for part in divided]
    assert names == [(number, source.files[number].path) for number, _ in names]
    assert len({part.source.files[0] for part in divided}) == len(divided)


@pytest.mark.parametrize("masked", [(), ("text",)])
def test_the_same_bytes_whatever_the_parts_and_shards(config, mixed, monkeypatch, masked):
    cache = lambda name: config(source=mixed, cache=str(mixed.parent / name), loss_mask=masked)
    one_part = content(prepare(cache("one"), 257, progress=False))
    monkeypatch.setattr(parts_module, "PART", 1000)
    monkeypatch.setattr(parts_module, "BLOCK", 7)
    monkeypatch.setattr(parts_module, "CHUNK", 50)
    assert content(prepare(cache("parts"), 257, progress=False)) == one_part
    for count in (1, 2, 7, 100):
        corpus = in_shards(cache(f"shards {count}"), count)
        assert content(corpus) == one_part
        assert {path.name for path in corpus.folder.parent.iterdir()} == {
            "known",
            corpus.folder.name,
        }


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_extents_are_the_lines_of_a_file(write, size, monkeypatch):
    """Whatever the line ends are: none at the end, empty lines, lines that are longer than an
    extent. Line numbers are those of the file."""
    monkeypatch.setattr(extents, "BLOCK", 64)
    long = json.dumps({"text": "x" * 300})
    text = lines(20) + "\r\n\n" + long + "\n" + "oops\n" * 3 + lines(9) + long
    path = write("a.jsonl", text)
    (whole,) = sources.find(str(path)).files
    divided = [extent for extent, _ in extents.extents(whole, size)]
    assert [extent.first for extent in divided[1:]] == [extent.last for extent in divided[:-1]]
    assert sum(bytes for _, bytes in extents.extents(whole, size)) == len(text)
    read, bad = [], Skipped()
    for extent in divided:
        source = sources.Source("a", path, (extent,))
        read += documents.pieces(source, ("text",), (), path.parent, bad)
    skipped = Skipped()
    source = sources.find(str(path))
    assert [piece.text for piece in read] == [
        piece.text for piece in documents.pieces(source, ("text",), (), path.parent, skipped)
    ]
    assert bad.places == skipped.places and len(bad.places) == 3


def test_bad_records_are_in_order_and_have_the_paths_of_today(config, mixed, small_parts, capsys):
    """Whatever shard leaves them out, and where the corpus is found later."""
    (mixed / "b.jsonl").write_text(lines(100) + "oops\n" + lines(100) + "{}\n")
    (mixed / "f.jsonl").write_text("[]\n" + lines(3))
    (mixed / "g").symlink_to("nothing")
    data = config(source=mixed, bad_records="skip")
    with pytest.raises(DataError, match=f"{mixed}/g: a link to nothing: "):
        prepare(config(source=mixed), 257, progress=False)
    found = in_shards(data, 3)
    starts = (f"{mixed}/g: a", f"{mixed}/b.jsonl:101: not", f"{mixed}/b.jsonl:202: no field")
    for place, start in zip(found.skipped.places, (*starts, f"{mixed}/f.jsonl:1: a"), strict=True):
        assert place.startswith(start)
    moved = mixed.rename(mixed.with_name("moved"))
    (moved / "b.jsonl").rename(moved / "b2.jsonl")
    again = prepare(config(source=moved, bad_records="skip"), 257, progress=False)
    assert again.folder == found.folder and again.skipped.count == 4
    assert again.skipped.places[1].startswith(f"{moved}/b2.jsonl:101: not valid JSON")
    assert f"{moved}/b2.jsonl:202: " in "".join(again.skipped.lines("moved", again.folder))


def test_a_bad_record_stops_with_its_line(config, mixed, small_parts):
    """Nothing stays. Records before it say that the fields are right."""
    (mixed / "b.jsonl").write_text(lines(100) + '{"txt": "a"}\n' + lines(100))
    with pytest.raises(DataError) as error:
        prepare(config(source=mixed), 257, progress=False)
    assert str(error.value).startswith(f"{mixed}/b.jsonl:101: no field 'text' ")
    assert "data.bad_records=skip" in str(error.value) and not pathlib.Path(config().cache).exists()


def test_a_moved_corpus_is_not_prepared_again(config, mixed, small_parts, monkeypatch, tmp_path):
    """Its files, or the cache, have another name, place or time."""
    first = prepare(config(source=mixed), 257, progress=False)
    old = first.folder.rename(first.folder.with_name(f"d-{first.folder.name[-16:]}"))
    info = json.loads((old / tokens.INFO).read_text())
    (old / tokens.INFO).write_text(json.dumps(info | {"of": old.name}))  # as versions before
    monkeypatch.setattr(tokens, "encode_part", None)
    assert prepare(config(source=mixed), 257, progress=False).folder == old
    moved = shutil.copytree(mixed, tmp_path / "elsewhere", copy_function=shutil.copy)
    (moved / "b.jsonl").rename(moved / "b1.jsonl")
    assert prepare(config(source=moved), 257, progress=False).folder == old
    copy = shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    shutil.rmtree(tmp_path / "cache")
    again = prepare(config(source=moved, cache=copy), 257, progress=False)
    assert again.folder == copy / old.name and content(again)["checksum"] == first.checksum


@pytest.mark.parametrize("name", ["a.npy", "a.txt"])
def test_a_source_of_one_part(config, tmp_path, name):
    """The shard that has it prepares it, and the others say what is missing."""
    ids = np.arange(200, dtype="<u2")
    np.save(tmp_path / "a.npy", ids)
    (tmp_path / "a.txt").write_text("text")
    data = config(source=tmp_path / name)
    report = prepare_shard(data, 257, (1, 2), progress=False)
    assert (report.parts, report.encoded, report.missing, report.corpus) == (1, 0, (0,), None)
    assert prepare_shard(data, 257, (0, 2), progress=False).corpus.tokens[0] in (0, ord("t"))
    assert prepare_shard(data, 257, (1, 2), progress=False).missing == ()


def test_parts_that_are_damaged_or_left_by_a_kill_are_encoded_again(config, mixed, small_parts):
    whole = content(prepare(config(source=mixed), 257, progress=False))
    data = config(source=mixed, cache=str(mixed.parent / "other"))
    done = prepare_shard(data, 257, (0, 3), progress=False)
    assert done.encoded and prepare_shard(data, 257, (0, 3), progress=False).encoded == 0
    (work,) = (mixed.parent / "other").glob("corpus-*.parts-1")
    part = work / "part-00003" / "tokens.bin"
    part.write_bytes(bytes(part.stat().st_size))
    (work / "part-00006" / "documents.bin").unlink()
    (work / "part-00000" / tokens.INFO).write_text("{")
    assert prepare_shard(data, 257, (0, 3), progress=False).encoded == 3
    assert content(prepare(data, 257, progress=False)) == whole


PREPARE = """
import sys
from jaxtrain.config.groups.run_settings import DataConfig
from jaxtrain.data.preparing import parts, prepare
parts.PART = 100_000
config = DataConfig(source=sys.argv[1], cache=sys.argv[2], tokenizer="bytes")
print("ready", flush=True)
print(prepare.prepare(config, 257, progress=False).checksum)
"""


@pytest.mark.parametrize("trials", [1, pytest.param(60, marks=pytest.mark.full)])
def test_a_kill_loses_the_part_in_hand_at_most(config, write, start_python, monkeypatch, trials):
    """At random moments: complete parts stay as they are, nothing else counts, and the corpus is
    that of an undisturbed preparation."""
    path = write("a.jsonl", lines(20_000))
    monkeypatch.setattr(parts_module, "PART", 100_000)
    whole = content(prepare(config(source=path), 257, progress=False))
    chance = random.Random(0)
    for trial in range(trials):
        cache = path.parent / f"killed {trial}"
        complete: dict[str, tuple[int, int]] = {}
        for attempt in itertools.count():
            process = start_python(PREPARE, path, cache)
            assert process.stdout.readline() == "ready\n"
            try:
                process.wait(chance.uniform(0, 0.2 + 0.1 * attempt))
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            present = {
                str(part): part.stat()[1:3]
                for part in cache.glob("corpus-*.parts-1/part-*")
                if re.fullmatch(r"part-\d+", part.name)
            }
            is_joined = any(re.fullmatch(r"corpus-\w+", each.name) for each in cache.glob("*"))
            if not is_joined:  # then parts are removed
                assert complete.items() <= present.items()
                complete = present
            unfinished = [each for each in cache.rglob("*.tmp-*") if "known" not in each.parts]
            assert len(unfinished) <= 2  # the part in hand, and the corpus
        assert process.stdout.read() == f"{whole['checksum']}\n", process.stderr.read()
        found = prepare(config(source=path, cache=str(cache)), 257, progress=False)
        assert content(found) == whole
        assert {each.name for each in cache.iterdir()} == {"known", found.folder.name}


@pytest.mark.parametrize(
    ("step", "call", "shard"),
    [
        ("encode_part", 1, None),
        ("encode_part", 3, (0, 1)),
        ("open_part", 4, (0, 1)),
        ("open_part", 9, (0, 2)),
        ("join", 1, None),
    ],
)
def test_another_machine_joins_first(config, write, small_parts, monkeypatch, step, call, shard):
    """Without locks, it encodes the same parts, and removes them; the corpus is that which it has
    made, and nothing else stays."""
    data, calls = config(source=write("a.jsonl", lines(100))), []
    original = getattr(tokens, step)

    def overtaken(*arguments):
        calls.append(None)
        if len(calls) == call:
            made.append(prepare(data, 257, progress=False))
        return original(*arguments)

    def unsupported(*_):
        raise OSError("no locks here")

    made = []
    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(tokens, step, overtaken)
    if shard is None:
        corpus = prepare(data, 257, progress=False)
    else:
        corpus = prepare_shard(data, 257, shard, progress=False).corpus
    assert content(corpus) == content(made[0])
    names = {path.name for path in pathlib.Path(data.cache).iterdir() if path.suffix != ".lock"}
    assert names == {"known", corpus.folder.name}


def test_a_prepared_source_is_not_divided_again(config, mixed, monkeypatch):
    """A start reads what it needs: of a source in a store each extent would cost a request."""
    first = prepare(config(source=mixed), 257, progress=False)
    monkeypatch.setattr(tokens, "divide", None)
    assert prepare(config(source=mixed), 257, progress=False).folder == first.folder


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9])
def test_documents_that_are_left_out(config, mixed, small_parts, monkeypatch, part):
    """The others are those of the whole corpus, in its order, whatever is joined at a time."""
    whole = prepare(config(source=mixed, loss_mask=("text",)), 257, progress=False)
    monkeypatch.setattr(parts_module, "BLOCK", 7)
    monkeypatch.setattr(parts_module, "CHUNK", 50)
    kept = np.random.default_rng(0).random(len(whole.documents) - 1) >= part

    def split(stored, data, left_out):
        return np.split(kept, np.cumsum([one.info["documents"] for one in stored])[:-1])

    monkeypatch.setattr(parts_module, "documents_kept", split)
    data = config(source=mixed, loss_mask=("text",), cache=str(mixed.parent / "other"))
    joined = prepare(data, 257, progress=False)
    chosen = np.repeat(kept, np.diff(whole.documents))
    assert np.array_equal(joined.tokens, whole.tokens[chosen])
    assert np.array_equal(joined.mask, whole.mask[chosen])
    assert np.array_equal(np.diff(joined.documents), np.diff(whole.documents)[kept])
