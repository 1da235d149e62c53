"""Sources of a mixture: items, flags and dicts."""

from jaxtrain.config import Config, DataConfig, replace
from jaxtrain.config.flags import apply
from jaxtrain.config.groups.mixture_settings import MixtureSource, mixture_of, validation_sets


def test_without_sources_there_is_one():
    data = DataConfig(source="a.txt")
    assert mixture_of(data) == (MixtureSource("", data),) and validation_sets(data) == ()


def test_a_source_has_the_settings_of_data_with_some_changed():
    data = DataConfig(
        sources={
            "web": {"path": "web/*.jsonl", "weight": 3},
            "code": {"path": "c.jsonl", "text_fields": ("title", "body"), "epochs": 1.5},
        },
        loss_mask=("title",),
    )
    web, code = mixture_of(data)
    assert (web.data.source, web.weight, web.epochs, web.exhausted) == ("web/*.jsonl", 3, 0, "stop")
    assert web.data.text_fields == ("text",) and web.data.sources == ()
    assert code.data.text_fields == ("title", "body") and code.data.loss_mask == ("title",)
    assert (code.weight, code.epochs) == (1.0, 1.5)


def test_flags_change_items():
    config = replace(Config(), {"data.sources": ("web=a.txt", "code=b.txt")})
    flags = [("data.sources.code.weight", "0.25"), ("data.sources.web", "other.txt")]
    changed = apply(config, flags).data
    assert changed.sources == ("web=other.txt", "code=b.txt", "code.weight=0.25")
    assert [s.weight for s in mixture_of(changed)] == [1.0, 0.25]
