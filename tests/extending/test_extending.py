"""docs/extending.md is true: each of its recipes that has a patch is applied to a copy of the tree.

A recipe NAME has NAME.patch, a small example of the addition, and check_NAME.py, which uses it. The
document names every file that the patch touches. A patch that no longer applies is made anew: apply
its change by hand and write `git diff -U1` to the file, without lines that begin with "index".
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

HERE = pathlib.Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.patch"))
TEXT = (ROOT / "docs/extending.md").read_text()
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
COPIED = ("jaxtrain", "configs", "tests", "docs", "scripts")


def recipe(name: str) -> str:
    """The part of the document with a recipe: the section or paragraph with a link to its patch."""
    parts = re.split(r"\n(?=## |\*\*)", TEXT)
    (part,) = [part for part in parts if f"](../tests/extending/{name}.patch)" in part]
    return part


def touched(name: str) -> set[str]:
    """The files that a patch changes or adds."""
    return set(re.findall(r"^\+\+\+ b/(\S+)$", (HERE / f"{name}.patch").read_text(), re.MULTILINE))


def changed_tests(name: str) -> list[str]:
    """The files of tests that a patch changes, or whose cases it changes."""
    of_settings = ["tests/config/test_checks.py", "tests/config/test_unused.py"]
    cases = {"tests/support/broken_settings.py": of_settings}
    paths = [test for path in sorted(touched(name)) for test in cases.get(path, [path])]
    return [path for path in paths if pathlib.Path(path).name.startswith("test_")]


@pytest.fixture
def patched(tmp_path):
    """patched(name) → a copy of the tree with a recipe's patch."""

    def make(name: str) -> pathlib.Path:
        for folder in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "golden", "*.png")
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        command = ["git", "apply", "-C1", "--recount", str(HERE / f"{name}.patch")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert not done.returncode, f"{name}.patch does not apply any more: {done.stderr}"
        return tmp_path

    return make


def run(tree: pathlib.Path, *words: object) -> None:
    """Runs this Python in a tree, with the package and the tests' support of that tree."""
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tests'}"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]


def test_every_patch_has_its_check_and_recipe():
    assert len(NAMES) >= 9
    assert sorted(path.name for path in HERE.glob("check_*.py")) == [f"check_{n}.py" for n in NAMES]
    assert sorted(re.findall(r"\]\(\.\./tests/extending/(\w+)\.patch\)", TEXT)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_the_files_that_it_touches(name):
    named = recipe(name)
    missing = [path for path in touched(name) if (ROOT / path).exists() and path not in named]
    assert not missing, f"the recipe of {name} does not name {missing}"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_that_says_its_number_of_files_has_as_many(name):
    said = re.findall(r"(\w+) files? of code", recipe(name))
    code = [path for path in touched(name) if path.startswith("jaxtrain/")]
    assert {NUMBERS[word.lower()] for word in said} <= {len(code)}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_works(name, patched):
    run(patched(name), HERE / f"check_{name}.py")


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if changed_tests(name)])
def test_the_tests_of_a_recipe_pass(name, patched):
    tree, options = patched(name), "-q -x -n 0 -p no:cacheprovider".split()
    run(tree, HERE / f"check_{name}.py")
    run(tree, "-m", "pytest", *options, *changed_tests(name))
