"""tests/by_hand/fuzz_tokenizers.py: a corpus has the ids that the library makes of each entire
document, and begins and ends it as the post-processor says; and that the script
sees what is wrong."""

import random

from by_hand import fuzz_tokenizers
from jaxtrain.data.preparing import encode
from jaxtrain.data.reading.records import TextPiece

SIZES = [14_000, 7]


def shorten(monkeypatch):
    for name, value in fuzz_tokenizers.SMALL.items():
        monkeypatch.setattr(encode, name, value)


def test_random_tokenizers(monkeypatch, tmp_path):
    shorten(monkeypatch)
    for seed in range(12):
        (tmp_path / str(seed)).mkdir()
        assert fuzz_tokenizers.check(random.Random(seed), tmp_path / str(seed), SIZES) == ""


def test_a_text_that_is_cut_is_found(monkeypatch, tmp_path):
    """As texts were: each piece by itself."""
    shorten(monkeypatch)

    def pieces_by_themselves(pieces):
        for piece in pieces:
            for at in range(0, len(piece.text), 1000):
                yield TextPiece(piece.text[at : at + 1000], True, False, 0)
            yield TextPiece("", True, piece.ends, 0)

    monkeypatch.setattr(encode, "_windows", pieces_by_themselves)
    errors = []
    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
        errors.append(fuzz_tokenizers.check(random.Random(seed), tmp_path / str(seed), SIZES))
    assert any("texts: documents [0] of 2 have other ids" in error for error in errors), errors
