"""What a device does in a step, counted from the config alone: its communication volume and its operations, by op.

Nothing is traced or compiled. The table says how often a stage runs an op, costs/collectives.py which
collectives stand in one, costs/transformer.py how many operations it takes. Numbers of a few bytes
(the loss, the norm of the gradients, counts) are left out. With stages the counts are one stage's.

Operations of products with weights are 2 · parameters · tokens: forward (F, K), again (R), of the
input's gradient (B) and the weights' (W). Causal attention takes half of its products: two forward
(F, K, R), in B four and the scores' once more. Key/value heads that several devices of `model` share
count on each. Experts count for the tokens that choose them, as if evenly. Documents kept apart count
as one sequence.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from jax.sharding import AbstractMesh

from jaxtrain.config import Config
from jaxtrain.config.pipeline_setup import Setup, make_setup
from jaxtrain.config.work import layout_of, transformer_of
from jaxtrain.costs.collectives import FLOAT32, GATHER, MODEL, PERMUTE, STAGE, Collective, Parameters, StepCollectives, sent
from jaxtrain.costs.step_time import ATTENTION_BACKWARD, bytes_of
from jaxtrain.devices.mesh import AXES, sizes_of
from jaxtrain.runtime.loss import cut_count
from jaxtrain.schedule.columns import CELL_OPS, EMBED, EMBED_GRADIENT, HEAD, WAY, cell_op, columns, permute_op, permutes
from jaxtrain.schedule.table import Permute, wraps
from jaxtrain.training.parameters import parameters_of
from jaxtrain.training.step import make_layout

ATTENTION_BACKWARD_ONCE = 2.0  # products of attention's backward over the two of its forward, without the scores computed again


@dataclasses.dataclass(frozen=True)
class Entry:
    """Collectives of an op, alike: over mesh axes, among `devices` of them, `count` times a step, of `size` bytes (collectives.py)."""

    op: str
    kind: str
    axes: tuple[str, ...]
    devices: int
    count: int
    size: int

    @property
    def bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return round(self.count * sent(self.kind, self.size, self.devices))


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of an op in a step on a device: products with weights, attention's products; `once`: without what is recomputed."""

    weights: float = 0.0
    attention: float = 0.0
    once: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.weights + other.weights, self.attention + other.attention, self.once + other.once)

    def __mul__(self, times: float) -> "Flops":
        return Flops(times * self.weights, times * self.attention, times * self.once)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Layers of a unit that go through F, R, B or W.

    label:    the op in whose program they stand
    times:    a step
    unread:   layers of which nothing reads the output
    same_op:  R stands in the same op, which still has what it has gathered
    reads:    the op reads its parameters, and the documents of tokens
    """

    label: str
    op: str
    times: int
    unit: str
    layers: int
    unread: int = 0
    same_op: bool = False
    reads: bool = True


class StepCounts:
    """The counts of a resolved config whose mesh is known. cpu: as XLA's CPU backend lowers collectives."""

    def __init__(self, config: Config, cpu: bool = False):
        self.config, self.model, self.layout = config, transformer_of(config), layout_of(config)
        self.setup: Setup = make_setup(config)
        # No device is needed: layouts ask a mesh for its sizes alone.
        self.state = make_layout(config, self.setup, AbstractMesh(sizes_of(config.mesh), AXES))  # type: ignore[arg-type]
        self.parameters = parameters_of(self.state)
        tokens = config.data.sequence_length // config.mesh.context
        self.collectives = StepCollectives(
            self.model,
            self.layout,
            item=bytes_of(config.precision.compute),
            read=bytes_of(config.precision.compute),
            reduced=FLOAT32 if cpu else bytes_of(config.precision.reduce),
            updated=FLOAT32,
            context=config.parallel.context,
            shares_vocabulary=self.setup.shares_vocabulary,
            gathers_in_ops=config.parallel.zero == 3 and config.parallel.gather == "layer",
            reduces_in_ops=config.parallel.reduce == "microbatch",
            documents=not config.data.attend_across_documents,
            loss_cuts=cut_count(self.layout.microbatch, tokens, config.mesh.model, config.model.loss_chunk),
            cpu=cpu,
            outer_int8=config.precision.outer == "int8",
        )

    @property
    def all_parameters(self) -> list[Parameters]:
        """All parameters, layers in their stacks."""
        return [p for group in self.parameters.values() for p in group.values()]

    # --- how often -----------------------------------------------------------------------------

    def _times(self, stage: int) -> Mapping[str, int]:
        """How often a stage runs each op; of one stage each once a microbatch."""
        if self.setup.train is None:
            return collections.defaultdict(lambda: self.layout.microbatches)
        return {op: int(times[stage]) for op, times in self._runs_of_ops.items()}

    @functools.cached_property
    def _runs_of_ops(self) -> dict[str, np.ndarray]:
        """[stages] for each op of the table: how often a stage runs it."""
        assert self.setup.train is not None
        return {op: column.sum(0) for op, column in columns(self.setup.train).runs.items()}

    def _runs(self, stage: int) -> Iterator[_Run]:
        """What layers go through, on a stage; with one stage forward and backward of a microbatch at once (tick.Accumulate)."""
        if self.setup.train is None:
            m, layers, full = self.layout.microbatches, self.model.layers, self.layout.remat == "full"
            yield _Run("F", "F", m, "0", layers)
            if full:
                yield _Run("B", "R", m, "0", layers, unread=layers, reads=False)
            yield _Run("B", "B", m, "0", layers, same_op=full)
            yield _Run("B", "W", m, "0", layers, same_op=full, reads=False)
            return
        placement, times = self.setup.placement, self._times(stage)
        for u in range(placement.units_per_stage):
            # A layer that stands outside of the loop over layers makes no output that nobody reads.
            outside = int(placement.stack_size(u) == 1 or self.collectives.gathers_in_ops)
            for name in CELL_OPS:
                op, layers = "F" if name == "K" else name, placement.layer_count(u, stage)
                yield _Run(op, op, times[cell_op(name, u)], str(u), layers, outside * (op == "R"))

    # --- communication volume ------------------------------------------------------------------

    def volume(self, stage: int = 0) -> list[Entry]:
        """The collectives of a step for the devices of a stage."""
        return self._entries(self._step(stage))

    def exchange_volume(self) -> list[Entry]:
        """The collectives of an exchange between independent replicas, every `train.diloco_inner_steps`; [] where there is none."""
        exchange = self.collectives.outer_exchange(self.all_parameters)
        return self._entries([("exchange", 1, exchange)]) if self.state.independent_replicas else []

    def busiest_stage(self) -> int:
        """The stage whose devices send most."""
        return max(range(self.layout.stage), key=lambda stage: sum(entry.bytes for entry in self.volume(stage)))

    def _entries(self, ops: Iterable[tuple[str, float, Iterable[Collective]]]) -> list[Entry]:
        counts: collections.Counter = collections.Counter()
        for op, times, collectives in ops:
            for c in collectives:
                axes = tuple(a for a in AXES if a in c.axes and getattr(self.layout, a) > 1)
                if axes and c.size and times:
                    counts[op, c.kind, axes, c.devices or self.collectives.devices(axes), round(c.size)] += round(times * c.times)
        return [Entry(op, kind, axes, devices, count, size) for (op, kind, axes, devices, size), count in counts.items()]

    def _step(self, stage: int) -> Iterator[tuple[str, float, Iterable[Collective]]]:
        """(op, how often a step, its collectives)."""
        c, times, parameters = self.collectives, self._times(stage), self.all_parameters
        if self.layout.zero == 3 and not c.gathers_in_ops:
            yield "gather", 1, (c.gathered(p) for p in parameters if p.over_data)
        yield EMBED, times[EMBED], self._embed()
        for run in self._runs(stage):
            if run.reads:
                yield run.label, run.times, c.document_ids(run.op)
            yield run.label, run.times * run.layers, self._weights(run)
            yield run.label, run.times * (run.layers - run.unread), c.layer(run.op, again=run.same_op)
            yield run.label, run.times * run.unread, c.layer(run.op, last=True, again=run.same_op)
        yield HEAD, times[HEAD], self._head()
        yield EMBED_GRADIENT, times[EMBED_GRADIENT], self._embed_gradient()
        if self.setup.train:
            yield "permute", times[permute_op(Permute.EARLY)] + times[permute_op(Permute.LATE)], self._messages(stage)
        yield "reduce", 1, (each for p in parameters for each in c.reductions(p))
        yield "optimizer", 1, (each for p in parameters for each in c.after_the_update(p))

    def _weights(self, run: _Run) -> Iterator[Collective]:
        """What an op does with one layer's parameters: gathers what it reads, reduces their gradients."""
        rows = self.setup.placement.stack_size(int(run.unit))
        layer = [p._replace(size=p.size // rows) for p in self.parameters[f"layers/{run.unit}"].values()]
        if run.reads:
            yield from self.collectives.gathers(p for p in layer if run.op != "W" or not p.matrix)
        if run.op == "W":
            yield from self.collectives.reductions_in_op(layer)

    def _messages(self, stage: int) -> Iterator[Collective]:
        table, c = self.setup.table, self.collectives
        round_ = wraps(table.stage_of, table.stages)
        for way in permutes(table):
            if round_ or 0 <= stage + WAY[way] < table.stages:
                yield Collective(PERMUTE, (STAGE,), c.activation / self.layout.model * c.item)

    def _embed(self) -> Iterator[Collective]:
        c, embed = self.collectives, self.parameters["embed"]
        yield from c.lookup(embed["table"])
        yield c.stage_sum()
        yield from c.gathers(p for name, p in embed.items() if name == "positions")
        yield from self._first("F")

    def _first(self, *ops: str) -> Iterator[Collective]:
        """Dense layers before the first unit."""
        c, count = self.collectives, self.model.dense_layers
        for i in range(count):
            layer = self.parameters[f"first/{i}"].values()
            last = "W" in ops and i == count - 1  # the last one's output is there already
            yield from c.document_ids("F")
            yield from c.gathers(layer)
            for op in ops:
                yield from c.layer(op, last=last, again=op != "F", dense=True)
            if "W" in ops:
                yield from c.reductions_in_op(layer)

    def _embed_gradient(self) -> Iterator[Collective]:
        c, embed, stages = self.collectives, self.parameters["embed"], self.setup.train is not None
        if self.model.dense_layers:  # they are run once more
            yield from c.lookup(embed["table"]) if stages else ()  # on one stage the embedding is still there
            yield from self._first("F", "B", "W")
        yield c.stage_sum()
        yield from c.lookup_gradient(embed["table"], same_op=not stages)
        if "positions" in embed:
            yield Collective(GATHER, (MODEL,), c.activation * c.item)
            yield from c.reductions_in_op([embed["positions"]])

    def _head(self) -> Iterator[Collective]:
        """Head and loss, and the predictions of further tokens."""
        c, head = self.collectives, dict(self.parameters["head"])
        if self.model.tied:
            head["table"] = self.parameters["embed"]["table"]
        yield c.stage_sum()._replace(times=2)
        yield from c.gathers(head.values())
        yield from c.reductions_in_op(head.values())
        yield from c.loss()
        for i in range(self.model.predictions):
            yield from self._prediction(self.parameters[f"predictors/{i}"])

    def _prediction(self, module: dict[str, Parameters]) -> Iterator[Collective]:
        """A module's forward and backward at once (EmbeddingAndHead._predict)."""
        c, table = self.collectives, self.parameters["embed"]["table"]
        yield from c.gathers(module.values())
        yield from c.reductions_in_op(module.values())
        yield from c.lookup(table)
        yield from c.lookup_gradient(table, same_op=True)
        yield from c.document_ids("F")
        for op in "FBW":
            yield from c.layer(op, again=op != "F")
        yield c.joining()
        yield from c.loss()

    # --- operations ----------------------------------------------------------------------------

    def flops(self, stage: int = 0) -> dict[str, Flops]:
        """Operations by op, for the devices of a stage."""
        by_op: dict[str, Flops] = collections.defaultdict(Flops)
        for run in self._runs(stage):
            by_op[run.op] += self._layer_flops(run.op) * (run.times * (run.layers - run.unread))
            by_op[run.op] += self._layer_flops(run.op, output=False) * (run.times * run.unread)
        times, dense = self._times(stage), self.model.dense_layers
        by_op[HEAD] += self._head_flops() * times[HEAD]
        by_op[EMBED] += self._layer_flops("F", dense=True) * (times[EMBED] * dense)
        for op in "RBW":
            by_op[EMBED_GRADIENT] += self._layer_flops(op, dense=True) * (times[EMBED_GRADIENT] * dense)
        return {op: flops for op, flops in by_op.items() if flops.total}

    def total_flops(self, stage: int = 0) -> Flops:
        """Operations of all ops, for the devices of a stage."""
        return sum(self.flops(stage).values(), Flops())

    @property
    def _tokens(self) -> float:
        """Tokens of a microbatch on a device, as if `model` cut them."""
        return self.collectives.tokens / self.layout.model

    def _layer_flops(self, op: str, output: bool = True, dense: bool = False) -> Flops:
        """Operations of one layer and microbatch. output: whether its last product is needed; experts' outputs always are, for the
        gradients of the weights with which they are added."""
        m, layout = self.model, self.layout
        parameters = m.layer(dense).per_token
        if not output:
            parameters -= m.width * (m.mlp_width if dense or not m.experts else m.shared_experts * m.expert_width)
        shared = 0 if m.mla else 2 * m.head_dim * max(0, layout.model - m.kv_heads)
        products, copied = 2.0 * parameters * self._tokens, 2.0 * shared * m.width * self._tokens
        forward = m.attention_flops() / 2 * layout.microbatch / (layout.context * layout.model)
        attention = forward * {"B": ATTENTION_BACKWARD, "W": 0.0}.get(op, 1.0)
        needed = forward * ATTENTION_BACKWARD_ONCE if op == "B" else attention
        return Flops(products + copied, attention, 0.0 if op == "R" else products + needed)

    def _head_flops(self) -> Flops:
        """Operations of a microbatch's head, forward and both gradients, with the modules that predict further tokens."""
        m, shards = self.model, self.layout.stage if self.setup.shares_vocabulary else 1
        logits = 3 * 2.0 * m.vocab_size * m.width * self._tokens * (1 + m.predictions) / shards
        join = 3 * 2.0 * 2 * m.width**2 * self._tokens
        module = sum((self._layer_flops(op) for op in "FBW"), Flops(join, 0.0, join))
        return Flops(logits, 0.0, logits) + module * m.predictions
