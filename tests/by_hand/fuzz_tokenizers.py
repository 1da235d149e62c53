#!/usr/bin/env python
"""Random tokenizer.json files: the ids of a corpus are those of the tokenizers library itself.

    tests/by_hand/fuzz_tokenizers.py [--seed=N] [--cases=100] [--long]

A case is a tokenizer of a published kind (byte-level BPE, BPE of whole texts as Llama 2's, Unigram,
WordPiece, WordLevel) with what such files have: prefixes, regexes, odd added tokens, truncation,
padding, dropout and post-processors; and a few documents, as texts and as JSONL. Its corpora have
the ids that the library makes of each entire document, between the ids that its post-processor
names. Texts are cut into windows of 5,040 characters, or (--long) of the size of a real corpus. The
exit status is 1 if a case failed.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from jaxtrain.config import DataConfig  # noqa: E402
from jaxtrain.data.preparing import encode  # noqa: E402 (the path comes first)
from jaxtrain.data.preparing.prepare import prepare  # noqa: E402

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
UNKNOWN, BEGIN, END, PAD = range(4)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [
    *"the cat and a hat is on mat Mat naïve cafe\u0301 漢字 仮名 привет 🙂 🙂🙂 x1 12345".split(),
    *"3.14 don't def return self.x == None; <tag> </s> <unk> [X] #include a_b --- … \x07".split(),
]
SPACES = [
    " ",
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\n    ",
    "\t",
    "\n\t",
    "\u00a0",
    " \n ",
    "",
]
SMALL = {"TASK": 5040, "SHARED": 512}


def text(rng: random.Random, size: int) -> str:
    """About `size` characters of words, and now and then a long run of one kind."""
    parts, count = [], 0
    words = rng.sample(WORDS, rng.randint(5, len(WORDS)))
    spaces = rng.sample(SPACES, rng.randint(2, len(SPACES)))
    while count < size:
        part = rng.choice(words) + rng.choice(spaces)
        if rng.random() < 0.0005:
            part = rng.choice([" ", "a", "7", "\n", "漢", "ab", "é"]) * rng.randint(2, 900)
        parts.append(part)
        count += len(part)
    return "".join(parts)


def tokenizer_json(rng: random.Random) -> dict:
    """A tokenizer.json as its library writes it, with what a training left switched on."""
    kind = rng.choice(["bytes", "llama2", "llama3", "unigram", "wordpiece", "words", "metaspace"])
    trained = text(rng, 4000).replace("</s>", "").replace("<unk>", "")
    unknown = {"unk_token": "<unk>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    maker = trainers.BpeTrainer
    arguments = {"initial_alphabet": alphabet} if kind in ("bytes", "llama3") else {}
    before: list = []  # pre-tokenizers
    normal: list = []
    prefix = pre_tokenizers.Metaspace(
        prepend_scheme=rng.choice(["always", "first", "never"]), split=rng.random() < 0.7
    )
    if kind == "bytes":
        model = models.BPE(ignore_merges=rng.random() < 0.2)
        before = [
            pre_tokenizers.ByteLevel(
                add_prefix_space=rng.random() < 0.5, use_regex=rng.random() < 0.7
            )
        ]
        if rng.random() < 0.3:
            before.insert(0, pre_tokenizers.Digits(individual_digits=rng.random() < 0.5))
    elif kind == "llama3":
        model = models.BPE(ignore_merges=rng.random() < 0.5)
        behavior = rng.choice(["isolated", "isolated", "merged_with_previous"])
        before = [
            pre_tokenizers.Split(Regex(LLAMA3), behavior),
            pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.3, use_regex=False),
        ]
    elif kind == "llama2":
        fallback = rng.random() < 0.6
        model = models.BPE(byte_fallback=fallback, fuse_unk=rng.random() < 0.7, **unknown)
        arguments = {"initial_alphabet": [f"<0x{i:02X}>" for i in range(256)]} if fallback else {}
        normal = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    elif kind == "metaspace":
        model = models.BPE(fuse_unk=rng.random() < 0.5, **unknown)
        before = [prefix]
    elif kind == "unigram":
        model, maker, arguments = models.Unigram(), trainers.UnigramTrainer, unknown
        before = [prefix]
        normal = rng.choice([[], [normalizers.NFKC()], [normalizers.Replace(Regex(" {2,}"), " ")]])
    elif kind == "wordpiece":
        model, maker = models.WordPiece(**unknown), trainers.WordPieceTrainer
        normal = [normalizers.BertNormalizer(lowercase=rng.random() < 0.5)]
        before = [pre_tokenizers.BertPreTokenizer()]
    else:
        model, maker = models.WordLevel(**unknown), trainers.WordLevelTrainer
        before = [
            rng.choice(
                [
                    pre_tokenizers.Whitespace(),
                    pre_tokenizers.WhitespaceSplit(),
                    pre_tokenizers.CharDelimiterSplit(" "),
                    pre_tokenizers.UnicodeScripts(),
                    pre_tokenizers.FixedLength(rng.randint(1, 7)),
                    pre_tokenizers.Split(Regex(r'"[^"]*"|\w+|\W'), "isolated"),
                ]
            )
        ]
    extra = [normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.NFKD()]
    if rng.random() < 0.4:
        normal = [rng.choice(extra), *normal]
    made = tokenizers.Tokenizer(model)
    if normal:
        made.normalizer = normal[0] if len(normal) == 1 else normalizers.Sequence(normal)
    if before:
        made.pre_tokenizer = before[0] if len(before) == 1 else pre_tokenizers.Sequence(before)
    trainer = maker(special_tokens=SPECIAL, vocab_size=700, show_progress=False, **arguments)
    made.train_from_iterator(trained.splitlines(keepends=True), trainer)
    for word in rng.sample(["[X]", "<tag>", "Mat", "  ", "🙂", "\n"], rng.randint(0, 3)):
        flags = {f: rng.random() < 0.3 for f in ("lstrip", "rstrip", "single_word", "normalized")}
        made.add_tokens([AddedToken(word, special=rng.random() < 0.5, **flags)])
    if rng.random() < 0.3:
        made.enable_truncation(rng.randint(1, 100))
    if rng.random() < 0.3:
        made.enable_padding(length=rng.randint(1, 100), pad_id=PAD, pad_token="<pad>")
    if (processor := post_processor(rng)) is not None:
        made.post_processor = processor
    content = json.loads(made.to_str())
    if content["model"]["type"] == "BPE" and rng.random() < 0.5:
        content["model"]["dropout"] = rng.choice([0.1, 0.5, 1.0])
    if content["model"]["type"] == "Unigram" and rng.random() < 0.5:
        content["model"] |= {"alpha": 0.1, "nbest_size": -1}
    return content


def post_processor(rng: random.Random) -> processors.PostProcessor | None:
    names = [("<s>", BEGIN), ("</s>", END)]
    template = rng.choice(["$A", "<s> $A", "<s> $A </s>", "$A </s>", "<s> <s> $A"])
    choices = [
        None,
        processors.TemplateProcessing(single=template, special_tokens=names),
        processors.RobertaProcessing(("</s>", END), ("<s>", BEGIN)),
        processors.BertProcessing(("</s>", END), ("<s>", BEGIN)),
        processors.ByteLevel(trim_offsets=True),
    ]
    choices.append(processors.Sequence([choices[4], choices[1]]))
    return rng.choice(choices)


def begin_of(processor: dict | None) -> list[int]:
    """The ids that the JSON of a post-processor puts before a text."""
    match (processor or {}).get("type"):
        case "Sequence":
            return [i for p in reversed(processor["processors"]) for i in begin_of(p)]
        case "TemplateProcessing":
            ids = []
            for item in processor["single"]:
                if "Sequence" in item:
                    return ids
                ids += processor["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        case "RobertaProcessing" | "BertProcessing":
            return [processor["cls"][1]]
    return []


def corpus_of(source: pathlib.Path, tokenizer: pathlib.Path) -> list[list[int]]:
    """The ids of each prepared document."""
    data = DataConfig(
        source=str(source), tokenizer=str(tokenizer), cache=str(tokenizer.parent / "cache")
    )
    corpus = prepare(data, 1 << 20, progress=False)
    return [ids.tolist() for ids in np.split(corpus.tokens, corpus.documents[1:-1])]


def check(rng: random.Random, folder: pathlib.Path, sizes: list[int]) -> str:
    """Draws a case into a folder; what is wrong with it, or ""."""
    content, path = tokenizer_json(rng), folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    plain = content | {"truncation": None, "padding": None}
    plain["model"] = {k: v for k, v in content["model"].items() if k != "dropout"}
    library = tokenizers.Tokenizer.from_str(json.dumps(plain))
    texts, begin = [text(rng, size) for size in sizes], begin_of(content["post_processor"])
    try:
        ids = [library.encode(t, add_special_tokens=False).ids for t in texts]
    except BaseException as panic:  # the library's own fault, of added tokens that overlap
        if type(panic).__name__ != "PanicException":
            raise
        return ""
    expected = [[*begin, *document, END] for document in ids]
    (folder / "texts").mkdir()
    for i, t in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_bytes(t.encode())
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
    (folder / "texts.jsonl").write_text(lines)
    for source in ("texts", "texts.jsonl"):
        found = corpus_of(folder / source, path)
        wrong = [i for i, ids in enumerate(expected) if found[i] != ids]
        if wrong or len(found) != len(expected):
            return f"{source}: documents {wrong} of {len(found)} have other ids: {path}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--long", action="store_true", help="documents of a few MB")
    flags = parser.parse_args(arguments)
    sizes = [3_000_000] if flags.long else [30_000, 7, 6_000]
    for name, value in ({} if flags.long else SMALL).items():
        setattr(encode, name, value)
    failures = 0
    for seed in range(flags.seed, flags.seed + flags.cases):
        with tempfile.TemporaryDirectory() as name:
            error = check(random.Random(seed), pathlib.Path(name), sizes)
        if error:
            print(f"case {seed}: {error}", flush=True)
            failures += 1
    print(f"{flags.cases} tokenizers, {failures} with other ids")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
