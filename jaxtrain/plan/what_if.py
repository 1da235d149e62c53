"""What single changes of a plan would gain, and `plan --advise WORKDIR`: what a run's records say and what to change. No jax.

Advice has three sources: goodput.jsonl, the fraction of wall time that went elsewhere than into steps;
planned.json, the part of the step that takes longer than planned; and, if the hardware is given, the
planner: the step with its parts, and the layouts that differ in one choice. A measured step that is far
from the planned one is reported first: a plan that is wrong for a machine gives poor advice.
"""

import dataclasses
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxtrain import config as cfg
from jaxtrain import config as configs
from jaxtrain.checkpoint.steps import CONFIG
from jaxtrain.config import Config, ConfigError, checks
from jaxtrain.config.errors import UsageError
from jaxtrain.config.mesh_rules import AXES
from jaxtrain.config.surroundings import Surroundings
from jaxtrain.config.work import platform_of, work_of
from jaxtrain.costs.hardware import GIB, Hardware
from jaxtrain.costs.memory import memory
from jaxtrain.plan import compare, layout_flag
from jaxtrain.plan.predict import Prediction, exactly, predict
from jaxtrain.run.goodput import Part
from jaxtrain.run.goodput_log import GOODPUT_FILE, REDONE, Goodput, read_goodput
from jaxtrain.run.metrics import METRICS_FILE, read_metrics
from jaxtrain.schedule.orders import INTERLEAVED, ZERO_BUBBLE

REMATS, ZEROS = ("none", "selective", "full"), (0, 1, 2, 3)
HALVED_FOR = (("model", "data"), ("stage", "data"), ("data", "model"), ("stage", "model"))  # (axis of half as many, of twice as many)


@dataclasses.dataclass(frozen=True)
class Change:
    """Other settings, the same as `--layout` names them, the seconds of the step then, and the bytes of its fullest device."""

    settings: Mapping[str, Any]
    text: str
    seconds: float
    bytes: float


def nearby(prediction: Prediction) -> list[Change]:
    """Single changes of the layout, the fastest first.

    They are reckoned by closed forms; where the prediction goes by its table, their steps are longer than those by as much as its own is.
    """
    work, config = prediction.work, prediction.config
    exact, here, changes = prediction.seconds / work.step().seconds, layout_flag.of(config), []
    around = Surroundings(prediction.devices, platform_of(work.hardware), config)
    for settings in _tried(config):
        changed = cfg.replace(config, settings)
        if checks.first_broken(changed, around) or changed.data.batch_size % _pieces(changed):
            continue
        resolved = changed.resolve()
        other = work_of(resolved, work.hardware, work.program.name)
        differs = {key: value for key, value in layout_flag.of(resolved).items() if value != here[key]}
        needs = memory(other, config.model.loss_chunk).bytes
        changes.append(Change(settings, layout_flag.text_of(differs), exact * other.step().seconds, needs))
    return sorted(changes, key=lambda change: change.seconds)


def _tried(config: Config) -> Iterator[dict[str, Any]]:
    pipeline, mesh = config.pipeline, config.mesh
    yield from ({"pipeline.remat": remat} for remat in REMATS if remat != pipeline.remat)
    if mesh.data > 1:
        yield from ({"parallel.zero": zero} for zero in ZEROS if zero != config.parallel.zero)
    yield from ({"pipeline.microbatches": n} for n in (2 * pipeline.microbatches, pipeline.microbatches // 2) if n)
    if mesh.stage > 1:
        yield {"pipeline.schedule": INTERLEAVED, "pipeline.repeats": 2 * max(1, pipeline.repeats)}
        yield from ({"pipeline.schedule": name, "pipeline.repeats": 0} for name in ZERO_BUBBLE if name != pipeline.schedule)
    for fewer, more in HALVED_FOR:
        sizes = {axis: getattr(mesh, axis) for axis in (fewer, more)}
        if sizes[fewer] % 2 == 0:
            yield {f"mesh.{fewer}": sizes[fewer] // 2, f"mesh.{more}": 2 * sizes[more], "pipeline.repeats": 0}


def _pieces(config: Config) -> int:
    """The number of pieces into which replicas, shards and microbatches cut a step's batch."""
    mesh = config.mesh
    return mesh.replica * mesh.data * mesh.expert * config.pipeline.microbatches


T = TypeVar("T")
FAR = 1.5  # times the planned step, or so many times less: so far off, the plan is not of this machine, or something is wrong with it
MOST = 5  # changes that are named
WORTH = 0.02  # of the step or of the wall time, from which on a change is named

# Part of the wall time → what is to be done about it.
REMEDIES: Mapping[str, str] = {
    Part.WAITING.value: "the step waits for batches: raise data.prefetch, put the corpus on a local disk, or give hosts more cores",
    Part.SAVING.value: "saves hold the loop: raise checkpoint.every or .minutes, with checkpoint.local for the frequent ones",
    Part.EVALUATING.value: "evaluation takes long: raise train.eval_every, or lower train.eval_batches",
    Part.COMPILING.value: "starts compile: keep the cache of programs ($JAXTRAIN_CACHE) on a disk that outlives them, and start less often",
    REDONE: "steps are done again after stops: save more often, or beside that every few steps into checkpoint.local",
    Part.ROLLING_BACK.value: "the run goes back often: look at its warnings, and at optimizer.learning_rate",
}


class AdviceError(UsageError):
    """A folder in which there is nothing to advise on; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run has recorded. seconds: of a step, the median of the later half; steps: how many rows that is from."""

    config: Config
    seconds: float
    rows: int
    goodput: Goodput
    last: Mapping[str, Any]


def read(workdir: str | os.PathLike) -> Measured:
    """The records of a run's folder. Raises AdviceError where they are missing or are none."""
    folder = pathlib.Path(workdir)
    for name in (CONFIG, METRICS_FILE, GOODPUT_FILE, compare.PLANNED):  # a pipe would be waited for, a device has no end
        if os.path.exists(folder / name) and not os.path.isfile(folder / name):
            raise AdviceError(f"--advise={str(workdir)!r}: its {name} is not a regular file: name the folder of a run")
    try:
        config = configs.from_dict(json.loads((folder / CONFIG).read_bytes()))
    except OSError as error:
        raise AdviceError(f"--advise={configs.shown(str(workdir))} has no {CONFIG} ({error.strerror}): name the folder of a run") from None
    except (ValueError, ConfigError, TypeError, AttributeError, RecursionError) as error:
        what = f"its {CONFIG} is no config ({' '.join(str(error).split())[:100]})"
        raise AdviceError(f"--advise={configs.shown(str(workdir))}: {what}: name the folder of a run") from None
    rows = [row for row in _records(workdir, METRICS_FILE, read_metrics) if _is_seconds(row.get("step_time_s")) and row["step_time_s"]]
    later = rows[len(rows) // 2 :] if len(rows) > 2 else rows[1:]
    if not later:
        raise AdviceError(f"--advise={configs.shown(str(workdir))} has {len(rows)} rows with a step's time: let it run for some steps more")
    seconds = statistics.median(row["step_time_s"] for row in later)
    goodput = _records(workdir, GOODPUT_FILE, lambda folder: Goodput(read_goodput(folder)))
    return Measured(config, seconds, len(later), goodput, rows[-1])


def _records(workdir: str | os.PathLike, name: str, read_file: Callable[[str | os.PathLike], T]) -> T:
    """What a file of the folder has. Raises AdviceError where it cannot be read, or says what no run writes."""
    try:
        return read_file(workdir)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError):
        what = "is not what a run writes"
    raise AdviceError(f"--advise={configs.shown(str(workdir))}: its {name} {what}: name the folder of a run")


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def losses_of_time(goodput: Goodput) -> list[tuple[str, float]]:
    """(part, its share of the wall time) of those that something can be done about, the largest first."""
    wall_s = goodput.wall_s()
    parts = goodput.parts() if wall_s > 0 else {}
    shares = [(name, parts[name] / wall_s) for name in REMEDIES if name in parts]
    return sorted((item for item in shares if item[1] >= WORTH), key=lambda item: -item[1])


def advise(workdir: str | os.PathLike, hardware: Hardware | None = None) -> list[str]:
    """Lines for people. hardware: the kind of device that the run is on; None: what the records alone say. Raises AdviceError."""
    measured = read(workdir)
    lines = [f"a step takes {measured.seconds:.4g} s, the median of {measured.rows} rows of metrics.jsonl"]
    if measured.goodput.starts:
        lines.append(measured.goodput.summary())
        lines += [f"{share:.1%} of the wall time: {REMEDIES[name]}" for name, share in losses_of_time(measured.goodput)]
    slowest, behind_s = (measured.last.get(name) for name in ("slowest_process", "slowest_behind_s"))
    if isinstance(slowest, int) and _is_seconds(behind_s):
        lines.append(f"process {slowest} is behind the others by {behind_s:.3g} s a step")
    if record := compare.read(pathlib.Path(workdir)):
        lines += [f"after warm-up: {line}" for line in _records(workdir, compare.PLANNED, lambda folder: record.lines())]
    if hardware is None:
        return [*lines, "with --hardware=NAME the planner says what else the step could be"]
    _check(workdir, measured.config, hardware)
    now = exactly(predict(measured.config.resolve(), hardware))
    ratio = measured.seconds / now.seconds
    lines.append(f"planned for {hardware.name}: {now.seconds:.4g} s; measured {ratio:.3g} times that")
    if not 1 / FAR <= ratio <= FAR:
        lines.append("that is far: a profile (train.profile_steps) says where the time goes; is this the device, and is it alone?")
    lines += _largest_parts(now)
    return [*lines, *_changes(now)]


def _check(workdir: str | os.PathLike, config: Config, hardware: Hardware) -> None:
    """Raises AdviceError where the planner cannot reckon with this config on this kind of device."""
    sizes = {f"mesh.{axis}": getattr(config.mesh, axis) for axis in AXES}
    left_open = next((f"{path}={size}" for path, size in sizes.items() if not isinstance(size, int) or size < 1), "")
    refusal = checks.refusal(config, Surroundings(None, platform_of(hardware), config))
    pieces = config.pipeline.microbatches * config.mesh.replica * config.mesh.data * config.mesh.expert
    rule = ""
    if left_open:
        rule = f"its {CONFIG} has {left_open}, which is no size that the planner could take"
    elif refusal:
        rule = f"its {CONFIG} is no run's: {str(refusal).partition(': use ')[0]}"
    elif config.data.batch_size % pieces:
        rule = f"its {CONFIG} cuts data.batch_size={config.data.batch_size} into {pieces} pieces"
    elif config.precision.compute not in hardware.peak_tflops:
        rule = f"precision.compute={config.precision.compute!r} has no peak on {hardware.name}"
    if rule:
        raise AdviceError(f"--advise={configs.shown(str(workdir))}: {rule}", {"hardware": ""}, advice="for what the records alone say")


def _largest_parts(now: Prediction) -> list[str]:
    shares = sorted(((seconds / now.seconds, name) for name, seconds in now.time.exposed.items()), reverse=True)
    return ["planned parts: " + ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= WORTH)]


def _changes(now: Prediction) -> list[str]:
    """The single changes that gain most, of those that fit."""
    room = now.work.hardware.memory
    listed = [change for change in nearby(now) if change.bytes <= room and change.seconds <= now.seconds * (1 - WORTH)][:MOST]
    if not listed:
        return ["no single change of the layout is planned to make it faster and to fit"]
    flags = [" ".join(f"--config.{path}={value}" for path, value in change.settings.items()) for change in listed]
    gains = [f"{1 - change.seconds / now.seconds:.0%} less time, {change.bytes / GIB:.1f} GiB a device" for change in listed]
    return ["planned to be faster, one change at a time:", *(f"  {flag}: {gain}" for flag, gain in zip(flags, gains, strict=True))]
