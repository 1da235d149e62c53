"""What a traced step's time went into: kinds of instructions, what counts of several things at
once, and a real trace."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support import hardware_file

from jaxtrain.config import Config, MeshConfig, ModelConfig, PipelineConfig, TrainConfig, replace
from jaxtrain.parallel.attention.causal import AttentionSettings, attend_causal
from jaxtrain.planner.programs.measured_step import (
    LEAST,
    STEPS_MEASURED,
    AfterWarmUp,
    Kind,
    Kinds,
    Rank,
    measured_parts,
    shared_out,
    without_waiting,
)
from jaxtrain.planner.programs.trace import TraceError, TraceEvent, read
from jaxtrain.planner.search.compare import plan_at_hand
from jaxtrain.run.files import PLANNED
from jaxtrain.run.wall_clock import Phase, WallClock
from jaxtrain.training.profile import WARM_UP, Profile

MESH = {"replica": 1, "data": 2, "stage": 2, "context": 1, "expert": 1, "model": 2}
PROGRAM = """HloModule jit_train, is_scheduled=true

%fused (p: bf16[8,4], q: bf16[4,8]) -> bf16[8,8] {
  %p = bf16[8,4]{1,0} parameter(0)
  %q = bf16[4,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit/F0/dot"}
}

%scores (c: bf16[8,4], e: bf16[4,8]) -> bf16[8,8] {
  %c = bf16[8,4]{1,0} parameter(0)
  %e = bf16[4,8]{1,0} parameter(1)
  ROOT %dot.2 = bf16[8,8]{1,0} dot(%c, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="transpose(attention)/x"}
}

ENTRY %main (a: bf16[8,4], b: bf16[4,8]) -> bf16[8,8] {
  %a = bf16[8,4]{1,0} parameter(0), metadata={op_name="params['attention']"}
  %b = bf16[4,8]{1,0} parameter(1)
  %copied = bf16[8,4]{1,0} copy(%a), metadata={op_name="params['attention']"}
  %product = bf16[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
  %attended = bf16[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%scores
  %softmax = bf16[8,8]{1,0} exponential(%attended), metadata={op_name="jit/B0/attention/exp"}
  %splash = bf16[8,8]{1,0} custom-call(%product), custom_call_target="tpu_custom_call", \
metadata={op_name="jit/F0/splash/pallas_call"}
  %gmm = bf16[8,8]{1,0} custom-call(%product), custom_call_target="tpu_custom_call", \
metadata={op_name="jit/F0/gmm/pallas_call"}
  %room = bf16[8,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %step = bf16[8,8]{1,0} multiply(%product, %product), metadata={op_name="jit/optimizer/mul"}
  %sum = bf16[8,8]{1,0} all-reduce(%product), replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
to_apply=%add
  %both = bf16[8,8]{1,0} all-reduce(%product), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add
  %sent-start = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) collective-permute-start(%product), \
source_target_pairs={{0,2},{2,0}}
  %sent-done = bf16[8,8]{1,0} collective-permute-done(%sent-start)
  %fetch-start = (bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[]) copy-start(%product)
  %fetch-done = bf16[8,8]{1,0} copy-done(%fetch-start)
  %away = bf16[8,8]{1,0:S(5)} copy(%product)
  %back-start = (bf16[8,8]{1,0}, bf16[8,8]{1,0:S(5)}, u32[]) copy-start(%away)
  %back-done = bf16[8,8]{1,0} copy-done(%back-start)
  %loop = bf16[8,8]{1,0} while(%product), condition=%c, body=%d
  ROOT %small = bf16[8,8]{1,0} call(%product), to_apply=%d
}
"""


def part_of(kinds: Kinds, instruction: str, kernel: str = "") -> str | None:
    kind = kinds.of(TraceEvent(instruction, kernel, 0.0, 1.0))
    return kind and kind.part


def test_kinds_of_instructions():
    kinds = Kinds(PROGRAM, MESH)
    expected = {
        "product": "matmuls",
        "attended": "attention",
        "softmax": "attention",
        "splash": "attention",
        "gmm": "matmuls",
    }
    expected |= {
        "step": "optimizer",
        "copied": "memory",
        "room": "memory",
        "small": "other",
        "loop": None,
        "a": None,
    }
    expected |= {
        "sum": "data",
        "both": "data",
        "sent-start": "stage",
        "sent-done": "stage",
        "fetch-start": "memory",
        "fetch-done": "memory",
        "away": "host",
        "back-start": "host",
        "back-done": "host",
    }
    assert {name: part_of(kinds, name) for name in expected} == expected
    rank = lambda name: kinds.of(TraceEvent(name, "", 0.0, 1.0)).rank
    ranks = [Rank.COMPUTES, Rank.COMMUNICATES, Rank.ENCLOSES, Rank.ENCLOSES]
    assert [rank(name) for name in ("product", "sum", "fetch-done", "small")] == ranks


@pytest.mark.parametrize(
    "kernel, part",
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "matmuls"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matmuls"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
        ("loop_add_fusion_7", "memory"),
        ("step", "optimizer"),  # an instruction's name
        ("sent_done", "stage"),
        ("MemcpyD2D", "memory"),
        ("MemcpyD2H", "host"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ],
)
def test_kinds_of_kernels_that_name_no_instruction(kernel, part):
    assert part_of(Kinds(PROGRAM, MESH), "", kernel) == part


def test_communication_over_the_only_axis():
    assert (
        part_of(Kinds(PROGRAM, MESH | {"stage": 1, "model": 1}), "", "ncclDevKernel_AllGather")
        == "data"
    )


PRODUCT, PASS, SENT = Kind("matmuls"), Kind("memory"), Kind("data", Rank.COMMUNICATES)
CALL, STAGE = Kind("other", Rank.ENCLOSES), Kind("stage", Rank.COMMUNICATES)


@pytest.mark.parametrize(
    "spans, exposed, hidden",
    [
        ([], {}, {}),
        ([(0, 2, PRODUCT), (3, 4, PRODUCT)], {"matmuls": 3}, {}),
        ([(0, 4, PRODUCT), (2, 4, PASS)], {"matmuls": 3, "memory": 1}, {}),
        ([(0, 4, PRODUCT), (0, 4, PRODUCT), (0, 4, PASS)], {"matmuls": 8 / 3, "memory": 4 / 3}, {}),
        ([(0, 4, PRODUCT), (3, 6, SENT)], {"matmuls": 4, "data": 2}, {"data": 1}),
        (
            [(0, 4, SENT), (2, 4, STAGE), (1, 2, PRODUCT)],
            {"matmuls": 1, "data": 2, "stage": 1},
            {"data": 1},
        ),
        ([(0, 10, CALL), (1, 3, PRODUCT), (3, 4, SENT)], {"other": 7, "matmuls": 2, "data": 1}, {}),
        ([(0, 0, PRODUCT), (1, 2, PASS)], {"memory": 1}, {}),
    ],
)
def test_what_counts_at_each_moment(spans, exposed, hidden):
    parts = shared_out(spans)
    assert dict(parts.exposed) == pytest.approx(exposed) and dict(parts.hidden) == pytest.approx(
        hidden
    )


def at(name: str, *times: tuple[float, float]) -> list[TraceEvent]:
    """Events of an instruction, each with its begin and end."""
    return [TraceEvent(name, "", *each) for each in times]


def test_a_step_is_the_sum_of_its_parts():
    """Of the device that computes most; what nothing accounts for is waiting."""
    kinds = Kinds(PROGRAM, MESH)
    events = {0: at("product", (0.0, 1.0)), 1: at("product", (0.0, 3.0)) + at("sum", (2.0, 5.0))}
    found = measured_parts(events, kinds, 2, 4.0)
    assert found.device == 1 and found.exposed == pytest.approx(
        {"matmuls": 1.5, "data": 1.0, "waiting": 1.5}
    )
    assert found.hidden == pytest.approx({"data": 0.5}) and sum(
        found.exposed.values()
    ) == pytest.approx(4.0)
    with pytest.raises(TraceError, match="no work"):
        measured_parts({0: at("sum", (0.0, 1.0))}, kinds, 2, 4.0)


def test_the_wait_for_who_comes_later():
    """Each time the last one to come says how long the sum itself takes; a device that runs one of
    its own as often as no other waits for nobody that is seen."""
    kinds = Kinds(PROGRAM, MESH)
    events = {
        0: at("sum", (10.0, 15.0), (1.0, 5.0))
        + at("both", (20.0, 29.0))
        + at("product", (0.0, 1.0)),
        1: at("sum", (4.0, 5.0), (9.0, 15.0)) + at("both", (20.0, 21.0), (22.0, 23.0)),
    }
    arrived = without_waiting(events, kinds)
    times = lambda device, name: [
        (e.begin, e.end) for e in arrived[device] if e.instruction == name
    ]
    assert times(0, "sum") == [(4.0, 5.0), (10.0, 15.0)] == times(1, "sum")
    assert (
        times(0, "both") == [(20.0, 29.0)]
        and times(1, "both") == [(20.0, 21.0), (22.0, 23.0)]
        and times(0, "product") == [(0.0, 1.0)]
    )
    assert measured_parts(events, kinds, 1, 30.0).exposed == pytest.approx(
        {"matmuls": 1.0, "data": 15.0, "waiting": 14.0}
    )


def test_a_real_trace(tmp_path):
    """Products, attention, a sum over `data` and an update on two simulated devices, traced as
    training is: each part is there, and all parts are the step."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2, 1, 1, 1, 1), tuple(MESH))
    x = jax.device_put(jnp.ones((4, 128, 64)), NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.eye(64), NamedSharding(mesh, P()))

    def loss(w, x):
        q = (x @ w).reshape(*x.shape[:2], 4, 16)
        return (attend_causal(q, q, q, None, AttentionSettings(kernel="xla", window=32)) ** 2).sum()

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def train(w, x):
        gradient = jax.shard_map(
            lambda w, x: jax.lax.psum(jax.grad(loss)(w, x), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )(w, x)
        with jax.named_scope("optimizer"):
            return w - 1e-6 * gradient

    compiled = train.lower(w, x).compile()
    profile = Profile(tmp_path, 0, 2, clock := WallClock())
    clock.enter(Phase.STEPPING)
    for at in range(WARM_UP + 3):
        profile.before(at)
        w = compiled(w, x)
        profile.after(at + 1, w)
    found = measured_parts(
        read(tmp_path, "jit_train"),
        Kinds(compiled.as_text(), MESH | {"stage": 1, "model": 1}),
        2,
        profile.step_time_s,
    )
    assert {"matmuls", "attention", "data", "optimizer", "waiting"} <= found.exposed.keys(), found
    assert (
        sum(found.exposed.values()) == pytest.approx(profile.step_time_s, rel=0.05)
        and not {"stage", "communication"} & found.exposed.keys()
    )
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


STEP, SLOW = 0.5, 9.0
CONFIG = Config(
    model=ModelConfig(layers=4, width=32, heads=4),
    mesh=MeshConfig(data=1, stage=2),
    pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
    train=TrainConfig(steps=100),
)


class Run:
    """A loop without devices: steps take as long as they are told to."""

    def __init__(
        self, folder, start: int = 0, profile_steps: int = 0, program=None, known: bool = True
    ):
        self.now, self.lines = 0.0, []
        self.clock = WallClock(0.0, lambda: self.now)
        self.clock.enter(Phase.STEPPING)
        self.profile = Profile(folder / "profile", start, profile_steps, self.clock)
        config = replace(
            CONFIG, {"train.hardware": str(hardware_file.write(folder)) if known else ""}
        ).resolve()
        self.planned = plan_at_hand(config, "cpu").prediction
        self.measured = AfterWarmUp(
            self.planned, program, folder, self.profile, self.clock, self.lines.append
        )
        self.at = start

    def steps(self, count: int, seconds: float = STEP) -> None:
        for _ in range(count):
            self.now += seconds
            self.at += 1
            self.measured.after(self.at)


def test_the_median_of_steps_after_warm_up(tmp_path):
    """The first steps are slow, as is one of those that count; saves between steps are none of
    their time."""
    run = Run(tmp_path, start=6)
    run.steps(WARM_UP, SLOW)
    run.steps(STEPS_MEASURED // 2)
    with run.clock.phase(Phase.SAVING):
        run.now += SLOW
    run.steps(1, SLOW)
    run.steps(STEPS_MEASURED - STEPS_MEASURED // 2 - 1)
    assert run.lines == []
    run.steps(1)
    (line,) = run.lines
    assert (
        f"planned step {run.planned.seconds:.4g} s (simulated), measured 0.5 s "
        f"({STEP / run.planned.seconds:.2f} x)" in line
    )
    record = json.loads((tmp_path / PLANNED).read_text())
    assert (
        record["step"] == run.at == 6 + WARM_UP + 1 + STEPS_MEASURED
        and record["steps"] == STEPS_MEASURED
    )
    assert record["step_time_s"] == pytest.approx(STEP) and record["planned"] == dict(
        run.planned.time.exposed
    )
    run.steps(50)
    run.measured.finish(run.at)
    assert len(run.lines) == 1


def test_traced_steps_do_not_count(tmp_path):
    run = Run(tmp_path, profile_steps=3)
    run.steps(WARM_UP + 3, SLOW)
    run.steps(1 + STEPS_MEASURED)
    assert len(run.lines) == 1 and "measured 0.5 s" in run.lines[0]


def test_a_run_that_goes_back(tmp_path):
    """The way back is no step; those before it count."""
    run = Run(tmp_path)
    run.steps(WARM_UP + 5)
    run.measured.go_back(None)
    run.steps(1, SLOW)
    run.steps(STEPS_MEASURED)
    record = json.loads((tmp_path / PLANNED).read_text())
    assert record["step_time_s"] == pytest.approx(STEP) and record["steps"] == STEPS_MEASURED


@pytest.mark.parametrize("laps", [LEAST - 1, LEAST])
def test_a_short_run_says_it_at_its_end(laps, tmp_path):
    run = Run(tmp_path)
    run.steps(WARM_UP + 1 + laps)
    assert run.lines == []
    run.measured.finish(run.at)
    assert len(run.lines) == (laps >= LEAST) and (tmp_path / PLANNED).exists() == (laps >= LEAST)


def test_nothing_is_said_of_devices_that_are_not_known(tmp_path):
    run = Run(tmp_path, known=False)
    run.steps(100)
    run.measured.finish(run.at)
    assert run.lines == [] and not (tmp_path / PLANNED).exists()


class Broken:
    """A program whose text is none."""

    def as_text(self) -> str:
        return "HloModule jit_train\n\n%what is this"


def test_a_trace_that_cannot_be_read_ends_no_run(tmp_path):
    """A line, and the record without parts."""
    run = Run(tmp_path, profile_steps=2, program=Broken())
    run.profile.step_time_s = STEP
    run.steps(100)
    warning, line, *_ = run.lines
    assert (
        warning.startswith("warning: the profile cannot be read by part (TraceError: ")
        and "\n" not in warning
    )
    assert (
        "measured 0.5 s" in line and json.loads((tmp_path / PLANNED).read_text())["trace"] is None
    )


def test_a_folder_that_cannot_be_written(tmp_path):
    run = Run(tmp_path)
    (tmp_path / PLANNED).mkdir()
    run.steps(100)
    assert (
        "measured 0.5 s" in run.lines[0]
        and run.lines[-1].startswith("warning: ")
        and "training goes on" in run.lines[-1]
    )
