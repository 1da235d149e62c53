"""Every shipped recipe, shrunk, has the losses and gradient norms that it had before
(tests/golden/), by version of jax."""

import json

import jax
import pytest
from support import golden

from jaxtrain.config.recipes import shipped_recipes

# Shrunk, their models are those of deepseek_v3, mixtral_tiny, tiny and, of both, gpt2_124m.
TWINS = ("deepseek_tiny", "mixtral_8x7b", "tiny_diloco", "gpt3_175b", "gpt_1t")
# its model is the user's; test_init_from.py trains one
WITHOUT_A_MODEL = {"from_hf"}
# its parts have tests of their own: latent attention, experts, predictions, zb_v
LONG = ("deepseek_v3",)
FILE = golden.values_file(jax.__version__)


def as_parameter(recipe: str):
    """For a process of its own: a recipe shares nothing with another."""
    marks = [
        pytest.mark.xdist_group(f"golden-{recipe}"),
        *[pytest.mark.full] * (recipe in (*TWINS, *LONG)),
    ]
    return pytest.param(recipe, marks=marks)


def test_every_recipe_has_its_flags_and_values():
    assert set(golden.RECIPES) == {*shipped_recipes()} - WITHOUT_A_MODEL
    for file in golden.FOLDER.glob("jax-*.json"):
        assert set(json.loads(file.read_text())) == set(golden.RECIPES), file


@pytest.mark.skipif(
    not FILE.exists(), reason=f"no values for jax {jax.__version__}: python tests/golden/write.py"
)
@pytest.mark.parametrize("recipe", [as_parameter(name) for name in golden.RECIPES])
def test_losses_are_what_they_were(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    expected = json.loads(FILE.read_text())[recipe]
    assert len([name for name in expected if name.endswith(" grad_norm")]) == 4
    assert golden.run(recipe, tmp_path / "run") == pytest.approx(expected, rel=1e-5, abs=0)
