"""The loss over held-out text, with a program that gives known losses; evaluations of one's own,
with functions that fail and hang."""

import concurrent.futures
import signal
import types

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain.config import ConfigError, TrainConfig
from jaxtrain.runtime.runtime import Losses
from jaxtrain.training.evaluation import Evaluation, OwnEvaluation


def test_batches_are_weighted_by_their_tokens():
    compiled = []
    lowered = types.SimpleNamespace(
        compile=lambda: compiled.append(1) or (lambda params, batch: batch)
    )
    evaluate = types.SimpleNamespace(lower=lambda *arguments: lowered)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:

        def of(held_out=("",), **sets):  # batches are their losses
            sets = {"" if name == "one" else name: sets[name] for name in sets}
            functions = {name: lambda batches=batches: batches for name, batches in sets.items()}
            return Evaluation(evaluate, {}, {}, functions, held_out, executor)

        evaluation = of(one=[Losses(1.0, 10.0), Losses(2.0, 30.0)])
        assert not compiled  # only when it is asked for
        evaluation.start_compiling().result()
        assert len(compiled) == 1
        assert evaluation.losses({}) == evaluation.losses({}) == {"": 1.75}
        assert len(compiled) == 1
        assert of(one=[Losses(0.0, 0.0)]).losses({}) == {}
        assert of(one=[]).losses({}) == of([]).losses({}) == {}
        assert len(compiled) == 2

        one, two = [Losses(1.0, 10.0), Losses(2.0, 30.0)], [Losses(5.0, 40.0)]
        several = of(["web", "code"], web=one, code=two, books=[Losses(3.0, 20.0)])
        sets = {"web": 1.75, "code": 5.0, "books": 3.0}
        assert several.losses({}) == sets | {"": (1.75 + 5) / 2}
        assert len(compiled) == 3  # one program for all
        assert of(one=one, books=two).losses({}) == {"": 1.75, "books": 5.0}
        # the sources hold out nothing
        only = of([], books=[Losses(3.0, 20.0)], wiki=[Losses(1.0, 20.0)], empty=[])
        assert only.losses({}) == {"": 2.0, "books": 3.0, "wiki": 1.0}


# --- of one's own ---------------------------------------------------------------------------------

OWN = """
import time

def good(params, context):
    return {"twice": 2 * params, "step": context.step, "loss": context.loss([[1, 2, 3]])}

def nothing(params, context):
    return None

def raises(params, context):
    return {"a": 1 / 0}

def leaves(params, context):
    raise SystemExit(3)

def no_number(params, context):
    return {"a": "b"}

def hangs(params, context):
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass

def late(params, context):
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        try:
            time.sleep(0.01)
        except BaseException:
            pass
    return {"a": 1}
"""


def own_numbers(folder, name, seconds=60.0):
    """The numbers of a function of OWN, and the lines that it has cost."""
    (folder / "own.py").write_text(OWN)
    train = TrainConfig(evaluate=f"{folder}/own.py:{name}", evaluate_seconds=seconds)
    own, lines = OwnEvaluation(types.SimpleNamespace(train=train), None, None), []
    evaluation = types.SimpleNamespace(loss=lambda params, tokens: params + tokens[0][-1])
    return own.numbers(evaluation, 5, 20, lines.append), lines


def test_own_numbers(tmp_path):
    assert own_numbers(tmp_path, "good") == ({"twice": 10.0, "step": 20.0, "loss": 8.0}, [])


@pytest.mark.parametrize(
    "name, seconds, why",
    [
        ("nothing", 60, "AttributeError: 'NoneType' object has no attribute 'items'"),
        ("raises", 60, "ZeroDivisionError: division by zero"),
        ("leaves", 60, "SystemExit: 3"),
        ("no_number", 60, "ValueError: could not convert string to float: 'b'"),
        ("hangs", 0.1, " s, more than train.evaluate_seconds=0.1"),
        ("late", 0.1, " s, more than train.evaluate_seconds=0.1"),
    ],
)
def test_what_fails_costs_a_line(tmp_path, name, seconds, why):
    before = signal.getsignal(signal.SIGALRM)
    numbers, (line,) = own_numbers(tmp_path, name, seconds)
    assert not numbers and line.endswith(why)
    assert line.startswith(f"warning: step 20: no numbers of train.evaluate={tmp_path}/own.py")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_no_own_evaluation():
    own = OwnEvaluation(types.SimpleNamespace(train=TrainConfig()), None, None)
    assert own.numbers(None, None, 1, print) == {}


def test_code_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="train.evaluate=.*names gone, which .* does not define"):
        own_numbers(tmp_path, "gone")


def test_the_loss_of_tokens():
    """All tokens are in batches of the run's shape, padded with such of no weight."""
    seen = []
    lowered = types.SimpleNamespace(
        compile=lambda: (
            lambda params, batch: (
                seen.append(jax.tree.map(np.asarray, batch))
                or Losses((batch["targets"] * batch["weights"]).mean(), batch["weights"].sum())
            )
        )
    )
    evaluate = types.SimpleNamespace(lower=lambda *arguments: lowered)
    sharding = SingleDeviceSharding(jax.devices()[0])
    like = {
        name: jax.ShapeDtypeStruct((2, 1, 4), dtype, sharding=sharding)
        for name, dtype in {"tokens": "int32", "targets": "int32", "weights": "float32"}.items()
    }
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        evaluation = Evaluation(evaluate, {}, like, {}, [], executor)
        loss = evaluation.loss({}, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 0], [1, 1], [0, 0.5]])
    tokens, targets = [
        [row for batch in seen for row in batch[name][:, 0].tolist()] for name in like
    ][:2]
    assert tokens == [[1, 2, 0, 0], [4, 5, 0, 0], [7, 8, 0, 0], [0] * 4]
    assert targets == [[2, 3, 0, 0], [5, 6, 0, 0], [8, 9, 0, 0], [0] * 4]
    assert loss == pytest.approx(((2 + 5 + 6) / 8 * 3 + 4.5 / 8 * 0.5) / 3.5)
