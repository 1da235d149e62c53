"""The small files of a published model, which a run keeps in a folder of its own: an export begins
from them."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain.data.tokenizer import TOKENIZER
from jaxtrain.hf.fields import HfError
from jaxtrain.run.files import fresh, parse_json, read_regular

SOURCE = "hf"  # the folder of a run with the small files of the model that it began with
CONFIG, TENSORS = "config.json", "tensors.json"
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


def small_files(folder: pathlib.Path) -> dict[str, bytes]:
    """The small files of a published model: name → content. Raises HfError for one that cannot be
    read, such as a link that leaves the folder."""
    contents = {}
    for name in SMALL_FILES:
        try:
            contents[name] = read_regular(folder / name, folder=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HfError(f"{folder / name} cannot be read ({error.strerror})") from None
    return contents


def keep(
    small: Mapping[str, bytes],
    values: Mapping[str, Any],
    dtypes: Mapping[str, str],
    run: pathlib.Path,
) -> None:
    """Writes a published model's small files into a run's folder, and the types of its tensors.
    Raises OSError.

    values: its config.json, which becomes that of a model that is not quantised and has no code
    dtypes: tensor → its type, such as "BF16"
    """
    target = run / SOURCE
    target.mkdir(parents=True, exist_ok=True)
    contents = {**small, TENSORS: json.dumps(dict(dtypes), indent=0).encode() + b"\n"}
    plain = {name: v for name, v in values.items() if name not in (QUANTIZATION, REMOTE_CODE)}
    if plain != parse_json(small[CONFIG]):
        contents[CONFIG] = json.dumps(plain, indent=2).encode() + b"\n"
    for name, content in contents.items():
        fresh(target / name).write_bytes(content)
