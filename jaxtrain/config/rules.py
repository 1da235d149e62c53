"""Rules between settings that do not depend on the mesh, and the types of which all rules are made.

mesh_rules.py has the rules of the mesh, checks.py those of a single setting.

A rule is a generator over a resolved config. It yields a `Violation` for each fault, with the fixes
to try, the best first. checks.py tries them, and reports the first fault only. Standard library
only.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, addresses, ends_with_layers, kernels, sources
from jaxtrain.schedule.orders import SCHEDULES, default_repeats, fits_repeats

BYTE_VOCABULARY = 257  # 256 bytes and the document separator
MOST_SMALLER = 16  # smaller numbers of stages or chunks that are tried

Changes = dict[str, Any]  # setting → value


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken rule: the setting at fault, the rule (read after "field=value"), the changes that
    may fix it, the best first, and how many values that work the message may list."""

    field: str
    rule: str
    fixes: Iterable[Changes] = ()
    show: int = 1


Rule = Callable[[Config], Iterator[Violation]]


def near(value: int, candidates: Iterable[int]) -> list[int]:
    """Candidates by their distance from a value; of two at the same distance, the smaller one
    first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


@functools.lru_cache(1024)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n ≥ 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def values_for(path: str, values: Iterable[Any]) -> list[Changes]:
    """Changes of one setting, to each of these values."""
    return [{path: value} for value in values]


# --- the model ------------------------------------------------------------------------------------


def head_size_is_whole(c: Config) -> Iterator[Violation]:
    """Takes a config that is not resolved, for `resolve` divides."""
    m = c.model
    if not m.head_dim and m.width % m.heads:
        floor = m.width // m.heads * m.heads
        wider = near(m.width, [n for n in (floor, floor + m.heads) if n])
        yield Violation(
            "model.heads",
            f"does not divide model.width={m.width}, and model.head_dim=0 means width/heads",
            [
                *values_for("model.heads", near(m.heads, divisors(m.width))),
                *values_for("model.width", wider),
            ],
            show=4,
        )


def _latent_attention(c: Config) -> Iterator[Violation]:
    m = c.model
    if m.attention != "mla":
        return
    if m.positions != "rotary":
        yield Violation(
            "model.attention",
            f"rotates a part of each head, and model.positions={m.positions!r} rotates nothing",
            [{"model.positions": "rotary"}, {"model.attention": "gqa"}],
        )
    if m.kv_heads != m.heads:
        yield Violation(
            "model.kv_heads",
            "is for model.attention='gqa': with mla each of "
            f"model.heads={m.heads} has its own keys and values",
            [{"model.kv_heads": 0}],
        )
    if not m.kv_rank:
        yield Violation(
            "model.kv_rank",
            "leaves model.attention='mla' without a latent",
            [{"model.kv_rank": 4 * m.head_dim}, {"model.attention": "gqa"}],
        )
    if not m.rope_head_dim or m.rope_head_dim % 2:
        size = m.rope_head_dim + 1 if m.rope_head_dim else -(-m.head_dim // 4) * 2
        yield Violation(
            "model.rope_head_dim",
            "is the part of a head that model.attention='mla' rotates, in pairs of numbers: it "
            "must be even and above 0",
            [{"model.rope_head_dim": size}],
        )


def _attention(c: Config) -> Iterator[Violation]:
    """Heads, and the kernel that was asked for by name. Whether the devices have that kernel is a
    rule of checks.py."""
    m, case = c.model, kernels.attention_case(c, kernels.TargetDevice())
    named = {
        kernels.SPLASH: [kernels.SPLASH],
        kernels.CUDNN: [kernels.CUDNN, kernels.CUDNN_MASK],
    }.get(m.attention_kernel, [])
    refusals = [kernels.refusal(kernel, case) for kernel in named]
    if refusals and all(refusals) and (last := refusals[-1]):
        yield Violation(
            "model.attention_kernel", last.rule, [{"model.attention_kernel": "auto"}, *last.fixes]
        )
    if m.heads % m.kv_heads:
        yield Violation(
            "model.kv_heads",
            f"does not divide model.heads={m.heads}",
            values_for("model.kv_heads", near(m.kv_heads, divisors(m.heads))),
            show=5,
        )
    if m.attention == "gqa" and m.positions == "rotary" and (m.head_dim % 2 or m.head_dim < 1):
        yield Violation(
            "model.head_dim",
            f"makes heads of {m.head_dim}, and rotary positions rotate pairs of numbers: it must "
            "be even",
            [{"model.head_dim": m.head_dim + 1}, {"model.positions": "learned"}],
        )


# Settings of experts alone. Without experts they have no use (unused.py), but for dense_layers,
# whose layers the model would lack.
OF_EXPERTS = (
    "dense_layers experts_per_token shared_experts expert_width router router_normalize "
    "router_scale router_bias router_groups "
    "router_group_limit router_group_best capacity_factor expert_room balance_rate "
    "balance_loss z_loss"
).split()


def _experts(c: Config) -> Iterator[Violation]:
    m = c.model
    if m.dense_layers and not m.experts:
        yield Violation(
            "model.dense_layers",
            "come before layers with experts, and model.experts=0",
            [{"model.dense_layers": 0}, {"model.experts": 8}],
        )
    if 0 < m.expert_room < 1:
        yield Violation(
            "model.expert_room",
            "is less than the mean number of tokens, so that some are always dropped: it must be "
            "at least 1, or 0 for the worst case",
            [{"model.expert_room": 1.0}],
        )
    if m.experts and m.biases:
        yield Violation(
            "model.biases",
            f"is not for model.experts={m.experts}: experts have no biases",
            [{"model.biases": False}],
        )


def _router(c: Config) -> Iterator[Violation]:
    """Groups divide the experts, and those that a token may use have as many experts as it uses."""
    m = c.model
    if not m.experts:
        return
    if m.experts % m.router_groups:
        yield Violation(
            "model.router_groups",
            f"does not divide model.experts={m.experts}",
            values_for("model.router_groups", near(m.router_groups, divisors(m.experts))),
            show=4,
        )
    groups = f"model.router_groups={m.router_groups}"
    if m.router_group_limit > m.router_groups:
        yield Violation(
            "model.router_group_limit",
            f"is more than {groups}",
            [{"model.router_group_limit": m.router_groups}],
        )
    size = m.experts // m.router_groups
    default: Any = cfg.fields()["model.router_group_best"].default
    if m.router_groups > 1 and m.router_group_best > max(size, default):
        yield Violation(
            "model.router_group_best",
            f"is more than the {size} in each of {groups}",
            [{"model.router_group_best": size}],
        )
    usable = size * m.router_group_limit
    if m.experts_per_token > usable:
        where = f"model.experts={m.experts}"
        if m.router_group_limit < m.router_groups:
            where = f"the {usable} in model.router_group_limit={m.router_group_limit} groups"
        yield Violation(
            "model.experts_per_token",
            f"is more than {where}",
            [{"model.experts_per_token": usable}],
        )


# --- sequences and data ---------------------------------------------------------------------------


def _sequence(c: Config) -> Iterator[Violation]:
    m, tokens = c.model, c.data.sequence_length
    if m.mtp_depth >= tokens:
        yield Violation(
            "model.mtp_depth",
            f"predicts tokens beyond data.sequence_length={tokens}",
            [{"model.mtp_depth": tokens - 1}],
        )
    if m.positions == "learned" and m.max_positions < tokens:
        yield Violation(
            "model.max_positions",
            f"is a shorter table than data.sequence_length={tokens}",
            [{"model.max_positions": tokens}],
        )
    if m.positions == "learned" and m.max_positions <= c.train.sample_tokens:
        learned = f"the learned positions, model.max_positions={m.max_positions}"
        yield Violation(
            "train.sample_tokens",
            f"and a prompt are longer than {learned}",
            [{"train.sample_tokens": m.max_positions - 1}],
        )


def _data(c: Config) -> Iterator[Violation]:
    mask, read = c.data.loss_mask, c.data.text_fields
    from_bytes = c.data.tokenizer == "bytes" and not sources.holds_tokens(c.data.source)
    if from_bytes and c.model.vocab_size < BYTE_VOCABULARY:
        yield Violation(
            "model.vocab_size",
            f"is too small for data.tokenizer='bytes', which has {BYTE_VOCABULARY} tokens",
            [{"model.vocab_size": BYTE_VOCABULARY}],
        )
    if not read:
        yield Violation(
            "data.text_fields", "names no field to read", [{"data.text_fields": ("text",)}]
        )
    if unread := tuple(name for name in mask if name not in read):
        yield Violation(
            "data.loss_mask",
            f"names {unread[0]!r}, which is not in data.text_fields={read!r}",
            [{"data.text_fields": unread + read}],
        )
    if set(mask) == set(read):
        yield Violation(
            "data.loss_mask",
            "names all of data.text_fields: no token would have a loss",
            [{"data.loss_mask": mask[:-1]}],
        )
    if c.train.eval_every and not c.data.validation_fraction > 0:
        yield Violation(
            "train.eval_every",
            "needs held-out data, and data.validation_fraction=0",
            [{"train.eval_every": 0}],
        )


# --- the pipeline ---------------------------------------------------------------------------------


def _pipeline(c: Config) -> Iterator[Violation]:
    p, at_an_end = c.pipeline, ends_with_layers(c.model)
    if at_an_end and p.vocabulary == "parallel":
        needs = f"{at_an_end}={cfg.get(c, at_an_end)} needs them on one stage"
        yield Violation(
            "pipeline.vocabulary",
            f"splits embedding and head over the stages, and {needs}",
            [{"pipeline.vocabulary": "auto"}],
        )
    if c.mesh.stage not in (1, -1) and not fits_repeats(p.schedule, p.repeats):
        schedule = SCHEDULES[p.schedule]
        fitting = [name for name in SCHEDULES if fits_repeats(name, p.repeats)]
        fixes = [{"pipeline.repeats": schedule.least_repeats}]
        yield Violation(
            "pipeline.repeats",
            f"does not fit pipeline.schedule={p.schedule!r}, which has {schedule.repeats_rule} on "
            "a stage",
            [*fixes, *values_for("pipeline.schedule", fitting)],
        )
    if p.memory and p.schedule != "auto":
        yield Violation(
            "pipeline.memory",
            f"is for pipeline.schedule='auto' alone, not {p.schedule!r}",
            [{"pipeline.memory": 0.0}, {"pipeline.schedule": "auto"}],
        )
    if p.times and len(p.times) not in (3, 4, 5, 6):
        fixed = (*p.times, 1.0, 1.0, 1.0)[:3] if len(p.times) < 3 else p.times[:6]
        yield Violation(
            "pipeline.times",
            "must have a time for F, B and W each, and may have one for message, R and head",
            values_for("pipeline.times", [fixed, ()]),
        )
    if p.times and not all(p.times[:3]):
        yield Violation("pipeline.times", "has no time for F, B or W", [{"pipeline.times": ()}])


def _layers_fill_chunks(c: Config) -> Iterator[Violation]:
    p, layers = c.pipeline, c.model.layers
    if p.layer_costs and len(p.layer_costs) != layers:
        yield Violation(
            "pipeline.layer_costs",
            f"must have a number for each of model.layers={layers}",
            [{"pipeline.layer_costs": ()}],
        )
    if not p.chunk_layers:
        return
    path, numbers = "pipeline.chunk_layers", len(p.chunk_layers)
    evenly: Changes = {path: ()}
    if p.layer_costs:
        yield Violation(
            path, "and pipeline.layer_costs both cut the layers", [{"pipeline.layer_costs": ()}]
        )
    if sum(p.chunk_layers) != layers:
        *others, _ = p.chunk_layers
        last = layers - sum(others)
        fitted = values_for(path, [(*others, last)] if last > 0 else [])
        yield Violation(path, f"does not sum to model.layers={layers}", [*fitted, evenly])
    chunks = c.mesh.stage * p.repeats
    if p.repeats and c.mesh.stage > 1 and numbers != chunks:
        sizes = f"mesh.stage={c.mesh.stage} · pipeline.repeats={p.repeats} = {chunks}"
        yield Violation(path, f"must have {sizes} numbers", [evenly])
    if p.schedule == "auto" and numbers % c.mesh.stage:
        yield Violation(
            path, f"has {numbers} numbers, no multiple of mesh.stage={c.mesh.stage}", [evenly]
        )


def _chunks_have_layers(c: Config) -> Iterator[Violation]:
    stages, repeats, layers = c.mesh.stage, max(c.pipeline.repeats, 1), c.model.layers
    if stages * repeats <= layers or stages == 1:
        return
    smaller = {"mesh.stage": layers // repeats, "pipeline.repeats": layers // max(stages, 1)}
    if stages * max(default_repeats(c.pipeline.schedule), 1) <= layers:
        smaller = dict(reversed(smaller.items()))
    fixes = [
        {path: size}
        for path, most in smaller.items()
        for size in range(most, max(most - MOST_SMALLER, 0), -1)
    ]
    yield Violation(
        next(iter(smaller)),
        f"makes more chunks (mesh.stage={stages} · pipeline.repeats={repeats}) than "
        f"model.layers={layers}",
        [*fixes, {"model.layers": stages * repeats}],
    )


# --- the run --------------------------------------------------------------------------------------


def _run(c: Config) -> Iterator[Violation]:
    o, t = c.optimizer, c.train
    # A warm-up may outlast a short run, such as a trial of another's recipe; a decay may not begin
    # before it.
    if o.decay_steps and o.schedule == "constant" and o.warmup_steps + o.decay_steps > t.steps:
        yield Violation(
            "optimizer.decay_steps",
            f"and optimizer.warmup_steps={o.warmup_steps} are more than train.steps={t.steps}",
            [{"optimizer.decay_steps": max(t.steps - o.warmup_steps, 0)}],
        )
    if t.profile_steps and t.profile_steps + 2 > t.steps:
        yield Violation(
            "train.profile_steps",
            f"from the third step on are more than train.steps={t.steps}",
            [{"train.profile_steps": max(t.steps - 2, 0)}],
        )
    if t.spike_threshold and t.on_nonfinite != "rollback":
        yield Violation(
            "train.spike_threshold",
            f"is for train.on_nonfinite='rollback' alone, not {t.on_nonfinite!r}",
            [{"train.on_nonfinite": "rollback"}, {"train.spike_threshold": 0.0}],
        )


def _compiler_options(c: Config) -> Iterator[Violation]:
    """Each option is NAME=VALUE, with a name that begins as all of XLA's do, and none stands
    twice."""
    path, options = "parallel.compiler_options", c.parallel.compiler_options
    right = tuple(dict.fromkeys(o for o in options if re.fullmatch(r"xla_\w+=\S+", o)))
    if wrong := [option for option in options if option not in right]:
        yield Violation(
            path,
            f"has {wrong[0]!r}, which is not an XLA option such as "
            "xla_gpu_enable_latency_hiding_scheduler=true",
            [{path: right}],
        )
    last = {option.partition("=")[0]: option for option in options}
    if len(last) < len(options):
        yield Violation(path, "names an option twice", [{path: tuple(last.values())}])


def _places(c: Config) -> Iterator[Violation]:
    directory, local = c.checkpoint.directory, c.checkpoint.local
    every = c.checkpoint.local_every
    if wrong := addresses.fault(directory) or addresses.not_utf8(directory):
        yield Violation(
            "checkpoint.directory",
            wrong.rule,
            values_for("checkpoint.directory", wrong.meant or [""]),
            show=2,
        )
    if addresses.is_address(c.data.cache) or addresses.fault(c.data.cache):
        yield Violation("data.cache", "is an address, not a folder", [{"data.cache": ""}])
    if local and not every:
        yield Violation(
            "checkpoint.local_every",
            f"leaves checkpoint.local={local!r} without a step at which to save",
            [{"checkpoint.local_every": 10}],
        )
    if every and not local:
        yield Violation(
            "checkpoint.local_every",
            "needs a folder, and checkpoint.local is empty",
            [{"checkpoint.local": "/dev/shm/jaxtrain"}, {"checkpoint.local_every": 0}],
        )
    if local and not local.startswith("/"):
        folder = f"/dev/shm/{local.partition('://')[2] or local}"
        yield Violation(
            "checkpoint.local",
            "is not an absolute path, which every machine needs",
            [{"checkpoint.local": folder}],
        )


RULES: tuple[Rule, ...] = (
    _latent_attention,
    _attention,
    _experts,
    _router,
    _sequence,
    _data,
    _compiler_options,
    _pipeline,
    _layers_fill_chunks,
    _chunks_have_layers,
    _run,
    _places,
)
