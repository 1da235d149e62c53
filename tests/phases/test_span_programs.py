"""The programs of a run's spans."""

import concurrent.futures

import jax
import pytest
from support import small

from jaxtrain.config.phases import config_of, span_at
from jaxtrain.phases.span_programs import SpanPrograms
from jaxtrain.training.state import initial_state
from jaxtrain.training.step import make_step

WIDE = ("wide.step=2", "wide.batch_size=8")
CHANGES = {
    "model.layers": 1,
    "model.width": 16,
    "model.mlp_width": 8,
    "data.batch_size": 4,
    "optimizer.warmup_steps": 0,
    "train.steps": 6,
}


def test_a_span_has_the_program_of_its_config():
    # The losses of routers are means over the sequences of a step.
    config = small.config(
        microbatches=1, changes=CHANGES | {"model.experts": 2, "train.phases": WIDE}
    )
    mesh = small.mesh_of(config)
    with jax.set_mesh(mesh):
        programs = SpanPrograms(config, make_step(config, mesh))
        for span in programs.spans:
            alone = make_step(config_of(config, span).resolve(), mesh)
            assert programs._step_of(span).lower().as_text() == alone.lower().as_text()


def test_spans_train_the_same_state_one_after_the_other(capsys):
    phases = (*WIDE, "last.step=4", "last.learning_rate_end=0")
    config = small.config(microbatches=1, changes=CHANGES | {"train.phases": phases})
    mesh, rates, compiled = small.mesh_of(config), [], []
    with jax.set_mesh(mesh), concurrent.futures.ThreadPoolExecutor(1) as executor:
        step = make_step(config, mesh)
        programs = SpanPrograms(config, step)
        programs.start(0, executor).result()
        state = initial_state(step.layout, step.optimizer, 0)
        for number in range(6):
            span = span_at(programs.spans, number)
            of_span = config_of(config, span).resolve()
            batch = small.place_batch(step, of_span, small.batch(of_span, number))
            compiled.append(programs.of(span))
            state, metrics = compiled[-1].take(state, batch)
            rates.append(float(metrics["learning_rate"]))
    assert compiled[0] is compiled[1] is not compiled[2]
    assert compiled[2] is compiled[5]  # spans of one shape share it
    waited = "waiting for the program of 8 sequences of 16 tokens in phase wide"
    assert set(capsys.readouterr().out.splitlines()) <= {waited}  # none where it was fast enough
    assert rates == sorted(rates, reverse=True) and rates[-1] == 0 < rates[-2]
    assert int(state.step) == 6
    failed = concurrent.futures.Future()
    failed.set_exception(jax.errors.JaxRuntimeError("no memory"))
    programs._programs[programs.spans[0].shape] = failed
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
        programs.of(programs.spans[0])
