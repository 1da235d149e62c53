"""A config as a recipe: a Python file that `--config` reads. No jax."""

import dataclasses
import json

from jaxtrain.config import Config

WIDTH = 120  # of a line


def recipe_text(config: Config, doc: str) -> str:
    """The file's text: every setting that is not the default. doc: one line about it."""
    groups = {field.name: _group(getattr(config, field.name)) for field in dataclasses.fields(config)}
    used = {name: text for name, text in groups.items() if not text.endswith("()")}
    kinds = sorted(type(getattr(config, name)).__name__ for name in used)
    lines = ["from jaxtrain.config import (", *(f"    {kind}," for kind in sorted(["Config", *kinds])), ")"]
    body = [f"        {name}={text}," for name, text in used.items()]
    return "\n".join([f'"""{doc}"""', "", *lines, "", "", "def get_config() -> Config:", "    return Config(", *body, "    )", ""])


def _group(group: object) -> str:
    """A group of settings as the call that makes it, over several lines where one is not enough."""
    kind = type(group)
    fields = ((field.name, getattr(group, field.name), field.default) for field in dataclasses.fields(kind))  # type: ignore[arg-type]
    arguments = [f"{name}={_literal(value)}" for name, value, default in fields if value != default]
    line = f"{kind.__name__}({', '.join(arguments)})"
    if len(line) <= WIDTH - 20:
        return line
    return "\n".join([f"{kind.__name__}(", *(f"            {argument}," for argument in arguments), "        )"])


def _literal(value: object) -> str:
    """A value in Python, its texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
