"""What begins and ends a document by the files beside a tokenizer.json, and the precedence among
them."""

import json
import shutil

import pytest
import tokenizers
from tokenizers.processors import (
    BertProcessing,
    ByteLevel,
    RobertaProcessing,
    Sequence,
    TemplateProcessing,
)

from jaxtrain.data.tokenizer import (
    ByteTokenizer,
    DataError,
    FileTokenizer,
    NoTokenizer,
    marks_line,
    prompt_ids,
    tokenizer_from,
)

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
        names = [("<s>", BEGIN), ("</s>", END), ("<|im_end|>", TURN)]
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
    "a post-processor before a name": ("$A <|im_end|>", {}, (), TURN, [TURN]),
    "a config before a post-processor": (
        "<s> $A <|im_end|>",
        {"tokenizer_config": {"eos_token": "<|end|>"}},
        (BEGIN,),
        LAST,
        [LAST],
    ),
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


TEMPLATE = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
BOTH = ("[SEP]", 4), ("[CLS]", 3)
PROCESSORS = {
    "none": (None, "no id begins one, 1 '</s>' ends it (its name)"),
    "offsets alone": (ByteLevel(), "no id begins one, 1 '</s>' ends it (its name)"),
    "template": (TEMPLATE, "0 '<s>' begins one (post), 1 '</s>' ends it (its name)"),
    "sequence": (
        Sequence([ByteLevel(), TEMPLATE]),
        "0 '<s>' begins one (post), 1 '</s>' ends it (its name)",
    ),
    "sequence of two": (
        Sequence([RobertaProcessing(*BOTH), TEMPLATE]),
        "0 '<s>', 3 '[CLS]' begins one (post), 4 '[SEP]' ends it (post)",
    ),
    "BERT": (BertProcessing(*BOTH), "3 '[CLS]' begins one (post), 4 '[SEP]' ends it (post)"),
    "RoBERTa": (RobertaProcessing(*BOTH), "3 '[CLS]' begins one (post), 4 '[SEP]' ends it (post)"),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("vocabulary", [["a"], ["漢"], ["##b"]])
def test_every_post_processor_whatever_the_vocabulary_has(tmp_path, name, vocabulary):
    """Also where the tokenizer cannot encode a letter, or makes nothing of it."""
    processor, line = PROCESSORS[name]
    words = ["<s>", "</s>", "<pad>", "[CLS]", "[SEP]", *vocabulary]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(dict(zip(words, range(9)))))
    made.normalizer = tokenizers.normalizers.Replace("a", "")
    if processor:
        made.post_processor = processor
    made.save(str(tmp_path / "tokenizer.json"))
    line = line.replace("post", "post_processor of tokenizer.json")
    assert marks_line(FileTokenizer(tmp_path / "tokenizer.json")) == f"documents: {line}"


def test_what_says_so_stands_in_the_line(folder):
    line = marks_line(FileTokenizer(folder(tokenizer_config={"eos_token": "<|end|>"})))
    assert (
        line
        == "documents: no id begins one, 3 '<|end|>' ends it (eos_token of tokenizer_config.json)"
    )
    line = marks_line(
        FileTokenizer(folder(tokenizer_config={}, generation_config={"eos_token_id": 2}))
    )
    assert line.endswith("2 '<|im_end|>' ends it (eos_token_id of generation_config.json)")
    assert marks_line(ByteTokenizer()) == "documents: no id begins one, id 256 ends it"
    assert marks_line(NoTokenizer(9)) == "documents: no id begins one, no id ends it"


def test_marks_that_the_tokenizer_does_not_have(folder):
    """They would be refused as damage when batches are read."""
    path = folder(config={"model_type": "llama", "eos_token_id": 7})
    with pytest.raises(DataError, match=f"^data.tokenizer={path} puts id 7 around .* has 7 ids: "):
        FileTokenizer(path)
    content = json.loads(folder(config={}).read_text())
    content["post_processor"] = {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 9]}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="puts id 9 around a document"):
        FileTokenizer(path)
    content["post_processor"] = json.loads(TEMPLATE.__getstate__()) | {"single": []}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="post_processor of tokenizer.json leaves out the text"):
        FileTokenizer(path)
