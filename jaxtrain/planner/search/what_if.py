"""Single changes of a plan with their gain, and `plan --advise WORKDIR`: advice from the records of
a run. No jax.

`fitting` is the advice for a step that has no memory.

Advice has three sources: goodput.jsonl, for the fraction of wall time that was not spent on steps;
planned.json, for the part of the step that takes longer than planned; and, if the hardware is
given, the planner, for the step's parts and the layouts that differ in one setting. If the measured
step is far from the planned one, this is reported first, because the plan's advice is then poor.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxtrain import config as cfg
from jaxtrain.config import Config, MeshConfig, PipelineConfig, ResolvedConfig, UsageError, kernels
from jaxtrain.config.phases import largest_of
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.mesh_rules import AXES, on_mesh
from jaxtrain.config.rules.rules import divisors
from jaxtrain.config.saved_values import LAYER_INPUT, saved_with
from jaxtrain.config.sizes import remat_of
from jaxtrain.planner.layer.hardware import GIB, Hardware, load
from jaxtrain.planner.layer.links import EXPERT
from jaxtrain.planner.search import compare, layout_flag
from jaxtrain.planner.search.predict import Prediction, exactly, predict
from jaxtrain.planner.step.memory import memory
from jaxtrain.planner.step.step_model import step_model_of
from jaxtrain.run.files import CONFIG_FILE, PLANNED, read_json
from jaxtrain.run.goodput import GOODPUT_FILE, REDONE, Goodput, read_goodput
from jaxtrain.run.metrics import METRICS_FILE, read_metrics
from jaxtrain.run.wall_clock import Phase
from jaxtrain.schedule.orders import INTERLEAVED, ZERO_BUBBLE

# (axis that is halved, axis that is doubled)
HALVED_FOR = (("model", "data"), ("stage", "data"), ("data", "model"), ("stage", "model"))


@dataclasses.dataclass(frozen=True)
class Change:
    """A single change of a layout.

    settings: fields of the config and their other values
    text:     the change as `--layout` writes it, or as flags of settings that are not of a layout
    seconds:  of the changed step
    bytes:    of its fullest device
    """

    settings: Mapping[str, Any]
    text: str
    seconds: float
    bytes: float


def single_changes(prediction: Prediction) -> list[Change]:
    """Single changes of the layout, the fastest first.

    Their times are closed forms, scaled by the ratio of this step's exact time to its closed form.
    """
    work, config = prediction.work, prediction.config.as_read()
    for path in ("parallel.ends", "parallel.reduce"):
        chosen = cfg.replace(config, {path: "auto"})
        if chosen.resolve() == prediction.config:  # with another layout it may be another
            config = chosen
    exact, layout = prediction.seconds / work.step().seconds, layout_flag.of(config.on_own_mesh())
    changes = []
    environment = checks.Environment(
        work.layout.devices, work.hardware.platform, config, is_ours=work.settings.ours
    )
    candidates = [*_candidates(config.mesh, config.pipeline, config.parallel.zero)]
    nodes = work.links.islands(EXPERT)
    if 1 < nodes < work.layout.expert and nodes != work.layout.expert_nodes:
        # the islands that `expert` spans as nodes, to which tokens go once
        candidates.append({"parallel.expert_nodes": nodes})
    for settings in candidates:
        changed = cfg.replace(config, settings)
        if checks.first_violation(changed, environment):
            continue
        resolved = changed.resolve()
        other = step_model_of(resolved, work.hardware, work.settings.name)
        differs = {
            key: value for key, value in layout_flag.of(resolved).items() if value != layout[key]
        }
        needs = memory(other, config.model.loss_chunk).bytes
        changes.append(
            Change(
                settings,
                layout_flag.text_of(differs) or cfg.suggestion(settings),
                exact * other.step().seconds,
                needs,
            )
        )
    return sorted(changes, key=lambda change: change.seconds)


def _candidates(mesh: MeshConfig, pipeline: PipelineConfig, zero: int) -> Iterator[dict[str, Any]]:
    """Settings for each single change, before any rule is checked."""
    for remat in layout_flag.choices("remat")[::-1]:
        if remat != pipeline.remat:
            names = saved_with(pipeline, remat)
            kept = {} if names == pipeline.save else {"pipeline.save": names}
            yield {"pipeline.remat": remat} | kept
    recomputed = remat_of(pipeline.remat)
    if recomputed.layers:
        counts = (recomputed.layers - 1, recomputed.layers + 1)
        yield from ({"pipeline.remat": f"{recomputed.mode}:{n}"} for n in counts if n)
    if mesh.data > 1:
        yield from (
            {"parallel.zero": other} for other in layout_flag.choices("zero") if other != zero
        )
    yield from (
        {"pipeline.microbatches": n}
        for n in (2 * pipeline.microbatches, pipeline.microbatches // 2)
        if n
    )
    if mesh.stage > 1:
        if recomputed.mode == "full" and not pipeline.save:
            yield {"pipeline.save": (LAYER_INPUT,)}
        apart = {"pipeline.overlap": False} if pipeline.overlap else {}
        repeats = 2 * max(1, pipeline.repeats)
        yield {"pipeline.schedule": INTERLEAVED, "pipeline.repeats": repeats} | apart
        yield from (
            {"pipeline.schedule": name, "pipeline.repeats": 0} | apart
            for name in ZERO_BUBBLE
            if name != pipeline.schedule
        )
        yield {"pipeline.overlap": not pipeline.overlap}
    for halved, doubled in HALVED_FOR:
        size = getattr(mesh, halved)
        if size % 2 == 0:
            sizes = {f"mesh.{halved}": size // 2, f"mesh.{doubled}": 2 * getattr(mesh, doubled)}
            yield sizes | {"pipeline.repeats": 0}


# --- memory that was not there --------------------------------------------------------------------

LESS = 0.9  # of the planned bytes, for a step that was planned to fit and does not


def fitting(config: Config, environment: checks.Environment, asked: int, available: int) -> str:
    """The rest of the line about a step that has no memory: its planned bytes by part, and the
    fewest flags with which it is planned to fit, that keep every rule and train the same.

    asked, available: bytes, 0 for what is not known; the available ones are a
    device's, or the host's for all simulated ones. Where one program's arrays are more than the
    plan has for all, as on simulated devices, plans count as so much larger.
    """
    device = dataclasses.replace(load("h100"), name=environment.platform)
    without_tables = dataclasses.replace(environment, rules=())
    largest, _ = largest_of(config)
    changed = lambda changes: on_mesh(cfg.replace(largest, changes), environment.devices).resolve()
    planned = lambda settings: memory(step_model_of(settings, device), settings.model.loss_chunk)
    breaks = lambda changes, where: checks.first_violation(cfg.replace(config, changes), where)
    now, simulated = planned(changed({})), environment.platform == kernels.CPU
    # threads and libraries on the host need a quarter of what is there
    sharing, scale = (environment.devices or 1) / 0.75, max(1.0, asked / now.bytes)
    most = min(
        (available / sharing if simulated else available) or math.inf, LESS * now.bytes * scale
    )
    fits = (
        changes
        for changes in _smaller(changed({}), simulated)
        if not breaks(changes, without_tables)
        if scale * planned(changed(changes)).bytes <= most and not breaks(changes, environment)
    )
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in compare.listed(now.parts))
    use = cfg.suggestion(next(fits, {})) or "more devices, for no setting is planned to be enough"
    return f"; a device is planned to need {now.bytes / GIB:.3g} GiB ({parts}): use {use}"


def _smaller(config: ResolvedConfig, simulated: bool) -> list[dict[str, Any]]:
    """Changes that may take less memory and train the same but for rounding: fewer settings first,
    and the host's memory last."""
    single = [*_candidates(config.mesh, config.pipeline, config.parallel.zero)]
    batch, count = config.data.batch_size, config.pipeline.microbatches
    offloads = layout_flag.choices("offload")[1:]
    options = (
        [] if simulated else [{"parallel.offload": name} for name in offloads],
        [changes for changes in single if "parallel.zero" in changes],
        [changes for changes in single if "pipeline.remat" in changes],
        # with a bounded room for experts' tokens, other microbatches drop other tokens
        [
            {"pipeline.microbatches": n}
            for n in divisors(batch)
            if n > count and not config.model.expert_room
        ],
    )
    combined = itertools.product(*([{}, *option] for option in options))
    merged = (dict(itertools.chain(*(c.items() for c in each))) for each in combined)
    return sorted(merged, key=lambda changes: ("parallel.offload" in changes, len(changes)))


# --- advice from a run's records ------------------------------------------------------------------

T = TypeVar("T")
FAR = 1.5  # ratio of measured and planned step, either way, beyond which the plan does not apply
MOST = 5  # changes that are listed

# Phase of the wall time → its remedy.
REMEDIES: Mapping[str, str] = {
    Phase.WAITING.value: "the step waits for batches: raise data.prefetch, put the corpus on a "
    "local disk, or give hosts more cores",
    Phase.SAVING.value: "saves hold the loop: raise checkpoint.every or .minutes, with "
    "checkpoint.local for the frequent ones",
    Phase.EVALUATING.value: "evaluation takes long: raise train.eval_every, or lower "
    "train.eval_batches",
    Phase.COMPILING.value: "starts compile: keep the cache of programs ($JAXTRAIN_CACHE) on a "
    "disk that outlives them, and start less often",
    REDONE: "steps are repeated after stops: save more often, or every few steps into "
    "checkpoint.local as well",
    Phase.ROLLING_BACK.value: "the run goes back often: look at its warnings, and at "
    "optimizer.learning_rate",
}


def _read(workdir: str | os.PathLike, name: str, read_file: Callable[[str | os.PathLike], T]) -> T:
    """What one file of a run's folder says. Raises UsageError if it cannot be read or is not what a
    run writes."""
    path = pathlib.Path(workdir, name)
    try:
        # a pipe would be waited for, a device has no end
        if os.path.isfile(path) or not os.path.exists(path):
            return read_file(workdir)
        problem = "is not a regular file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError) as e:
        problem = f"is not what a run writes ({' '.join(str(e).split())[:100]})"
    raise UsageError(
        f"--advise={cfg.shown(str(workdir))}: its {name} {problem}: name the folder of a run"
    )


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _from_records(workdir: str | os.PathLike) -> tuple[float, list[str]]:
    """Seconds of a step, the median of the later half of the records, and what a run's records say
    as lines of text. Raises UsageError for records that are missing or that no run writes."""
    records = [
        record
        for record in _read(workdir, METRICS_FILE, read_metrics)
        if _is_seconds(record.get("step_time_s")) and record["step_time_s"]
    ]
    later = records[len(records) // 2 :] if len(records) > 2 else records[1:]
    if not later:
        raise UsageError(
            f"--advise={cfg.shown(str(workdir))} has {len(records)} records with a step's time: "
            "let it run for some steps more"
        )
    seconds = statistics.median(record["step_time_s"] for record in later)
    goodput = _read(workdir, GOODPUT_FILE, lambda folder: Goodput(read_goodput(folder)))
    lines = [f"a step takes {seconds:.4g} s, the median of {len(later)} records of metrics.jsonl"]
    if goodput.starts:
        lines.append(goodput.summary())
    if (wall_s := goodput.wall_s()) > 0:
        losses = {name: seconds / wall_s for name, seconds in goodput.parts().items()}
        lines += [
            f"{losses[name]:.1%} of the wall time: {REMEDIES[name]}"
            for name in sorted(losses.keys() & REMEDIES.keys(), key=lambda name: -losses[name])
            if losses[name] >= compare.WORTH
        ]
    slowest, behind_s = (records[-1].get(name) for name in ("slowest_process", "slowest_behind_s"))
    if isinstance(slowest, int) and _is_seconds(behind_s):
        lines.append(f"process {slowest} is behind the others by {behind_s:.3g} s a step")
    planned = _read(
        workdir,
        PLANNED,
        lambda folder: record.lines() if (record := compare.read(pathlib.Path(folder))) else [],
    )
    lines += [f"after warm-up: {line}" for line in planned]
    return seconds, lines


def advise(workdir: str | os.PathLike, hardware: Hardware | None = None) -> list[str]:
    """Advice as lines of text, from the records alone if the run's hardware is None. Raises
    UsageError."""
    config = _read(
        workdir,
        CONFIG_FILE,
        lambda folder: cfg.from_dict(read_json(pathlib.Path(folder, CONFIG_FILE), folder=folder)),
    )
    measured_s, lines = _from_records(workdir)
    if hardware is None:
        return [*lines, "with --hardware=NAME the planner says what else the step could be"]
    _check(workdir, config, hardware)
    now = exactly(predict(config.resolve(), hardware))
    ratio = measured_s / now.seconds
    lines.append(
        f"planned for {hardware.name}: {now.seconds:.4g} s; measured {ratio:.3g} times that"
    )
    if not 1 / FAR <= ratio <= FAR:
        lines.append(
            "that is far: a profile (train.profile_steps) says where the time goes; is this "
            "the device, and is it alone?"
        )
    parts = ", ".join(
        f"{name} {seconds / now.seconds:.0%}" for name, seconds in compare.listed(now.time.exposed)
    )
    lines += [*now.expected.lines(), f"planned parts: {parts}"]
    changes = [
        change
        for change in single_changes(now)
        if change.bytes <= hardware.memory and change.seconds <= now.seconds * (1 - compare.WORTH)
    ]
    if not changes:
        return [*lines, "no single change of the layout is planned to make it faster and to fit"]
    return [
        *lines,
        "planned to be faster, one change at a time:",
        *(
            f"  {cfg.suggestion(change.settings)}: {1 - change.seconds / now.seconds:.0%} less "
            f"time, {change.bytes / GIB:.1f} GiB a device"
            for change in changes[:MOST]
        ),
    ]


def _check(workdir: str | os.PathLike, config: Config, hardware: Hardware) -> None:
    """Raises UsageError for a config that the planner cannot take on this hardware."""
    unknown = [
        f"mesh.{axis}={size}"
        for axis in AXES
        for size in [getattr(config.mesh, axis)]
        if not isinstance(size, int) or size < 1
    ]
    if unknown:
        rule = f"its {CONFIG_FILE} has {unknown[0]}, which is no size that the planner could take"
    elif refusal := checks.error_of(config, checks.Environment(None, hardware.platform, config)):
        rule = f"its {CONFIG_FILE} is no run's: {str(refusal).partition(': use ')[0]}"
    elif config.precision.compute not in hardware.peak_tflops:
        rule = f"precision.compute={config.precision.compute!r} has no peak on {hardware.name}"
    else:
        return
    raise UsageError(
        f"--advise={cfg.shown(str(workdir))}: {rule}",
        {"hardware": ""},
        advice="for what the records alone say",
    )
