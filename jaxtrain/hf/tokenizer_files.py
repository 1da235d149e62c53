"""The tokenizer of a run that starts from a published model; and the tokenizer's files of an
export, with generation_config.json.

    the run's tokenizer is a file      the files beside it
    the run began with a published     that model's other files, and no tokenizer
    model that has no tokenizer
    the run is on bytes                a tokenizer.json with the same ids

What is missing beside a tokenizer is made from its marks (data/marks.py), so that transformers
begins and ends a text as the run does.
"""

import dataclasses
import json
import pathlib
from typing import Any

import tokenizers

from jaxtrain.data.errors import StoreError
from jaxtrain.data.marks import TOKENIZER_CONFIG
from jaxtrain.data.tokenizer import (
    ByteTokenizer,
    DataError,
    FileTokenizer,
    Tokenizer,
    check_stops,
    open_tokenizer,
)
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.run_config import Published
from jaxtrain.hf.source_files import CONFIG, GENERATION, TOKENIZER, small_files

END_OF_BYTES = "<|endoftext|>"


@dataclasses.dataclass(frozen=True, eq=False)
class RunTokenizer:
    """A run's tokenizer, and lines for people."""

    tokenizer: Tokenizer
    notes: tuple[str, ...]


def tokenizer_of_run(published: Published, name: str, size: int) -> RunTokenizer:
    """The tokenizer of a run that starts from a published model. Raises HfError if it cannot be
    read, or if it has ids that the model does not have.

    name: `data.tokenizer`; size: `model.vocab_size`
    """
    try:
        tokenizer = open_tokenizer(name, size)
        check_stops(tokenizer, size)
    except StoreError:
        raise  # the hub's, which may pass
    except DataError as error:
        raise HfError(str(error)) from None
    if tokenizer.vocab_size > size:
        raise HfError(
            f"{published.folder / CONFIG}: vocab_size={size} is less than the "
            f"{tokenizer.vocab_size} ids of data.tokenizer={name}"
        )
    notes = []
    if tokenizer.vocab_size < size:
        notes.append(
            f"data.tokenizer={name} has {tokenizer.vocab_size} of {size} ids; the other "
            f"{size - tokenizer.vocab_size} are never made"
        )
    if not (published.folder / TOKENIZER).is_file():
        text = ", which reads no text (--config.data.tokenizer names another)" * (name == "none")
        notes.append(f"{published.folder} has no {TOKENIZER}: data.tokenizer={name}{text}")
    return RunTokenizer(tokenizer, tuple(notes))


def exported_files(tokenizer: Tokenizer, source: pathlib.Path) -> dict[str, bytes]:
    """File → content. Raises HfError for a file that cannot be read.

    source: folder with the small files of the model that the run began with, if there is one
    """
    if isinstance(tokenizer, FileTokenizer):
        files = small_files(tokenizer.path.parent) | {TOKENIZER: tokenizer.content}
    elif source.is_dir() and not (source / TOKENIZER).is_file():
        files = small_files(source)
        return {name: files[name] for name in files if name != CONFIG}
    elif isinstance(tokenizer, ByteTokenizer):
        files = {TOKENIZER: byte_level(tokenizer)}
    else:
        return {}
    text = tokenizers.Tokenizer.from_buffer(files[TOKENIZER]).id_to_token
    begin, end = tokenizer.begin_of_document, tokenizer.end_of_document
    marks = {"bos_token": begin[0] if begin else None, "eos_token": end}
    tokens = {name: text(i) for name, i in marks.items() if i is not None}
    defaults = {
        TOKENIZER_CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens,
        GENERATION: token_ids(tokenizer),
    }
    files.pop(CONFIG, None)
    return {
        name: json.dumps(defaults[name], indent=2).encode() + b"\n" for name in defaults
    } | files


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """bos_token_id and eos_token_id, as config.json and generation_config.json have them."""
    begins, stops = tokenizer.begin_of_document, tokenizer.stops
    eos = list(stops) if len(stops) > 1 else stops[0] if stops else None
    return {"bos_token_id": begins[0] if begins else None, "eos_token_id": eos}


def byte_level(tokenizer: ByteTokenizer) -> bytes:
    """A tokenizer.json whose ids are those of a ByteTokenizer."""
    # Tokens of byte-level BPE are characters that stand for bytes: printable ones for themselves,
    # the others, in their order, from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    bpe = tokenizers.models.BPE({character: byte for byte, character in characters.items()}, [])
    result = tokenizers.Tokenizer(bpe)
    result.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    result.decoder = tokenizers.decoders.ByteLevel()
    result.add_special_tokens([END_OF_BYTES])
    assert result.token_to_id(END_OF_BYTES) == tokenizer.end_of_document
    return result.to_str().encode()
