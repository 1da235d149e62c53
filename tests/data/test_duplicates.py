"""Keys of documents, and the documents whose keys an earlier one has."""

import random

import numpy as np
import pytest

from jaxtrain.data.preparing import duplicates
from jaxtrain.data.reading.records import TextPiece


def write_keys(folder, texts, setting, parts=1):
    """The files of the documents' keys, in parts of which the last may be empty."""
    size, files = -(-len(texts) // parts), []
    for number in range(parts):
        files.append(folder / f"{setting}-{parts}-{number}")
        pieces = [TextPiece(text, True, True, 0) for text in texts[size * number :][:size]]
        store = lambda keys, path=files[-1]: path.write_bytes(keys.tobytes())
        assert list(duplicates.with_keys(pieces, setting, store)) == pieces
    return files


def repeated(folder, texts, setting, parts=1):
    files = write_keys(folder, texts, setting, parts)
    return duplicates.repeated(files, duplicates.KEYS[setting])


def near_duplicates(count, seed=0):
    """Documents of random words, and as many copies with some words changed; the similarity of each
    pair."""
    draw = random.Random(seed)
    runs = lambda words: {tuple(words[i : i + 5]) for i in range(len(words) - 4)}
    originals, copies, similarities = [], [], []
    for _ in range(count):
        words = [f"w{draw.randrange(3000)}" for _ in range(draw.randrange(60, 200))]
        changed = list(words)
        for _ in range(draw.randrange(9)):
            changed[draw.randrange(len(words))] = f"x{draw.random()}"
        originals.append(" ".join(words))
        copies.append(", ".join(changed).upper())
        both = runs(words) & runs(changed)
        similarities.append(len(both) / len(runs(words) | runs(changed)))
    return originals, copies, np.array(similarities)


def test_exact_duplicates(tmp_path):
    texts = ["one", "two", "One", "one", "", "two", "", "three"]
    flags = repeated(tmp_path, texts, "exact")
    assert flags[:, 0].tolist() == [False] * 3 + [True, False, True, True, False]
    assert not flags[:, 1].any() and duplicates.KEYS["keep"] == 0


def test_a_text_in_pieces_has_the_keys_of_the_whole(tmp_path):
    pieces = [TextPiece(text, True, i == 2, 0) for i, text in enumerate(["a b c d ", "é f g", "."])]
    stored = []
    list(duplicates.with_keys(pieces, "exact", stored.append))
    (whole,) = write_keys(tmp_path, ["a b c d é f g."], "exact")
    assert stored[0].tobytes() == whole.read_bytes()


def test_near_duplicates_are_those_above_the_threshold(tmp_path):
    """The documents that are left out follow the formula of the module's table."""
    originals, copies, similarity = near_duplicates(400)
    flags = repeated(tmp_path, originals + copies, "near")
    assert not flags[:400].any(), "documents that are not alike"
    left_out = flags[400:].any(axis=1)
    assert left_out[similarity >= 0.9].mean() >= 0.97  # recall
    assert left_out[similarity < 0.6].mean() <= 0.05
    near = duplicates
    expected = 1 - (1 - similarity**near.HASHES) ** near.BANDS
    deviation = np.sqrt(np.sum(expected * (1 - expected)))
    assert abs(left_out.sum() - expected.sum()) < 4 * deviation + 1


@pytest.mark.parametrize("setting", ["exact", "near"])
def test_neither_parts_nor_memory_change_the_result(tmp_path, monkeypatch, setting):
    originals, copies, _ = near_duplicates(60)
    texts = originals + copies + originals[:7]
    whole = repeated(tmp_path, texts, setting)
    assert whole.any()
    for parts in (2, 7, 60):
        assert np.array_equal(repeated(tmp_path, texts, setting, parts), whole)
    monkeypatch.setattr(duplicates, "SORTED", 10)
    assert np.array_equal(repeated(tmp_path, texts, setting, 7), whole)


def test_short_texts_and_other_scripts(tmp_path):
    """A text of few words is one run of them; one without words has no run."""
    texts = ["a b", "A, b!", "a c", "...", "???", "日本語", "日本語。", "b a"]
    flags = repeated(tmp_path, texts, "near").any(axis=1)
    assert flags.tolist() == [False, True, False, False, False, False, True, False]
