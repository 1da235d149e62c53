"""Rules of the items of data.sources and data.validation: one line that names the item, and
settings that work."""

import pytest
from support.broken_settings import offer

from jaxtrain.config import Config, replace
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.checks import Environment
from jaxtrain.pipeline.run_checks import RULES

WEB = "web=stdlib"


def error_of(changes):
    config = replace(Config(), {"mesh.data": 1} | changes)
    return config, checks.error_of(config, Environment(1, "cpu", rules=RULES))


@pytest.mark.parametrize("path", ["data.sources", "data.validation"])
@pytest.mark.parametrize(
    "items, rule",
    [
        (("web",), "has 'web', which is not NAME=PATH or NAME.SETTING=VALUE"),
        (("a b=x",), "has 'a b=x', which is not NAME=PATH or NAME.SETTING=VALUE"),
        (("web=",), "has 'web=', which is not NAME=PATH or NAME.SETTING=VALUE"),
        ((WEB, "web.text_field=a"), "has 'web.text_field=a', whose setting is none of "),
        ((WEB, "b.packing=stream"), "has no path of b, b=PATH"),
        ((WEB, WEB), "has an empty or repeated name"),
        ((WEB, f"web={__file__}"), "names a setting twice"),
        ((WEB, "web.packing=fit"), "has 'web.packing=fit', and data.packing='fit' is unknown"),
        ((WEB, "web.validation_fraction=2"), "data.validation_fraction=2.0 must be at least 0"),
        ((WEB, "web.loss_mask=text"), "makes data.loss_mask=('text',), which names all of"),
        (("web=no.txt",), "makes data.source='no.txt', which is neither 'stdlib' nor an"),
        ((WEB, "web.tokenizer=a"), "makes data.tokenizer='a', which is neither 'bytes' nor"),
    ],
)
def test_an_item_that_breaks_a_rule_is_named(path, items, rule):
    config, error = error_of({path: items})
    text = f"{error}"
    assert text.startswith(f"{path}=") and rule in text and "\n" not in text
    if path == "data.sources" and ("no.txt" in rule or "tokenizer='a'" in rule):
        assert not error.nearest  # only the user knows another corpus to train on
        return
    works = replace(config, offer(error))
    assert checks.error_of(works, Environment(1, "cpu", rules=RULES)) is None


def test_what_an_item_may_mean_is_offered():
    _, error = error_of({"data.validation": (WEB, "web.text_field=a+b")})
    assert offer(error) == {"data.validation": (WEB, "web.text_fields=a+b")}


@pytest.mark.parametrize(
    "item, rule",
    [
        ("web.weight=-1", "has 'web.weight=-1', which needs a number from 0 on"),
        ("web.weight=nan", "has 'web.weight=nan', which needs a number from 0 on"),
        ("web.epochs=many", "has 'web.epochs=many', which needs a number from 0 on"),
        ("web.exhausted=go", "has 'web.exhausted=go', which needs one of stop, leave, repeat"),
        ("web.weight=0", "has no source with a weight above 0"),
    ],
)
def test_settings_of_the_mixture(item, rule):
    assert rule in f"{error_of({'data.sources': (WEB, item)})[1]}"
    assert error_of({"data.sources": (WEB, "web.weight=0.5", "web.epochs=2")})[1] is None
    text = f"{error_of({'data.validation': (WEB, item)})[1]}"
    assert f"has '{item}', whose setting is none of tokenizer" in text


@pytest.mark.parametrize("weight", ["many", "nan", "0"])
def test_weights_are_checked_before_those_of_phases(weight):
    settings = {"data.sources": (WEB, f"web.weight={weight}"), "train.phases": ("a.step=9",)}
    assert error_of(settings)[1].field == "data.sources"


def test_a_set_may_not_have_the_name_of_a_source():
    both = {"data.validation": (WEB, "books=stdlib"), "data.sources": (WEB,)}
    _, error = error_of(both)
    assert "has web, the name of a source, and of the part that it holds out" in f"{error}"
    assert offer(error) == {"data.validation": ("books=stdlib",)}


def test_a_set_is_enough_to_evaluate_on():
    without = {"train.eval_every": 5, "data.validation_fraction": 0.0}
    assert error_of(without | {"data.validation": (WEB,)})[1] is None
    held_out = ("a=stdlib", "a.validation_fraction=0.1")
    assert error_of(without | {"data.sources": held_out})[1] is None
    assert "needs held-out data" in f"{error_of(without)[1]}"
