"""The corpora of a mixture: their settings in errors, one tokenizer, lines for people."""

import dataclasses

import pytest

from jaxtrain.config import ConfigError, DataConfig
from jaxtrain.data.corpora import prepare_all
from jaxtrain.data.tokenizer import DataError


@pytest.fixture
def mixture(tmp_path, write):
    """mixture(code={…}) → the `data` settings of two sources, changed."""

    def make(**changes):
        sources = {
            "web": {"path": str(write("web.jsonl", '{"text": "the web"}\n' * 30)), "weight": 3},
            "code": {"path": str(write("code.txt", "x = 1\n" * 40)), "weight": 1},
        }
        for name, settings in changes.items():
            sources[name] |= settings
        return DataConfig(sources=sources, cache=str(tmp_path / "cache"))

    return make


def test_sources_are_corpora_of_their_own(mixture):
    corpora = prepare_all(mixture(code={"validation_fraction": 0}), 257, progress=False)
    assert [*corpora.checksums] == ["web", "code"] and len({*corpora.checksums.values()}) == 2
    assert [*corpora.validation_sets] == ["web"]
    lines = corpora.describe()
    assert lines[0].startswith("web, weight 0.75 (49,152/65,536): corpus: 240 tokens")
    assert lines[1].startswith("code, weight 0.25 (16,384/65,536): corpus: 241 tokens")


def test_one_source_is_a_corpus(mixture, write):
    data = DataConfig(source=str(write("a.txt", "abc")), cache=mixture().cache)
    corpora = prepare_all(data, 257, progress=False)
    assert corpora.checksum == corpora.corpora[0].checksum and [*corpora.checksums] == [""]
    assert corpora.describe() == [corpora.corpora[0].describe()]


def test_validation_sets(mixture, write):
    """A set is its entire corpus, or the part that its own fraction holds out."""
    data = mixture()
    books, part = str(write("books.txt", "ab" * 500)), {"validation_fraction": 0.1}
    data = dataclasses.replace(
        data, validation={"books": books, "part": {"path": books, "packing": "best_fit"} | part}
    )
    corpora = prepare_all(data, 257, progress=False)
    assert [*corpora.checksums] == ["web", "code"]
    sizes = {name: len(each.stream) for name, each in corpora.validation_sets.items()}
    assert [*sizes] == ["web", "code", "books", "part"]
    assert (sizes["books"], sizes["part"]) == (1001, 100)
    assert sizes["web"] == len(corpora.corpora[0].validation)
    packing = {n: each.source.data.packing for n, each in corpora.validation_sets.items()}
    assert packing == {"web": "stream", "code": "stream", "books": "stream", "part": "best_fit"}
    assert corpora.describe()[2:] == [
        f"validation set books: 1,001 tokens from {books}",
        f"validation set part: 100 tokens from {books}",
    ]
    with pytest.raises(ConfigError, match=r"^data.validation.books='gone' is neither"):
        prepare_all(dataclasses.replace(data, validation={"books": "gone"}), 257, progress=False)


def test_errors_name_the_source(mixture, write, tokenizer_file):
    with pytest.raises(ConfigError, match=r"^data.sources.code='gone' is neither"):
        prepare_all(mixture(code={"path": "gone"}), 257, progress=False)
    with pytest.raises(DataError, match=r"^data.sources.web[:=].*bad.jsonl:1: not valid JSON"):
        path = str(write("bad.jsonl", "no record\n"))
        prepare_all(mixture(web={"path": path}), 257, progress=False)
    file = str(tokenizer_file())
    with pytest.raises(ConfigError, match=r"^data.sources.code.tokenizer='.*bpe.json' is another"):
        prepare_all(mixture(code={"tokenizer": file}), 512, progress=False)
