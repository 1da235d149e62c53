"""Published runs of 2025 and 2026: rows of a table that has the flags of `jaxtrain plan` for each,
and what the planner says of them.

A row without a framework has a part that no flag expresses; its remark names it. A column that the
flags do not say is read as the source has it: the device, the framework's release.
"""

import csv
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping

from errors_by_kind import Kind

from jaxtrain.config import Config, fields
from jaxtrain.config.errors import ConfigError, UsageError
from jaxtrain.config.flags import apply
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules.checks import Environment
from jaxtrain.planner.layer import hardware
from jaxtrain.planner.layer.hardware import Hardware
from jaxtrain.planner.search import layout_flag
from jaxtrain.planner.search.predict import Prediction, predict
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS

# what a source calls a device → its file
DEVICES = (
    (r"TPU7x", "tpu-7x"),
    (r"TPU (v\d\w?)", r"tpu-\1"),
    (r"H100 .*\(A3\)", "h100-a3"),
    (r"([A-Z]+\d+)", r"\1"),
)
# columns that are read, and the units of `rate`: of a step, of a device, or of all of them
COLUMNS = (
    *("row", "source", "model", "devices", "device_kind", "class", "rate", "rate_unit"),
    *("framework", "recipe", "flags", "layout", "remarks"),
)
UNITS = re.compile(r"s|(TFLOP|tokens)/s(/\w+| \(all.*\))")
RELEASE = re.compile(r"\((\d\d\.\d\d)")


class RowError(Exception):
    """A table or a row that cannot be planned, as one line."""


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A row: the run's config and hardware, and its published rate.

    values: the row's columns
    """

    values: dict[str, str]

    @property
    def name(self) -> str:
        """The row's number, model and devices."""
        values = self.values
        text = f"{values['row']}: {values['model']} on {values['devices']} {self.device}"
        return f"{text}, {self.precision}"

    @functools.cached_property
    def unplanned(self) -> str:
        """Why no plan has the row's error: no flag expresses it, or its flags are refused; "" if
        one has."""
        if not self.values["framework"]:
            return self.values["remarks"] or "no framework"
        try:
            self.plan  # noqa: B018 (an error says what is refused)
        except (ConfigError, UsageError) as error:
            return str(error)
        return ""

    @property
    def approximate(self) -> bool:
        """True if the model has windows and sinks, and is planned with full attention."""
        return self.values["class"] == "MoE-window"

    @functools.cached_property
    def device(self) -> str:
        for pattern, name in DEVICES:
            if match := re.search(pattern, self.values["device_kind"]):
                return match.expand(name).lower()
        raise ValueError(f"row {self.values['row']}: {self.values['device_kind']!r} is no device")

    @functools.cached_property
    def hardware(self) -> Hardware:
        return hardware.load(self.device)

    @property
    def precision(self) -> str:
        """What products are computed in: a choice of `precision.matmul`, or of `compute`."""
        precision = self.config.precision
        return precision.compute if precision.matmul == "compute" else precision.matmul

    @property
    def kind(self) -> Kind:
        model = "experts" if self.config.model.experts else "dense"
        return Kind(self.device, model, self.precision, self.values["framework"])

    @property
    def framework(self) -> str:
        """The framework with its release, where the planner knows that, or the newest one that it
        knows before it."""
        name, release = self.values["framework"], RELEASE.search(self.values["source"])
        known = sorted(each for each in FRAMEWORKS if each.startswith(f"{name}@"))
        later = [each for each in known if release and each >= f"{name}@{release[1]}"]
        return later[0] if later else name

    @functools.cached_property
    def config(self) -> Config:
        values, recipe = self.values, load_recipe(find_recipe(self.values["recipe"]))
        flags = [tuple(flag.split("=", 1)) for flag in values["flags"].split()]
        config = apply(recipe, flags)
        known = Environment(None, self.hardware.platform, recipe, is_ours=False)
        return layout_flag.laid_out(config, layout_flag.read(values["layout"]), known).resolve()

    @functools.cached_property
    def plan(self) -> Prediction:
        return predict(self.config, self.hardware, self.framework)

    @property
    def published(self) -> float:
        """Tokens a second of all devices, or TFLOP/s of a device."""
        rate, unit = float(self.values["rate"]), self.values["rate_unit"]
        if unit == "s":
            return self.plan.work.layout.batch * self.plan.work.model.sequence / rate
        each = 1 if "(all" in unit or unit.startswith("TFLOP") else int(self.values["devices"])
        return rate * each

    @property
    def predicted(self) -> float:
        """The same of the plan."""
        of_flops = self.values["rate_unit"].startswith("TFLOP")
        return self.tflops if of_flops else self.plan.tokens_per_s

    @property
    def error(self) -> float:
        """The predicted speed over the published one, less 1."""
        return self.predicted / self.published - 1

    @property
    def figures(self) -> tuple[str, str]:
        """The predicted and the published rate."""
        each = "TFLOP/s" if self.values["rate_unit"].startswith("TFLOP") else "tokens/s"
        return f"{self.predicted:,.0f}", f"{self.published:,.0f} {each}"

    @property
    def tflops(self) -> float:
        """Planned TFLOP/s of a device, of the model's operations."""
        work = self.plan.work
        return work.model_flops() / self.plan.seconds / work.layout.devices / 1e12

    @property
    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of a step by part, but for what other work hides."""
        return dict(self.plan.time.exposed)


def read(path: pathlib.Path) -> Iterator[PublishedRun]:
    """The rows of a table. Raises RowError for a table that cannot be read, or a row in which
    something that no plan refuses is wrong."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise RowError(f"has no column {', '.join(missing)}")
            for row in rows:
                if wrong := wrong_value({name: value or "" for name, value in row.items()}):
                    raise RowError(f"row {row['row']!r} (line {rows.line_num}): {wrong}")
                yield PublishedRun({name: row[name] or "" for name in COLUMNS})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowError(f"cannot be read as a table: {error}") from None


def wrong_value(values: Mapping[str, str]) -> str:
    """What is wrong with a row of a framework; "" for nothing, and for rows without one, which are
    not planned."""
    if not (framework := values["framework"]):
        return ""
    if framework not in FRAMEWORKS or "@" in framework:
        known = ", ".join(name for name in FRAMEWORKS if "@" not in name)
        return f"framework {framework!r} is not known ({known}; a release is read in source)"
    if not any(re.search(pattern, values["device_kind"]) for pattern, _ in DEVICES):
        return f"device_kind {values['device_kind']!r} is no device"
    if not re.fullmatch(r"[1-9]\d*", values["devices"]):
        return f"devices {values['devices']!r} is no number of devices"
    try:
        rate = float(values["rate"])
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        return f"rate {values['rate']!r} is no positive number"
    if not UNITS.fullmatch(values["rate_unit"]):
        return f"rate_unit {values['rate_unit']!r} is not s, TFLOP/s/… or tokens/s/…"
    settings = [flag.partition("=") for flag in values["flags"].split()]
    if wrong := ["".join(parts) for parts in settings if not parts[1] or parts[0] not in fields()]:
        return f"flags {wrong[0]!r} is no SETTING=VALUE"
    return ""
