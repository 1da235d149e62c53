"""The loss over held-out text, with a program that gives known losses."""

import concurrent.futures
import types

from jaxtrain.runtime.runtime import Losses
from jaxtrain.training.evaluation import Evaluation


def held_out(*losses: Losses) -> types.SimpleNamespace:
    """A Loader whose batches are their losses."""
    return types.SimpleNamespace(
        batches=len(losses), iterate=lambda: iter(losses), specification=dict
    )


def test_batches_are_weighted_by_their_tokens():
    compiled = []
    lowered = types.SimpleNamespace(
        compile=lambda: compiled.append(1) or (lambda params, batch: batch)
    )
    evaluate = types.SimpleNamespace(lower=lambda *arguments: lowered)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        batches = held_out(Losses(1.0, 10.0), Losses(2.0, 30.0))
        evaluation = Evaluation(evaluate, {}, batches, executor)
        assert not compiled  # only when it is asked for
        evaluation.start_compiling().result()
        assert len(compiled) == 1
        assert evaluation.loss({}) == evaluation.loss({}) == 1.75 and len(compiled) == 1
        assert Evaluation(evaluate, {}, held_out(Losses(0.0, 0.0)), executor).loss({}) is None
        assert Evaluation(evaluate, {}, held_out(), executor).loss({}) is None
        assert len(compiled) == 2
