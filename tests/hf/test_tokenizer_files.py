"""The tokenizer's files of an export. tests/test_convert.py exports runs with them."""

import json

import pytest
import tokenizers

from jaxtrain.data.marks import Marks
from jaxtrain.data.tokenizer import ByteTokenizer, FileTokenizer, NoTokenizer
from jaxtrain.hf.tokenizer_files import exported_files, token_ids

TEXT = "naïve 漢字 🙂\r\n\ttab\x00nul" + "".join(map(chr, range(1, 300)))


def test_bytes_as_a_tokenizers_file(tmp_path):
    """It has the ids of a run on bytes, and reading it gives the run's marks."""
    files = exported_files(ByteTokenizer(), tmp_path / "hf")
    assert sorted(files) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    again = FileTokenizer(tmp_path / "tokenizer.json")
    assert again.encode(TEXT).tolist() == ByteTokenizer().encode(TEXT).tolist()
    assert again.decode(again.encode(TEXT)) == TEXT
    assert again.vocab_size == 257 and again.end_of_document == 256
    assert (again.begin_of_document, again.stops) == ((), (256,))
    assert json.loads(files["generation_config.json"]) == {
        "bos_token_id": None,
        "eos_token_id": 256,
    }


def file_tokenizer(folder, marks=None):
    words = tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<|end|>": 3}, "a")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json", marks)


def test_files_beside_a_tokenizer_are_kept(tmp_path):
    others = {"chat_template.jinja": b"{{ x }}", "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    for name, content in (others | {"config.json": b"{}", "else.txt": b""}).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = file_tokenizer(tmp_path)
    files = exported_files(tokenizer, tmp_path / "hf")
    assert others.items() <= files.items()
    assert files["tokenizer.json"] == tokenizer.content
    assert set(files) - set(others) == {"tokenizer.json", "generation_config.json"}


def test_files_that_a_tokenizer_lacks_are_made(tmp_path):
    tokenizer = file_tokenizer(tmp_path, Marks((1,), 2, (2, 3)))
    files = exported_files(tokenizer, tmp_path / "hf")
    assert json.loads(files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert json.loads(files["generation_config.json"]) == token_ids(tokenizer) == ids


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NoTokenizer(9)])
def test_a_published_model_without_a_tokenizer(tmp_path, tokenizer):
    """No other one is put in its place, and its other files are kept."""
    (tmp_path / "generation_config.json").write_bytes(b"{}")
    assert exported_files(tokenizer, tmp_path) == {"generation_config.json": b"{}"}


def test_token_files_have_no_tokenizer(tmp_path):
    assert exported_files(NoTokenizer(9), tmp_path / "hf") == {}
    assert token_ids(NoTokenizer(9)) == {"bos_token_id": None, "eos_token_id": None}
