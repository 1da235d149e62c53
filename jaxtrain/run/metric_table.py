"""METRICS: the numbers in the records of metrics.jsonl, each described once. No jax.

A step's program computes those that have a rule for independent replicas; all others are numbers of
the host. metrics.py writes and draws them, progress.py shows them, `--replay` compares them, and
docs/use.md lists them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtrain.run.wall_clock import Part

NATS, SECONDS = "nats per token", "s"


# Rules by which the values of independent replicas, numpy or jax arrays [replicas], become the
# step's. tokens: the weighted tokens of each replica.


def mean(values: Any, tokens: Any) -> Any:
    return values.mean()


def mean_by_tokens(values: Any, tokens: Any) -> Any:
    return (values * tokens).sum() / tokens.sum().clip(1)


def total(values: Any, tokens: Any) -> Any:
    return values.sum()


def largest(values: Any, tokens: Any) -> Any:
    return values.max()


def host(values: Any, tokens: Any) -> Any:
    raise TypeError("a number of the host has one value")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that a record may have.

    unit:     "" for a fraction, a count or a name
    meaning:  a phrase; it says when a metric is missing
    combine:  the rule by which the values of independent replicas become the step's. All devices of
        a replica have the same value
    title:    its name in texts
    line:     a function from its value to its text on the printed line, which shows those that are
        not empty
    matters_most: a narrow line shows it before all others
    group:    the group in TensorBoard of the records that have it
    curve:    the label of its curve in loss.png, which has those with a label
    replayed: whether `--replay` compares it
    """

    unit: str
    meaning: str
    combine: Callable[[Any, Any], Any]
    title: str = ""
    line: Callable[[float], str] = lambda value: ""
    matters_most: bool = False
    group: str = "train"
    curve: str = ""
    replayed: bool = False


def short(number: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


METRICS = {
    # of every record
    "step": Metric("", "the number of the step, from 1", host),
    "time": Metric(SECONDS, "Unix time at which the record was written", host),
    "wall_s": Metric(
        SECONDS,
        "what all starts of the run have lasted, compilation and lost steps included, without the "
        "time between starts",
        host,
    ),
    # of a logged step, computed by its program
    "loss": Metric(
        NATS,
        "mean over the batch's weighted tokens, before the update",
        mean_by_tokens,
        title="loss",
        line=lambda loss: f"loss {loss:.4f}",
        matters_most=True,
        curve="training",
        replayed=True,
    ),
    "grad_norm": Metric(
        "",
        "l2 norm of all gradients together, before clipping",
        mean,
        title="gradient norm",
        replayed=True,
    ),
    "param_norm": Metric(
        "",
        "l2 norm of all parameters together, after the update; independent replicas have one each, "
        "taken before they exchange",
        mean,
    ),
    "learning_rate": Metric("", "that of the update", mean),
    "weighted_tokens": Metric("tokens", "the batch's tokens that count in the loss", total),
    "mtp_loss": Metric(
        NATS,
        "mean loss of the tokens beyond the next; only with `model.mtp_depth`",
        mean_by_tokens,
    ),
    "expert_load": Metric(
        "",
        "the busiest expert's load over the mean, in the layer where that is largest; only with "
        "`model.experts`",
        largest,
    ),
    "dropped": Metric(
        "",
        "fraction of the choices of experts that were dropped; only where experts have a capacity",
        mean,
    ),
    "skipped": Metric(
        "",
        "updates skipped for numbers that are not finite, since the run began; only where "
        "`train.on_nonfinite` is not `stop`",
        total,
    ),
    # of a logged step, from the host
    "tokens": Metric("tokens", "those of all steps so far, with a weight or without", host),
    "batch": Metric("", "the number of the step's batch, from 0", host),
    "step_time_s": Metric(
        SECONDS,
        "mean over the steps since the last record of a step, without evaluations and saves",
        host,
    ),
    "tokens_per_s": Metric(
        "tokens/s",
        "mean over the same steps",
        host,
        line=lambda rate: f"{short(rate)} tokens/s",
    ),
    "mfu": Metric(
        "",
        "model FLOPs utilization over the same steps, 0 to 1; null if the device's peak is unknown",
        host,
        line=lambda mfu: f"MFU {100 * mfu:.1f} %",
    ),
    "goodput": Metric("", "fraction of `wall_s` spent on steps that count", host),
    "slowest_process": Metric("", "the process that the others wait for, if one is", host),
    "slowest_behind_s": Metric(SECONDS, "the time a step by which it is behind them", host),
    # of an evaluation
    "validation_loss": Metric(
        NATS,
        "mean loss over the held-out batches",
        host,
        title="validation loss",
        line=lambda loss: f"validation loss {loss:.4f} nats a token",
        group="validation",
        curve="validation",
    ),
    # of the first step of a start
    "start_up_s": Metric(SECONDS, "from the start of the command to its first finished step", host),
    **{f"{part.value}_s": Metric(SECONDS, "its parts", host) for part in Part},
    # of a save
    "save_s": Metric(SECONDS, "from the request to the complete checkpoint", host),
    "save_blocked_s": Metric(SECONDS, "the part of it in which training stood still", host),
    # of a rollback
    "rolled_back_from": Metric("", "the step that the run had reached", host),
    "next_batch": Metric("", "the number of the batch that it goes on with", host),
    "why": Metric("", "the reason, a line of text", host),
    "rollbacks": Metric("", "rollbacks so far", host),
}
