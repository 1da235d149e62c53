"""Code of one's own: where it is looked for, and the one line about what is wrong with it."""

import pytest

from jaxtrain.config import own_code
from jaxtrain.config.recipes import load_recipe

FAULTS = {
    "layer": "is not FILE.py:NAME",
    "layer.py": "is not FILE.py:NAME",
    "layer.py:": "is not FILE.py:NAME",
    "my-layer:Block": "is not FILE.py:NAME",
    "absent.py:Block": "names no file: absent.py does not exist in /",
    "/absent.py:Block": "names no file: /absent.py does not exist",
    "absent.module:Block": "names no module: absent is not on Python's path",
    "layer.py:Blok": "names Blok, which layer.py does not define: it has Block",
    "layer.py:Other": "names Other, which layer.py does not define: it has Block, size",
    "raises.py:Block": "cannot be imported: raises.py, line 2, raises ZeroDivisionError: ",
    "syntax.py:Block": "cannot be imported: syntax.py, line 1, raises SyntaxError: ",
    "imports.py:Block": "cannot be imported: imports.py, line 1, raises ModuleNotFoundError: ",
    "exits.py:Block": "cannot be imported: exits.py, line 1, raises SystemExit: 3",
}
FILES = {
    "layer.py": "class Block:\n    size = 1\nsize = 2\n",
    "raises.py": "def f(x):\n    return 1 / x\nf(0)\n",
    "syntax.py": "class Block\n",
    "imports.py": "import absent_package\n",
    "exits.py": "raise SystemExit(3)\n",
    "neighbour.py": "import neighbour_of_it\nBlock = neighbour_of_it.BLOCK\n",
    "neighbour_of_it.py": "BLOCK = 7\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_in_a_file_or_module(folder, monkeypatch):
    assert own_code.load("layer.py:Block").size == 1
    assert own_code.load(f"{folder}/layer.py:Block") is own_code.load("layer.py:Block")
    assert own_code.load("neighbour.py:Block") == 7
    assert own_code.load("jaxtrain.config.own_code:load") is own_code.load


@pytest.mark.parametrize("text", FAULTS)
def test_one_line_about_each_fault(folder, text):
    with pytest.raises(own_code.OwnCodeError) as error:
        own_code.load(text)
    assert str(error.value).startswith(FAULTS[text]) and "\n" not in str(error.value)


def test_a_changed_file_is_read_again(folder):
    before = own_code.load("layer.py:size"), own_code.digest("layer.py:size")
    (folder / "layer.py").write_text("size = 3\n")
    after = own_code.load("layer.py:size"), own_code.digest("layer.py:size")
    assert (before[0], after[0]) == (2, 3) and before[1] != after[1]


def test_a_recipes_neighbour(folder, monkeypatch, tmp_path_factory):
    (folder / "recipe.py").write_text(
        "from jaxtrain import Config, ModelConfig\n"
        "def get_config():\n"
        "    return Config(model=ModelConfig(block='layer.py:Block', kinds=('a.mixer=b.py:B',)))\n"
    )
    here = load_recipe(folder / "recipe.py").model
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    elsewhere = load_recipe(folder / "recipe.py").model
    assert here.block == "layer.py:Block"
    assert elsewhere.block == f"{folder}/layer.py:Block"
    assert here.kinds == elsewhere.kinds == ("a.mixer=b.py:B",)
