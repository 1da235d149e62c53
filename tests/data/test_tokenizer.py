"""Tokenizers: round trips, what ends a document, and finding a tokenizer again."""

import json
import os

import pytest

from jaxtrain.data.tokenizer import (
    ByteTokenizer,
    DataError,
    FileTokenizer,
    NoTokenizer,
    load_tokenizer,
    prompt_ids,
    tokenizer_from,
)

TEXT = "naïve 漢字 🙂\r\n\ttab\x00nul"


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_bytes_decode_never_raises():
    assert ByteTokenizer().decode([0xFF, 104, 105, 256, 300, -1]) == "\ufffdhi"


def test_file_round_trip_without_marks_truncation_or_padding(tokenizer_file):
    tokenizer = FileTokenizer(tokenizer_file())
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 4 and tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == TEXT
    several, counts = tokenizer.encode_batch([TEXT, "", "the"])
    assert several.tolist() == [*ids, *tokenizer.encode("the")] and counts == [len(ids), 0, 1]
    assert len(tokenizer.encode("the")) == 1
    assert (
        tokenizer.decode([*tokenizer.encode("the"), tokenizer.end_of_document, 10**6, -1]) == "the"
    )


def test_nothing_is_drawn_at_random(tokenizer_file):
    """Dropout is left in a file from its training. Sampling of Unigram is off as well, should the
    library once store it."""
    path = tokenizer_file()
    content = json.loads(path.read_text())
    text = "the quick brown fox " * 9
    expected = FileTokenizer(path).encode(text).tolist()
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))
    again = FileTokenizer(path)
    assert again.encode(text).tolist() == again.encode(text).tolist() == expected
    assert again.content == path.read_bytes()  # a run's copy, and what is published
    pieces = [["<unk>", 0], ["</s>", 0], *([letters, -1] for letters in ("a", "aa", "aaa"))]
    content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces}
    content["model"] |= {"alpha": 0.1, "nbest_size": -1}
    path.write_text(json.dumps(content | {"pre_tokenizer": None, "added_tokens": []}))
    again = FileTokenizer(path)
    assert len({tuple(again.encode("a" * 99)) for _ in range(5)}) == 1


@pytest.mark.parametrize("token", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_file_end_of_document(tokenizer_file, token):
    tokenizer = FileTokenizer(tokenizer_file(["<a>", "<b>", token]))
    assert tokenizer.end_of_document == 2


def test_file_without_end_of_document(tokenizer_file):
    path = tokenizer_file(["<pad>"])
    with pytest.raises(
        DataError, match=f"data.tokenizer={path} has no end-of-document token.*<eos>"
    ):
        FileTokenizer(path)


def test_file_errors_are_one_line(write, tmp_path):
    with pytest.raises(DataError, match=r"^data\.tokenizer=.*missing\.json: No such file.*bytes"):
        FileTokenizer(tmp_path / "missing.json")
    for content in (b"{}", b"\xff", b'{"version": "1.0",\n "model": 3}'):
        with pytest.raises(
            DataError, match=r"^data\.tokenizer=.*bad\.json is not a tokenizers JSON file"
        ) as caught:
            FileTokenizer(write("bad.json", content))
        assert "\n" not in str(caught.value)
    os.mkfifo(tmp_path / "pipe.json")  # nobody writes to it
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name, kind in {"pipe.json": "a FIFO", "": "a folder", "zero.json": "a device"}.items():
        special = tmp_path / name
        message = f"^data.tokenizer={special}: it is {kind}, not a file: name a tokenizers JSON"
        with pytest.raises(DataError, match=message):
            FileTokenizer(special)


def test_vocabulary_must_fit(tokenizer_file):
    path = tokenizer_file()
    size = FileTokenizer(path).vocab_size
    with pytest.raises(
        DataError,
        match=r"^model\.vocab_size=256 is less than the 257 ids of data\.tokenizer=bytes: use "
        r"--config\.model\.vocab_size=257$",
    ):
        load_tokenizer("bytes", 256)
    with pytest.raises(DataError, match=f"use --config.model.vocab_size={size}$"):
        load_tokenizer(str(path), size - 1)
    assert load_tokenizer(str(path), size).vocab_size == size


def test_none_writes_ids():
    tokenizer = load_tokenizer("none", 1000)
    assert tokenizer.encode("5 999").tolist() == [5, 999]
    assert tokenizer.decode([5, 999]) == "5 999"
    assert tokenizer.end_of_document is None
    for bad in ("1000", "-1", "1.0", "x", "9" * 5000):
        with pytest.raises(
            DataError,
            match=f"takes ids from 0 to 999 separated by spaces as text, not '{bad[:40]}'",
        ):
            tokenizer.encode(f"5 {bad}")


def test_found_again_by_description(tokenizer_file, tmp_path):
    path = tokenizer_file()
    for tokenizer in (ByteTokenizer(), NoTokenizer(77), FileTokenizer(path)):
        again = tokenizer_from(tokenizer.describe())
        assert type(again) is type(tokenizer) and again.describe() == tokenizer.describe()
    described = FileTokenizer(path).describe()
    copies = tmp_path / "copies"
    copies.mkdir()
    path.rename(copies / "tokenizer.json")
    assert tokenizer_from(described, [copies]).describe()["sha256"] == described["sha256"]
    with pytest.raises(DataError, match="is gone"):
        tokenizer_from(described)
    path.write_text("{}")
    with pytest.raises(DataError, match="has changed"):
        tokenizer_from(described)


def test_prompts_without_ids():
    assert prompt_ids(ByteTokenizer(), "", 257) == [256]
    assert prompt_ids(NoTokenizer(10), "0 9", 10) == [0, 9]
    with pytest.raises(DataError, match="no end-of-document id to start from: use one id or more"):
        prompt_ids(NoTokenizer(10), " ", 10)
    with pytest.raises(DataError, match="has id 100, and the model knows 61"):
        prompt_ids(ByteTokenizer(), "abcd", 61)
    with pytest.raises(DataError, match="not UTF-8"):
        prompt_ids(ByteTokenizer(), "\udcff", 257)
    assert prompt_ids(ByteTokenizer(), "é\udcc3\udca9", 257) == [195, 169, 195, 169]


def test_a_hub_s_cache(tokenizer_file, tmp_path):
    """The files beside the link are the tokenizer's, not those beside its blob. A link without
    others beside it stands for its target."""
    blob = tmp_path / "cache" / "blobs" / "12"
    snapshot = tmp_path / "cache" / "snapshots" / "f00"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    plain = tokenizer_file()
    blob.write_bytes(plain.read_bytes())
    (snapshot / "tokenizer.json").symlink_to("../../blobs/12")
    assert FileTokenizer(snapshot / "tokenizer.json").path == blob
    stop = FileTokenizer(plain).end_of_document - 1
    (blob.parent / "34").write_text(json.dumps({"eos_token_id": [stop]}))
    (snapshot / "generation_config.json").symlink_to("../../blobs/34")
    tokenizer = FileTokenizer(snapshot / "tokenizer.json")
    assert tokenizer.path == snapshot / "tokenizer.json" and stop in tokenizer.stops
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to(plain)
    with pytest.raises(DataError, match="generation_config.json: it is a link to .*, outside"):
        FileTokenizer(snapshot / "tokenizer.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": 5}, "has no path and sha256"),
        ({"sha256": [1] * 10**5}, "has no path and sha256"),
        ({"path": "/dev/zero"}, "data.tokenizer=/dev/zero is gone"),
        ({"path": "x" * 10**6}, "is gone since"),
        ({"path": "a\0b"}, "is gone since"),
        ({"marks": {"begins": [], "ends": -1, "stops": []}}, "are no ids"),
        ({"marks": {"begins": 3, "ends": 1, "stops": []}}, "are no ids"),
        ({"marks": {"begins": [True], "ends": 1, "stops": []}}, "are no ids"),
        ({"marks": {"begins": [], "ends": 1.0, "stops": []}}, "are no ids"),
        ({"marks": {"begins": [], "ends": 10**30, "stops": []}}, "puts id 1000"),
    ],
)
def test_descriptions_that_no_run_writes(tokenizer_file, values, message):
    description = FileTokenizer(tokenizer_file()).describe()
    with pytest.raises(DataError, match=message) as caught:
        tokenizer_from(description | values)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("ids", [[5, 10**30], [5, 290], [*range(10**6)]])
def test_stops_that_the_model_does_not_have(tokenizer_file, ids):
    path = tokenizer_file()
    (path.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(DataError, match=r"a text ends at id \d+ .eos_token_id.*has 290 ids"):
        load_tokenizer(str(path), 290)
