"""The functions that `import jaxtrain` offers beside the settings (docs/python.md). To be read
from `train`; the other functions have its arguments.

A recipe is a Config, or a name or file as of the flag --config; changes are settings by path. They
are read and checked as the flags of a command, so an error is the command's line, as an exception:
a RunError. Nothing ends the process.

Everything that imports jax is imported inside the functions: a wrong setting is told at once, and
the number of simulated devices can be chosen until then.

The functions train, generate and plan have the names of the modules that `python -m` starts. A
submodule that is imported becomes an attribute of its package, so those modules only start a
command (train_command.py, generate_command.py, planner/command/), and nothing imports them.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain import cli, generate_command, train_command
from jaxtrain.config import Config, ConfigError, ResolvedConfig, get, value_text
from jaxtrain.config.groups.setting import as_entries
from jaxtrain.devices import startup
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import read_metrics
from jaxtrain.run.wall_clock import WallClock

if TYPE_CHECKING:  # these import jax, or take long
    from jax.sharding import Mesh

    from jaxtrain.data.loader import Batch
    from jaxtrain.planner.command.main import Prediction
    from jaxtrain.training.one_step import StepMetrics
    from jaxtrain.training.state import TrainState

Recipe = Config | str | os.PathLike[str]
# of an interactive session, ahead of all other flags: a hung step would end its process
PATIENT = "--config.train.hang_after=0"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A run that has ended: why, and its folder, in which the same call goes on."""

    status: ExitStatus
    folder: pathlib.Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, of all starts of the run; docs/use.md says what they
        have."""
        return read_metrics(self.folder)

    @property
    def losses(self) -> dict[int, float]:
        """The training loss by step, of the logged steps (metrics.log_every)."""
        return {record["step"]: record["loss"] for record in self.metrics if "loss" in record}


def train(
    recipe: Recipe | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    workdir: str | os.PathLike[str] = "",
    cpu_devices: int = 0,
    flags: Sequence[str] = (),
) -> RunResult:
    """Trains in this process as the command does, and returns how the run ended.

    recipe: a Config, a recipe's name or its file; the recipe tiny if neither it nor flags name one
    changes: settings by path, {"train.steps": 20}, which go before the recipe's
    workdir: the run's folder, in which it goes on if it has begun; "": runs/NAME of the recipe
    cpu_devices: simulated devices; 0: the accelerator's, or 8 simulated ones without one
    flags: more flags of the command, as on the command line

    The devices of a process are settled by its first use of jax. jax.distributed may run already;
    otherwise it is started if flags or environment describe several processes.

    In the main thread Ctrl-C stops the run after a step, which is saved (status INTERRUPTED); a
    second one raises KeyboardInterrupt. In another thread only the last step or an error ends it. A
    run whose step hangs ends the process, so that it can be started again; in an interactive
    session no step counts as hung. A run that loses its folder or another process ends the process.

    Raises RunError, with the status that the command would exit with.

    >>> import jaxtrain
    >>> run = jaxtrain.train("mine.py", {"train.steps": 20}, workdir="runs/first")
    >>> run.status.name, run.losses[20] < 5
    ('FINISHED', True)
    """
    argv, given = _command_line(recipe, changes, workdir=workdir, cpu_devices=cpu_devices)
    with cli.run_errors():
        patient = [PATIENT] * hasattr(sys, "ps1")
        config, namespace = train_command.parse([*patient, *argv, *flags], given)
        status = train_command.run(config, namespace, WallClock())
    return RunResult(
        ExitStatus.INTERRUPTED if status is None else status, pathlib.Path(namespace.workdir)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStep:
    """A run's training step, compiled, with what a loop of one's own gives it.

    config:        the settings, resolved
    mesh:          the devices
    initial_state: () → the parameters and the optimizer's state before the first step
    batch:         number, from 0 → a batch of the training data: "tokens", "targets" and "weights",
                   global arrays [microbatches, sequences, tokens]. The number alone decides about
                   its sequences
    train:         (state, batch) → (state after the step, its metrics: "loss", "grad_norm" and
                   others as float32 arrays). It donates the state, which cannot be used afterwards
    """

    config: ResolvedConfig
    mesh: "Mesh"
    initial_state: "Callable[[], TrainState]"
    batch: "Callable[[int], Batch]"
    train: "Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]"


def make_step(
    recipe: Recipe | None = None, changes: Mapping[str, Any] | None = None, *, cpu_devices: int = 0
) -> CompiledStep:
    """Compiles the training step for a loop of one's own: no folder, checkpoint or log. Arguments
    and errors as of `train`.

    >>> import jaxtrain
    >>> step = jaxtrain.make_step("mine.py", {"model.layers": 1, "mesh.stage": 1})
    >>> state = step.initial_state()
    >>> for number in range(3):
    ...     state, metrics = step.train(state, step.batch(number))
    >>> int(state.step), float(metrics["loss"]) < 6
    (3, True)
    """
    argv, given = _command_line(recipe, changes, cpu_devices=cpu_devices)
    with cli.run_errors():
        config, namespace = train_command.parse(argv, given)
        alone = ("train.diloco_inner_steps", 0), ("parallel.offload_directory", "")
        for path, without in (*alone, ("train.phases", ()), ("train.fork_from", "")):
            if (value := get(config, path)) != without:
                raise ConfigError(path, value, "is for train alone", fixes=[{path: without}])
        startup.start_jax(namespace, config)
        # Imported now that jax's devices are chosen.

        import jax

        from jaxtrain.config.phases import spans
        from jaxtrain.data.batches import TrainingBatches
        from jaxtrain.data.loader import make_loaders, prepare_corpora
        from jaxtrain.devices.mesh import make_mesh, sizes_of
        from jaxtrain.phases.prepare import check_on_devices, prepare
        from jaxtrain.phases.run_state import make_state, until_exhausted
        from jaxtrain.training import step as steps
        from jaxtrain.training.compiled_step import trace

        checked, no_folder = check_on_devices(config, namespace.recipe), pathlib.Path()
        ready = prepare(checked, no_folder, reads_times=False, measures_times=False)
        if ready is None:
            raise KeyboardInterrupt
        settings = ready.config
        corpora = prepare_corpora(settings.data, settings.model.vocab_size, settings.train)
        content = TrainingBatches(corpora, spans(settings))
        settings = until_exhausted(settings, content)
        mesh = make_mesh(sizes_of(settings.mesh))
        with jax.set_mesh(mesh):
            step = steps.make_step(settings, mesh, ready.setup)
            programs = trace(step)()
        tokens = step.abstract_batch["tokens"]
        data, _ = make_loaders(content, settings.data, tokens, 1, 0)

        def first_state() -> "TrainState":
            with jax.set_mesh(mesh):
                return make_state(settings, step, None)

        return CompiledStep(settings, mesh, first_state, data.batch, programs.take)


def generate(
    workdir: str | os.PathLike[str],
    prompt: str = "",
    tokens: int = 100,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int = -1,
    cpu_devices: int = 0,
) -> str:
    """Returns a continuation of the prompt, without the prompt, by the model of a run's newest
    checkpoint, or of that of a step.

    workdir: the run's folder, or the folder or address of its checkpoints
    tokens: how many are made; fewer where the document ends
    temperature: of the logits, 0 for the likeliest token; top_k, top_p: 0 and 1 for all tokens

    Raises RunError.

    >>> import jaxtrain
    >>> text = jaxtrain.generate("runs/first", "def ", tokens=8, temperature=0)
    >>> len(text) <= 8
    True
    """
    argv, _ = _command_line(
        None,
        None,
        workdir=workdir,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        step=step,
        cpu_devices=cpu_devices,
    )
    with cli.run_errors():
        flags = cli.checked_flags(
            argv, generate_command.DESCRIPTION, generate_command.FLAGS, generate_command.check
        )
        generate_command.start_jax(flags)
        model = generate_command.load(flags)

        from jaxtrain.generation.sampling import Sampling
        from jaxtrain.generation.text import sample_text

        return sample_text(
            model.sampler,
            model.tokenizer,
            prompt,
            tokens,
            Sampling(temperature, top_k, top_p, seed),
        )


def plan(
    recipe: Recipe | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    hardware: str = "",
    devices: int = 0,
    layout: str = "",
    tokens: float = 0,
) -> "list[Prediction]":
    """Returns the fastest layouts that fit, at most ten, the fastest first, or the one that is
    asked for, whether it fits or not. Nothing runs, and the devices need not be here.

    hardware: a kind of device, or a JSON file of one's own; "": h100
    devices: their number; 0: those of `layout`, or of the recipe's mesh
    layout: KEY=VALUE,… as of the flag --layout; "": all are searched
    tokens: of the complete training, from which its days follow

    Raises RunError, also where no layout fits.

    >>> import jaxtrain
    >>> (plan,) = jaxtrain.plan("gpt2_124m", hardware="h100", layout="data=8,microbatch=4")
    >>> plan.fits, plan.work.layout.devices, 0.05 < plan.seconds < 5
    (True, 8, True)
    >>> sorted(plan.figures())[:3]
    ['attention_flops', 'bubble_fraction', 'fits']
    """
    from jaxtrain.planner.command import main as planner

    argv, given = _command_line(
        recipe, changes, hardware=hardware, devices=devices, layout=layout, tokens=tokens
    )
    with cli.run_errors():
        return cli.parse_unchecked(
            argv, planner.DESCRIPTION, planner.FLAGS, planner.plans, recipe=given
        )


def _command_line(
    recipe: Recipe | None, changes: Mapping[str, Any] | None, **flags: object
) -> tuple[list[str], Config | None]:
    """The flags of a command, and the recipe if it is no file or name."""
    given = recipe if isinstance(recipe, Config) else None
    named = {} if recipe is None or given else {"config": recipe}
    settings = {f"config.{path}": value for path, value in (changes or {}).items()}
    values = named | flags | settings
    return [f"--{name}={value_text(as_entries(value))}" for name, value in values.items()], given
