"""Whether a Kubernetes object has the form that a CustomResourceDefinition gives: fields that it
does not know, types, what is required, enums, patterns and bounds. CEL rules are the API server's
alone.
"""

import re
from collections.abc import Iterator
from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def schema_of(crd: dict, version: str) -> dict:
    """The schema of a version of the objects."""
    (found,) = [served for served in crd["spec"]["versions"] if served["name"] == version]
    return found["schema"]["openAPIV3Schema"]


def problems(value: Any, schema: dict, path: str = "") -> Iterator[str]:
    """Lines about what is wrong with a value below a path."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path}: {value!r} is neither a number nor a text"
        return
    expected = schema.get("type")
    if expected and (
        not isinstance(value, TYPES[expected])
        or (expected != "boolean" and isinstance(value, bool))
    ):
        yield f"{path}: {value!r} is no {expected}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if expected in ("integer", "number") and not schema.get(
        "minimum", value
    ) <= value <= schema.get("maximum", value):
        yield f"{path}: {value} is out of bounds"
    if isinstance(value, list | str) and not schema.get("minItems", 0) <= len(value) <= schema.get(
        "maxItems", len(value)
    ):
        yield f"{path}: {len(value)} entries"
    if isinstance(value, dict):
        yield from _problems_of_fields(value, schema, path)
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from problems(entry, schema.get("items", {}), f"{path}[{number}]")


def _problems_of_fields(value: dict, schema: dict, path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}: {name} is missing"
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, entry in value.items():
        below = f"{path}.{name}"
        if name in known:
            yield from problems(entry, known[name], below)
        elif isinstance(others, dict):
            yield from problems(entry, others, below)
        elif known and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{below}: there is no such field"
