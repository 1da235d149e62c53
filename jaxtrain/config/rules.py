"""Rules between settings that no mesh decides, and what every rule is made of; those of the mesh
are in mesh_rules.py.

A rule takes a resolved config and says what is broken, if anything. Standard library only.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, addresses, ends_with_layers, kernels
from jaxtrain.schedule.orders import SCHEDULES, default_repeats, fits_repeats

BYTE_VOCABULARY = 257  # 256 bytes and the document separator


@dataclasses.dataclass(frozen=True)
class Broken:
    """A broken rule: the setting at fault, the rule (read after "field=value"), and changes that
    may mend it, nearest first."""

    field: str
    rule: str
    fixes: Iterable[dict[str, Any]] = ()
    show: int = 1  # how many settings that work the message may list


Rule = Callable[[Config], Broken | None]
# before defaults are filled in; with the number of devices, if known
EarlyRule = Callable[[Config, int | None], Broken | None]


def near(value: int, candidates: Iterable[int]) -> list[int]:
    """Candidates by their distance from a value; of two as near, the smaller first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


@functools.lru_cache(1024)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n ≥ 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def values_for(path: str, values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Changes of one setting."""
    return ({path: v} for v in values)


# --- the rules ---


def _kv_heads_divide_heads(c: Config) -> Broken | None:
    m = c.model
    if m.heads % m.kv_heads == 0:
        return None
    fixes = values_for("model.kv_heads", near(m.kv_heads, divisors(m.heads)))
    return Broken("model.kv_heads", f"does not divide model.heads={m.heads}", fixes, show=5)


def _latent_attention_is_whole(c: Config) -> Broken | None:
    """The settings of latent attention have a meaning together."""
    m = c.model
    if m.attention != "mla":
        return None
    if m.positions != "rotary":
        rule = f"turns a part of its heads, and model.positions={m.positions!r} turn nothing"
        return Broken(
            "model.attention", rule, [{"model.positions": "rotary"}, {"model.attention": "gqa"}]
        )
    if m.kv_heads != m.heads:
        rule = (
            "is for model.attention='gqa': latents make keys and values for each of "
            f"model.heads={m.heads}"
        )
        return Broken("model.kv_heads", rule, values_for("model.kv_heads", [0]))
    if not m.kv_rank:
        fixes: list[dict[str, Any]] = [
            {"model.kv_rank": 4 * m.head_dim},
            {"model.attention": "gqa"},
        ]
        return Broken("model.kv_rank", "leaves model.attention='mla' no latent", fixes)
    if not m.rope_head_dim or m.rope_head_dim % 2:
        rule = (
            "is the rotated part of model.attention='mla', and rotary positions turn pairs: it "
            "must be even, and not 0"
        )
        sizes = [m.rope_head_dim + 1] if m.rope_head_dim else [-(-m.head_dim // 4) * 2]
        return Broken("model.rope_head_dim", rule, values_for("model.rope_head_dim", sizes))
    return None


def _kernel_fits(c: Config) -> Broken | None:
    """An attention kernel that was asked for by name takes the model; whether it is for the
    devices, surroundings.py says."""
    wanted, case = c.model.attention_kernel, kernels.attention_case(c, kernels.Hardware())
    rows = {
        kernels.SPLASH: [kernels.SPLASH],
        kernels.CUDNN: [kernels.CUDNN, kernels.CUDNN_MASK],
    }.get(wanted, [])
    refusals = [found for row in rows if (found := kernels.refusal(row, case))]
    if len(refusals) < len(rows) or not rows:
        return None
    return Broken(
        "model.attention_kernel",
        refusals[-1].rule,
        [{"model.attention_kernel": "auto"}, *refusals[-1].fixes],
    )


# Of experts alone. Without them these have no use (unused.py), but for dense_layers, which would be
# missing in the model.
OF_EXPERTS = (
    "dense_layers experts_per_token shared_experts expert_width router router_normalize "
    "router_scale router_bias router_groups "
    "router_group_limit router_group_best capacity_factor expert_room balance_rate "
    "balance_loss z_loss"
).split()


def _experts_go_with_the_others(c: Config) -> Broken | None:
    m = c.model
    if m.experts and m.biases:
        return Broken(
            "model.biases",
            f"are not in model.experts={m.experts}",
            values_for("model.biases", [False]),
        )
    if m.dense_layers and not m.experts:
        fixes: list[dict[str, Any]] = [{"model.dense_layers": 0}, {"model.experts": 8}]
        return Broken(
            "model.dense_layers", "come before layers with experts, and model.experts=0", fixes
        )
    return None


def _room_holds_the_mean(c: Config) -> Broken | None:
    room = c.model.expert_room
    if room == 0 or room >= 1:
        return None
    rule = (
        "is less than the mean number of rows, so that some are always dropped: it must be at "
        "least 1, or 0 for all rows there can be"
    )
    return Broken("model.expert_room", rule, values_for("model.expert_room", [1.0]))


def _tokens_find_experts(c: Config) -> Broken | None:
    """Groups divide the experts, and those that a token may use hold as many as it takes."""
    m = c.model
    if not m.experts:
        return None
    if m.experts % m.router_groups:
        fixes = values_for("model.router_groups", near(m.router_groups, divisors(m.experts)))
        return Broken(
            "model.router_groups", f"does not divide model.experts={m.experts}", fixes, show=4
        )
    if m.router_group_limit > m.router_groups:
        rule = f"is more than model.router_groups={m.router_groups}"
        return Broken(
            "model.router_group_limit",
            rule,
            values_for("model.router_group_limit", [m.router_groups]),
        )
    size = m.experts // m.router_groups
    default = int(cfg.fields()["model.router_group_best"].default)  # type: ignore[arg-type]
    if m.router_groups > 1 and m.router_group_best > max(size, default):
        rule = f"is more than the {size} in each of model.router_groups={m.router_groups}"
        return Broken(
            "model.router_group_best", rule, values_for("model.router_group_best", [size])
        )
    within = size * m.router_group_limit
    if m.experts_per_token > within:
        grouped = m.router_group_limit < m.router_groups
        where = (
            f"the {within} in model.router_group_limit={m.router_group_limit} groups"
            if grouped
            else f"model.experts={m.experts}"
        )
        return Broken(
            "model.experts_per_token",
            f"is more than {where}",
            values_for("model.experts_per_token", [within]),
        )
    return None


def _predictions_have_a_place(c: Config) -> Broken | None:
    """Of tokens beyond the next: within the sequence."""
    m = c.model
    if m.mtp_depth >= c.data.sequence_length:
        rule = f"looks beyond data.sequence_length={c.data.sequence_length}"
        return Broken(
            "model.mtp_depth", rule, values_for("model.mtp_depth", [c.data.sequence_length - 1])
        )
    return None


def _ends_with_layers_are_stages(c: Config) -> Broken | None:
    """Layers beside the embedding and the head are the work of one stage."""
    path = ends_with_layers(c.model)
    if not path or c.pipeline.vocabulary != "parallel":
        return None
    rule = f"shares embedding and head, and {path}={cfg.get(c, path)} needs them on one stage"
    return Broken("pipeline.vocabulary", rule, values_for("pipeline.vocabulary", ["auto"]))


def _rotary_turns_pairs(c: Config) -> Broken | None:
    m = c.model
    if m.attention != "gqa" or m.positions != "rotary" or (m.head_dim % 2 == 0 and m.head_dim > 0):
        return None
    fixes = itertools.chain(
        values_for("model.head_dim", [m.head_dim + 1]), values_for("model.positions", ["learned"])
    )
    return Broken(
        "model.head_dim",
        f"gives heads of {m.head_dim}, and rotary positions turn pairs: it must be even",
        fixes,
    )


def _positions_cover_sequence(c: Config) -> Broken | None:
    if c.model.positions != "learned" or c.model.max_positions >= c.data.sequence_length:
        return None
    rule = f"is a shorter table than data.sequence_length={c.data.sequence_length}"
    return Broken(
        "model.max_positions", rule, values_for("model.max_positions", [c.data.sequence_length])
    )


def _sample_fits_positions(c: Config) -> Broken | None:
    if c.model.positions != "learned" or c.train.sample_tokens < c.model.max_positions:
        return None
    rule = (
        "and a prompt are longer than the learned positions, "
        f"model.max_positions={c.model.max_positions}"
    )
    return Broken(
        "train.sample_tokens", rule, values_for("train.sample_tokens", [c.model.max_positions - 1])
    )


def _bytes_fit_vocabulary(c: Config) -> Broken | None:
    ready = c.data.source.endswith((".bin", ".npy"))
    if ready or c.data.tokenizer != "bytes" or c.model.vocab_size >= BYTE_VOCABULARY:
        return None
    rule = f"is too small for data.tokenizer='bytes', which has {BYTE_VOCABULARY} tokens"
    return Broken("model.vocab_size", rule, values_for("model.vocab_size", [BYTE_VOCABULARY]))


def _compiler_options_are_named(c: Config) -> Broken | None:
    """Each is NAME=VALUE, of a name that begins as all of XLA's do, and none stands twice."""
    options = c.parallel.compiler_options
    right = tuple(dict.fromkeys(o for o in options if re.fullmatch(r"xla_\w+=\S+", o)))
    wrong = [o for o in options if o not in right]
    if wrong:
        rule = (
            f"has {wrong[0]!r}, which is no option of XLA's such as "
            "xla_gpu_enable_latency_hiding_scheduler=true"
        )
        return Broken(
            "parallel.compiler_options", rule, values_for("parallel.compiler_options", [right])
        )
    names = [o.partition("=")[0] for o in options]
    if len(set(names)) < len(names):
        last = tuple({o.partition("=")[0]: o for o in options}.values())
        return Broken(
            "parallel.compiler_options",
            "names an option twice",
            values_for("parallel.compiler_options", [last]),
        )
    return None


def _masked_fields_are_read(c: Config) -> Broken | None:
    mask, read = c.data.loss_mask, c.data.text_fields
    if not read:
        return Broken(
            "data.text_fields",
            "names no field to read",
            values_for("data.text_fields", [("text",)]),
        )
    unread = tuple(name for name in mask if name not in read)
    if unread:
        fixes = [{"data.text_fields": unread + read}]
        return Broken(
            "data.loss_mask",
            f"names {unread[0]!r}, which is not in data.text_fields={read!r}",
            fixes,
        )
    if set(mask) == set(read):
        return Broken(
            "data.loss_mask",
            "names all of data.text_fields: no token would have a loss",
            values_for("data.loss_mask", [mask[:-1]]),
        )
    return None


def _schedule_has_its_repeats(c: Config) -> Broken | None:
    p = c.pipeline
    if c.mesh.stage in (1, -1) or fits_repeats(p.schedule, p.repeats):
        return None
    number = SCHEDULES[p.schedule].repeats_rule
    fixes: list[dict[str, Any]] = [{"pipeline.repeats": SCHEDULES[p.schedule].least_repeats}]
    fixes += values_for(
        "pipeline.schedule", (name for name in SCHEDULES if fits_repeats(name, p.repeats))
    )
    return Broken(
        "pipeline.repeats",
        f"does not fit pipeline.schedule={p.schedule!r}, which has {number} on a stage",
        fixes,
    )


def _table_settings_have_a_use(c: Config) -> Broken | None:
    p = c.pipeline
    if p.memory and p.schedule != "auto":
        fixes: list[dict[str, Any]] = [{"pipeline.memory": 0.0}, {"pipeline.schedule": "auto"}]
        return Broken(
            "pipeline.memory", f"is for pipeline.schedule='auto' alone, not {p.schedule!r}", fixes
        )
    if p.times and len(p.times) not in (3, 4, 5, 6):
        fixed = (*p.times, 1.0, 1.0, 1.0)[:3] if len(p.times) < 3 else p.times[:6]
        return Broken(
            "pipeline.times",
            "has to be the times of F, B, W, then message, R, head",
            values_for("pipeline.times", [fixed, ()]),
        )
    if p.times and not all(p.times[:3]):
        return Broken(
            "pipeline.times", "has no time for F, B or W", values_for("pipeline.times", [()])
        )
    return None


def _layers_fill_chunks(c: Config) -> Broken | None:
    p, layers = c.pipeline, c.model.layers
    if p.layer_costs and len(p.layer_costs) != layers:
        return Broken(
            "pipeline.layer_costs",
            f"has to have a number for each of model.layers={layers}",
            values_for("pipeline.layer_costs", [()]),
        )
    if not p.chunk_layers:
        return None
    if p.layer_costs:
        return Broken(
            "pipeline.chunk_layers",
            "and pipeline.layer_costs both cut the layers",
            [{"pipeline.layer_costs": ()}],
        )
    if sum(p.chunk_layers) != layers:
        last = layers - sum(p.chunk_layers[:-1])
        sizes = [(*p.chunk_layers[:-1], last)] if last > 0 else []
        return Broken(
            "pipeline.chunk_layers",
            f"is not model.layers={layers} in all",
            values_for("pipeline.chunk_layers", [*sizes, ()]),
        )
    chunks = c.mesh.stage * p.repeats
    if p.repeats and c.mesh.stage > 1 and len(p.chunk_layers) != chunks:
        rule = (
            f"has to have mesh.stage={c.mesh.stage} · pipeline.repeats={p.repeats} = {chunks} "
            "numbers"
        )
        return Broken("pipeline.chunk_layers", rule, values_for("pipeline.chunk_layers", [()]))
    if p.schedule == "auto" and len(p.chunk_layers) % c.mesh.stage:
        rule = f"has {len(p.chunk_layers)} numbers, no multiple of mesh.stage={c.mesh.stage}"
        return Broken("pipeline.chunk_layers", rule, values_for("pipeline.chunk_layers", [()]))
    return None


def _chunks_have_layers(c: Config) -> Broken | None:
    stages, repeats, layers = c.mesh.stage, max(c.pipeline.repeats, 1), c.model.layers
    if stages * repeats <= layers or stages == 1:
        return None
    rule = (
        f"makes more chunks (mesh.stage={stages} · pipeline.repeats={repeats}) than "
        f"model.layers={layers}"
    )
    least = max(default_repeats(c.pipeline.schedule), 1)
    blame, other = (
        ("mesh.stage", "pipeline.repeats")
        if stages * least > layers
        else ("pipeline.repeats", "mesh.stage")
    )
    small = {"mesh.stage": layers // repeats, "pipeline.repeats": layers // max(stages, 1)}
    fixes = [
        values_for(path, range(small[path], max(small[path] - 16, 0), -1))
        for path in (blame, other)
    ]
    return Broken(
        blame, rule, itertools.chain(*fixes, values_for("model.layers", [stages * repeats]))
    )


def _schedule_fits_steps(c: Config) -> Broken | None:
    o, steps = c.optimizer, c.train.steps
    # A warm-up may outlast a short run, such as a trial of another's recipe; a decay may not begin
    # before it.
    if o.decay_steps and o.schedule == "constant" and o.warmup_steps + o.decay_steps > steps:
        rule = f"and optimizer.warmup_steps={o.warmup_steps} are more than train.steps={steps}"
        return Broken(
            "optimizer.decay_steps",
            rule,
            values_for("optimizer.decay_steps", [max(steps - o.warmup_steps, 0)]),
        )
    return None


def _profile_fits_steps(c: Config) -> Broken | None:
    n, steps = c.train.profile_steps, c.train.steps
    if n == 0 or n + 2 <= steps:
        return None
    rule = f"from the third step on are more than train.steps={steps}"
    return Broken(
        "train.profile_steps", rule, values_for("train.profile_steps", [max(steps - 2, 0)])
    )


def _evaluation_has_data(c: Config) -> Broken | None:
    if c.train.eval_every == 0 or c.data.validation_fraction > 0:
        return None
    return Broken(
        "train.eval_every",
        "needs held-out data, and data.validation_fraction=0",
        values_for("train.eval_every", [0]),
    )


def _spikes_take_a_run_back(c: Config) -> Broken | None:
    t = c.train
    if t.spike_threshold == 0 or t.on_nonfinite == "rollback":
        return None
    fixes: list[dict[str, Any]] = [
        {"train.on_nonfinite": "rollback"},
        {"train.spike_threshold": 0.0},
    ]
    return Broken(
        "train.spike_threshold",
        f"is for train.on_nonfinite='rollback' alone, not {t.on_nonfinite!r}",
        fixes,
    )


def _directory_is_a_folder_or_a_store(c: Config) -> Broken | None:
    if wrong := addresses.fault(c.checkpoint.directory) or addresses.not_utf8(
        c.checkpoint.directory
    ):
        return Broken(
            "checkpoint.directory",
            wrong.rule,
            values_for("checkpoint.directory", wrong.meant or [""]),
            show=2,
        )
    return None


def _cache_is_a_folder(c: Config) -> Broken | None:
    cache = c.data.cache
    if not (addresses.is_address(cache) or addresses.fault(cache)):
        return None
    return Broken("data.cache", "is an address, not a folder", values_for("data.cache", [""]))


def _local_checkpoints_have_folder_and_steps(c: Config) -> Broken | None:
    local, every = c.checkpoint.local, c.checkpoint.local_every
    if bool(local) != (every > 0):
        if local:
            rule = f"leaves checkpoint.local={local!r} without a step at which to save"
            return Broken(
                "checkpoint.local_every", rule, values_for("checkpoint.local_every", [10])
            )
        rule = "needs a folder, and checkpoint.local is empty"
        return Broken(
            "checkpoint.local_every",
            rule,
            [{"checkpoint.local": "/dev/shm/jaxtrain"}, {"checkpoint.local_every": 0}],
        )
    if local and not local.startswith("/"):
        rule = "is no absolute path, which it must be on every machine"
        return Broken(
            "checkpoint.local",
            rule,
            values_for("checkpoint.local", [f"/dev/shm/{local.partition('://')[2] or local}"]),
        )
    return None


def _head_size_is_whole(c: Config, devices: int | None) -> Broken | None:
    m = c.model
    if m.head_dim or m.width % m.heads == 0:
        return None
    whole = m.width // m.heads * m.heads
    wider = values_for("model.width", near(m.width, [n for n in (whole, whole + m.heads) if n]))
    fixes = itertools.chain(values_for("model.heads", near(m.heads, divisors(m.width))), wider)
    return Broken(
        "model.heads",
        f"does not divide model.width={m.width}, and model.head_dim=0 means width/heads",
        fixes,
        show=4,
    )


EARLY_RULES: tuple[EarlyRule, ...] = (_head_size_is_whole,)
RULES: tuple[Rule, ...] = (
    _latent_attention_is_whole,
    _kernel_fits,
    _predictions_have_a_place,
    _ends_with_layers_are_stages,
    _kv_heads_divide_heads,
    _experts_go_with_the_others,
    _tokens_find_experts,
    _room_holds_the_mean,
    _rotary_turns_pairs,
    _positions_cover_sequence,
    _sample_fits_positions,
    _bytes_fit_vocabulary,
    _masked_fields_are_read,
    _compiler_options_are_named,
    _schedule_has_its_repeats,
    _table_settings_have_a_use,
    _layers_fill_chunks,
    _chunks_have_layers,
    _schedule_fits_steps,
    _profile_fits_steps,
    _evaluation_has_data,
    _spikes_take_a_run_back,
    _directory_is_a_folder_or_a_store,
    _cache_is_a_folder,
    _local_checkpoints_have_folder_and_steps,
)
