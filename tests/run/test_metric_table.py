"""The table of metrics: each has a rule, and docs/use.md lists them all.

That the rules are right is tested in tests/training/test_step_metrics.py, that a run writes nothing
else in tests/test_train.py.
"""

import itertools

import numpy as np
import pytest
from support import ROOT

from jaxtrain.run.metric_table import METRICS, Metric, host, largest, mean, mean_by_tokens, total

HEAD = ["| metric | unit | what it is | of independent replicas |", "|---|---|---|---|"]


def rows() -> list[str]:
    """The document's rows: one for neighbours of the table that say the same."""
    described = lambda name: words_of(METRICS[name])
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(words)} |"
        for words, names in itertools.groupby(METRICS, described)
    ]


def words_of(metric: Metric) -> tuple[str, str, str]:
    rule = "" if metric.combine is host else metric.combine.__name__.replace("_", " ")
    return metric.unit, metric.meaning, rule


def test_the_document_lists_the_table():
    section = (ROOT / "docs/use.md").read_text().split("\n## The metrics\n")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("|")]
    assert listed == [*HEAD, *rows()], "\n".join(["docs/use.md should have", *HEAD, *rows()])


def test_a_metric_without_a_rule_cannot_be_made():
    with pytest.raises(TypeError, match="combine"):
        Metric("", "a number that nobody combines")


def test_rules():
    values, tokens = np.float32([3.0, 1.0]), np.float32([10.0, 30.0])
    assert [rule(values, tokens) for rule in (mean, mean_by_tokens, total, largest)] == [
        2,
        1.5,
        4,
        3,
    ]
    assert mean_by_tokens(values, 0 * tokens) == 0
    with pytest.raises(TypeError, match="has one value"):
        host(values, tokens)


def test_texts():
    lines = {name: metric.line(1234.5) for name, metric in METRICS.items()}
    assert {name: line for name, line in lines.items() if line} == {
        "loss": "loss 1234.5000",
        "tokens_per_s": "1.23k tokens/s",
        "mfu": "MFU 123450.0 %",
        "validation_loss": "validation loss 1234.5000 nats a token",
    }
    assert all(metric.title for metric in METRICS.values() if metric.replayed)
