"""Batches of mixtures: weights, exhausted sources, spans. test_loader.py puts them onto devices."""

import json
import time
import tracemalloc

import numpy as np
import pytest

from jaxtrain.config import DataConfig
from jaxtrain.config.phases import Span
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.corpora import prepare_all
from jaxtrain.data.mixture import in_parts
from jaxtrain.data.tokenizer import DataError

LENGTH = 8
SIZES = {"web": 900, "code": 500, "wiki": 120}  # documents of a source


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    for name, count in SIZES.items():
        texts = (
            "".join(random.choice(list("abcd "), random.integers(1, 40))) for _ in range(count)
        )
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def corpora_of(files, weights, **settings):
    """Corpora of sources with these weights, and further settings of some of them."""
    sources = {
        name: {"path": str(files / f"{name}.jsonl"), "weight": weight, **settings.get(name, {})}
        for name, weight in zip(SIZES, weights, strict=True)
    }
    data = DataConfig(sources=sources, cache=str(files / "cache"), sequence_length=LENGTH)
    return prepare_all(data, 257, progress=False)


def span_of(weights, begin=0, end=1000, size=8, length=LENGTH, rows=0, tokens=0):
    return Span("", begin, end, size, length, tuple(weights), rows, tokens)


def sources_of(batches, numbers):
    """The sources of all places of some batches, in order."""
    return [
        batches.draw(number, place).source
        for number in numbers
        for place in range(batches.spans[0].batch_size)
    ]


def test_a_mixture_has_its_weights(files):
    weights = (0.7, 0.2, 0.1)
    batches = TrainingBatches(corpora_of(files, weights), [span_of(weights)])
    drawn = sources_of(batches, range(100))
    for count in range(1, len(drawn) + 1):
        for name, weight in zip(SIZES, weights, strict=True):
            assert abs(drawn[:count].count(name) - weight * count) <= 1


@pytest.mark.parametrize("weight", [0.3, 0.1])
def test_an_exhausted_source_leaves(files, weight):
    """The others' weights are renormalised from the next sequence on, and each source has its own
    sequences one after the other."""
    weights = (1.0, 0.5, weight)
    corpora = corpora_of(files, weights, wiki={"epochs": 1.5, "exhausted": "leave"})
    batches = TrainingBatches(corpora, [span_of(weights)])
    draws = [batches.draw(number, place) for number in range(1500) for place in range(8)]
    of_wiki = [i for i, draw in enumerate(draws) if draw.source == "wiki"]
    epoch = len(draws[of_wiki[0]].sequences)
    assert len(of_wiki) == epoch + epoch // 2 and len({draws[i].number for i in of_wiki}) == epoch
    after = [draw.source for draw in draws[of_wiki[-1] + 1 :]]
    for count in range(1, 500):
        assert abs(after[:count].count("web") - count * 2 / 3) <= 1
    for name in SIZES:
        ordinals = [draw.ordinal for draw in draws if draw.source == name]
        assert ordinals == list(range(len(ordinals)))
    assert batches.end() is None


def test_all_sources_leave(files):
    weights = (1.0, 1.0, 1.0)
    leaves = {"epochs": 1.0, "exhausted": "leave"}
    corpora = corpora_of(files, weights, web=leaves, code=leaves, wiki=leaves)
    batches = TrainingBatches(corpora, [span_of(weights, end=10**6)])
    source, last = batches.end()
    sequences = sum((len(corpus.train) - 1) // LENGTH for corpus in corpora.corpora)
    assert last == sequences // 8 and source.name == "web"


def test_an_exhausted_source_stops_the_run(files):
    weights = (0.0, 0.5, 0.5)
    stops = {"epochs": 2.0, "exhausted": "stop"}
    corpora = corpora_of(files, weights, web=stops, wiki=stops)
    batches = TrainingBatches(corpora, [span_of(weights)])
    source, last = batches.end()
    assert source.name == "wiki"
    drawn = sources_of(batches, range(last))
    sequences = (len(corpora.corpora[2].train) - 1) // LENGTH
    assert 2 * sequences - 8 <= drawn.count("wiki") <= 2 * sequences and "web" not in drawn
    with pytest.raises(DataError, match=r"is beyond the 2 epochs of data.sources.wiki: use fewer"):
        sources_of(batches, [last + 1])
    assert TrainingBatches(corpora, [span_of(weights, end=last)]).end() is None


def test_an_exhausted_source_is_repeated(files):
    weights = (0.0, 0.0, 1.0)
    corpora = corpora_of(files, weights, wiki={"epochs": 1.0, "exhausted": "repeat"})
    batches = TrainingBatches(corpora, [span_of(weights)])
    assert batches.end() is None and batches.draw(999, 7).epoch > 3


def spans_with_changes():
    """Weights, sizes and lengths change, also in the middle of each source's epoch."""
    changes = [
        ((1.0, 0.0, 0.0), 20, 8, 8),
        ((0.5, 0.4, 0.1), 30, 8, 8),
        ((0.5, 0.4, 0.1), 10, 24, 8),
        ((0.5, 0.4, 0.1), 40, 16, 32),
        ((0.1, 0.4, 0.5), 60, 8, 16),
        ((0.0, 0.4, 0.5), 200, 4, 16),
    ]
    begin, rows, tokens, spans = 0, 0, 0, []
    for weights, count, size, length in changes:
        spans.append(span_of(weights, begin, begin + count, size, length, rows, tokens))
        begin, rows = begin + count, rows + count * size
        tokens += count * size * length
    return spans


def test_spans(files):
    spans = spans_with_changes()
    batches = TrainingBatches(corpora_of(files, spans[0].weights), spans)
    tokens = {name: {} for name in SIZES}
    for span in spans:
        counts = dict.fromkeys(SIZES, 0)
        for number in range(span.begin, span.end):
            for place in range(span.batch_size):
                draw = batches.draw(number, place)
                counts[draw.source] += 1
                assert len(draw.arrays()["tokens"]) == span.sequence_length
                epoch = tokens[draw.source].setdefault(draw.epoch, [])
                for first, last in draw.record().ranges:
                    epoch += range(first + 1, last)
        total = (span.end - span.begin) * span.batch_size
        for name, weight in zip(SIZES, span.weights, strict=True):
            assert abs(counts[name] - total * weight / sum(span.weights)) <= 2
    for (_, corpus), epochs in zip(batches.corpora.pairs(), tokens.values(), strict=True):
        for epoch, read in epochs.items():
            assert len(read) == len({*read})
            if epoch + 1 in epochs:
                firsts = len(corpus.train.starts)
                assert len(corpus.train) - firsts - len(read) < 32
    assert max(tokens["wiki"]) > 3


def test_the_order_in_which_batches_are_read_does_not_matter(files):
    spans = spans_with_changes()
    corpora = corpora_of(files, spans[0].weights)
    forward, backward = (TrainingBatches(corpora, spans) for _ in range(2))
    numbers = [*range(0, 300, 7), 10**6]
    seen = {n: backward.draw(n, 1)[:3] + (backward.draw(n, 1).number,) for n in numbers[::-1]}
    for n in numbers:
        draw = forward.draw(n, 1)
        assert (*draw[:3], draw.number) == seen[n]


def test_a_far_batch_comes_at_once(files):
    """Neither the time nor the memory of a start grows with the number of the first batch."""
    weights = (0.7, 0.2, 0.1)
    corpora = corpora_of(files, weights)
    tracemalloc.start()
    began = time.process_time()
    batches = TrainingBatches(corpora, [span_of(weights, end=10**9)])
    arrays = [batches.draw(10**9 // 8, place).arrays() for place in range(8)]
    assert time.process_time() - began < 1 and len(arrays) == 8
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_the_past_of_a_mixture(files):
    """Sources that are exhausted later, or that were added without a weight, leave it as it was."""
    weights, leaves = (0.7, 0.2, 0.1), {"exhausted": "leave"}

    def history(epochs, weights=weights):
        corpora = corpora_of(files, weights, wiki={"epochs": epochs, **leaves})
        return TrainingBatches(corpora, [span_of(weights)]).history(600)

    assert len(history(0.5)) == 2 and len(history(3.0)) == 1
    assert history(0.5) == history(0.5) != history(0.6) and history(2.0) == history(3.0)
    assert history(1.0, (0.7, 0.3, 0.0)) == [(0, in_parts([0.7, 0.3]))]


def test_remarks_are_about_the_first_batches(files):
    """Also once the sizes of later ones are known."""
    weights = (0.7, 0.2, 0.1)
    later = span_of(weights, begin=10, length=4096, rows=80, tokens=640)
    batches = TrainingBatches(corpora_of(files, weights), [span_of(weights, end=10), later])
    assert batches.draw(20, 0).arrays()["tokens"].shape == (4096,) and not batches.remarks()
    alone = TrainingBatches(batches.corpora, [span_of(weights, length=4096)])
    assert "data.sources.wiki: its train split has " in alone.remarks()[-1]


def test_a_batch_in_words_names_its_sources(files):
    weights = (0.7, 0.2, 0.1)
    text = TrainingBatches(corpora_of(files, weights), [span_of(weights)]).describe(3)
    assert text.startswith("batch 3: epoch 0, sequences ") and text.count("; epoch 0, ") >= 1
    assert "train split of " in text and "web.jsonl (checksum" in text
