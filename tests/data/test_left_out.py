"""Documents that are left out while a source is prepared: by a filter, and as duplicates."""

import json

import numpy as np
import pytest

from jaxtrain.config import ConfigError
from jaxtrain.data.preparing import parts
from jaxtrain.data.preparing.prepare import prepare, prepare_shard
from jaxtrain.data.reading import extents
from jaxtrain.data.tokenizer import DataError
from jaxtrain.run.files import read_json


def documents(corpus):
    places = corpus.documents.tolist()
    return [
        corpus.tokenizer.decode(corpus.tokens[first:last])
        for first, last in zip(places, places[1:])
    ]


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def folder(write, tmp_path, monkeypatch):
    """A folder of texts with exact and near duplicates, in several parts."""
    monkeypatch.setattr(parts, "PART", 4000)
    monkeypatch.setattr(extents, "BLOCK", 64)
    draw = np.random.default_rng(0)
    texts = [" ".join(map(str, draw.integers(500, size=40))) for _ in range(60)]
    near = [f"{text} more" for text in texts[::3]]
    write("d/a.jsonl", jsonl([*texts, *texts[:9], "", "short"]))
    write("d/b.txt", texts[20])
    write("d/c.jsonl", jsonl([*near, *texts[30:40], "short"]))
    write("mine.py", "def keep(text):\n    return len(text) > 9\n")
    monkeypatch.chdir(tmp_path)
    return texts, near


def test_the_first_of_equal_documents_stays(folder, config):
    texts, near = folder
    fields = {"source": "d", "validation_fraction": 0.0}
    assert documents(prepare(config(duplicates="exact", **fields), 257)) == [
        *texts,
        "short",
        *near,
    ]
    corpus = prepare(config(duplicates="near", filter="mine.py:keep", **fields), 257)
    assert documents(corpus) == texts
    info = read_json(corpus.folder / "corpus.json")
    assert info["left_out"] == {"filter": 2, "exact": 20, "near": 20}
    assert info["files"] == [60, 0, 0]
    assert info["text"] == sum(map(len, [*texts, *texts[:9], texts[20], *near, *texts[30:40]]))
    assert info["encoded"] == info["text"] + 100  # with the ends of documents


@pytest.mark.parametrize("duplicates", ["exact", "near"])
def test_shards_change_nothing(folder, config, tmp_path, duplicates):
    def content(count):
        settings = config(
            source="d",
            duplicates=duplicates,
            filter="mine.py:keep",
            cache=tmp_path / f"cache{count}",
            loss_mask=("prompt",),
            text_fields=("prompt", "text"),
        )
        for number in range(count):
            shard = prepare_shard(settings, 257, (number, count), progress=False)
        assert shard.parts >= 4
        names = ("tokens.bin", "documents.bin", "mask.bin")
        return [(shard.corpus.folder / name).read_bytes() for name in names]

    texts = [json.loads(line) for line in (tmp_path / "d/a.jsonl").read_text().splitlines()]
    (tmp_path / "d/a.jsonl").write_text(
        "".join(json.dumps({"prompt": "Say: ", **record}) + "\n" for record in texts)
    )
    (tmp_path / "d/b.txt").unlink()
    (tmp_path / "d/c.jsonl").unlink()
    assert content(1) == content(2) == content(7)


def test_settings_and_the_filter_s_file_decide_which_corpus_it_is(folder, config, tmp_path):
    settings = [{}, {"duplicates": "exact"}, {"duplicates": "near"}, {"filter": "mine.py:keep"}]
    folders = [prepare(config(source="d", **some), 257, False).folder for some in settings]
    assert len({*folders}) == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "other/mine.py")
    moved = config(source="d", filter="other/mine.py:keep")
    assert prepare(moved, 257, False).folder == folders[3]
    with (tmp_path / "other/mine.py").open("a") as file:
        file.write("# changed\n")
    assert prepare(moved, 257, False).folder not in folders


def test_duplicates_of_held_out_documents_are_in_no_split(folder, config):
    corpus = prepare(config(source="d", duplicates="near", validation_fraction=0.3), 257, False)
    read = lambda stream: corpus.tokenizer.decode(stream.read(corpus.tokens, 0, len(stream)))
    train, held_out = read(corpus.train), read(corpus.validation)
    assert held_out and not any(text in train for text in folder[0] if text in held_out)


def test_one_line_where_nothing_is_left_or_the_filter_fails(folder, config, tmp_path):
    (tmp_path / "mine.py").write_text("def nothing(text):\n    return False\ndef fails(text): 1/0")
    with pytest.raises(DataError, match="data.filter=mine.py:nothing leaves out all 102$"):
        prepare(config(source="d", filter="mine.py:nothing"), 257, False)
    with pytest.raises(ConfigError, match="mine.py, line 3, raises ZeroDivisionError"):
        prepare(config(source="d", filter="mine.py:fails"), 257, False)
    assert not (tmp_path / "cache").exists()
