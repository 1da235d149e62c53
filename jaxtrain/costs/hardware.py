"""Kinds of devices, as data: hardware/NAME.json, or a file of a user's own with the same keys.

A file says what a data sheet says (peaks, memory, links) and which part of it programs reach. The
parts are few and physical:

    matmul.peak     part of the peak that large products reach
    matmul.half     [m, n, k]: a product whose m (n, k) is this long reaches half of that: tiles at
                    its edges, pipelines that fill
    attention       parts of the peak that a fused kernel reaches, forward and backward
    memory_reached  part of the memory's bandwidth that passes over large arrays reach
    host_gb_per_s   what a device copies to or from its host's memory, one way; 16, as PCIe 3, if
                    left out
    launch_us       time between the operations of a program
    clock_ghz       cycles of a TPU's cores, of which its compiler estimates each operation's
                    number; 0, unknown, if left out
    alone           simulated devices share their cores: how many times as fast one is while the
                    others wait; 1 if left out
    tiers           links from the fastest to the slowest. devices: how many one of them joins, 0
                    for any number; gb_per_s: what a device sends at most, one way; reached: the
                    part of it that large collectives reach; latency_us: of one step of a ring

    device_kind     a pattern of what jax calls such devices (`Device.device_kind`), so that a run
                    knows its own; may be left out
    like            the name of a kind whose figures are those that this file leaves out; may be
                    left out

Sources of the figures stand in each file.
"""

import dataclasses
import difflib
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "hardware"
GIB = 2**30
# GB/s one way of PCIe 3 × 16, and the part of a link to the host that large copies reach
HOST, HOST_REACHED = 16.0, 0.8
# of products, as `precision.compute` has them; a file has the peak of at least one
DTYPES = ("bfloat16", "float32")
# types that a file may have the peak of
PEAKS = (*DTYPES, "float16", "float8", "float4", "int8", "int4")
TIER_KEYS = ("name", "devices", "gb_per_s", "reached", "latency_us")
MATMUL_KEYS = ("peak", "half")
KEYS = (  # of a file, beside `like`
    *(
        "name",
        "peak_tflops",
        "memory_gib",
        "memory_usable",
        "memory_gb_per_s",
        "memory_reached",
        "matmul",
        "attention",
        "launch_us",
    ),
    *("tiers", "watts", "sources", "alone", "host_gb_per_s", "clock_ghz", "device_kind"),
)
MOST_DEVICES = 10**9  # that links join
PART = (1e-6, 1.0, 0.8)
SPEED = (1e-9, 1e6, 450.0)
# Key of a figure → the least and the most that it may be, and a usual one. What is beyond that is
# in another unit, or a slip.
FIGURES: Mapping[str, tuple[float, float, float]] = {
    "peak_tflops": (1e-9, 1e6, 989.0),
    "memory_gib": (1e-6, 1e6, 80.0),
    "memory_usable": PART,
    "memory_gb_per_s": (1e-9, 1e6, 3350.0),
    "memory_reached": PART,
    "host_gb_per_s": SPEED,
    "matmul.peak": PART,
    "matmul.half": (0.0, 1e9, 128.0),
    "attention": PART,
    "launch_us": (0.0, 1e9, 3.0),
    "clock_ghz": (0.0, 1e3, 1.75),
    "watts": (0.0, 1e6, 700.0),
    "alone": (1.0, 1e6, 1.0),
    "gb_per_s": SPEED,
    "reached": PART,
    "latency_us": (0.0, 1e9, 3.0),
}


class HardwareError(Exception):
    """A kind of device that is not known, or a file that does not describe one; the message is one
    line.

    rule: what is wrong, to be read after the name; use: a name that works.
    """

    def __init__(self, name: str, rule: str, use: str):
        self.rule, self.use = rule, use
        super().__init__(f"--hardware={name!r} {rule}: use --hardware={use}")


@dataclasses.dataclass(frozen=True)
class Tier:
    """Links of one kind, which join so many devices; 0: any number."""

    name: str
    devices: int
    gb_per_s: float
    reached: float
    latency_us: float

    @property
    def bytes_per_s(self) -> float:
        """What a device sends, one way, in a large collective."""
        return 1e9 * self.gb_per_s * self.reached


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The part of the peak that a product [m, k] · [k, n] reaches."""

    peak: float
    half: tuple[float, float, float]  # m, n, k

    def reached(self, m: float, n: float, k: float) -> float:
        """Operations a second of a product of these sizes, less than `peak`."""
        half_m, half_n, half_k = self.half
        return self.peak / (1 + half_m / max(m, 1) + half_n / max(n, 1) + half_k / max(k, 1))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A kind of device.

    peak_tflops:    dense, by the type of the operands
    memory_gib, memory_usable: and the part of it that a program's arrays may take
    memory_gb_per_s, memory_reached: bandwidth, and the part that is reached
    attention_forward, attention_backward: parts of the peak
    watts:          of the device under load, for energy; 0: not known
    clock_ghz:      cycles, 10⁹ a second, that a TPU's compiler counts in; 0: not known
    host_gb_per_s:  of copies to or from the host's memory, one way
    alone:          how many times as fast a device is while those that share its cores wait
    device_kind:    a pattern of jax's name of it; "" for none
    """

    name: str
    peak_tflops: Mapping[str, float]
    memory_gib: float
    memory_usable: float
    memory_gb_per_s: float
    memory_reached: float
    matmul: Matmul
    attention_forward: float
    attention_backward: float
    launch_us: float
    tiers: tuple[Tier, ...]
    watts: float
    sources: tuple[str, ...]
    alone: float = 1.0
    host_gb_per_s: float = HOST
    clock_ghz: float = 0.0
    device_kind: str = ""

    def waited(self, busy: float, idle: float) -> float:
        """Seconds by which idle time lengthens the step. Simulated devices share cores, so the
        others use what an idle one leaves."""
        return max(0.0, (busy + idle) / self.alone - busy)

    def peak(self, dtype: str = "bfloat16") -> float:
        """Operations a second. KeyError for a type whose peak is not known."""
        return 1e12 * self.peak_tflops[dtype]

    def utilization(self, flops_per_s: float, dtype: str) -> float | None:
        """The part of a device's peak that so many operations a second are (MFU, of a model's own);
        None where the peak is not known."""
        return flops_per_s / self.peak(dtype) if dtype in self.peak_tflops else None

    @property
    def memory(self) -> float:
        """Bytes that a program's arrays may take."""
        return GIB * self.memory_gib * self.memory_usable

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes a second of large copies to or from the host's memory, one way."""
        return 1e9 * self.host_gb_per_s * HOST_REACHED

    @property
    def streaming(self) -> float:
        """Bytes a second of a pass over large arrays."""
        return 1e9 * self.memory_gb_per_s * self.memory_reached


def known() -> tuple[str, ...]:
    """The kinds of devices that are there by name."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@functools.cache
def of_device(kind: str) -> "Hardware | None":
    """The kind of device that jax calls so (`Device.device_kind`); None if it is not known, as any
    CPU."""
    listed = map(load, known())
    return next(
        (
            each
            for each in listed
            if each.device_kind and re.search(each.device_kind, kind, re.IGNORECASE)
        ),
        None,
    )


def load(name: str) -> Hardware:
    """The kind of device with this name, or that of this file. Raises HardwareError."""
    path = pathlib.Path(name)
    if path.suffix != ".json":
        if name not in known():
            raise HardwareError(
                name, f"is not known ({', '.join(known())}, or a JSON file)", _nearest(name)
            )
        path = FOLDER / f"{name}.json"
    try:
        # a pipe would be waited for, a device has no end
        if os.path.exists(path) and not os.path.isfile(path):
            raise HardwareError(name, "is not a regular file", known()[0])
        return from_json(_completed(json.loads(path.read_bytes())))
    except OSError as error:
        raise HardwareError(
            name, f"cannot be read ({os.strerror(error.errno or 0)})", known()[0]
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = (
            f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        )
        rule = f"does not describe a device ({what}; {FOLDER / known()[0]}.json does)"
        raise HardwareError(name, rule, known()[0]) from None


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """A file's object with the figures of the kind that it is like. Raises ValueError for a key
    that is none, and where no kind has that name."""
    _check_keys(values, (*KEYS, "like"), "")
    if "like" not in values:
        return values
    name = values["like"]
    if name not in known():
        raise ValueError(
            f"like={_shown(name)} is no kind of device, and {_nearest(str(name))!r} is"
        )
    base = _completed(json.loads((FOLDER / f"{name}.json").read_bytes()))
    return {
        **base,
        "device_kind": "",
        "sources": [],
        **{key: value for key, value in values.items() if key != "like"},
    }


def _nearest(name: str) -> str:
    """The known name that has the longest text in common with this one, without punctuation; of
    several the shortest, of these the last."""
    letters = lambda text: re.sub(r"[^a-z0-9]", "", text.lower())
    if not letters(name):
        return "h100"
    shared = lambda kind: difflib.SequenceMatcher(None, letters(kind), letters(name))
    longest = lambda kind: shared(kind).find_longest_match().size
    return max(known(), key=lambda kind: (longest(kind), -len(letters(kind)), kind))


def from_json(values: Mapping[str, Any]) -> Hardware:
    """A kind of device from a file's object, without `like`. Raises KeyError for a key that it
    lacks, ValueError for one that is none, or that has no such value."""
    _check_keys(values, KEYS, "")
    tiers, matmul = _tiers(_list(values["tiers"], "tiers")), values["matmul"]
    _check_keys(values["peak_tflops"], PEAKS, "peak_tflops")
    peaks = {
        dtype: _figure(peak, "peak_tflops", f"peak_tflops.{dtype}")
        for dtype, peak in values["peak_tflops"].items()
    }
    if not any(dtype in peaks for dtype in DTYPES):
        raise ValueError(f"peak_tflops has none of {', '.join(DTYPES)}")
    _check_keys(matmul, MATMUL_KEYS, "matmul")
    m, n, k = (_figure(size, "matmul.half") for size in _list(matmul["half"], "matmul.half", 3))
    forward, backward = (
        _figure(part, "attention") for part in _list(values["attention"], "attention", 2)
    )
    return Hardware(
        name=_text(values["name"], "name"),
        peak_tflops=peaks,
        memory_gib=_figure(values["memory_gib"], "memory_gib"),
        memory_usable=_figure(values["memory_usable"], "memory_usable"),
        memory_gb_per_s=_figure(values["memory_gb_per_s"], "memory_gb_per_s"),
        memory_reached=_figure(values["memory_reached"], "memory_reached"),
        matmul=Matmul(_figure(matmul["peak"], "matmul.peak"), (m, n, k)),
        attention_forward=forward,
        attention_backward=backward,
        launch_us=_figure(values["launch_us"], "launch_us"),
        tiers=tiers,
        watts=_figure(values["watts"], "watts"),
        sources=tuple(
            _text(source, "sources") for source in _list(values.get("sources", []), "sources")
        ),
        alone=_figure(values.get("alone", 1.0), "alone"),
        host_gb_per_s=_figure(values.get("host_gb_per_s", HOST), "host_gb_per_s"),
        clock_ghz=_figure(values.get("clock_ghz", 0.0), "clock_ghz"),
        device_kind=_pattern(values.get("device_kind", "")),
    )


def _tiers(listed: Sequence[Any]) -> tuple[Tier, ...]:
    """Links that join ever more devices, the last any number."""
    tiers = []
    for at, values in enumerate(listed):
        key = f"tiers[{at}]"
        _check_keys(values, TIER_KEYS, key)
        devices = values["devices"]
        if (
            isinstance(devices, bool)
            or not isinstance(devices, int)
            or not 0 <= devices <= MOST_DEVICES
        ):
            raise ValueError(
                f"{key}.devices={_shown(devices)} must be a whole number up to "
                f"{MOST_DEVICES:,}, and 0 for the last tier"
            )
        figure = lambda name, value, key=key: _figure(value, name, f"{key}.{name}")
        speed, reached = (
            figure("gb_per_s", values["gb_per_s"]),
            figure("reached", values.get("reached", 1.0)),
        )
        latency = figure("latency_us", values.get("latency_us", 0.0))
        tiers.append(Tier(_text(values["name"], f"{key}.name"), devices, speed, reached, latency))
    sizes = [tier.devices for tier in tiers]
    if not sizes or sizes[-1]:
        raise ValueError("the last of tiers joins any number of devices: devices 0")
    if any(a >= b for a, b in itertools.pairwise(sizes[:-1])) or 0 in sizes[:-1]:
        raise ValueError(
            f"tiers have devices {', '.join(map(str, sizes))}, which must grow, and 0 for the last"
        )
    return tuple(tiers)


# --- figures of a file ----------------------------------------------------------------------------


def _figure(value: Any, figure: str, key: str = "") -> float:
    """The number of a key, whose limits are those of this figure. Raises ValueError where it is
    none, or beyond them."""
    least, most, usual = FIGURES[figure]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and least <= value <= most:
        return float(value)
    use = most if is_number and value > most else usual
    raise ValueError(
        f"{key or figure}={_shown(value)} must be a number from {least:g} to {most:g}, such "
        f"as {use:g}"
    )


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"{key}={_shown(value)} must be a text of one line, such as 'mine'")
    return value


def _shown(value: Any) -> str:
    """A value as messages have it, a long one cut."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_keys(values: Any, keys: Sequence[str], where: str) -> None:
    """Raises ValueError for what is no object, and for the first key of one that is none of these,
    with the nearest that is."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the file'} must be an object of keys")
    for key in values:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1, 0.0)[0]
            raise ValueError(
                f"the key {_shown(key)}{f' of {where}' * bool(where)} is unknown, and "
                f"{near!r} is the nearest"
            )


def _pattern(value: Any) -> str:
    """A regular expression. Raises ValueError where it is none."""
    try:
        return re.compile(value).pattern
    except (re.error, TypeError) as error:
        raise ValueError(f"device_kind={value!r} must be a regular expression: {error}") from None


def _list(value: Any, key: str, length: int = 0) -> Sequence[Any]:
    """length: 0 for any."""
    if not isinstance(value, (list, tuple)) or (length and len(value) != length):
        raise ValueError(f"{key} must be a list{f' of {length} numbers' * bool(length)}")
    return value


def to_json(hardware: Hardware) -> dict[str, Any]:
    """The object of a file that `from_json` reads as this."""
    values = dataclasses.asdict(hardware)
    values["attention"] = [values.pop("attention_forward"), values.pop("attention_backward")]
    values["matmul"]["half"] = list(hardware.matmul.half)
    return values | {
        "peak_tflops": dict(hardware.peak_tflops),
        "tiers": [dataclasses.asdict(tier) for tier in hardware.tiers],
    }
