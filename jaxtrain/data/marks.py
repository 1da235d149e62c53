"""The marks of a published tokenizer: the ids that begin and end a document, as the files beside
its tokenizer.json say, in transformers' order of precedence.

    begins   what tokenizer.json's post-processor puts before a text; add_bos_token has no effect
             beside it
    ends     eos_token of special_tokens_map.json (only if tokenizer_config.json has no
             added_tokens_decoder), then of tokenizer_config.json; then eos_token_id of config.json
             or generation_config.json, if it is a list its first; then the first id that the
             post-processor puts behind a text; then a name in END_OF_DOCUMENT
    stops    eos_token_id of generation_config.json, else of config.json, and `ends`
"""

import dataclasses
import pathlib
from typing import Any

import tokenizers

from jaxtrain.config.errors import cut, shown
from jaxtrain.run.files import read_json

# The names of the end of a document in published tokenizers, in the order of precedence.
END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)
TOKENIZER_CONFIG, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, CONFIG = "generation_config.json", "config.json"
BESIDE = (TOKENIZER_CONFIG, TOKENS_MAP, GENERATION, CONFIG)
END = "eos_token"
POST_PROCESSOR = "post_processor of tokenizer.json"
TEXT = 2**32 - 1  # an id that no tokenizer has, in the place of a text


class MarksError(ValueError):
    """Files beside a tokenizer that contradict it; the text is one line without the tokenizer."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """The ids before each document, the id after it, and the ids at which generated text stops.

    origin: what says which id ends a document
    """

    begins: tuple[int, ...]
    ends: int
    stops: tuple[int, ...]
    origin: str = dataclasses.field(default="its name", compare=False)


def plain_marks(tokenizer: tokenizers.Tokenizer) -> Marks | None:
    """The marks of a tokenizer without other files; None if no token is in END_OF_DOCUMENT."""
    ids = (tokenizer.token_to_id(token) for token in END_OF_DOCUMENT)
    end = next((i for i in ids if i is not None), None)
    return None if end is None else Marks((), end, (end,))


def read_marks(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> Marks | None:
    """The marks of the tokenizer of a folder; None if nothing says what ends a document.

    Raises MarksError, which names the file, for a file that cannot be read or contradicts the
    tokenizer.
    """
    names = _read(folder, TOKENIZER_CONFIG)
    place = folder / TOKENIZER_CONFIG
    added = names.get("added_tokens_decoder")  # id → token
    for number, token in added.items() if isinstance(added, dict) else ():
        text = token.get("content") if isinstance(token, dict) else token
        if str(tokenizer.token_to_id(str(text))) != number:
            raise MarksError(
                f"{place}: added_tokens_decoder has {shown(text)} as {cut(number)}, and "
                "tokenizer.json has not"
            )
    if "added_tokens_decoder" not in names and (tokens := _read(folder, TOKENS_MAP)).get(END):
        names, place = tokens, folder / TOKENS_MAP
    model = _read(folder, CONFIG)
    if "model_type" not in model:  # another program's
        model = {}
    stops = _ids(folder / GENERATION, _read(folder, GENERATION))
    config_stops = _ids(folder / CONFIG, model)
    begins, behind = _around_a_text(folder, tokenizer)
    candidates = [
        (_id_of(place, names.get(END), tokenizer), f"{END} of {place.name}"),
        *((i, f"eos_token_id of {CONFIG}") for i in config_stops),
        *((i, f"eos_token_id of {GENERATION}") for i in stops),
        *((i, POST_PROCESSOR) for i in behind),
    ]
    if plain := plain_marks(tokenizer):
        candidates.append((plain.ends, plain.origin))
    for ends, origin in candidates:
        if ends is not None:
            return Marks(
                begins, ends, tuple(dict.fromkeys([ends, *(stops or config_stops)])), origin
            )
    return None


def _read(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The JSON object of a file; empty if there is no file."""
    try:
        values = read_json(folder / name, folder=folder)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else f"is no JSON: {error}"
        raise MarksError(f"{folder / name}: {what}") from None
    if not isinstance(values, dict):
        raise MarksError(f"{folder / name} holds no JSON object")
    return values


def _id_of(place: pathlib.Path, token: Any, tokenizer: tokenizers.Tokenizer) -> int | None:
    """The id of eos_token: a text, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    number = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if number is None:
        raise MarksError(f"{place}: {END}={shown(text)} is no token of tokenizer.json")
    return number


def _ids(place: pathlib.Path, values: dict[str, Any]) -> list[int]:
    """The ids of eos_token_id: a number, or a list of them."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise MarksError(f"{place}: eos_token_id={shown(value)} is no id and no list of ids")
    return ids


def _around_a_text(
    folder: pathlib.Path, tokenizer: tokenizers.Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer's post-processor puts before a text, and those behind it."""
    # whatever the tokenizer's own vocabulary has
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"text": TEXT}, "text"))
    if tokenizer.post_processor is not None:
        probe.post_processor = tokenizer.post_processor
    ids = tuple(probe.encode("text").ids)
    if TEXT not in ids:
        raise MarksError(f"{folder}: {POST_PROCESSOR} leaves out the text")
    place = ids.index(TEXT)
    return ids[:place], ids[place + 1 :]
