"""Rules about the other things that a run needs: files, hardware, tables. No jax."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator

from jaxtrain.config import (
    Config,
    ConfigError,
    DataConfig,
    FilledConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    ResolvedModel,
    TrainConfig,
    fields,
    get,
    own_code,
    sources,
    suggestion,
)
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.mesh_rules import on_mesh
from jaxtrain.config.rules.mixture_rules import of_corpora
from jaxtrain.config.rules.rules import SettingsRule, Violation, values_for
from jaxtrain.data.stores import hub
from jaxtrain.pipeline.prepared_run import CheckedRun
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.planner.step.planned_op_times import HardwareError, load, model_of
from jaxtrain.schedule.orders import CSV, SCHEDULES

# Parameters beyond which nobody means to train on the default corpus.
LARGE = 100_000_000
# Settings of the corpus → what stands for them until their user says what they are.
CORPUS = {"data.source": "YOUR_DATA", "data.tokenizer": "YOUR_TOKENIZER"}


def check_run(config: Config, environment: checks.Environment) -> CheckedRun:
    """The config on its mesh, which keeps the rules of settings, devices and the files that it
    names. Raises ConfigError for the first broken rule. No table is made for it, but its fixes keep
    the environment's rules, too."""
    if checks.first_violation(config, dataclasses.replace(environment, rules=RULES)):
        checks.check(config, environment)
    return CheckedRun(config, environment, on_mesh(config, environment.devices))


def default_corpus(config: Config) -> dict[str, str]:
    """The settings of the corpus that are at their defaults in a config of more than LARGE
    parameters, with their placeholders; {} for smaller models."""
    # Unset is as good as default: nobody writes the defaults of a corpus out on purpose.
    unset = {
        path: placeholder
        for path, placeholder in CORPUS.items()
        if get(config, path) == fields()[path].default
    }
    if not unset:
        return {}
    model = model_of(config.fill().model, config.data.sequence_length)
    return unset if model.parameters() > LARGE else {}


def default_corpus_notes(config: Config) -> list[str]:
    """A line for a config of more than LARGE parameters that trains on the default corpus."""
    flags = suggestion(default_corpus(config))
    return [
        f"a model of more than {LARGE // 10**6} million parameters trains on Python's own library "
        f"or by bytes, the defaults for small trials: {flags} say what it is for"
    ] * bool(flags)


def _corpora_exist(data: DataConfig) -> Iterator[Violation]:
    return of_corpora(_files_exist, data)


def _files_exist(data: DataConfig) -> Iterator[Violation]:
    """The rules of the files that a corpus is made of."""
    try:
        sources.check(data.source)
    except ConfigError as error:
        yield Violation(error.field, error.rule, error.fixes)
    try:
        if data.filter:
            own_code.digest(data.filter)
    except own_code.OwnCodeError as error:
        yield Violation("data.filter", str(error), [{"data.filter": ""}])
    path, value = "data.tokenizer", data.tokenizer
    file = pathlib.Path(os.path.expanduser(value))
    # "none" (the corpus has tokens) and "bytes" are no paths
    if value in ("none", "bytes") or os.path.isfile(file):
        return
    similar, rule = sources.similar_files(file), "is neither 'bytes' nor an existing path"
    if value and os.path.exists(file):
        rule = "is not a regular file"
    elif not similar and hub.repository(path, value):
        return  # the hub is asked when all else is right
    yield Violation(path, rule, values_for(path, similar))


def _schedule_exists(pipeline: PipelineConfig) -> Iterator[Violation]:
    path, schedule = "pipeline.schedule", pipeline.schedule
    file = pathlib.Path(schedule.removeprefix(CSV))
    if schedule.startswith(CSV) and not file.is_file():
        rule = "names no file (python -m jaxtrain.schedule --csv=FILE writes one)"
        names = [*(CSV + name for name in sources.similar_files(file)), *SCHEDULES]
        yield Violation(path, rule, values_for(path, names))


def _hardware_is_known(train: TrainConfig, precision: PrecisionConfig) -> Iterator[Violation]:
    path, compute = "train.hardware", precision.compute
    if not train.hardware:
        return
    try:
        peaks = load(train.hardware).peak_tflops
    except HardwareError as error:
        yield Violation(
            path, error.problem, values_for(path, filter(None, [error.use])) or [{path: ""}]
        )
        return
    if compute not in peaks:
        yield Violation(
            path,
            f"has no peak for precision.compute={compute!r}",
            [*values_for("precision.compute", peaks), {path: ""}],
        )


def _own_layers_work(
    model: ResolvedModel, data: DataConfig, mesh: MeshConfig, precision: PrecisionConfig
) -> Iterator[Violation]:
    if model.block or model.mixer:
        # a user's module needs jax, which nothing else here imports
        from jaxtrain.pipeline.own_layers import violations

        yield from violations(model, data, mesh, precision)


def tables_can_be_made(config: FilledConfig) -> Iterator[Violation]:
    """The tables of a config can be made. Only a file's table and a bound on memory can be refused
    (setup.py)."""
    pipeline = config.pipeline
    # A mesh that is still to be filled in has no table. A named schedule without a bound always has
    # one, and making it would only take time.
    is_meshed = min(config.mesh.sizes().values()) >= 1
    if not is_meshed or not (pipeline.schedule.startswith(CSV) or pipeline.memory):
        return
    try:
        make_setup(config.resolve())
    except ConfigError as error:
        yield Violation(error.field, error.rule, error.fixes, show=2)


RULES: tuple[SettingsRule, ...] = (
    _corpora_exist,
    _schedule_exists,
    _hardware_is_known,
    _own_layers_work,
)
# a suggestion has to keep this one too, which may take long
RULES_WITH_TABLES: tuple[SettingsRule, ...] = (*RULES, tables_can_be_made)
