"""The rules of `train.phases`: its items, the beginnings of phases, and every other rule for the
config of each span. Standard library only."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from jaxtrain.config import DataConfig, FilledConfig, MeshedConfig, TrainConfig, number
from jaxtrain.config.errors import nearly
from jaxtrain.config.groups.mixture_settings import mixture_of
from jaxtrain.config.groups.phase_settings import (
    SETTINGS,
    TrainingPhase,
    numbers_of,
    phases_of,
    spans_of,
)
from jaxtrain.config.groups.setting import entry_text, parse_item, with_entry, without_entries
from jaxtrain.config.phases import Span, config_of, spans
from jaxtrain.config.rules.kind_rules import violations
from jaxtrain.config.rules.rules import (
    SettingChanges,
    SettingsRule,
    Violation,
    in_items,
    item_violations,
)

PHASES = "train.phases"
SIZES = ("data.batch_size", "data.sequence_length")  # that phases change


def phases_are_known(train: TrainConfig, data: DataConfig) -> Iterator[Violation]:
    """The items have settings that there are, and each phase begins after the one before it."""
    entries, phases, all_spans = train.phases, phases_of(train), spans_of(data, train)
    yield from item_violations(PHASES, entries, lambda item: _fault_of_item(item, data))
    for name, phase in phases.items():
        yield from _violations_of_phase(name, phase, train)
    begun = {span.phase for span in all_spans}
    for name, later in itertools.pairwise(phases):
        # The spans of a phase end where the next one begins, so this one has none.
        if name not in begun and later in begun:
            after = with_entry(entries, f"{later}.step", str(phases[name].get("step", 0) + 1))
            fixes = [{PHASES: after}, _without(train, name)]
            rule = f"has phase {later} begin before or with {name}, which stands first"
            yield Violation(PHASES, rule, fixes)
    if empty := [span.phase for span in all_spans if entries and not sum(span.weights) > 0]:
        rule = f"leaves no source a weight above 0 in phase {empty[0]}"
        yield Violation(PHASES, rule, [_without(train, empty[0])])


def of_spans(rules: Iterable[SettingsRule], config: FilledConfig) -> Iterator[Violation]:
    """The violations of rules by the config of each span; none without phases, where the config
    itself is checked."""
    for span in spans(config) if config.train.phases else ():
        of_span = config_of(config, span).fill()
        for rule in rules:
            yield from (_in_span(one, config, span) for one in violations(rule, of_span))


def notes(config: MeshedConfig) -> list[str]:
    """Lines about phases that never begin."""
    begun = {span.phase for span in spans(config)}
    return [
        f"{PHASES}: phase {name} never begins within train.steps={config.train.steps}"
        for name in phases_of(config.train)
        if name not in begun
    ]


def _fault_of_item(entry: str, data: DataConfig) -> tuple[str, str] | None:
    """What is wrong with an item, and what it may mean or ""; None for nothing."""
    item, name = parse_item(entry), entry.partition("=")[0]
    if not item or not item.setting or bool(item.part) != (item.setting == "weight"):
        return "which is not NAME.SETTING=VALUE or NAME.weight.SOURCE=VALUE", ""
    if item.setting not in SETTINGS:
        near = nearly(item.setting, SETTINGS, 0.45)
        rule = f"whose setting is none of {', '.join(SETTINGS)}"
        return rule, near and f"{item.name}.{near}={item.text}"
    if not numbers_of(item):
        kind, bounds = SETTINGS[item.setting]
        what = "a whole number" if type(kind) is int else "a number"
        sizes = ", or several with + between them" * (item.setting == "batch_size")
        value = number(item.text)
        near = "" if value is None else f"{name}={max(bounds.at_least or 0, round(value))}"
        return f"which needs {what} {bounds}{sizes}", near
    sources = [source.name for source in mixture_of(data) if source.name]
    if item.part and item.part not in sources:
        near = nearly(item.part, sources, 0.5)
        rule = f"and data.sources has {', '.join(sources) or 'no sources'}"
        return rule, near and f"{item.name}.weight.{near}={item.text}"
    return None


def _violations_of_phase(
    name: str, phase: TrainingPhase, train: TrainConfig
) -> Iterator[Violation]:
    """The violations of a phase, whatever the others are."""
    sizes, ramp_steps = len(phase.get("batch_size", ())), phase.get("ramp_steps", 0)
    set_to = lambda setting, value: {PHASES: with_entry(train.phases, f"{name}.{setting}", value)}
    without = lambda setting: _without(train, f"{name}.{setting}")
    beginnings = len({"step", "tokens"} & phase.keys())
    middle, tenth = str(max(1, train.steps // 2)), str(max(sizes, train.steps // 10))
    faults = {
        "neither step nor tokens, where it begins": (not beginnings, set_to("step", middle)),
        "both step and tokens, and begins once": (beginnings == 2, without("tokens")),
        f"{sizes} batch sizes, which need {sizes} ramp_steps or more": (
            1 < sizes > ramp_steps,
            set_to("ramp_steps", tenth),
        ),
        "ramp_steps, and no batch_size of several sizes, such as 8+16": (
            sizes < 2 and ramp_steps,
            without("ramp_steps"),
        ),
    }
    for rule, (is_fault, fix) in faults.items():
        if is_fault:
            yield Violation(PHASES, f"has phase {name} with {rule}", [fix, _without(train, name)])


def _in_span(violation: Violation, config: FilledConfig, span: Span) -> Violation:
    """The violation by the config of a span."""
    if not span.phase:
        return violation
    ramp = phases_of(config.train)[span.phase].get("batch_size", ())

    def put(items: tuple[str, ...], setting: str, size: Any) -> tuple[str, ...]:
        mended = tuple(size if each == span.batch_size else each for each in ramp)
        sizes = mended if setting == "data.batch_size" else ()
        name = f"{span.phase}.{setting.removeprefix('data.')}"
        return with_entry(items, name, entry_text(sizes or size))

    where, values = f"in phase {span.phase} of {PHASES}", dict(zip(SIZES, span.shape, strict=True))
    return in_items(violation, PHASES, config.train.phases, where, values, put)


def _without(train: TrainConfig, name: str) -> SettingChanges:
    """The items without those of a phase, or without one of its settings."""
    return {PHASES: without_entries(train.phases, name)}
