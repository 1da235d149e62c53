"""Writes docs/models.md, the families of published models, from their tables.

    python docs/write_models.py

A test compares the file with what this script writes.
"""

import pathlib
import re
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxtrain.hf.entries import PassedOver, Training  # noqa: E402 (the path comes first)
from jaxtrain.hf.families import FAMILIES  # noqa: E402
from jaxtrain.hf.families.family import Family  # noqa: E402
from jaxtrain.hf.fields import MARKS, WITHOUT_EFFECT  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Published models

[docs/use.md](use.md) shows how a run starts from a published model, and how a run's model is
published. `python docs/write_models.py` makes this page of the tables in `jaxtrain/hf/families/`,
which conversion itself reads and writes.

A field of a config.json is honoured, has only the values that stand here, has no effect on what a
model computes, or is refused by its name; so is a field that no table has. A missing field has
transformers' default. Both forms are read: `rope_parameters` and `dtype` of transformers 5,
`rope_theta`, `rope_scaling` and `torch_dtype` of older versions.
"""
TAIL = """
## Refused

- Another `model_type` (Llama 4, Gemma, Qwen3-Next, Mamba, …), and `architectures` with another head
  than the next token's.
- Other attention: a `sliding_window` shorter than `max_position_embeddings`, `layer_types` other
  than full attention, the rotary scalings `dynamic` and `longrope`, rotary parameters by layer
  type, and fields that no table has, such as `index_topk` of DeepSeek's sparse attention.
- Quantized weights, but for float8 in blocks (`quantization_config` of DeepSeek-V3 and Kimi-K2),
  which are multiplied by their scales: a run trains them without quantization.
- Remote code (`auto_map`), but for families whose published folders bring some: jaxtrain's own
  model is used in its place.
- Sizes that jaxtrain's model cannot have, such as an odd number of rotated dimensions.

## Prediction modules

`num_nextn_predict_layers` is `model.mtp_depth`; a module's tensors follow those of the layers. Its
default is 1, but transformers saves no modules: where the files have no tensor of one, the field is
read as 0, with a line. `--config.model.mtp_depth=0` leaves the modules out. What the files hold of
embedding and output matrix beside a module must have the model's numbers, and is written again.

## Only in training

A run trains by its own settings, and says so where one of these is set: {training}.

## Without effect

{passed}.

Fields whose names begin with {marks} are marks that libraries leave:
they are passed over with a line.
"""


def names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{field}`" for field in sorted(set(fields)))


def honoured(family: Family) -> set[str]:
    """The fields that give settings of the model."""
    return {field for entry in family.table for field in entry.sources.values()}


def limits(family: Family) -> set[tuple[str, str]]:
    """The fields that may have few values, each with these."""
    by_field = re.compile(r"model\.(\w+)")
    return {
        (field, by_field.sub(lambda match: family.source(match[1]), words))
        for entry in family.table
        for field, words in entry.limits.items()
    }


def row(name: str, models: str, fields: set[str], only: set[tuple[str, str]]) -> str:
    values = "; ".join(f"`{field}`: {words}" for field, words in sorted(only))
    return f"| {name} | {models} | {names(fields)} | {values} |"


def of_kind(kind: type[PassedOver] | type[Training]) -> set[str]:
    return {
        field
        for family in FAMILIES.values()
        for entry in family.table
        if isinstance(entry, kind)
        for field in entry.fields
    }


def text() -> str:
    """The page."""
    decoders = [family for name, family in FAMILIES.items() if name != "gpt2"]
    fields = set.intersection(*map(honoured, decoders))
    only = set.intersection(*map(limits, decoders))
    lines = ["| model_type | models | honoured | only with these values |", "|---|---|---|---|"]
    lines.append(row("all but `gpt2`", "", fields, only))
    for name, family in FAMILIES.items():
        shared = (fields, only) if family in decoders else (set(), set())
        given, narrow = honoured(family) - shared[0], limits(family) - shared[1]
        lines.append(row(f"`{name}`", family.models, given, narrow))
    tail = TAIL.format(
        training=names(of_kind(Training)),
        passed=names((of_kind(PassedOver) | WITHOUT_EFFECT) - {"architectures", "model_type"}),
        marks=names(MARKS),
    )
    return f"{HEAD}\n## Families\n\n" + "\n".join(lines) + "\n" + tail


if __name__ == "__main__":
    PAGE.write_text(text())
