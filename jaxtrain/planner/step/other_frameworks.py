"""Other frameworks that train transformers, as the differences of their steps from ours in time and
memory: published runs, with which the planner is compared, were made by them.

Each difference is physical: an array that is saved or passes through memory, an operation that
waits. A framework has other settings and rates, and changes parts of a step.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.config import OptimizerConfig, ParallelConfig
from jaxtrain.config.optimizers import record_of
from jaxtrain.config.sizes import SELECTIVE, SHARD_AXES
from jaxtrain.planner.layer.collective_time import Parameters
from jaxtrain.planner.layer.layout import Layout
from jaxtrain.planner.layer.links import REPLICA
from jaxtrain.planner.layer.settings import ITEM, Rates, StepSettings
from jaxtrain.planner.step.layer_time import LayerTime
from jaxtrain.planner.step.parameters import (
    DeviceParameters,
    DeviceState,
    Layers,
    ParameterGroups,
)
from jaxtrain.planner.step.saved import layer_bytes
from jaxtrain.planner.step.step_part import StepPart, once
from jaxtrain.planner.step.step_time import StepModel
from jaxtrain.planner.step.time_breakdown import (
    ATTENTION,
    LAUNCHES,
    MATMULS,
    MEMORY,
    TimeBreakdown,
)

ROUNDED = 4  # operands of an expert's two products, forward and backward

ON_ITS_WAY = 2  # layers whose copies to the host's memory or back a device has at once


class TheirLayer(LayerTime):
    """A layer that may recompute attention's core alone, or products by their kind, and whose
    operations the host starts one by one."""

    @once
    def ops(
        self, dense: bool, looped: bool, unread: float, pairs: tuple[float, float]
    ) -> dict[str, TimeBreakdown]:
        """F, R, B and W. With experts no op is shorter than the host takes to start it: F and R a
        third of its time, B and W two. Without a capacity it rounds the operands of each expert on
        their own. Nothing is started where the entire step is a graph."""
        ops, settings, model = super().ops(dense, looped, unread, pairs), self.settings, self.model
        if dense or not model.experts or settings.fused_experts == settings.precision.matmul:
            return ops
        rounding = settings.rates.rounding_us[not settings.format.blocks] * ROUNDED * settings.fp8
        experts = model.experts / self.layout.expert * (not model.capacity_factor)
        host = (1e-3 * settings.rates.host_ms + 1e-6 * rounding * experts) / 3
        least = {
            "F": host,
            "R": host if self.layout.remat == "full" else 0.0,
            "B": 2 * host - ops["W"].seconds,
        }
        late = {op: max(0.0, seconds - ops[op].seconds) for op, seconds in least.items()}
        return ops | {op: ops[op] + TimeBreakdown({LAUNCHES: s}) for op, s in late.items() if s}

    def made_again(self, dense: bool) -> dict[str, float]:
        """Seconds by part of what selective recomputation makes again."""
        if self.settings.recomputes == "half":
            part = lambda p: 1.0 if self.settings.fp8 or p.of.experts else 0.5
            again = sum(p.forward * part(p) for p in self.work.products(dense) if p.of.read)
            return {MATMULS: again, MEMORY: self.work.passes(dense)}
        if not self._recomputes_core:
            return super().made_again(dense)
        attention, _, scores = self.work.attention
        return {ATTENTION: attention, MEMORY: scores}

    def flops_made_again(self, attention: float) -> float:
        """Operations of a sequence that selective recomputation makes again."""
        return attention if self._recomputes_core else super().flops_made_again(attention)

    @property
    def _recomputes_core(self) -> bool:
        """Selective recomputation makes attention's core again, and nothing else."""
        return self.settings.recomputes == "core" and not self.layout.save

    def on_host(self) -> tuple[float, float]:
        return saved_of_layer(self, self.layout.remat)[1], 0.0


class Device(DeviceState):
    """What a device holds where ZeRO cuts flat buffers."""

    axes_of_ends = ()

    def tables(self, shared: bool) -> int:
        """Tables of the vocabulary: the first and the last stage have one each."""
        return 1 if self.layout.stage > 1 and not shared else super().tables(shared)

    def parts_of_ends(self, zero: int, shared: bool | None = None) -> int:
        """1: stages do not cut the state of embedding and head."""
        return 1

    def sharded(self, held: DeviceParameters, shards: int) -> float:
        """The number of parameters on a device where ZeRO cuts what is no expert into so many
        shards, and experts into as many on each device of `expert`."""
        experts = held.experts / max(1, shards // self.layout.expert)
        return experts + (held.layers - held.experts + held.ends) / shards

    @once
    def numbers(
        self, of: OptimizerConfig | str, layers: Layers = (), shared: bool | None = None
    ) -> float:
        """Numbers of an optimizer's state, or of MASTERS, in proportion to the parameters."""
        updated = self.updated(layers, shared)
        if isinstance(of, str):
            return updated
        record, mean = record_of(of.name), self.model.mean
        numbers = lambda a: record.of(bool(a.matrices)).state_numbers(a.shape, of)
        state = mean(lambda m: sum(map(numbers, m.layer().arrays)))
        return state / mean(lambda m: m.layer().size) * updated

    @functools.cached_property
    def groups(self) -> ParameterGroups:
        """The parameters of the device: what stands before and after the layers is with these.
        ZeRO cuts them over all devices that hold the same."""
        ours, zero = super().groups, self.layout.zero > 0
        over = lambda group, axes: group._replace(
            scatter=axes * zero, shard=axes * zero, sums=(REPLICA, *axes * (not zero))
        )
        layers = ours.layers._replace(size=sum(group.size for group in ours[1:]))
        return ParameterGroups(
            over(ours.experts, SHARD_AXES[:2]),
            over(layers, SHARD_AXES),
            Parameters(0),
            Parameters(0),
        )


@dataclasses.dataclass(frozen=True)
class Framework(StepSettings):
    """Settings of another framework's step. It has no tables of slots; ZeRO cuts flat buffers
    anywhere; only the stages at both ends have tables of the vocabulary."""

    causal_rates: bool = False
    vocabulary_parallel: bool = False
    weight_bytes: float = 2.0
    master_bytes: float = 4.0
    sent_weight: float = 2.0
    rates: Rates = Rates(stage_overlap=False)
    parallel: ParallelConfig = ParallelConfig(collective_matmul="off")
    by_xla: bool = False
    ours: ClassVar[bool] = False
    changed: ClassVar[Mapping[type, type]] = {
        LayerTime: TheirLayer,
        DeviceState: Device,
    }

    def shards(self, layout: Layout, width: int) -> int:
        """ZeRO's shard count of what is no expert: over all devices that hold the same."""
        return layout.data * layout.context * layout.expert

    def reduces_in_ops(self, layout: Layout) -> bool:
        """True if each microbatch's gradients are reduced: from ZeRO-2 on."""
        return layout.zero > 1


# --- memory -------------------------------------------------------------------------------------


def saved_by_others(step: StepModel) -> float:
    """Bytes that the fullest stage saves of its microbatches in flight, and of one layer what is on
    its way to the host's memory and what comes back."""
    layout, p, v = step.layout, step.layout.stage, step.layout.repeats
    layers = math.ceil(step.model.layers / p) + step.model.dense_layers * (p == 1)
    in_flight = 1.0
    if p > 1:
        residuals = step.schedule_forms.residuals(p, v, layout.microbatches)
        in_flight = min(float(layout.microbatches), residuals / v)
    fraction = step.recomputed_fraction
    parts = {"none": 1 - fraction} | {layout.recomputation.mode: fraction}
    saved = [
        (part * of_kind, saved_of_layer(kind, remat))
        for kind, of_kind in step.kinds()
        for remat, part in parts.items()
        if part
    ]
    each = sum(part * on_device for part, (on_device, _) in saved)
    return each * layers * in_flight + ON_ITS_WAY * max(on_host for _, (_, on_host) in saved)


def saved_of_layer(step: StepPart, remat: str) -> tuple[float, float]:
    """Bytes that one layer saves of one microbatch with this mode of remat: in a device's memory,
    and in its host's."""
    layout, saved = step.layout, _activations_of_layer(step, remat)
    on_host = saved * (layout.saves_on_host and remat == "full")
    if remat == SELECTIVE and layout.save:
        layer = layer_bytes(step)
        saved, on_host = layer.residual_b + layer.residual_w, layer.host_b + layer.host_w
    return (0.0, saved) if layout.offloads("activations") else (saved - on_host, on_host)


def _activations_of_layer(step: StepPart, remat: str) -> float:
    """Bytes that one layer saves of one microbatch with this mode of remat, without names in
    `pipeline.save`."""
    model, layout, settings = step.model, step.layout, step.settings
    split = layout.model if settings.sequence_parallel else 1
    if not settings.fused_attention:
        plain = activation_bytes(
            remat,
            settings.sequence_parallel,
            model.sequence,
            layout.microbatch,
            model.width,
            model.heads,
            layout.model,
        )
        return plain * step.item / ITEM
    # Without recomputation the inputs of products are saved, too: what norms have made, the hidden
    # layer, and tokens as experts have received them.
    number = (settings.format.number if settings.fp8 else step.item) * (remat == "none")
    arrays = (remat != "full") * (1 + model.is_gated)
    width = (1 if remat == "full" else 2) * step.item + 2 * number
    # queries, keys, values, and the result
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim * (remat != "full")
    rows = step.routed_tokens / step.tokens if model.experts else 0.0
    hidden = model.layer().hidden * (rows / model.experts_per_token if model.experts else 1.0)
    inner = step.item * (heads + hidden * arrays) + number * (hidden + model.width * rows)
    return step.tokens * (width * model.width / split + inner / layout.model)


def activation_bytes(
    remat: str, sequence_parallel: bool, s: int, b: int, h: int, a: int, t: int
) -> float:
    """Bytes that one layer saves of a microbatch for its backward, in 16 bits, where scores pass
    through memory (Korthikanti 2022, arXiv:2205.05198, table 2): h width, a heads, s sequence, b
    microbatch, t tensor parallel.

    remat: "selective" recomputes attention's core, with its scores; "full" saves the layer's input
    """
    factor = 34 / t if sequence_parallel else 10 + 24 / t
    if remat == "none":
        factor += 5 * a * s / h / t
    return s * b * h * (2.0 if remat == "full" else factor)


def working_of_others(step: StepModel) -> float:
    """Bytes of one layer's backward: the widest arrays of a microbatch, and with ZeRO-3 what is
    gathered and the gradients that wait to be scattered, or those of the head if they are more."""
    model, layout, settings = step.model, step.layout, step.settings
    attention = (model.heads + 2 * model.kv_heads) * model.head_dim
    hidden = model.layer().hidden * (1 + model.is_gated)
    arrays = step.item * 4 * step.tokens * max(hidden, attention) / layout.model
    if layout.zero < 3 or step.shards == 1:
        return arrays + step.item * step.layer_parameters()
    # XLA scatters a matrix's gradient before it makes the next one's: a third of a layer's. Others
    # have gathered the next layer, too, and have gradients in two types.
    sent = settings.format.sent
    number = sent + ITEM / 3 if settings.by_xla else 2 * sent + ITEM + settings.sent_gradient
    head = 2 * step.item * model.vocab_size * model.width / layout.model / layout.stage
    return arrays + max(number * step.layer_parameters(), head)


# --- the frameworks -----------------------------------------------------------------------------

_MEGATRON_2021 = Framework(
    "megatron2021",
    "no sequence parallelism; scores pass through memory; tensor's sums, gradients' sums and "
    "messages are waited for; dropout",
    fused_attention=False,
    # product, scaled and masked softmax, dropout with its mask, product: written and read, in 16
    # bits
    attention_passes=6.5,
    sequence_parallel=False,
    recomputes="core",
    # two norms (2 each), two residuals with dropout and bias (5 each)
    rates=Rates(passes=14.0, inner_passes=3.0, logit_passes=8.0, stage_overlap=False),
    sent_gradient=2.0,
)
_TORCHTITAN = Framework(
    "torchtitan",
    "FSDP whose all-gathers overlap with products, torch.compile: fused attention, separate passes "
    "for norms and activations",
    sends_once=True,
    weight_bytes=4.0,
    master_bytes=0.0,
    fp8_forms=2,  # products of weights' gradients read transposed operands
    recomputes="half",
    rates=Rates(
        passes=14.0, inner_passes=3.0, logit_passes=8.0, data_overlap=0.9, stage_overlap=False
    ),
)
_MEGATRON_CORE = Framework(
    "megatron_core@25.11",
    "sequence parallelism, fused attention, distributed optimizer; tensor's and data's collectives "
    "overlap with products in part, those of routed tokens between nodes; experts' operands are "
    "rounded one by one",
    recomputes="core",
    sends_once=True,
    # 0.37 of the messages' time had products beside it on 16 H100 (Megatron-Bridge's notes, 2026).
    # Layers of Qwen3 take 4.7 ms with a capacity, 12.6 and 13.3 in MXFP8 and 32 in FP8 without one.
    rates=Rates(
        14.0,
        3.0,
        8.0,
        model_overlap=0.6,
        data_overlap=0.9,
        expert_overlap=(0.0, 0.37),
        host_ms=4.7,
        rounding_us=(120, 400),
    ),
    sent_gradient=2.0,
)
_MEGATRON_CORE_2026 = dataclasses.replace(
    _MEGATRON_CORE,
    name="megatron_core",
    text="sequence parallelism, fused attention, distributed optimizer; all collectives overlap "
    "with products in part; in MXFP8 experts are one kernel in a graph of the entire step",
    fused_experts="mxfp8",
    rates=dataclasses.replace(
        _MEGATRON_CORE.rates, expert_overlap=(0.37, 0.37), rounding_us=(120, 120)
    ),
)
FRAMEWORKS: dict[str, StepSettings] = {
    framework.name: framework
    for framework in (
        StepSettings(),
        _MEGATRON_2021,
        dataclasses.replace(
            _MEGATRON_2021,
            name="megatron2022",
            text="as megatron2021, with sequence parallelism; selective recomputes attention's "
            "core and nothing else",
            sequence_parallel=True,
        ),
        _MEGATRON_CORE_2026,
        dataclasses.replace(_MEGATRON_CORE_2026, name="megatron_core@26.08"),
        dataclasses.replace(
            _MEGATRON_CORE,
            name="megatron_core@26.04",
            rates=dataclasses.replace(_MEGATRON_CORE.rates, rounding_us=(120, 120)),
        ),
        _MEGATRON_CORE,
        dataclasses.replace(
            _MEGATRON_CORE,
            name="pith_train",
            text="as megatron_core@25.11, but one kernel multiplies or rounds rows of all experts, "
            "and the host starts every operation",
            # four layouts and two precisions take 8.4 to 9.4 ms
            rates=dataclasses.replace(_MEGATRON_CORE.rates, host_ms=8.2, rounding_us=(0, 0)),
        ),
        Framework(
            "maxtext",
            "ZeRO-3 (fsdp) whose all-gathers overlap with products, fused attention, full "
            "recomputation but for named matrices",
            tile_rows=512,  # the default; recipes have 128 to 512
            by_xla=True,
            weight_bytes=4.0,
            master_bytes=0.0,
            fp8_forms=2,  # qwix has scales of rows for one gradient, of columns for the other
            rates=Rates(
                model_overlap=0.9, data_overlap=0.9, gather_overlap=0.95, stage_overlap=False
            ),
            reduced_gradient=2.0,  # as compiled (docs/log/2026-11.md)
        ),
        _TORCHTITAN,
        dataclasses.replace(
            _TORCHTITAN,
            name="torchtitan_eager",
            text="as torchtitan without torch.compile: each operation reads and writes its arrays, "
            "casts to 32 bits in norms and rotation",
            rates=Rates(40.0, 8.0, 12.0, data_overlap=0.9, stage_overlap=False),
        ),
        dataclasses.replace(
            _TORCHTITAN,
            name="llama3",
            text="as torchtitan, in a pipeline whose messages overlap with ops; tensor's and "
            "context's collectives are waited for",
            causal_rates=True,
            rates=Rates(14.0, 3.0, 8.0, data_overlap=0.9),
        ),
        dataclasses.replace(
            _MEGATRON_2021,
            name="zero3",
            text="DeepSpeed's ZeRO-3 of 2021 without tensor parallelism: parameters gathered one "
            "by one, over one adapter of each node",
            rates=Rates(14.0, 3.0, 8.0, gather_overlap=0.78, stage_overlap=False),
            one_link=0.85,  # many small tensors
        ),
    )
}
