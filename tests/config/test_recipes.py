"""recipes.py: which file a `--config` means, and what is said where it means none."""

import json
import os
import pathlib

import pytest
from support import ROOT

from jaxtrain.config import Config, recipes, replace, to_dict
from jaxtrain.config.recipes import RecipeError, find_recipe, load_recipe, shipped_recipes

SHIPPED = ROOT / "configs"
RECIPE = "from jaxtrain.config import Config\ndef get_config():\n    return Config()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty folder, which is the present one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*paths: str) -> None:
    for path in map(pathlib.Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECIPE)


@pytest.mark.parametrize(
    "name", ["tiny", "tiny.py", "configs/tiny.py", "configs/tiny", "./configs/tiny.py", "./tiny"]
)
def test_a_shipped_recipe_is_found_from_any_folder(name):
    assert find_recipe(name) == SHIPPED / "tiny.py"


def test_every_shipped_recipe_has_a_name():
    assert {*shipped_recipes()} == {path.stem for path in SHIPPED.glob("*.py")} and len(
        shipped_recipes()
    ) > 5
    for name, file in shipped_recipes().items():
        assert find_recipe(name) == file
        assert isinstance(load_recipe(file), Config)


def test_a_file_wins_over_a_shipped_recipe(folder, monkeypatch):
    write("tiny.py", "configs/tiny.py", "gpt2_124m.py")
    assert find_recipe("tiny.py") == folder / "tiny.py"
    assert find_recipe("configs/tiny.py") == folder / "configs" / "tiny.py"
    assert find_recipe(f"{folder}/tiny.py") == folder / "tiny.py"
    monkeypatch.setenv("HOME", str(folder))
    assert find_recipe("~/gpt2_124m.py") == folder / "gpt2_124m.py"


def test_a_name_alone_is_the_shipped_recipe(folder):
    """Whatever else is called so: a file of Python beside, a folder, a file that is no Python."""
    write("tiny.py", "configs/tiny.py")
    (folder / "tiny").mkdir()
    (folder / "gpt2_124m").write_text("notes")
    assert find_recipe("tiny") == SHIPPED / "tiny.py"
    assert find_recipe("gpt2_124m") == SHIPPED / "gpt2_124m.py"


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "tinny",
            "--config='tinny' is neither a file nor a recipe of jaxtrain's: use --config=tiny",
        ),
        (
            "configs/llama3.py",
            "--config='configs/llama3.py' is neither a file nor a recipe of jaxtrain's: use a "
            "file,",
        ),
        (
            "elsewhere/tiny.py",
            "--config='elsewhere/tiny.py' is neither a file nor a recipe of jaxtrain's: use "
            "--config=tiny",
        ),
        (
            "tiny.yaml",
            "--config='tiny.yaml' is neither a file nor a recipe of jaxtrain's: use --config=tiny",
        ),
        (
            "mine",
            "--config='mine' is neither a file nor a recipe of jaxtrain's: use --config=mine.py",
        ),
        (
            "other.py",
            "--config='other.py' is neither a file nor a recipe of jaxtrain's: use "
            "--config=configs/other.py",
        ),
        (
            "my runs/smal.py",
            "--config='my runs/smal.py' is neither a file nor a recipe of jaxtrain's: use "
            "--config='my runs/small.py'",
        ),
        ("runs", "--config='runs' is a folder, not a recipe: use a file,"),
        ("", "--config='' is a folder, not a recipe: use a file,"),
        (
            "setup_.py",
            "--config='setup_.py' is neither a file nor a recipe of jaxtrain's: use a file,",
        ),
        ("n" * 300, "is neither a file nor a recipe of jaxtrain's: use a file,"),
        ("channel.py", "--config='channel.py' is not a regular file: use a file,"),
        ("nul\0.py", "is neither a file nor a recipe of jaxtrain's: use a file,"),
    ],
)
def test_what_is_none_is_answered_by_a_flag_that_works(name, message):
    write("mine.py", "configs/other.py", "my runs/small.py", "my runs/tiny.py", "runs/x/recipe.py")
    pathlib.Path("setup.py").write_text("print('no recipe')\n")
    os.mkfifo("channel.py")
    with pytest.raises(RecipeError) as error:
        find_recipe(name)
    said = str(error.value)
    assert (
        said == message
        if "use a file," not in message
        else message in said and said.endswith(f", or one of {', '.join(shipped_recipes())}")
    )


def test_a_copy_without_recipes_says_so(folder, monkeypatch):
    monkeypatch.setattr(recipes, "SHIPPED", folder / "nowhere")
    with pytest.raises(
        RecipeError,
        match="use the path of a Python file with a get_config.., for this copy of jaxtrain came "
        "without recipes",
    ):
        find_recipe("tiny")


def test_a_run_s_config(tmp_path):
    config = replace(Config(), {"model.layers": 7, "pipeline.times": (1.0, 2.0, 1.0, 0.1)})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    assert load_recipe(find_recipe(str(path))) == config
    for text, why in {"{": "Expecting", '{"model": {"layer": 7}}': "layer", "[]": "list"}.items():
        path.write_text(text)
        with pytest.raises(RecipeError, match=f"is no config.json of a run: .*{why}"):
            load_recipe(path)


def test_the_config_of_a_published_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(RecipeError, match="published model: use --config=from_hf --config.train"):
        load_recipe(path)
