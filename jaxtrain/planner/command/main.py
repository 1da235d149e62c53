"""`python -m jaxtrain.plan`: memory, time and best layout of a run before it is paid for.

Closed forms (planner/step) come first, then the table with its slots and exact clock. Nothing is
compiled: jax traces layers, for which it needs no device.
"""

import contextlib
import dataclasses
import difflib
import gc
import importlib
import itertools
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import cli, config as cfg
from jaxtrain.config import Config, ConfigError, MeshedConfig, UsageError, kernels
from jaxtrain.config.flags import SHARED_FLAGS, Flag
from jaxtrain.config.phases import largest_of
from jaxtrain.config.recipes import recipe_text
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.field_rules import field_violation
from jaxtrain.config.rules.mesh_rules import AXES
from jaxtrain.config.rules.phase_rules import SIZES
from jaxtrain.config.rules.unused import unused_settings
from jaxtrain.pipeline.run_checks import default_corpus
from jaxtrain.planner.command import picture
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.layer.hardware import Hardware
from jaxtrain.planner.layer.model import model_of
from jaxtrain.planner.layer.settings import FORMATS
from jaxtrain.planner.search import heterogeneous, layout_flag, layout_search
from jaxtrain.planner.search.explain import amount, explained, table
from jaxtrain.planner.search.layout_search import Space
from jaxtrain.planner.search.predict import Prediction, exactly, predict, with_op_times
from jaxtrain.planner.search.what_if import advise
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS
from jaxtrain.planner.step.step_model import OURS, with_allocator
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus

DESCRIPTION = """\
usage: jaxtrain plan --config=NAME|FILE --hardware=NAME|FILE --devices=N [--tokens=N]
                     [--recipe=FILE] [--json]
       jaxtrain plan --config=NAME|FILE --hardware=NAME|FILE --layout=KEY=VALUE,… [--tokens=N]
                     [--json]
       jaxtrain plan --calibrate --out=FILE
                     measures this machine's devices, as a file for --hardware
       jaxtrain plan --compile --topology=DEVICES --config=NAME|FILE [--layout=…]
                     compiles a step for devices that are not here, and compares it with its plan
       (or python -m jaxtrain.plan …; --calibrate --help and --compile --help have the flags of
       these two)

Says how much memory a run needs, how fast it is, and which layout is best, on devices that need not
be here:
  jaxtrain plan --config=gpt3_175b --hardware=a100-80gb --devices=1024 --tokens=300e9
  jaxtrain plan --config=gpt3_175b --hardware=a100-80gb \\
      --layout=data=8,stage=16,model=8,microbatch=1

--layout replaces the recipe's mesh, microbatches, repeats, remat, ZeRO stage and schedule:
  data, stage, model, context, expert, replica            sizes of the mesh axes; default 1
  microbatch                                              sequences of a microbatch on a data shard
  repeats, remat, zero, schedule, offload, vocabulary     as in a recipe; default: the recipe's
A layout that does not fit is evaluated, too. Without --layout all layouts are searched, by closed
forms. The layout, or the ten best that fit, are timed by the exact clock of their tables, if the
framework is our own.

--json prints, for the layout or for the best one:
  step_time_s                   seconds of a step
  model_tflops_per_device       rate of the model's operations; hardware_tflops_per_device counts
                                recomputation, too
  mfu, hfu                      these rates over the peak; a run's metrics.jsonl has the same mfu
  attention_flops               attention's operations in these: causal, the half that a causal
                                mask leaves, or full, as in the papers of --assume
  memory_gib_per_device         of the fullest device; fits: true if the device has so much
  bubble_fraction               fraction of the step that is bubble
  tokens_per_s, train_days      days without a stop, null without --tokens
  step_time_range_s             the least and the most that is expected; also tokens_per_s_range
                                and train_days_range
  validation                    the run's kind, how many measured runs are of it, the error that 8
                                of 10 keep, and the kinds behind that, the nearest if these are few
  note                          the same in words
  notes                         settings that differ from their defaults and that the plan does not
                                follow
  layout                        the layout in the form of --layout
  command                       trains it; YOUR_… stand for what only you know. null if train.steps
                                does not go so far, or jaxtrain has no such products"""
DEFAULT_HARDWARE = "h100"
FILES = {
    "recipe": "planned.py",
    "png": "plan.png",
    "html": "plan.html",
}  # flags of files to write, and usual names
# beginnings of settings that make another model or step, and are named where that is
OF_MODEL = ("model.", "precision.", "optimizer.name", "data.seq", "data.batch", "train.init_from")
TRAIN, WORKDIR = "python -m jaxtrain.train", "--workdir=YOUR_WORKDIR"
# flags of each process where there are several hosts
PROCESSES = "--coordinator=YOUR_HOST:29500 --processes=YOUR_PROCESSES --process_id=YOUR_PROCESS_ID"
ELSEWHERE = (
    "  in each process of every host; Slurm, MPI, Kubernetes, SkyPilot and Ray start them without "
    "the last three flags (docs/operations.md)"
)
# devices of the largest host, and of one in a rack whose fast links join more
NODE, TRAY = 8, 4
# how a command does not do what was planned, to be read after "to train it"
NO_PLAN, ONE_KIND, UNFIT = (
    " with jaxtrain, which this is no plan of",
    " on one kind of devices",
    ", though it does not fit",
)
MOST_TRIED = 128  # layouts over groups that are tried to suggest one
FLAGS = (
    next(flag for flag in SHARED_FLAGS if flag.name == "config"),
    Flag(
        "hardware",
        "",
        f"kind of device: {', '.join(hardware.known())}, or a JSON file of your own; "
        "NAME:N,NAME:N: groups of N devices each; empty: h100",
    ),
    Flag(
        "devices",
        0,
        "number of devices; 0: those of --layout, or of the recipe's mesh",
        1,
        cfg.LARGEST_INT,
    ),
    Flag("layout", "", "evaluate this layout: KEY=VALUE,…; empty: search"),
    Flag(
        "assume",
        OURS,
        f"the framework that trains: {', '.join(FRAMEWORKS)}. With @ it is that release, without "
        "one the newest",
    ),
    Flag("tokens", 0.0, "tokens of the complete training; 0: unknown", at_least=0),
    Flag("price", 0.0, "US dollars per device-hour; 0: unknown", at_least=0),
    Flag("kwh_price", 0.0, "US dollars per kilowatt-hour; 0: unknown", at_least=0),
    Flag("recipe", "", "write the layout's config to this file, as a recipe that train takes"),
    Flag(
        "advise",
        "",
        "print the changes that the records of the run in this folder suggest; with --hardware, "
        "also those that the planner finds faster",
    ),
    Flag("png", "", "draw memory and time by part to this file; of groups of devices, by stage"),
    Flag("html", "", "write the plan to this file as a page that needs nothing else"),
    Flag("json", False, "print the figures as one JSON object"),
)


# Flags that stand for commands with flags of their own, which import jax.
COMMANDS = {"--calibrate": "command.calibrate", "--compile": "programs.compile_check"}


@cli.command
def main(argv: Sequence[str]) -> int:
    """The exit status: 0, or 2 and one line on stderr for flags that cannot work."""
    if command := next((flag for flag in argv if flag in COMMANDS), ""):
        module = importlib.import_module(f"jaxtrain.planner.{COMMANDS[command]}")
        return int(module.main([flag for flag in argv if flag != command]))
    # A search makes millions of objects and few circles: to look for these took a quarter of it.
    gc.set_threshold(200_000, 50, 100)
    output = cli.parse_unchecked(argv, DESCRIPTION, FLAGS, planned)
    for path, content in output.files.items():
        cli.write_output(path, content)
    print("\n".join(output.lines))
    return ExitStatus.FINISHED


@dataclasses.dataclass(frozen=True)
class Output:
    """Lines for standard output, and the contents of files by their paths."""

    lines: Sequence[str]
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def planned(flags: types.SimpleNamespace, config: Config, recipe: Config) -> Output:
    """The output that the flags ask for; empty where they are refused anyhow and it would take
    long. Raises UsageError or ConfigError."""
    if flags.advise:
        _refuse_others(flags, ("config", "advise", "hardware"), "--advise")
        known = hardware.load(flags.hardware) if flags.hardware else None
        return Output(advise(flags.advise, known))
    if flags.assume not in FRAMEWORKS:
        raise UsageError(
            f"--assume={cfg.shown(flags.assume)} is not known ({', '.join(FRAMEWORKS)})",
            {"assume": difflib.get_close_matches(flags.assume, FRAMEWORKS, 1, 0.0)[0]},
        )
    for flag, otherwise in FILES.items():
        cli.check_output(flag, path := getattr(flags, flag), otherwise)
        if path and path in [getattr(flags, other) for other in FILES if other < flag]:
            raise UsageError(
                f"--{flag}={cfg.shown(path)} is another flag's file", {flag: otherwise}
            )
    check_settings(config, recipe)
    if heterogeneous.is_groups(flags.hardware):
        return _planned_groups(flags, config, recipe)
    kind = hardware.load(flags.hardware or DEFAULT_HARDWARE)
    space = _space(config, recipe, flags, kind)
    laid_out, plans = _plans(space, flags)
    if laid_out is None:
        return Output([])
    best, cells = plans[0], table(plans)
    report = picture.PlanReport(
        _with_notes(best.figures(), space.config, laid_out, kind),
        devices=f"{best.work.layout.devices:,} × {kind.name}",
        caution=NO_PLAN * (flags.assume != OURS) + UNFIT * (not best.fits),
        cells=cells,
        bars=picture.of_layouts(plans),
        drawn=with_op_times(best.config, best.work) if best.work.settings.ours else None,
        lines=lambda: explained(best, flags.price, flags.kwh_price),
        heading=[*streams.aligned(cells, ">"), ""] if len(plans) > 1 else (),
    )
    return _output(flags, config, laid_out, recipe, kind, report)


def plans(flags: types.SimpleNamespace, config: Config, recipe: Config) -> list[Prediction]:
    """The plans that the flags ask for on one kind of device, the fastest first; [] where the flags
    are refused anyhow. Raises UsageError or ConfigError."""
    check_settings(config, recipe)
    kind = hardware.load(flags.hardware or DEFAULT_HARDWARE)
    return _plans(_space(config, recipe, flags, kind), flags)[1]


def _plans(
    space: Space, flags: types.SimpleNamespace
) -> tuple[MeshedConfig | None, list[Prediction]]:
    """The config with the layout of the first plan, and the plans: of --layout, or of the best
    layouts; (None, []) where other flags are refused and a search would take minutes."""
    tokens = flags.tokens or None
    if flags.layout:
        config = _laid_out(space, flags.layout)
        return config, [exactly(predict(config.resolve(), space.hardware, flags.assume, tokens))]
    if not space.devices:  # those of the recipe's mesh
        sizes = [getattr(space.config.mesh, axis) for axis in AXES]
        known = [size for size in sizes if isinstance(size, int) and size > 0]
        if len(known) < len(sizes):
            raise UsageError(
                "--devices is not given, and the recipe's mesh leaves the number open",
                {"devices": math.prod(known)},
            )
        space = dataclasses.replace(space, devices=math.prod(sizes))
    if flags.refused:
        layout_search.check_fits(space)
        return None, []
    best = layout_search.best_plans(space, tokens)
    return layout_search.laid_out(space, best[0].work.layout), best


def check_settings(config: Config, recipe: Config) -> None:
    """Raises ConfigError for the first setting that breaks a rule by itself, also of those that a
    layout replaces."""
    for path in cfg.fields():
        value = cfg.get(config, path)
        if wrong := field_violation(path, value, cfg.get(recipe, path)):
            raise ConfigError(path, value, wrong.rule, fixes=[*wrong.fixes])


def _planned_groups(flags: types.SimpleNamespace, config: Config, recipe: Config) -> Output:
    """The output for a layout over groups of devices. Raises UsageError or ConfigError."""
    _refuse_others(
        flags,
        ("config", "hardware", "devices", "layout", "assume", "tokens", "json", *FILES),
        "groups of devices",
    )
    groups = heterogeneous.parse(flags.hardware)
    space = [_space(config, recipe, flags, group.hardware) for group in groups][0]
    count = sum(group.devices for group in groups)
    if flags.devices not in (0, count):
        raise UsageError(
            f"--devices={flags.devices} is not the {count} of --hardware={flags.hardware!r}",
            {"devices": count},
        )
    layout_search.check(space)
    values = layout_flag.read(flags.layout)
    refused = lambda rule: _error_with_layout(rule, space, groups, values, flags.hardware)
    if not flags.layout:
        raise refused(
            f"--hardware={flags.hardware!r} names groups, over which a --layout is planned, "
            "and none is searched"
        )
    if layout_flag.devices(values) != count:
        raise refused(
            f"--layout is for {layout_flag.devices(values)} devices, and "
            f"--hardware={flags.hardware!r} names {count}"
        )
    laid_out = _laid_out(space, flags.layout)
    try:
        plan = heterogeneous.plan(laid_out.resolve(), groups, flags.assume)
    except (ConfigError, UsageError):
        raise
    except ValueError as error:
        raise refused(
            f"--layout={flags.layout!r} does not go with --hardware={flags.hardware!r}: {error}"
        ) from None
    chunks = {"pipeline.chunk_layers": plan.config.pipeline.chunk_layers}
    kind, figures = groups[0].hardware, plan.figures(flags.tokens or None)
    report = picture.PlanReport(
        _with_notes(figures, space.config, laid_out, kind),
        devices=" and ".join(f"{group.devices:,} × {group.hardware.name}" for group in groups),
        caution=ONE_KIND * (len(groups) > 1) + UNFIT * (not plan.fits),
        cells=plan.table(),
        bars=picture.of_groups(plan),
        drawn=plan.config,
        lines=lambda: heterogeneous.describe(plan, flags.tokens),
        below_axis="stage (its layers)",
    )
    return _output(flags, config, cfg.replace(laid_out, chunks), recipe, kind, report)


def _with_notes(
    figures: Mapping[str, Any], given: Config, config: MeshedConfig, kind: Hardware
) -> Mapping[str, Any]:
    """The figures of a plan, with a note for each setting that has no use in its config, and for
    names in `pipeline.save` that do not go with its recomputation.

    given, config: as the flags have it, and as the layout has changed it
    """
    left_out = (
        f"pipeline.save={cfg.value_text(given.pipeline.save)} does not go with "
        f"remat={config.pipeline.remat}, so this plan is without it"
    )
    return {
        **figures,
        "notes": [
            *figures["notes"],
            *[left_out] * (given.pipeline.save != config.pipeline.save),
            *unused_settings(config, kind.platform),
        ],
    }


def _output(
    flags: types.SimpleNamespace,
    given: Config,
    planned: Config,
    recipe: Config,
    kind: Hardware,
    report: picture.PlanReport,
) -> Output:
    """The output of a plan: its figures or its lines, its command, and the requested files. The
    command and the recipe have steps for --tokens, and placeholders for what only the user knows.

    given:   the config as the flags have it
    planned: with the layout of the plan, to be trained
    kind:    of the devices; of groups the first one's

    Raises ConfigError if so many steps break a rule.
    """
    # A plan is that of the largest batches; its command has the phases.
    of_run = {path: cfg.get(given, path) for path in ("train.phases", *SIZES)}
    config, (_, of_phases) = cfg.replace(planned, of_run), largest_of(given)
    report.figures["notes"].extend([of_phases] * bool(of_phases))
    files, name = {}, f"{_name(flags, config, recipe)}, on {report.devices}"
    size = config.data.batch_size * config.data.sequence_length
    steps = math.ceil(flags.tokens / size) or config.train.steps
    changes = {**default_corpus(config), "train.steps": steps}
    file = flags.hardware.partition(":")[0]
    if "," not in flags.hardware and not (kind.device_kind and file in ("", *hardware.known())):
        changes["train.hardware"] = file  # which jax's name of the devices does not tell
    config, known = cfg.replace(config, changes), checks.Environment(None, kind.platform, recipe)
    cannot = f"train.steps has at most {cfg.LARGEST_INT:,}" * (steps > cfg.LARGEST_INT)
    if flags.assume != OURS and (broken := checks.first_violation(config, known)):
        cannot = cannot or f"{broken.field}={cfg.get(config, broken.field)!r} {broken.rule}"
    if flags.recipe or not cannot:
        checks.check(config, known)
    if flags.recipe:
        files[flags.recipe] = recipe_text(config, f"{name}, as planned.").encode()
    command = None if cannot else _command(flags, config, recipe, kind)
    train = [
        *(f"note: {note}" for note in report.figures["notes"]),
        f"no command trains it: {cannot}",
    ]
    if command:
        train[-1:] = [
            f"to train it{report.caution}, {steps:,} steps of {size:,} tokens, filling in each "
            "YOUR_…:",
            *[ELSEWHERE] * (PROCESSES in command),
            f"  {command}",
        ]
    if flags.png:
        files[flags.png] = picture.png(report.bars, f"{name}, as planned", report.below_axis)
    if flags.html:
        files[flags.html] = picture.page(f"{name}, as planned", report, train)
    if flags.json:
        return Output([json.dumps({**report.figures, "command": command})], files)
    return Output([*report.heading, *report.lines(), *train], files)


def _command(flags: types.SimpleNamespace, config: Config, recipe: Config, kind: Hardware) -> str:
    """The command that trains a plan's config: `train` with the flags that make it of the recipe.
    Simulated devices are asked for; processes on several GPU hosts need flags to find each other,
    those of a TPU slice do not."""
    devices = math.prod(getattr(config.mesh, axis) for axis in AXES)
    node = TRAY if kind.tiers[0].devices > NODE else NODE
    several = {kernels.CPU: f"--cpu_devices={devices}", kernels.GPU: PROCESSES * (devices > node)}
    words = [
        TRAIN,
        cfg.flag_text("config", flags.config),
        WORKDIR,
        cfg.flags_of(config, recipe),
        several.get(kind.platform),
    ]
    return " ".join(filter(None, words))


def _error_with_layout(
    rule: str,
    space: Space,
    groups: Sequence[heterogeneous.Group],
    values: layout_flag.Values,
    text_of_groups: str,
) -> UsageError:
    """The error `rule`, with a change that works: the layout over these groups that is nearest to
    `values`, one that fits in memory if there is any; or else the first group's kind of device.

    values: --layout as read; text_of_groups: --hardware as given
    """
    working = []
    for tried in itertools.islice(heterogeneous.layouts(space.config, groups, values), MOST_TRIED):
        with contextlib.suppress(UsageError, ConfigError):
            working.append((text := layout_flag.text_of(tried), _laid_out(space, text).resolve()))
    for text, config in sorted(
        working,
        key=lambda layout: not heterogeneous.hold_all_layers(layout[1], groups, space.assume),
    ):
        with contextlib.suppress(ConfigError, ValueError):
            heterogeneous.plan(config, groups, space.assume)
            return UsageError(rule, {"layout": text})
    return UsageError(rule, {"hardware": text_of_groups.split(",")[0].rpartition(":")[0]})


def _refuse_others(flags: types.SimpleNamespace, known: Sequence[str], what: str) -> None:
    """Raises UsageError for the first flag that is not one of these and not at its default."""
    for flag in FLAGS:
        value = getattr(flags, flag.name)
        if flag.name not in known and value != flag.default:
            raise UsageError(
                f"{cfg.flag_text(flag.name, value)} has no meaning for {what}",
                {flag.name: flag.default},
            )


def _space(config: Config, recipe: Config, flags: types.SimpleNamespace, kind: Hardware) -> Space:
    """The space of the flags on this hardware. Raises UsageError for a type without a peak."""
    compute, matmul = config.precision.compute, config.precision.matmul
    if compute not in kind.peak_tflops:
        dtype = next(
            (dtype for dtype in ("bfloat16", "float32") if dtype in kind.peak_tflops), "bfloat16"
        )
        raise UsageError(
            f"precision.compute={compute!r} has no peak on {kind.name}",
            {"config.precision.compute": dtype},
        )
    # This trainer rounds, and multiplies in the compute type, where a device has no such products.
    known = [*(name for name, of in FORMATS.items() if of.peak in kind.peak_tflops), "compute"]
    if flags.assume != OURS and matmul not in known:
        raise UsageError(
            f"precision.matmul={matmul!r} has no peak on {kind.name}",
            {"config.precision.matmul": known[0]},
        )
    largest, _ = largest_of(config)
    return Space(largest, recipe, with_allocator(kind, flags.assume), flags.devices, flags.assume)


def _laid_out(space: Space, text: str) -> MeshedConfig:
    """The config with the layout of --layout. Raises UsageError or ConfigError."""
    values = layout_flag.read(text)
    count = layout_flag.devices(values)
    if space.devices and space.devices != count:
        data, rest = divmod(space.devices, count // values.get("data", 1))
        raise UsageError(
            f"--devices={space.devices} and --layout, which is for {count}, are not the same "
            "number",
            {"devices": count},
            [] if rest else [f"data={data} in --layout"],
        )
    known = checks.Environment(
        None, space.hardware.platform, space.recipe, is_ours=space.assume == OURS
    )
    return layout_flag.laid_out(space.config, values, known)


def _name(flags: types.SimpleNamespace, config: Config, recipe: Config) -> str:
    """The name of what is planned: the recipe's, the number of parameters, and the flags that
    change the model, its numbers or the batch."""
    name = os.path.basename(flags.config).removesuffix(".py")
    count = model_of(config.fill().model, config.data.sequence_length).parameters()
    changed = [
        f"{path}={cfg.value_text(cfg.get(config, path))}"
        for path in cfg.fields()
        if path.startswith(OF_MODEL) and cfg.get(config, path) != cfg.get(recipe, path)
    ]
    return f"{name}, {amount(count, 'count')} parameters" + f" ({', '.join(changed)})" * bool(
        changed
    )
