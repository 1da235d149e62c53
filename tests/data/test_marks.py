"""What begins and ends a document by the files beside a tokenizer.json, and the precedence among
them."""

import json
import shutil

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxtrain.data.tokenizer import DataError, FileTokenizer, prompt_ids, tokenizer_from

TOKENS = ["<s>", "</s>", "<|im_end|>", "<|end|>", "a", "b", "[UNK]"]
BEGIN, END, TURN, LAST, A, B, UNKNOWN = range(7)
# A list of added tokens, beside which special_tokens_map.json is not read.
ADDED = {"added_tokens_decoder": {str(i): {"content": TOKENS[i]} for i in range(4)}}


@pytest.fixture
def folder(tmp_path):
    """folder(post-processor, file name without .json → content) → the path of a tokenizer.json
    whose words are letters."""

    def make(template: str = "$A", **files):
        words = tokenizers.models.WordLevel(dict(zip(TOKENS, range(7))), "[UNK]")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(TOKENS[:4])
        names = [("<s>", BEGIN), ("</s>", END)]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=names)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        return tmp_path / "tokenizer.json"

    return make


CASES = {
    "names alone": ("$A", {}, (), END, [END]),
    "a post-processor": ("<s> $A", {}, (BEGIN,), END, [END]),
    "a post-processor with both": ("<s> $A </s>", {}, (BEGIN,), END, [END]),
    "add_bos_token has no effect": (
        "$A",
        {"tokenizer_config": {"add_bos_token": True, "bos_token": "<s>"}},
        (),
        END,
        [END],
    ),
    "a text": ("$A", {"tokenizer_config": {"eos_token": "<|im_end|>"}}, (), TURN, [TURN]),
    "an object": (
        "$A",
        {"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}},
        (),
        TURN,
        [TURN],
    ),
    "null": ("$A", {"tokenizer_config": {"eos_token": None}}, (), END, [END]),
    "the older map first": (
        "$A",
        {
            "tokenizer_config": {"eos_token": "<|im_end|>"},
            "special_tokens_map": {"eos_token": {"content": "<|end|>"}},
        },
        (),
        LAST,
        [LAST],
    ),
    "no older map beside added tokens": (
        "$A",
        {
            "tokenizer_config": {"eos_token": "<|im_end|>"} | ADDED,
            "special_tokens_map": {"eos_token": "<|end|>"},
        },
        (),
        TURN,
        [TURN],
    ),
    "a map alone": ("$A", {"special_tokens_map": {"eos_token": "<|end|>"}}, (), LAST, [LAST]),
    "a model's config": (
        "$A",
        {"config": {"model_type": "llama", "eos_token_id": [TURN, LAST]}},
        (),
        TURN,
        [TURN, LAST],
    ),
    "a config that is no model's": ("$A", {"config": {"eos_token_id": TURN}}, (), END, [END]),
    "stops of generation": (
        "$A",
        {
            "tokenizer_config": {"eos_token": "</s>"},
            "config": {"model_type": "llama", "eos_token_id": LAST},
            "generation_config": {"eos_token_id": [TURN, END]},
        },
        (),
        END,
        [END, TURN],
    ),
    "stops of a config": (
        "$A",
        {
            "tokenizer_config": {"eos_token": "</s>"},
            "config": {"model_type": "llama", "eos_token_id": LAST},
            "generation_config": {"temperature": 1},
        },
        (),
        END,
        [END, LAST],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_precedence(folder, tmp_path, name):
    template, files, begins, ends, stops = CASES[name]
    tokenizer = FileTokenizer(folder(template, **files))
    assert tokenizer.begin_of_document == begins
    assert tokenizer.end_of_document == ends
    assert list(tokenizer.stops) == stops
    assert tokenizer.encode("a b").tolist() == [A, B], "marks are put around documents and prompts"
    assert prompt_ids(tokenizer, "b a", 7) == [*begins, B, A]
    assert prompt_ids(tokenizer, "", 7) == list(begins or [ends])
    # a description has them, wherever the file is then
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "tokenizer.json", tmp_path / "elsewhere" / "tokenizer.json")
    description = json.loads(json.dumps(tokenizer.describe()))
    assert ("marks" in description) == ((begins, ends, stops) != ((), END, [END]))
    again = tokenizer_from(description, [tmp_path / "elsewhere"])
    assert (again.begin_of_document, again.end_of_document) == (begins, ends)
    assert list(again.stops) == stops


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"tokenizer_config": {"eos_token": "<end>"}},
            "tokenizer_config.json: eos_token='<end>' is no token of tokenizer.json",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<new>"}}}},
            "tokenizer_config.json: added_tokens_decoder has '<new>' as 9, and tokenizer.json has "
            "not",
        ),
        (
            {"generation_config": {"eos_token_id": "2"}},
            "generation_config.json: eos_token_id='2' is no id and no list of ids",
        ),
        ({"tokenizer_config": [1]}, "tokenizer_config.json holds no JSON object"),
    ],
)
def test_files_that_contradict(folder, files, message):
    path = folder(**files)
    with pytest.raises(DataError) as raised:
        FileTokenizer(path)
    assert str(raised.value) == f"data.tokenizer={path}: {path.parent}/{message}"
