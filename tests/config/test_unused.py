"""Notes about settings that have no use."""

import pytest
from support import ROOT
from support.broken_settings import BASE, UNUSED

from jaxtrain import config as cfg
from jaxtrain.config import checks
from jaxtrain.config.mesh_rules import filled
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.unused import USES, unused_settings


@pytest.mark.parametrize("changes, note", UNUSED, ids=[str(changes) for changes, _ in UNUSED])
def test_a_setting_without_a_use_is_a_note(changes, note):
    config = cfg.replace(BASE, {"mesh.data": 2} | changes)
    checks.check(config)
    assert note in unused_settings(config)
    assert unused_settings(cfg.replace(BASE, {"mesh.data": 2})) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_a_recipe_as_it_is_shipped_has_no_notes(name):
    assert unused_settings(filled(load_recipe(find_recipe(name)), 2048)) == []


def test_every_setting_that_may_have_no_use_is_tried():
    paths = {path for use in USES for path in use.settings}
    assert paths <= cfg.fields().keys()
    tried = {path for changes, _ in UNUSED for path in changes}
    assert len(paths - tried) < len(paths) / 2
