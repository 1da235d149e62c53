"""Writes docs/models.md, the families of published models, from their tables.

    python docs/write_models.py

A test compares the file with what this script writes.
"""

import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxtrain.hf.entries import Training  # noqa: E402 (the path comes first)
from jaxtrain.hf.families import FAMILIES  # noqa: E402
from jaxtrain.hf.families.family import Family  # noqa: E402
from jaxtrain.hf.fields import MARKS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
# a family's fields, or pairs (field, its values in words)
Items = set[str] | set[tuple[str, str]]
TEXT = """# Published models

[use.md](use.md#published-models) shows how to start a run from a published model, and how to
publish one. `python docs/write_models.py` writes this page from the tables in
[hf/families/](../jaxtrain/hf/families), by which models are converted.

| model_type | models |
|---|---|
{families}

Every field of a config.json is known: it gives a setting, allows only some values, has no effect on
the model, or is refused by its name. A missing field has transformers' default. Files of
transformers 5 are read, and those of older versions: `rope_parameters` and `dtype`, or
`rope_theta`, `rope_scaling` and `torch_dtype`.

## Fields that give settings

| fields | model types |
|---|---|
{settings}

## Fields with few allowed values

| fields and their values | model types |
|---|---|
{limits}

## Refused

- Every other `model_type` (Llama 4, Gemma 3 with images, Mamba, …), and `architectures` that
  predict anything but the next token.
- Other attention: a window in a family without windows, chunks, the rotary scalings `dynamic` and
  `longrope`, and `index_topk` of DeepSeek's sparse attention.
- Quantized weights, except float8 with scales of blocks (`quantization_config` of DeepSeek-V3 and
  Kimi-K2) and `mxfp4` (gpt-oss). These are dequantized, and a run trains them without quantization.
- Remote code (`auto_map`), except that of families whose published folders have some: jaxtrain's
  own model replaces it.
- Sizes that jaxtrain's model cannot have, such as an odd number of rotated dimensions, and fields
  that no table has.

## Prediction modules

`num_nextn_predict_layers` becomes `model.mtp_depth`, and the modules' tensors follow those of the
layers. transformers saves no modules although the field's default is 1. If the files lack them, the
field counts as 0, and a line says so. `--config.model.mtp_depth=0` leaves them out. A copy of the
embedding or the output matrix in a module must equal the model's; an export writes it again.

## Ignored

- Fields for training, which a run's own settings replace; a line names them: {training}.
- Fields without effect on the model, such as `use_cache`: `WITHOUT_EFFECT` of
  [fields.py](../jaxtrain/hf/fields.py), and each family's `PassedOver`.
- Marks of libraries, whose names begin with {marks}; a line names them.
"""


def names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{field}`" for field in sorted(set(fields)))


def settings(family: Family) -> set[str]:
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


def training() -> set[str]:
    """The fields of any family that only training reads."""
    entries = [entry for family in FAMILIES.values() for entry in family.table]
    return {field for entry in entries if isinstance(entry, Training) for field in entry.fields}


def families_of(chosen: tuple[str, ...]) -> str:
    """These families in words: the others are named where they are fewer."""
    others = [name for name in FAMILIES if name not in chosen]
    if len(others) < len(chosen):
        return f"all but {names(others)}" if others else "all"
    return names(chosen)


def grouped(items: Mapping[str, Items]) -> Iterator[tuple[list, str]]:
    """(the items that the same families have, these families), the most families first.

    items: family → its items
    """
    groups: dict[tuple[str, ...], list] = {}
    for item in sorted(set().union(*items.values())):
        groups.setdefault(tuple(name for name in items if item in items[name]), []).append(item)
    for families, shared in sorted(groups.items(), key=lambda group: -len(group[0])):
        yield shared, families_of(families)


def text() -> str:
    """The page."""
    models = [f"| `{name}` | {family.models} |" for name, family in FAMILIES.items()]
    by_settings = grouped({name: settings(family) for name, family in FAMILIES.items()})
    by_limits = grouped({name: limits(family) for name, family in FAMILIES.items()})
    return TEXT.format(
        families="\n".join(models),
        settings="\n".join(f"| {names(fields)} | {types} |" for fields, types in by_settings),
        limits="\n".join(
            f"| {'; '.join(f'`{field}`: {words}' for field, words in fields)} | {types} |"
            for fields, types in by_limits
        ),
        training=names(training()),
        marks=names(MARKS),
    )


if __name__ == "__main__":
    PAGE.write_text(text())
