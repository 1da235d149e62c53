"""The small files of a published model, which a run keeps in a folder of its own: an export begins
from them."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

SOURCE = "hf"  # the folder of a run with the small files of the model that it began with
CONFIG, TENSORS, TOKENIZER = "config.json", "tensors.json", "tokenizer.json"
GENERATION = "generation_config.json"
REMOTE_CODE, QUANTIZATION = "auto_map", "quantization_config"  # fields of config.json
# Those of tokenizers that need transformers to be read.
SLOW_TOKENIZERS = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
SMALL_FILES = (
    CONFIG,
    GENERATION,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    *SLOW_TOKENIZERS,
)


def tokenizer_of(name: str, run: pathlib.Path) -> str:
    """`data.tokenizer`, or the run's copy of it if that file is gone. name: its value"""
    copy = run / SOURCE / TOKENIZER
    is_gone = name not in ("bytes", "none") and not os.path.exists(os.path.expanduser(name))
    return str(copy) if is_gone and copy.is_file() else name


def keep(
    folder: pathlib.Path, values: Mapping[str, Any], dtypes: Mapping[str, str], run: pathlib.Path
) -> None:
    """Copies a published model's small files into a run's folder, and writes down the types of its
    tensors. Raises OSError.

    values: its config.json, which becomes that of a model that is not quantised and has no code
    dtypes: tensor → its type, such as "BF16"
    """
    target = run / SOURCE
    target.mkdir(parents=True, exist_ok=True)
    for name in SMALL_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    plain = {name: v for name, v in values.items() if name not in (QUANTIZATION, REMOTE_CODE)}
    if plain != json.loads((target / CONFIG).read_bytes()):
        (target / CONFIG).write_text(json.dumps(plain, indent=2) + "\n")
    (target / TENSORS).write_text(json.dumps(dict(dtypes), indent=0) + "\n")
