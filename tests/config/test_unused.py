"""Notes about settings that have no use."""

import random

import pytest
from support import ROOT, effects
from support.broken_settings import BASE, UNUSED

from jaxtrain import config as cfg
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.mesh_rules import filled
from jaxtrain.config.rules.unused import unused_settings
from jaxtrain.config.rules.uses import USES


@pytest.mark.parametrize("changes, note", UNUSED, ids=[str(changes) for changes, _ in UNUSED])
def test_a_setting_without_a_use_is_a_note(changes, note):
    config = cfg.replace(BASE, {"mesh.data": 2} | changes)
    checks.check(config)
    assert note in unused_settings(config)
    assert unused_settings(cfg.replace(BASE, {"mesh.data": 2})) == []


def test_a_kind_without_a_setting_of_the_model_has_no_note():
    kinds = {
        "model.pattern": ("window", "far"),
        "model.window": 8,
        "model.kinds": ("far.window=0",),
    }
    config = cfg.replace(BASE, {"mesh.data": 2} | kinds)
    checks.check(config)
    assert unused_settings(config) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_a_recipe_as_it_is_shipped_has_no_notes(name):
    assert unused_settings(filled(load_recipe(find_recipe(name)), 2048)) == []


def test_every_setting_that_may_have_no_use_is_tried():
    paths = {path for use in USES for path in use.settings}
    assert paths <= cfg.fields().keys()
    tried = {path for changes, _ in UNUSED for path in changes}
    assert len(paths - tried) < len(paths) / 2


# settings whose effect is looked at, over the bases of support/effects.py
SEEN = [path for path in cfg.fields() if path not in " ".join(effects.UNSEEN.values()).split()]
HOST = [path for path in SEEN if path.startswith(effects.BESIDE_THE_PROGRAM)]
DRAWN = [
    *((number, path) for number in range(3) for path in HOST),
    *(
        (number, path)
        for number in (0, 3, 4)
        for path in random.Random(number).sample(sorted({*SEEN} - {*HOST}), 3)
    ),
]
ALL = [(number, path) for number in range(len(effects.BASES)) for path in SEEN]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return effects.write_corpora(folder), str(folder / "cache")


@pytest.mark.parametrize(
    "base, path",
    [
        *DRAWN,
        *(pytest.param(*each, marks=pytest.mark.full) for each in ALL if each not in DRAWN),
    ],
)
def test_a_setting_changes_what_a_run_does_or_has_a_note(corpora, base, path):
    """A setting is without effect if all its values leave the program and all else that a run does
    as it is."""
    sources, cache = corpora
    # packing is about several documents: the first source alone has them
    every = path.startswith("data.") and path != "data.packing"
    for source in sources if every else sources[:1]:
        settings = effects.SMALL | {"data.cache": cache, "data.source": source}
        settings |= effects.BASES[base]
        if not source.endswith(".jsonl"):
            settings |= {"data.loss_mask": (), "data.text_fields": ("text",)}
        if source.endswith(".bin"):
            settings |= {"data.token_dtype": "uint32"}
        now, default = effects.values_of(path, settings)
        before = effects.effects(effects.config_of(settings))
        same = [now]
        for value in effects.others_of(path, settings):
            if effects.effects(effects.config_of(settings | {path: value})) != before:
                break
            same.append(value)
        else:
            for value in same[len(same) == 1 :]:  # a setting with one value has no other effect
                notes = unused_settings(effects.config_of(settings | {path: value}), "cpu")
                assert value == default or any(path in note for note in notes), (source, value)
