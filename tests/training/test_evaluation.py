"""The loss over held-out text, with a program that gives known losses."""

import concurrent.futures
import types

from jaxtrain.runtime.runtime import Losses
from jaxtrain.training.evaluation import Evaluation


def test_batches_are_weighted_by_their_tokens():
    compiled = []
    lowered = types.SimpleNamespace(
        compile=lambda: compiled.append(1) or (lambda params, batch: batch)
    )
    evaluate = types.SimpleNamespace(lower=lambda *arguments: lowered)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        of = lambda *batches: Evaluation(evaluate, {}, {}, lambda: batches, executor)
        evaluation = of(Losses(1.0, 10.0), Losses(2.0, 30.0))  # batches are their losses
        assert not compiled  # only when it is asked for
        evaluation.start_compiling().result()
        assert len(compiled) == 1
        assert evaluation.loss({}) == evaluation.loss({}) == 1.75 and len(compiled) == 1
        assert of(Losses(0.0, 0.0)).loss({}) is None
        assert of().loss({}) is None
        assert len(compiled) == 2
