"""Ids to text as they come, and prompts to ids."""

import pytest
import tokenizers

from jaxtrain.data.tokenizer import ByteTokenizer, FileTokenizer, NoTokenizer
from jaxtrain.generation.text import NOT_TEXT, TextStream

TEXT = "naïve 日本語 😀👍🏽\n\tend"


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory) -> FileTokenizer:
    """A byte-level tokenizers file with few merges, so that characters are split over tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return FileTokenizer(path)


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("byte_pairs")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_text_comes_whole_characters_at_a_time(tokenizer, size):
    text = TEXT * 10  # longer than what is decoded again
    encoded = tokenizer.encode(text).tolist()
    assert len(encoded) > len(text)
    stream = TextStream(tokenizer, tokenizer.encode("before "))
    pieces = [stream.push(encoded[i : i + size]) for i in range(0, len(encoded), size)]
    assert "".join(pieces) + stream.finish() == text
    assert not any(NOT_TEXT in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(pieces) / 3  # as it comes, not at the end


def test_bytes_that_are_no_text_hold_nothing_up():
    stream = TextStream(ByteTokenizer())
    broken = [0xFF] * 100 + list(b"a") + [0xF0, 0x9F]
    pieces = [stream.push([i]) for i in broken]
    assert len("".join(pieces[:100])) >= 97
    assert "".join(pieces) + stream.finish() == bytes(broken).decode(errors="replace")


def test_ids_without_a_tokenizer_keep_their_spaces():
    stream = TextStream(NoTokenizer(100), [7, 8])
    assert [stream.push([1]), stream.push([22, 3]), stream.finish()] == [" 1", " 22 3", ""]
