"""Recipes, which are found by path or by name, and read. No jax.

    --config=mine/run.py                       the file
    --config=runs/mine/config.json             a run's config, as train and convert write it
    --config=tiny | tiny.py | configs/tiny.py  that file if it exists, else the recipe of the
    package

A recipe is a Python file whose get_config() returns a `Config`. cli.py applies flags to the config
and checks it.
"""

import dataclasses
import json
import os
import pathlib
import runpy
from collections.abc import Sequence
from typing import Any

from jaxtrain.config import Config, from_dict, get, replace, to_dict
from jaxtrain.config.errors import UsageError, cut, nearly
from jaxtrain.config.own_code import SHIPPED, line_in
from jaxtrain.config.paths import FORK

DEFAULT_RECIPE = "tiny"
WIDTH = 98  # of the call that makes a group of a recipe's settings, without its parentheses


class RecipeError(UsageError):
    """A recipe that does not exist or cannot be read; the text is one line.

    rule: what is wrong; nearest: a value of `--config` that works, or "" where `advice` says what
    to do; others: further names.
    """

    def __init__(
        self, rule: str, nearest: str = DEFAULT_RECIPE, others: Sequence[str] = (), advice: str = ""
    ):
        super().__init__(rule, {"config": nearest} if nearest else {}, others, advice=advice)


def shipped_recipes() -> dict[str, pathlib.Path]:
    """Name → file of the recipes that came with the package."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.py"))}


def find_recipe(name: str) -> pathlib.Path:
    """The file of `--config`: the Python file of this path, else the shipped recipe of this name,
    which may be written NAME, NAME.py or configs/NAME.py.

    Only a Python file hides a shipped recipe; a folder `tiny`, say, does not. Raises RecipeError,
    which names the nearest recipe, where there is none.

    >>> from jaxtrain import find_recipe
    >>> find_recipe("tiny").name, find_recipe("configs/gpt2_124m.py").name
    ('tiny.py', 'gpt2_124m.py')
    """
    path = pathlib.Path(os.path.expanduser(name))
    by_name = path.suffix in ("", ".py") and str(path.parent) in (".", "configs")
    shipped = shipped_recipes().get(path.stem) if by_name else None
    if os.path.isfile(path) and (path.suffix == ".py" or not shipped):
        return path.resolve()
    if shipped:
        return shipped
    rule = "is neither a file nor a recipe of jaxtrain's"
    if os.path.isdir(path):
        rule = "is a folder, not a recipe"
    elif os.path.exists(path):
        rule = "is not a regular file"
    raise _unknown(f"--config={name!r} {rule}", path)


def _unknown(rule: str, path: pathlib.Path) -> RecipeError:
    """The error for a path that is no recipe, with the recipe most like it; with all that are
    shipped where none is."""
    shipped, current = shipped_recipes(), pathlib.Path()
    neighbours = _recipes_in(path.parent) if path.parent != current else []
    known: dict[str, str] = {}  # the first of several with one name counts
    for recipe in [
        *neighbours,
        *map(pathlib.Path, shipped),
        *_recipes_in(current),
        *_recipes_in(current / "configs"),
    ]:
        known.setdefault(recipe.stem, str(recipe))
    if near := nearly(path.stem, known):
        return RecipeError(rule, known[near])
    if shipped:
        return RecipeError(rule, "", advice=f"a file, or one of {', '.join(shipped)}")
    return RecipeError(
        rule,
        "",
        advice="the path of a Python file with a get_config(), for this copy of jaxtrain came "
        "without recipes",
    )


def _recipes_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The Python files of a folder that look like recipes; none where the folder does not exist or
    may not be read."""
    if not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        return []
    return [
        file
        for file in sorted(folder.glob("*.py"))
        if file.is_file() and os.access(file, os.R_OK)
        if "def get_config(" in file.read_text(errors="replace")
    ]


def config_text(config: Config, fork: dict[str, Any] | None = None) -> str:
    """The text of a run's config.json, which `load_recipe` reads. fork: what the run has inherited
    from another one"""
    return json.dumps(to_dict(config) | ({FORK: fork} if fork else {}), indent=2) + "\n"


def recipe_text(config: Config, doc: str) -> str:
    """The text of a recipe, which `load_recipe` reads: every setting that is not the default. doc:
    one line about it."""
    changed = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != type(getattr(config, field.name))()
    ]
    kinds = sorted(["Config", *(type(getattr(config, name)).__name__ for name in changed)])
    return "\n".join(
        [
            f'"""{doc}"""',
            "",
            "from jaxtrain.config import (",
            *(f"    {kind}," for kind in kinds),
            ")",
            "",
            "",
            "def get_config() -> Config:",
            "    return Config(",
            *(f"        {name}={_group(getattr(config, name))}," for name in changed),
            "    )",
            "",
        ]
    )


def _group(group: Any) -> str:
    """The call that makes a group of settings, over several lines where one is not enough."""
    values = (
        (field.name, getattr(group, field.name), field.default)
        for field in dataclasses.fields(group)
    )
    arguments = [
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value, default in values
        if value != default
    ]
    name, line = type(group).__name__, ", ".join(arguments)
    if len(name) + len(line) <= WIDTH:
        return f"{name}({line})"
    return "\n".join(
        [f"{name}(", *(f"            {argument}," for argument in arguments), "        )"]
    )


def load_recipe(recipe: str | pathlib.Path) -> Config:
    """The config that a recipe's get_config() returns, or that a run's config.json holds. Nothing
    is checked or filled in. Raises RecipeError, with the line, for whatever goes wrong in it.

    recipe: its file, or a text as of `find_recipe`, such as the name of a shipped one

    >>> from jaxtrain import load_recipe
    >>> load_recipe("llama3_8b").model.layers
    32
    """
    path = find_recipe(recipe) if isinstance(recipe, str) else recipe
    name = f"--config={str(path)!r}"
    if path.suffix == ".json":
        try:
            with path.open("rb") as file:  # it has some 6,000 bytes
                values = json.loads(file.read(10**6))
            if "model_type" not in values:
                return from_dict(values)
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise RecipeError(f"{name} is no config.json of a run: {cut(str(error))}") from None
        raise RecipeError(
            f"{name} is the config.json of a published model",
            nearest="",
            advice=f"--config=from_hf --config.train.init_from={path.parent}",
        )
    if path.suffix != ".py":
        raise RecipeError(f"{name} is not a Python file")
    try:
        get_config = runpy.run_path(str(path), run_name=f"recipe_{path.stem}").get("get_config")
        config = get_config() if callable(get_config) else None
    except (Exception, SystemExit) as error:
        place = name + line_in(str(path), error)
        raise RecipeError(f"{place} raises {type(error).__name__}: {error}") from None
    if not callable(get_config):
        raise RecipeError(
            f"{name} defines no function get_config(), which returns a jaxtrain.config.Config"
        )
    if not isinstance(config, Config):
        raise RecipeError(
            f"{name}: get_config() returns {type(config).__name__}, not a jaxtrain.config.Config"
        )
    for group in dataclasses.fields(Config):
        kind: Any = group.type
        if not isinstance(value := getattr(config, group.name), kind):
            raise RecipeError(f"{name}: {group.name}={value!r} is not a {kind.__name__}")
    return _with_code_beside(path.parent, config)


def _with_code_beside(folder: pathlib.Path, config: Config) -> Config:
    """The config of a recipe in this folder. Files of its user's own code (own_code.py) that lie
    there, and not in the current folder, have their full paths."""

    def full_path(text: str) -> str:
        source, _, name = text.rpartition(":")
        beside = folder / source
        is_there = source.endswith(".py") and not os.path.isfile(source) and beside.is_file()
        return f"{beside}:{name}" if is_there else text

    def entry(text: str) -> str:  # NAME=VALUE
        setting, equals, value = text.partition("=")
        return setting + equals + full_path(value)

    names = ("model.block", "model.mixer", "train.loss", "train.evaluate", "optimizer.name")
    changes: dict[str, Any] = {
        path: full_path(get(config, path)) for path in (*names, "data.filter")
    }
    for path in ("model.kinds", "data.sources", "data.validation"):
        if isinstance(entries := get(config, path), tuple):
            changes[path] = tuple(map(entry, entries))
    return replace(config, changes)
