"""Formats against those who own them: Megatron, datasets and Grain write files, and a corpus of
them has the ids and the documents that their own readers give."""

import json
import pathlib

import grain
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from support import in_transformers

from jaxtrain.data.preparing.prepare import prepare

OWNERS = pytest.mark.skipif(
    not all(map(in_transformers.has, ("datasets", "megatron", "torch"))),
    reason=f"no datasets and Megatron here: {in_transformers.INSTALL_FORMATS}",
)
MEGATRON = "uint8 int8 int16 int32 int64 uint16 merged optimal".split()
DATASETS = (
    "plain large shuffled columns one splits/train again nested texts.parquet cache.arrow"
).split()


@pytest.fixture(scope="module")
def owners(tmp_path_factory) -> pathlib.Path:
    """A folder with the files of both, and expected.json."""
    folder = tmp_path_factory.mktemp("owners")
    in_transformers.run_script("owners_formats.py", folder)
    return folder


def documents_of(corpus):
    bounds = corpus.documents.tolist()
    return [corpus.tokens[first:last].tolist() for first, last in zip(bounds, bounds[1:])]


def texts_of(corpus):
    return [bytes(document[:-1]).decode() for document in documents_of(corpus)]


@pytest.mark.full
@OWNERS
@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(config, owners, name):
    expected = json.loads((owners / "expected.json").read_text())["megatron"][name]
    for ending in ("", ".bin", ".idx"):
        source = owners / "megatron" / f"{name}{ending}"
        corpus = prepare(config(source=source, tokenizer="none"), 50_257, progress=False)
        assert documents_of(corpus) == expected
    assert corpus.tokens.filename == owners / "megatron" / f"{name}.bin"


@pytest.mark.full
@OWNERS
def test_several_of_megatrons_files(config, owners):
    expected = json.loads((owners / "expected.json").read_text())["megatron"]
    source = owners / "megatron" / "[um]*[6d]"
    corpus = prepare(config(source=source, tokenizer="none"), 50_257, progress=False)
    assert documents_of(corpus) == expected["merged"] + expected["uint16"]


@pytest.mark.full
@OWNERS
@pytest.mark.parametrize("name", DATASETS)
def test_datasets(config, owners, name):
    expected = json.loads((owners / "expected.json").read_text())["datasets"][name]
    fields = ("doc.text",) if name == "nested" else ("text",)
    source = owners / "datasets" / name
    corpus = prepare(config(source=source, text_fields=fields), 257, progress=False)
    assert texts_of(corpus) == expected


@pytest.mark.parametrize("options", ["group_size:1", "group_size:7", "group_size:1,uncompressed"])
def test_grain(config, tmp_path, options):
    texts = [f"document {i}: {'naïve 漢字 ' * (i % 7)}" for i in range(200)]
    paths = [tmp_path / "files" / f"a.array_record-0000{i}-of-00002" for i in range(2)]
    paths[0].parent.mkdir()
    for i, path in enumerate(paths):
        writer = ArrayRecordWriter(str(path), options)
        for text in texts[i * 100 : (i + 1) * 100]:
            writer.write(json.dumps({"text": text}).encode())
        writer.close()
    owned = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
    expected = [json.loads(owned[i])["text"] for i in range(len(owned))]
    corpus = prepare(config(source=tmp_path / "files"), 257, progress=False)
    assert texts_of(corpus) == expected == texts
