"""Several steps in one program (`pipeline.steps_per_program`): losses, norms, metrics and state are
bit for bit those of one step at a time, with clipped and with skipped steps among them."""

import jax
import numpy as np
import pytest
from support import plain_loop, small
from support.small import Case

from jaxtrain import config as configs
from jaxtrain.training.one_step import StepMetrics
from jaxtrain.training.several_steps import CompiledSteps
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step, make_step

SKIP = {"train.on_nonfinite": "skip"}
# The first cases' norms are between 0.5 and 1.1; see `test_same_bits` for what this makes of them.
UNCLIPPED = {"optimizer.clip_norm": 100.0}
END_STAGES = {"pipeline.vocabulary": "end_stages"}
TIED = {"model.tied_embeddings": True, **UNCLIPPED}
SAMPLE = Case(
    (2, 2, 1), "zb_h2", 1, 3, UNCLIPPED | {"model.layers": 2, "pipeline.steps_per_program": 2}
)
MORE = {
    "data 2, stage 4": Case((2, 4, 1), "zb_h2", 1, 8, UNCLIPPED),
    "stage 8, odd microbatches": Case((1, 8, 1), "zb_h2", 1, 15, UNCLIPPED | {"model.layers": 11}),
    "data 2, stage 2, model 2, 5 microbatches": Case(
        (2, 2, 2), "zb_h2", 1, 5, UNCLIPPED | END_STAGES
    ),
    "zb_v, tied, one stage for both ends, zero 0": Case(
        (2, 2, 1), "zb_v", 2, 4, TIED | END_STAGES | {"parallel.zero": 0}
    ),
    "tied over two stages": Case((2, 2, 1), "zb_h1", 1, 4, TIED | END_STAGES),
    "tied, shared vocabulary": Case((2, 2, 1), "zb_h1", 1, 4, TIED),
    # Lion is equal with XLA's own flags, and not with those of this suite (docs/log.md).
    "1f1b, full remat, 7 layers": Case(
        (1, 4, 1), "1f1b", 1, 5, UNCLIPPED | {"pipeline.remat": "full", "model.layers": 7}
    ),
    "auto, partial remat, no clipping": Case(
        (2, 2, 1), "auto", 0, 6, {"pipeline.remat": "selective:1", "optimizer.clip_norm": 0.0}
    ),
    "replica 2, context 2": Case(
        (1, 2, 1), "zb_h1", 1, 3, UNCLIPPED | {"mesh.replica": 2, "mesh.context": 2}
    ),
    "bfloat16": Case((2, 2, 1), "zb_h2", 1, 3, UNCLIPPED | {"precision.compute": "bfloat16"}),
    "dense layer, predicted tokens, documents": Case(
        (1, 2, 1),
        "zb_h1",
        1,
        3,
        UNCLIPPED | {"model.mtp_depth": 1, "data.attend_across_documents": False},
    ),
    "clipped": Case((2, 2, 1), "zb_h2", 1, 3, {"optimizer.clip_norm": 0.7}),
}


class Programs:
    """The compiled programs of a case, with its batches and its first state."""

    def __init__(self, case: Case, steps: int, shared: dict):
        cfg = case.config({"pipeline.steps_per_program": steps} | small.PLAIN_LAYER | shared)
        self.cfg, self.step = cfg, make_step(cfg, small.mesh_of(cfg))
        with jax.set_mesh(self.step.mesh):
            number = cfg.pipeline.steps_per_program
            self.several = CompiledSteps(self.step.lower().compile(), number)

    def batches(self, count: int, spoilt: tuple[int, ...] = ()) -> list[dict]:
        """Batches in order; a token of the `spoilt` ones has a weight that is not a number."""
        made = [small.batch(self.cfg, index) for index in range(count)]
        for index in spoilt:
            made[index]["weights"][0, 3] = np.nan
        return made

    def run(self, train, batches: list[dict]) -> tuple[TrainState, list[dict]]:
        """The state and the metrics of each step. train: (state, batches) → (state, metrics)"""
        with jax.set_mesh(self.step.mesh):
            state = small.first_state(self.step, plain_loop.weights(self.cfg))
            metrics, number = [], self.several.number
            for begin in range(0, len(batches), number):
                some = batches[begin : begin + number]
                placed = [small.place_batch(self.step, self.cfg, batch) for batch in some]
                state, results = train(state, placed)
                results = jax.device_get(results)
                metrics += [{k: a[i] for k, a in results.items()} for i in range(len(some))]
            return jax.device_get(state), metrics

    def together(self, state: TrainState, batches: list[dict]) -> tuple[TrainState, StepMetrics]:
        """All steps together, or the rest of the run one at a time."""
        full = len(batches) == self.several.number
        return (self.several.together if full else self.several.alone)(state, batches)


def one_at_a_time(step: Step):
    """The ordinary program of one step as the `train` of `Programs.run`."""
    program = step.train.lower(step.abstract_state(), step.abstract_batch).compile()

    def train(state: TrainState, batches: list[dict]):
        results = []
        for batch in batches:
            state, metrics = program(state, batch)
            results.append(jax.device_get(metrics))
        return state, {name: np.stack([each[name] for each in results]) for name in results[0]}

    return train


def assert_same_bits(found, expected) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def test_a_sample_runs_together_and_again_for_a_number_that_is_not_finite():
    """The steps together against the steps one at a time of the same program; the full tests have
    the ordinary program of one step. A step without a token, a spoilt one, and one left over."""
    programs = Programs(SAMPLE, 2, SKIP)
    batches = programs.batches(5, spoilt=(3,))
    state, metrics = programs.run(programs.together, batches)
    expected, of_each = programs.run(programs.several.alone, batches)
    assert_same_bits((state, metrics), (expected, of_each))
    assert [int(m["skipped"]) for m in metrics] == [0, 0, 0, 1, 1]
    assert not np.isfinite(metrics[3]["loss"]) and int(state.step) == 5
    losses = [m["loss"] for m in metrics]
    assert losses[0] != losses[1] != losses[2]
    first, _ = programs.run(programs.together, batches[:2])
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (first, state)), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("case", MORE)
def test_same_bits(case, steps):
    """Five steps of the ordinary program, of which the fourth is spoilt: the first program's steps
    run together unless they are clipped."""
    programs = Programs(MORE[case], steps, SKIP)
    batches = programs.batches(5, spoilt=(3,))
    with jax.set_mesh(programs.step.mesh):
        one = one_at_a_time(programs.step)
    expected = programs.run(one, batches)
    assert_same_bits(programs.run(programs.together, batches), expected)
    norms = [float(m["grad_norm"]) for m in expected[1]]
    limit = programs.cfg.optimizer.clip_norm
    assert (max(norms[:3]) > limit) == (case == "clipped") or not limit


@pytest.mark.full
def test_a_run_that_stops_at_bad_numbers_has_the_same_ones():
    """train.on_nonfinite=stop updates with what it has, and clipping by NaN gives NaN."""
    programs = Programs(SAMPLE, 2, {})
    batches = programs.batches(4, spoilt=(2,))
    with jax.set_mesh(programs.step.mesh):
        one = one_at_a_time(programs.step)
    state, metrics = programs.run(programs.together, batches)
    assert_same_bits((state, metrics), programs.run(one, batches))
    assert np.isnan(metrics[2]["loss"]) and "skipped" not in metrics[2]


def test_a_program_of_several_steps_is_made_where_it_is_asked_for():
    """And nowhere else: with one step a run has the programs that it had."""
    cfg = SAMPLE.config(SKIP | small.PLAIN_LAYER)
    step = make_step(cfg, small.mesh_of(cfg))
    assert step.several is not None and step.setup.several is not None
    assert step.setup.several.steps == step.steps_per_program == 2
    one = configs.replace(cfg, {"pipeline.steps_per_program": 1}).resolve()
    alone = make_step(one, small.mesh_of(cfg))
    assert alone.several is None and alone.setup.several is None
