"""The account of a step against what XLA compiled, loops multiplied out: the same bytes by kind of
collective and mesh axes."""

import collections
import functools
import sys

import jax
import pytest
from support import ROOT, ahead, compiled_account, small
from support.compilers import KINDS, compiled_for
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.config import Config
from jaxtrain.config.saved_values import ATTENTION
from jaxtrain.devices.mesh import AXES
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.layer.links import EXCHANGE, sent
from jaxtrain.planner.layer.settings import ATTENTION_BACKWARD
from jaxtrain.planner.programs.compile_check import step_loops
from jaxtrain.planner.programs.compiled_collectives import FEW, collectives
from jaxtrain.planner.programs.program import Program
from jaxtrain.planner.programs.report import step_counts
from jaxtrain.planner.step.step_counts import CollectiveCount
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.training.step import Step, make_step

sys.path.append(str(ROOT / "benchmarks"))
import step_flops
from instruction_costs import InstructionCosts

SHAPES = {
    "model.width": 64,
    "model.mlp_width": 192,
    "model.vocab_size": 256,
    "data.sequence_length": 32,
    "model.layers": 8,
}
SHAPES |= {"data.batch_size": 32}
NONE, GPT2 = (
    {"pipeline.remat": "none"},
    {
        "model.norm": "layernorm",
        "model.activation": "gelu",
        "model.positions": "learned",
        "model.biases": ("qkv", "out", "mlp", "norm"),
    },
)
MOE = {"mesh.expert": 2, "model.experts": 4, "model.expert_width": 32}
TWO_STEPS = {
    **MOE,
    "mesh.expert": 4,
    "model.experts": 8,
    "parallel.expert_nodes": 2,
    "pipeline.remat": "selective",
}
MLA = {
    "model.attention": "mla",
    "model.kv_rank": 20,
    "model.query_rank": 24,
    "model.rope_head_dim": 4,
}
ENDS = {"pipeline.vocabulary": "end_stages"}
LATENT = {
    "model.attention": "mla",
    "model.query_rank": 24,
    "model.kv_rank": 40,
    "model.rope_head_dim": 6,
}
APART = {"data.attend_across_documents": False}
FP8 = {"precision.matmul": "fp8"}
MXFP8 = {
    "precision.matmul": "mxfp8",
    "model.heads": 4,
    "model.head_dim": 32,
    "data.sequence_length": 128,
}


PROJECTION = {"model.qk_norm": True, "model.qk_norm_over": "projection"}
INPUTS = {"pipeline.save": ("layer_input",)}
# Short sequences attend to all keys, so a plan's operations with a window would be fewer.
ALIKE = {"model.pattern": ("full", "nope", "nope")}
TWO_HEAD_SIZES = {
    "model.pattern": ("full", "wide"),
    "model.kinds": ("wide.head_dim=24",),
}
ENDS_WITH_LAYERS = {"model.dense_layers": 1, "model.mtp_depth": 1}
MUON = {"optimizer.name": "muon"}
SHARDED_ENDS = {"parallel.ends": "sharded"}


def saving(*names: str) -> dict:
    return {"pipeline.remat": "selective", "pipeline.save": names}


CASES = {
    "data · stage · model": Case(
        (2, 2, 2),
        microbatches=4,
        changes={"parallel.zero": 3, "model.qk_norm": True, "model.biases": ("out",)}
        | {"model.heads": 2, "model.kv_heads": 2, "model.head_dim": 36},
    ),
    "overlapped, stage and expert, sharded ends": Case(
        (1, 2, 1),
        microbatches=8,
        changes={**MOE, **NONE, **ENDS_WITH_LAYERS, "model.layers": 4, "pipeline.overlap": True}
        | small.PLAIN_LAYER,
    ),
    "Muon, data and model": Case((2, 1, 2), changes={**MUON, "model.layers": 4}),
    # Only stage 0 has a layer of the last kind: XLA computed its W before a loop of no trips.
    "several kinds, one of them on one stage": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        4,
        changes={**NONE, "model.layers": 7, "model.pattern": ("full", "full", "full", "nope")},
    ),
}
OVERLAPPED = {
    "overlapped, stage and expert": Case(
        (1, 2, 1),
        "dualpipe_v",
        2,
        8,
        changes={**MOE, **NONE, "model.layers": 4, "pipeline.overlap": True},
    ),
    "overlapped, stage, expert and model, two chunks": Case(
        (1, 2, 2), "interleaved", 2, 8, changes={**MOE, **INPUTS, "pipeline.overlap": True}
    ),
    "overlapped, stage, expert and model": Case(
        (1, 2, 2), "dualpipe_v", 2, 8, changes={**MOE, **NONE, "pipeline.overlap": True}
    ),
    "overlapped, stage and model, uneven chunks": Case(
        (1, 2, 2), "dualpipe_v", 2, 8, changes={"model.layers": 7, "pipeline.overlap": True}
    ),
    "overlapped, data, expert and stage, zero 3, selective": Case(
        (2, 2, 1),
        "dualpipe_v",
        2,
        8,
        changes={
            **MOE,
            "parallel.zero": 3,
            "pipeline.remat": "selective",
            "pipeline.overlap": True,
        },
    ),
    "overlapped, data and stage, zero 3, k of n layers": Case(
        (2, 2, 1),
        "dualpipe_v",
        2,
        8,
        changes={"parallel.zero": 3, "pipeline.remat": "full:1", "pipeline.overlap": True},
    ),
}
MORE = OVERLAPPED | {
    "Muon, data, stage, model, copies of shards": Case(
        (2, 2, 2), microbatches=4, changes={**MUON, "parallel.zero": 0}
    ),
    "Muon, data, stage and model, zero 3": Case(
        (2, 2, 2), microbatches=4, changes={**MUON, "parallel.zero": 3}
    ),
    "Muon, whole experts scattered over data, context": Case(
        (2, 1, 1), changes={**MUON, **MOE, "mesh.expert": 1, "mesh.context": 2}
    ),
    "Muon, replica and data, zero 2": Case(
        (2, 1, 2), changes={**MUON, "mesh.replica": 2, "parallel.zero": 2, **GPT2}
    ),
    "several kinds, zero 3": Case(
        (2, 2, 2), microbatches=4, changes={**ALIKE, "parallel.zero": 3, "model.layers": 6}
    ),
    "several forms, stages that differ, zero 3": Case(
        (2, 2, 2), microbatches=4, changes={**TWO_HEAD_SIZES, "parallel.zero": 3, "model.layers": 7}
    ),
    "stage and context, tokens of a window's neighbours": Case(
        (1, 2, 1), microbatches=4, changes={"mesh.context": 2, "model.window": 8}
    ),
    "context, a window for which neighbours are too few, ring": Case(
        (1, 1, 1), changes={"mesh.context": 2, "parallel.context": "ring", "model.window": 12}
    ),
    "several kinds, experts in every second layer": Case(
        (1, 2, 2),
        microbatches=4,
        changes={**MOE, "model.layers": 7, "model.pattern": ("full", "dense")},
    ),
    "stage": Case((1, 7, 1), microbatches=4),
    "data · expert": Case((2, 1, 1), changes={**MOE, "parallel.zero": 3}),
    "hybrid": Case((4, 1, 1), changes={"mesh.replica": 2, "parallel.zero": 3}),
    "model, heads shared": Case((1, 1, 8), changes={"model.kv_heads": 2, "model.biases": ("qkv",)}),
    "data · context · model": Case((2, 1, 2), changes={"mesh.context": 2}),
    "replica": Case((2, 1, 1), changes={"mesh.replica": 4, "parallel.zero": 2}),
    "data, zero 3, gathered by layer": Case((8, 1, 1), changes={"parallel.zero": 3}),
    "data · expert · stage": Case((2, 2, 1), microbatches=4, changes={**MOE, "parallel.zero": 3}),
    "context": Case((1, 1, 1), changes={"mesh.context": 4, **NONE}),
    "data, zero 1": Case((8, 1, 1)),
    "data and model, zero 1, one microbatch": Case((4, 1, 2), microbatches=1),
    "stage, and data that divides nothing": Case(
        (3, 2, 1), microbatches=4, changes={"parallel.zero": 3, "data.batch_size": 24, **ENDS}
    ),
    "data, zero 0": Case((8, 1, 1), changes={"parallel.zero": 0}),
    "data, zero 2": Case((8, 1, 1), changes={"parallel.zero": 2, **NONE}),
    "data, zero 3, gathered once, in a V": Case(
        (2, 2, 2),
        "zb_v",
        2,
        4,
        changes={
            "parallel.zero": 3,
            "parallel.gather": "step",
            "model.tied_embeddings": True,
            **ENDS,
        },
    ),
    "stage and expert, selective, latent attention": Case(
        (2, 2, 1), "zb_v", 2, 4, changes={**MOE, **MLA, "pipeline.remat": "selective"}
    ),
    "expert, context and model": Case(
        (1, 1, 2),
        changes={**MOE, "mesh.context": 2, "model.shared_experts": 1, "model.expert_room": 1.5},
    ),
    "expert in two steps, stage": Case((1, 2, 1), "zb_h1", 1, 4, changes=TWO_STEPS),
    "expert in two steps to 4 nodes, room": Case(
        (1, 1, 1),
        changes={
            **TWO_STEPS,
            "mesh.expert": 8,
            "model.experts": 16,
            "model.experts_per_token": 5,
            "model.expert_room": 1.5,
            "parallel.expert_nodes": 4,
            "pipeline.remat": "full",
        },
    ),
    "FP8, expert in two steps and model": Case(
        (1, 1, 2), changes={**FP8, **TWO_STEPS, "pipeline.remat": "full"}
    ),
    "expert in two steps, data, none": Case((2, 1, 1), changes={**TWO_STEPS, **NONE}),
    "expert in two steps, tokens saved": Case(
        (1, 2, 1), microbatches=4, changes={**TWO_STEPS, **saving("attention", "routed")}
    ),
    "expert by capacity, stage and model": Case(
        (1, 2, 2),
        microbatches=4,
        changes={**MOE, **NONE, "model.capacity_factor": 1.5, "model.biases": ("router",)},
    ),
    "model, latent attention": Case(
        (2, 1, 2), changes={**MLA, "model.value_head_dim": 8, "model.biases": ("qkv", "mlp")}
    ),
    "stage and context by heads, selective": Case(
        (1, 2, 1),
        microbatches=4,
        changes={
            "mesh.context": 2,
            "parallel.context": "ulysses",
            "pipeline.remat": "selective",
            **APART,
        },
    ),
    "dense layers first": Case(
        (2, 2, 2),
        microbatches=4,
        changes={
            **MOE,
            "mesh.expert": 1,
            "parallel.zero": 3,
            "model.dense_layers": 2,
            "model.layers": 6,
        },
    ),
    "dense layers first, one stage": Case(
        (2, 1, 2), changes={**MOE, "model.dense_layers": 2, "model.layers": 2}
    ),
    "ring": Case((1, 1, 2), changes={"mesh.context": 4, "parallel.context": "ring"}),
    "ring, documents, none": Case(
        (1, 1, 1), changes={"mesh.context": 4, "parallel.context": "ring", **APART, **NONE}
    ),
    "stage and ring, documents": Case(
        (1, 2, 1),
        microbatches=4,
        changes={"mesh.context": 4, "parallel.context": "ring", **APART},
    ),
    "stage, ring and model, selective": Case(
        (1, 2, 2),
        "zb_h1",
        1,
        4,
        changes={"mesh.context": 2, "parallel.context": "ring", "pipeline.remat": "selective"},
    ),
    "stage and context by heads": Case(
        (2, 2, 1), microbatches=4, changes={"mesh.context": 2, "parallel.context": "ulysses"}
    ),
    "stage, context and model, selective": Case(
        (1, 2, 2),
        microbatches=4,
        changes={"mesh.context": 2, "pipeline.remat": "selective", **APART},
    ),
    "sharded ends, data, stage, expert": Case(
        (2, 2, 1), microbatches=4, changes={**MOE, **ENDS_WITH_LAYERS, **APART}
    ),
    "sharded ends, stage, context, expert": Case(
        (1, 2, 1),
        microbatches=4,
        changes={**MOE, **ENDS_WITH_LAYERS, **GPT2, "mesh.context": 2, "parallel.zero": 3},
    ),
    "sharded ends, data, zero 3, gathered once": Case(
        (2, 2, 1),
        microbatches=4,
        changes={**SHARDED_ENDS, **ENDS, "parallel.zero": 3, "parallel.gather": "step"},
    ),
    "sharded ends, data, context and model, one stage": Case(
        (2, 1, 2), changes={"mesh.context": 2, **SHARDED_ENDS}
    ),
    "sharded ends, data and stage, shared vocabulary": Case(
        (2, 2, 1),
        microbatches=4,
        changes={**SHARDED_ENDS, "pipeline.vocabulary": "parallel", "parallel.zero": 2},
    ),
    "further tokens": Case(
        (1, 2, 2), microbatches=4, changes={"mesh.context": 2, "model.mtp_depth": 2, **NONE}
    ),
    "further tokens, zero 3, latent": Case(
        (2, 1, 2), changes={"model.mtp_depth": 1, "parallel.zero": 3, **LATENT}
    ),
    "replica, zero 0, gpt2 form": Case(
        (2, 2, 1), "interleaved", 2, 4, changes={"mesh.replica": 2, "parallel.zero": 0, **GPT2}
    ),
    "stage and model, two values saved": Case(
        (1, 2, 2), microbatches=4, changes=saving("attention", "mlp_in")
    ),
    "model, one value saved": Case((1, 1, 2), changes=saving("attention", "attention_norm")),
    "expert and model, tokens saved": Case(
        (1, 1, 2), changes={**MOE, **saving("attention", "routed")}
    ),
    "stage, expert and model, products saved": Case(
        (1, 2, 2), microbatches=4, changes={**MOE, **saving("qkv", "mlp_in", "router")}
    ),
    "FP8, expert and model, one value saved": Case(
        (1, 1, 2), changes={**FP8, **MOE, **saving("mlp_in")}
    ),
    "FP8, expert and model, selective": Case(
        (1, 1, 2), changes={**FP8, **MOE, "pipeline.remat": "selective"}
    ),
    "context by heads, one value saved": Case(
        (1, 1, 1),
        changes={"mesh.context": 2, "parallel.context": "ulysses", **saving("mlp_in")},
    ),
    "ring, one value saved": Case(
        (1, 2, 1),
        microbatches=4,
        changes={"mesh.context": 2, "parallel.context": "ring", **saving("mlp_in")},
    ),
    "FP8, data, stage and model": Case(
        (2, 2, 2), microbatches=4, changes={**FP8, "parallel.zero": 3, "model.kv_heads": 1}
    ),
    "MXFP8, data, stage and model": Case(
        (2, 2, 2), microbatches=4, changes={**MXFP8, "parallel.zero": 3}
    ),
    "MXFP8, data and model, heads shared": Case(
        (2, 1, 2), changes={**MXFP8, "model.kv_heads": 1, "model.head_dim": 64}
    ),
    "MXFP8, context, stage and model, named": Case(
        (1, 2, 2),
        microbatches=4,
        changes={
            **MXFP8,
            "data.sequence_length": 256,
            "mesh.context": 2,
            **saving("attention", "mlp_in"),
        },
    ),
    "FP8, data and expert": Case((2, 1, 1), changes={**FP8, **MOE, "parallel.zero": 3}),
    "FP8, expert by capacity and model, selective": Case(
        (1, 2, 2),
        microbatches=4,
        changes={**FP8, **MOE, "pipeline.remat": "selective", "model.capacity_factor": 1.5},
    ),
    "FP8, model, latent attention": Case((2, 1, 2), changes={**FP8, **MLA, "parallel.zero": 3}),
    "FP8, weights' gradients in the compute type": Case(
        (2, 1, 2), changes={**FP8, "precision.fp8_weight_gradients": "compute"}
    ),
    "data, stage and model, zero 3, layers' inputs saved": Case(
        (2, 2, 2), "interleaved", 2, 4, changes={"parallel.zero": 3, **INPUTS}
    ),
    "stage, expert and model, layers' inputs saved": Case(
        (1, 2, 2), microbatches=4, changes={**MOE, **INPUTS}
    ),
    "latent attention, k of n layers' inputs saved": Case(
        (2, 2, 1), "zb_v", 2, 4, changes={**MLA, **INPUTS, "pipeline.remat": "full:1"}
    ),
    "stage and model, norms after and over projections, a gate": Case(
        (1, 2, 2),
        microbatches=4,
        changes={**PROJECTION, **NONE, "model.norm_place": "after", "model.attention_gate": True},
    ),
    "model, norms before and after, heads shared, selective": Case(
        (2, 1, 4),
        changes={**PROJECTION, "model.norm_place": "both", "pipeline.remat": "selective"}
        | {"model.kv_heads": 2, "model.norm_weight": "one_plus", "model.activation": "geglu"},
    ),
    "data, stage and model, parallel blocks, zero 3": Case(
        (2, 2, 2),
        microbatches=4,
        changes={"parallel.zero": 3, "model.parallel_block": True, **GPT2},
    ),
    "expert and model, biases and gates of experts": Case(
        (1, 1, 2),
        changes={**MOE, "model.shared_experts": 1, "model.shared_gate": True}
        | {"model.biases": ("experts", "mlp"), "model.norm_place": "both"},
    ),
    "data and expert, biases and gates of experts, zero 3": Case(
        (2, 1, 1),
        changes={**MOE, "parallel.zero": 3, "model.shared_experts": 1, "model.shared_gate": True}
        | {"model.biases": ("experts",), "pipeline.remat": "selective"},
    ),
    "data, stage and model, gpt2 form, zero 2": Case(
        (2, 2, 2), microbatches=4, changes={"parallel.zero": 2, **NONE, **GPT2}
    ),
}


def products(setup: Setup, program: Program, stage: int) -> float:
    """Operations of a step's dots and convolutions on a device of the stage."""
    costs = InstructionCosts(program)
    return sum(
        run.times * costs.flops(run.instruction)
        for run in step_loops(program, setup, stage).executed()
    )


def by_axes(found: dict, others: bool = False) -> collections.Counter:
    """(kind, axes) → bytes; of what stands in the manual region and the optimizer, and `others`:
    what has lost its name."""
    total: collections.Counter = collections.Counter()
    for (op, kind, axes, _), size in found.items():
        total[kind, axes] += size if others or op != "other" else 0
    return +total


def in_steps(found: dict) -> collections.Counter:
    """(kind, devices) → bytes of tokens on their way to experts and back."""
    total: collections.Counter = collections.Counter()
    for (_, kind, axes, devices), size in found.items():
        total[kind, devices] += size if axes == ("expert",) and kind == EXCHANGE else 0
    return +total


@functools.cache
def compiled_case(case: str) -> tuple[Config, Step, Program]:
    cfg = (CASES | MORE)[case].config(SHAPES)
    return cfg, *compiled_account.compile_train(cfg, small.mesh_of(cfg))


@pytest.mark.parametrize("case", small.named(CASES, MORE))
def test_as_compiled(case):
    cfg, step, program = compiled_case(case)
    for stage in {0, cfg.mesh.stage - 1}:
        compiled = compiled_account.read(step.mesh.shape, step.setup, program, stage)
        predicted: collections.Counter = collections.Counter()
        for row in step_counts(cfg, cpu=True).volume(stage):
            if row.size > FEW:
                predicted[row.op, row.kind, row.axes, row.devices] += row.bytes
        got, expected = by_axes(compiled), by_axes(predicted)
        assert got.keys() == expected.keys()
        assert {key: got[key] / expected[key] for key in got} == pytest.approx(
            dict.fromkeys(got, 1), abs=0.05
        )
        if cfg.parallel.expert_nodes > 1:  # also what goes across nodes
            assert in_steps(compiled) == pytest.approx(in_steps(predicted), rel=0.001)
        # What is left to the partitioner is the batch, four bytes a token.
        assert sum(n for (op, *_), n in compiled.items() if op == "other") < 0.02 * sum(
            compiled.values()
        )
        if not cfg.model.experts and cfg.mesh.context == 1:
            planned = step_flops.by_op(step_counts(cfg), stage)
            # Short sequences attend to all keys: twice the causal half. They keep the scores, so B
            # has no product again, or all of them with selective recomputation.
            layout = step_counts(cfg).collectives.layout
            again = ATTENTION_BACKWARD + layout.makes_again(ATTENTION)
            again /= step_flops.ATTENTION_BACKWARD_ONCE + (layout.remat == "selective")
            attention = sum(
                2 * cost.attention / (again if op == "B" else 1) for op, cost in planned.items()
            )
            expected = sum(cost.weights for cost in planned.values()) + attention
            # Muon's iterations, shared out over the devices of a stage
            work = step_model_of(cfg, load("h100"))
            expected += work.update.newton_schulz_flops() / (cfg.mesh.data * cfg.mesh.model)
            assert products(step.setup, program, stage) == pytest.approx(expected, rel=0.01)


AHEAD = {
    "zb_h1, none": {"pipeline.schedule": "zb_h1", **NONE},
    "zero 3, heads shared": {"parallel.zero": 3, "model.kv_heads": 1},
    "ring": {"mesh.data": 1, "mesh.context": 2, "parallel.context": "ring"},
}


@pytest.mark.parametrize("case", AHEAD)
@compiled_for(*KINDS)
def test_as_compiled_ahead_of_time(platform, case):
    """Also over `model`, and no sum of a weight or an activation is an all-reduce where a
    reduce-scatter was meant."""
    changes = {"model.layers": 8, "pipeline.repeats": 1} | AHEAD[case]
    cfg = configs.replace(Config(), ahead.MODEL | changes).resolve()
    program, mesh = (
        ahead.compile_step(platform, changes).program,
        {axis: getattr(cfg.mesh, axis) for axis in AXES},
    )
    for stage in (0, cfg.mesh.stage - 1):
        # the program is that of the gradients
        rows = [row for row in step_counts(cfg).volume(stage) if row.op != "optimizer"]
        total = sum(row.bytes for row in rows)
        expected = by_axes(
            {(row.op, row.kind, row.axes, n): row.bytes for n, row in enumerate(rows)}
        )
        got = by_axes(compiled_account.read(mesh, make_setup(cfg), program, stage), others=True)
        # Of what is small a compiler may make what it likes.
        got, expected = (
            {key: n for key, n in found.items() if n > total / 100} for found in (got, expected)
        )
        assert got == pytest.approx(expected, rel=0.05)


def test_the_busiest_stage():
    cfg = small.config((1, 4, 1), "1f1b", 1, 4, SHAPES)
    counts = step_counts(cfg)
    totals = [sum(row.bytes for row in counts.volume(stage)) for stage in range(4)]
    assert totals[counts.busiest_stage()] == max(totals) > min(totals)


def test_bytes_of_the_ring_algorithms():
    """Of 8 devices: a gather brings 7 parts by every link, a permute sends all that there is."""
    assert [
        sent(kind, 800, 8) for kind in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
    ] == [700, 700, 700, 1400]
    assert sent("collective-permute", 800, 8) == 800
    assert CollectiveCount("F", "all-gather", ("data",), 8, 3, 800).bytes == 2100


@pytest.mark.parametrize("outer", ["float32", "int8"])
def test_an_exchange_as_compiled(outer):
    changes = {"mesh.replica": 2, "train.diloco_inner_steps": 5, "precision.outer": outer}
    cfg = small.config((2, 1, 2), "1f1b", 1, 2, SHAPES | changes)
    step = make_step(cfg, small.mesh_of(cfg))
    with jax.set_mesh(step.mesh):
        program = Program(step.exchange.lower(step.abstract_state()).compile().as_text())
    compiled = by_axes(
        {
            ("exchange", *key): n
            for (_, *key), n in compiled_account.read(
                step.mesh.shape, step.setup, program, 0
            ).items()
        }
    )
    predicted = by_axes(
        {
            (row.op, row.kind, row.axes, i): row.bytes
            for i, row in enumerate(step_counts(cfg, cpu=True).exchange_volume())
            if row.size > FEW
        }
    )
    assert compiled.keys() == predicted.keys()
    assert ("all-reduce" if outer == "float32" else "all-to-all", ("replica",)) in predicted
    assert {key: compiled[key] / predicted[key] for key in compiled} == pytest.approx(
        dict.fromkeys(compiled, 1), abs=0.05
    )
    assert (
        not [row for row in step_counts(cfg).volume() if "replica" in row.axes]
        and not step_counts(small.config()).exchange_volume()
    )


def test_sums_of_16_bit_numbers_on_cpu():
    cfg = small.config((1, 1, 2), changes={**SHAPES, "precision.compute": "bfloat16"})
    total = lambda cpu, kind: sum(
        row.bytes for row in step_counts(cfg, cpu).volume() if row.kind == kind
    )
    assert total(True, "all-gather") == total(False, "all-gather") and total(
        True, "reduce-scatter"
    ) == 2 * total(False, "reduce-scatter")


def test_nothing_is_sent_on_one_device():
    assert step_counts(small.config()).volume() == []


def exchanged_by_muon(mesh: dict[str, int], setup: Setup, program: Program) -> float:
    """Bytes that a device sends for Muon's iterations. They are loops, and none has a
    collective."""
    loops, sends = set(), 0.0
    for run in step_loops(program, setup, 0).executed():
        loops |= {loop.name for loop in run.loops if "/dealt_" in loop.op_name}
        for c in collectives(program, run.instruction, mesh):
            if "/optimizer/shard_map" in c.instruction.op_name:
                assert not run.loops, c.instruction.text[:200]
                sends += run.times * sent(c.kind, c.sending, c.devices)
    assert loops
    return sends


def test_muon_iterates_without_collectives():
    """Matrices cross the devices once each way."""
    _, step, program = compiled_case("Muon, data and model")
    sends = exchanged_by_muon(step.mesh.shape, step.setup, program)
    matrices = sum(p.size for p in step.layout.parameters() if p.spec.orthogonalized)
    assert 0 < sends * step.mesh.size <= 2 * 4 * matrices


@compiled_for(*KINDS)
def test_muon_ahead_of_time(platform):
    """The same on TPUs and GPUs, where the bytes are those of bfloat16, as planned."""
    changes = {**MUON, "parallel.zero": 3, "model.width": 1024, "model.heads": 8}
    changes |= {"model.layers": 8, "model.vocab_size": 8192, "mesh.data": 8, "mesh.stage": 1}
    changes |= {"pipeline.microbatches": 1, "parallel.collective_matmul": "off"}
    cfg = configs.replace(Config(), ahead.MODEL | changes).resolve()
    mesh = {axis: getattr(cfg.mesh, axis) for axis in AXES}
    program = ahead.compile_step(platform, changes, program="train").program
    sends = exchanged_by_muon(mesh, make_setup(cfg), program)
    rows = [row for row in step_counts(cfg).volume() if row.op == "optimizer"]
    planned = sum(row.bytes for row in rows if row.kind == EXCHANGE)
    assert sends == pytest.approx(planned, rel=0.02)
