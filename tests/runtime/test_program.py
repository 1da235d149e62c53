"""What stands where in the compiled step. Outside the ops' loops a tick moves payloads and nothing
larger; inside an op no device waits for another stage; gradients cross the data axis once, after
the last row.

The sizes tell things apart: a payload is smaller than an op's other activations, and those than a
device's part of any matrix. Each check is also shown a runtime that breaks its rule.
"""

import dataclasses
import functools
import math

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from support import small
from support.small import Case
from support.ticks_text import goes_round, groups_over, holders, is_fill, loop, moves

from jaxtrain.config import Config
from jaxtrain.devices.mesh import AXES, MODEL, STAGE
from jaxtrain.parallel.zero import Reduction
from jaxtrain.planner.programs.program import Instruction, Program
from jaxtrain.runtime import state_plan, tick, tick_ops
from jaxtrain.runtime.tick_state import ModelTree, Pools, TickState, merged, only
from jaxtrain.schedule.columns import permutes
from jaxtrain.schedule.slots import SlottedTable
from jaxtrain.schedule.table import Permute, wraps
from jaxtrain.training.step import Step, make_step

WIDTH, LENGTH = 64, 8
SHAPES = {
    "model.width": WIDTH,
    "model.mlp_width": 192,
    "model.vocab_size": 131,
    "data.sequence_length": LENGTH,
}
SHAPES |= {"model.activation": "gelu"}

ENDS = {"pipeline.vocabulary": "end_stages"}
PROGRAMS = {
    "train 2x2x2": Case(
        (2, 2, 2),
        "interleaved",
        2,
        4,
        program="train",
        changes={"model.layers": 8, "pipeline.permute": "early"},
    ),
    "tied 1x8x1": Case(
        (1, 8, 1), "gpipe", 1, 4, changes={"model.layers": 8, "model.tied_embeddings": True}
    ),
    "zb_v 2x2x2, none": Case(
        (2, 2, 2), "zb_v", 2, 5, changes={"model.layers": 8, "pipeline.remat": "none"}
    ),
    "groups 1x2x2, ends": Case(
        (1, 2, 2), microbatches=4, changes={"model.layers": 5, "pipeline.layers_per_op": 1, **ENDS}
    ),
    "evaluate 1x2x2": Case(
        (1, 2, 2), "interleaved", 2, 4, program="evaluate", changes={"model.layers": 5}
    ),
}
MORE = {
    "uneven 1x4x2, early": Case(
        (1, 4, 2), microbatches=4, changes={"model.layers": 9, "pipeline.permute": "early"}
    ),
    "dualpipe_v 1x4x2, selective, aligned": Case(
        (1, 4, 2),
        "dualpipe_v",
        2,
        8,
        changes={"model.layers": 8, "pipeline.remat": "selective", "pipeline.permute": "aligned"},
    ),
    "uneven 2x4x1, ends": Case(
        (2, 4, 1), "interleaved", 2, 4, changes={"model.layers": 9, "parallel.zero": 0, **ENDS}
    ),
    "zb_h1 1x4x1, none": Case(
        (1, 4, 1), "zb_h1", 1, 5, changes={"model.layers": 4, "pipeline.remat": "none"}
    ),
}
# what is broken on purpose
SMALLEST = Case(
    (1, 2, 1), microbatches=4, changes={"model.layers": 2, "pipeline.permute": "late", **ENDS}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A program, and the table that it executes (None on one stage)."""

    cfg: Config
    step: Step
    table: SlottedTable | None
    program: Program
    text: str

    @property
    def payload(self) -> tuple[int, ...]:
        """The shape that a device sends to another stage; the microbatches have one row on each
        data shard."""
        return (1, LENGTH // self.cfg.mesh.model, WIDTH)

    @property
    def smallest_matrix(self) -> int:
        """Elements of a device's part of a layer's smallest matrix."""
        return WIDTH * WIDTH // self.cfg.mesh.model

    @property
    def tick(self) -> str:
        """The body of the scan over the table's rows."""
        rows = self.table.table.ticks if self.table else self.cfg.pipeline.microbatches
        return loop(self.program, rows).calls["body"]

    def outside(self) -> list[Instruction]:
        """Instructions before and after the scan."""
        inside = {id(i) for i in self.program.below(self.tick)}
        return [i for i in self.program.below(self.program.entry) if id(i) not in inside]


def compile_program(case: Case) -> Compiled:
    cfg, which = (
        case.config(SHAPES | {"data.batch_size": case.microbatches * case.mesh[0]}),
        case.program,
    )
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        state = step.abstract_state()
        arguments = (state if which == "train" else state.params, step.abstract_batch)
        text = getattr(step, which).lower(*arguments).compile().as_text()
    table = step.setup.evaluate if which == "evaluate" else step.setup.train
    return Compiled(cfg, step, table, Program(text), text)


@functools.cache
def compiled(name: str) -> Compiled:
    return compile_program((PROGRAMS | MORE)[name])


# --- the checks: each returns what it finds wrong -------------------------------------------------


def large_moves(c: Compiled) -> list:
    """What is larger than a payload in the tick outside the ops' loops; or too many payloads: what
    arrives and what leaves each way, and one more copy. Early permutes stand beside the ops, so XLA
    copies both ends of each."""
    moved, payload = moves(c.program, c.tick, holders(c.program, c.tick)), math.prod(c.payload)
    total = sum(size * times for (_, size), times in moved.items())
    limit = 13 if c.table and (c.table.table.permute == Permute.EARLY).any() else 6
    return [key for key in moved if key[1] > payload] + [f"{total} elements in all"] * (
        total > limit * payload
    )


def misplaced_permutes(c: Compiled) -> list:
    """Permutes inside an op or outside of the scan, or in the tick not one each way, early and late
    where there are both; where only some rows send, in a loop that the others do not enter."""
    found = lambda instructions: {
        i.name: i.text for i in instructions if i.collective == "collective-permute"
    }
    loops = [
        i
        for i in c.program.inline(c.tick)
        if i.opcode == "while" and not c.program.is_op(i) and not c.program.holds_ops(i)
    ]
    inside, everywhere = (
        found(j for i in loops for j in c.program.inline(i.calls["body"])),
        found(c.program.below(c.program.entry)),
    )
    here = found(c.program.inline(c.tick)) | inside
    some = [
        p
        for p in (Permute.EARLY, Permute.LATE)
        if c.table and 0 < (c.table.table.permute == p).mean() < 1
    ]
    elsewhere = [text for name, text in everywhere.items() if name not in here]
    table = c.table.table if c.table else None
    wanted = (
        len(permutes(table)) * len(set(table.permute.tolist()) - {Permute.NONE}) if table else 0
    )
    shape = tuple(c.step.mesh.shape.values())
    closed = not table or table.stages == 2 or wraps(table.stage_of, table.stages)
    around = [
        text
        for text in everywhere.values()
        if not closed and goes_round(text, shape, AXES.index(STAGE))
    ]
    lifted = len(inside) != len(some) * len(permutes(table)) if table else False
    return (
        elsewhere
        + around
        + [f"{len(here)} permutes"] * (len(here) != wanted)
        + ["in every row"] * lifted
    )


def wide_collectives(c: Compiled) -> list:
    """Collectives in the scan that are not over `model` alone (stages run different ops), or as
    large as a matrix. Only what all stages do together may be over `stage`: embedding and head,
    where these are shared."""
    shape = tuple(c.step.mesh.shape.values())
    groups = lambda axis: groups_over(shape, (AXES.index(axis),))
    together = (
        ("/embed/", "/head/", "/embed_gradient/")
        if c.table and c.table.table.vocabulary == "parallel"
        else ()
    )

    def allowed(i: Instruction) -> bool:
        met = i.groups(math.prod(shape))
        return met <= groups(MODEL) or (
            met <= groups(STAGE) and any(name in i.text for name in together)
        )

    found = [
        i for i in c.program.below(c.tick) if i.collective and i.collective != "collective-permute"
    ]
    return [i.text for i in found if not allowed(i) or max(i.sizes) >= c.smallest_matrix]


def large_copies(c: Compiled) -> list:
    """Copies of a pool, or of a matrix's size, anywhere in the scan, also in ops; filling a new
    buffer with zeros is none."""
    assert c.table is not None
    pools = {(n, *c.payload) for n in c.table.pool_sizes.values() if n > 1}
    copies = [i for i in c.program.below(c.tick) if i.opcode in ("copy", "copy-start")]
    large = [i for i in copies if max(i.sizes) >= c.smallest_matrix or i.shapes[0] in pools]
    return [i.text for i in large if not is_fill(c.program, i.operands[0])]


def odd_reductions(c: Compiled) -> list:
    """Differences between the collectives that gradients need, each once, and those around the scan
    before the optimizer."""
    wanted = []
    reductions = jax.tree.leaves(
        c.step.layout.reductions, is_leaf=lambda x: isinstance(x, Reduction)
    )
    for r, array in zip(reductions, jax.tree.leaves(c.step.layout.shapes), strict=True):
        part = math.prod(NamedSharding(c.step.mesh, r.storage).shard_shape(array.shape))
        over = [
            axes
            for axes in (r.scatter_axes, r.sum_axes)
            if any(c.step.mesh.shape[a] > 1 for a in axes)
        ]
        wanted += [part] * len(over)
    here = [i for i in c.outside() if i.collective and "/optimizer/" not in i.text]
    found = [size for i in here for size in i.sizes if size > 1]  # the loss and counts are scalars
    return [] if sorted(found) == sorted(wanted) else [i.text for i in here]


CHECKS = (large_moves, misplaced_permutes, wide_collectives, large_copies)


@pytest.mark.parametrize("name", small.named(PROGRAMS, MORE))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_program(check, name):
    assert not check(compiled(name))


@pytest.mark.parametrize(
    "name",
    small.named([name for name, case in PROGRAMS.items() if case.program == "gradients"], MORE),
)
def test_gradients_are_reduced_once(name):
    assert not odd_reductions(compiled(name))


@pytest.mark.parametrize("name", ["zb_v 2x2x2, none", "tied 1x8x1", "evaluate 1x2x2"])
def test_a_shared_vocabulary_is_nowhere_whole(name):
    """Neither logits nor tables: a device has its stage's and its model shard's rows alone, in the
    whole program."""
    c = compiled(name)
    whole, mesh = c.step.layout.shapes["embed"]["table"].shape[0], c.cfg.mesh
    part = whole // (mesh.stage * mesh.model)
    larger = {whole, SHAPES["model.vocab_size"], whole // mesh.stage, whole // mesh.model} - {part}
    found = {d for i in c.program.below(c.program.entry) for shape in i.shapes for d in shape}
    assert part in found and not found & larger


def test_parameters_are_gathered_once_after_the_update():
    c = compiled("train 2x2x2")
    shape = tuple(c.step.mesh.shape.values())
    gathers = [i for i in c.outside() if i.collective == "all-gather"]
    local = lambda which: [
        math.prod(s.shard_shape(a.shape))
        for s, a in zip(jax.tree.leaves(which), jax.tree.leaves(c.step.layout.shapes))
    ]
    wanted = [
        whole
        for whole, part in zip(
            local(c.step.layout.shardings), local(c.step.layout.scattered), strict=True
        )
        if whole > part
    ]
    assert sorted(size for i in gathers for size in i.sizes) == sorted(wanted)
    assert not [i for i in gathers if i.groups(8) & groups_over(shape, (AXES.index(MODEL),))]


def test_ops_have_names_in_a_profile():
    text = compiled("train 2x2x2").text
    names = [f"{op}{chunk}" for op in "FRBW" for chunk in range(2)] + [
        "K1",
        "embed",
        "head",
        "embed_gradient",
    ]
    names += ["permute_EARLY", "reduce_gradients", "optimizer"]
    assert [name for name in names if f"/{name}/" not in text] == []


def test_one_stage_is_a_plain_scan():
    """Gradient accumulation: no loop of one trip, no permute, and one layer after the other."""
    c = compile_program(Case((1, 1, 1), microbatches=4, changes={"model.layers": 1}))
    loops = [i for i in c.program.below(c.tick) if i.opcode in ("while", "conditional")]
    loops = [i for i in loops if "scatter" not in i.op_name]  # on CPU one, over tokens
    assert loops == [] and not [i for i in c.program.below(c.program.entry) if i.collective]


@pytest.mark.parametrize("which", ["gradients", "evaluate"])
def test_one_microbatch_on_one_stage_is_no_loop_at_all(which):
    """XLA's TPU compiler makes two programs of a scan of one tick: the forward ran twice
    (docs/log.md)."""
    cfg = Case((1, 1, 1), microbatches=1, changes={"model.layers": 1}).config(
        SHAPES | {"data.batch_size": 1}
    )
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        text = (
            getattr(step, which).lower(step.abstract_state().params, step.abstract_batch).as_text()
        )
    assert "stablehlo.dot_general" in text and "stablehlo.while" not in text


@pytest.mark.parametrize("model", [1, 2])
def test_the_partitioner_has_nothing_to_decide_where_model_has_one_device(model):
    """jax writes a constraint behind every operation of a region that is manual over some axes
    only: a third of the program."""
    cfg = small.config((1, 2, model), microbatches=2)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        text = step.gradients.lower(step.abstract_state().params, step.abstract_batch).as_text()
    assert ("sdy.sharding_constraint" in text) == (model > 1)


# --- that each check can fail ---------------------------------------------------------------------


def test_without_the_barrier_matmuls_are_lifted_into_every_tick(monkeypatch):
    monkeypatch.setattr(tick.lax, "optimization_barrier", lambda values: values)
    made = compile_program(SMALLEST)
    assert [key for key in large_moves(made) if key[0] == "dot"]
    assert "in every row" in misplaced_permutes(made)


@pytest.mark.full
def test_a_conditional_in_place_of_the_loop_is_found(monkeypatch):
    def once(self, op, state, columns):
        if not self.ticks.columns.runs[op.name].any():
            return state
        carried, fixed = only(state, op.state), only(self.constants, op.constants)
        runs = lambda carried: op.run(carried, fixed, columns)
        return merged(
            state, lax.cond(columns.runs[op.name] > 0, runs, lambda carried: carried, carried)
        )

    monkeypatch.setattr(tick.Tick, "_once", once)
    assert large_moves(compile_program(SMALLEST))


@pytest.mark.full
def test_a_gradient_added_up_outside_its_op_is_found(monkeypatch):
    def call(self, state, columns, original=tick.Tick.__call__):
        changed = original(self, state, columns)
        before, after = (s.gradients.layers["0"] for s in (state, changed))
        halved = jax.tree.map(lambda a, b: a + 0.5 * (b - a), before, after)
        return merged(changed, TickState(gradients=ModelTree(layers={"0": halved})))

    monkeypatch.setattr(tick.Tick, "__call__", call)
    assert large_moves(compile_program(SMALLEST))


@pytest.mark.full
def test_a_copied_pool_is_found(monkeypatch):
    def forward(cell, state, original=tick_ops.forward):
        pool, up = state.pools.activation, state.buffers["up"]
        changed = lax.fori_loop(0, cell.slots.activation, lambda i, x: x.at[i].set(up), pool)
        # the old pool is read after the loop has updated the new one
        kept = pool[changed.sum().astype(int) % 2]
        after = original(cell, state)
        return dataclasses.replace(after, buffers={"up": after.buffers["up"] + kept})

    monkeypatch.setattr(tick_ops, "forward", forward)
    assert large_copies(compile_program(SMALLEST))


def test_a_permute_in_an_op_is_found(monkeypatch):
    def embed(self, state, constants, columns, original=tick_ops.EndOps.embed):
        after = original(self, state, constants, columns)
        moved = lax.ppermute(after.pools.activation, STAGE, [(0, 1), (1, 0)])
        return dataclasses.replace(after, pools=Pools(activation=moved))

    monkeypatch.setattr(tick_ops.EndOps, "embed", embed)
    assert len(misplaced_permutes(compile_program(SMALLEST))) == 1


@pytest.mark.full
def test_a_reduction_in_the_scan_is_found(monkeypatch):
    def backward(cell, state, original=tick_ops.weight_gradient):
        after = original(cell, state)
        return dataclasses.replace(
            after, gradients=jax.tree.map(lambda a: lax.psum(a, "data"), after.gradients)
        )

    monkeypatch.setattr(tick_ops, "weight_gradient", backward)
    assert wide_collectives(compile_program(dataclasses.replace(SMALLEST, mesh=(2, 2, 1))))


@pytest.mark.full
def test_a_gradient_gathered_over_model_is_found(monkeypatch):
    """What the partitioner makes of a reduce-scatter that leaves `model` to it."""

    def reduce(gradient, reduction, dtype):
        return lax.psum_scatter(
            gradient,
            reduction.scatter_axes,
            scatter_dimension=reduction.axis(gradient.ndim),
            tiled=True,
        )

    monkeypatch.setattr(state_plan, "reduce", reduce)
    found = odd_reductions(compile_program(dataclasses.replace(SMALLEST, mesh=(2, 2, 2))))
    assert [text for text in found if "all-gather" in text]


@pytest.mark.parametrize(
    "changes",
    small.named(
        [{"mesh.expert": 2, "model.experts": 4, "model.expert_width": 32}, {"mesh.context": 2}],
        [{}],
    ),
    ids=str,
)
def test_slots_are_as_large_as_is_said(changes, monkeypatch):
    """Also where what an op keeps depends on the devices of other axes."""
    planned, make = [], state_plan.UnitPlan.pools
    monkeypatch.setattr(
        state_plan.UnitPlan, "pools", lambda *given: planned.append(make(*given)) or planned[-1]
    )
    cfg = small.config(
        (1, 2, 1), "zb_h1", 1, 4, {"pipeline.remat": "none", "data.batch_size": 16, **changes}
    )
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        step.gradients.trace(step.abstract_state().params, step.abstract_batch)
    size = lambda kind: sum(
        math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(getattr(planned[-1], kind))
    )
    said, kinds = (
        step.slot_bytes(),
        ("activation", "gradient", "residual_b", "residual_w", "weight_stash"),
    )
    assert {kind: max(1, step.setup.train.pool_sizes[kind]) * said[kind].all for kind in kinds} == {
        kind: size(kind) for kind in kinds
    }
