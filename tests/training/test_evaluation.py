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
