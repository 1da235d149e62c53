"""The training command that gets a signal at a moment:
`python -m support.signalled MOMENT NUMBER -- FLAGS…`.

The signal comes when a function of MOMENTS is called, which waits then, so that it is found there.
"""

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxtrain import BEGAN, train_command as train
from jaxtrain.run import streams

# Moment → (module, name) of a function that is called then.
MOMENTS = {
    "imports": ("jaxtrain.devices.startup", "start_jax"),
    "table": ("jaxtrain.phases.prepare", "make_setup"),
    "data": ("jaxtrain.data.preparing.prepare", "_tokenize"),
    "tracing": ("jaxtrain.loop", "make_step"),
    "compiling": ("jaxtrain.devices.cluster", "compile_everywhere"),
    "restoring": ("jaxtrain.checkpoint.resuming", "restore_newest"),
    "step": ("jaxtrain.data.loader", "Feed.next"),
    "saving": ("jaxtrain.checkpoint.saving", "SaveThread._write"),
    "finishing a save": ("jaxtrain.checkpoint.saving", "SaveThread._finish"),
    "evaluating": ("jaxtrain.training.evaluation", "Evaluation.loss"),
    "ending": ("jaxtrain.loop", "AfterWarmUp.finish"),
    "sampling": ("jaxtrain.phases.run_end", "sample_text"),
}
LASTS_S = 0.5


def signalled(function: Callable, number: int) -> Callable:
    """The function, whose first call sends this process a signal before it begins."""
    called = threading.Event()

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not called.is_set():
            called.set()
            os.kill(os.getpid(), number)
            time.sleep(LASTS_S)
        return function(*arguments, **named)

    return call


if __name__ == "__main__":
    moment, number, _, *flags = sys.argv[1:]
    module, name = MOMENTS[moment]
    owner, names = importlib.import_module(module), name.split(".")
    for each in names[:-1]:
        owner = getattr(owner, each)
    setattr(owner, names[-1], signalled(getattr(owner, names[-1]), int(number)))
    sys.exit(streams.run(lambda argv: train.main(argv, BEGAN), flags))
