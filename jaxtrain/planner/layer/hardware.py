"""Kinds of devices as data: hardware/NAME.json, or a user's file with the same keys.

A file has the figures of a data sheet (peaks, memory, links) and the fractions of them that
programs reach. These are few and physical:

    matmul.peak     fraction of the peak that large products reach
    matmul.half     [m, n, k]: a product whose m (n, k) is this long reaches half of that, because
                    of tiles at its edges and pipelines that fill
    quantized_reached  fraction of its peak that a product of 8 or 4 bits reaches, over that of the
                    compute type; 1 if left out
    attention       fractions of the peak that a fused kernel reaches, forward and backward
    memory_usable   fraction of the memory that arrays may take; gpu_memory() if left out
    memory_reached  fraction of the memory's bandwidth that passes over large arrays reach
    host_gb_per_s   rate of copies between a device and its host's memory, one way; 16, as PCIe 3,
                    if left out
    disk_gb_per_s   a device's part of its machine's local disks, bytes read and written together;
                    2 if left out
    launch_us       time between two operations of a program
    clock_ghz       clock of a TPU's cores, because its compiler estimates operations in cycles; 0,
                    unknown, if left out
    alone           for simulated devices, which share cores: how many times as fast one device is
                    while the others wait; 1 if left out
    tiers           links from the fastest to the slowest. devices: number of devices that the link
                    joins, 0 for any number; gb_per_s: the most that a device sends, one way;
                    reached: fraction of it that large collectives reach; latency_us: of one step of
                    a ring; sides: of the slice that is a torus of such links, 2 or 3, whose
                    gb_per_s is that of one ring both ways; 0, no torus, if left out

    device_kind     a pattern of jax's name for such devices (`Device.device_kind`), by which a run
                    knows its devices; may be left out
    like            the name of another kind, which has the figures that this file leaves out; may
                    be left out

Each file names the sources of its figures.
"""

import dataclasses
import difflib
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxtrain.config import UsageError, kernels, shown
from jaxtrain.config.sizes import gpu_memory

T = TypeVar("T")
FOLDER = pathlib.Path(__file__).parent / "hardware"
GIB = 2**30
# GB/s one way of PCIe 3 × 16, and the part of a link to the host that large copies reach
HOST, HOST_REACHED = 16.0, 0.8
# GB/s of a device's part of local NVMe disks, and the part of it that a run's stream reaches
# (benchmarks/offload_disk.py)
DISK, DISK_REACHED = 2.0, 0.8
# `precision.compute`'s types; a file has the peak of at least one
DTYPES = ("bfloat16", "float32")
# types whose peak a file may have
PEAKS = (*DTYPES, "float16", "float8", "mxfloat8", "float4", "int8", "int4")
MOST_DEVICES = 10**9  # that links join
PART = (1e-6, 1.0, 0.8)
SPEED = (1e-9, 1e6, 450.0)
# Last part of a figure's key → its least, its greatest and a usual value. What is beyond that is in
# another unit, or a slip.
FIGURES: Mapping[str, tuple[float, float, float]] = {
    "peak_tflops": (1e-9, 1e6, 989.0),
    "memory_gib": (1e-6, 1e6, 80.0),
    "memory_usable": PART,
    "memory_gb_per_s": (1e-9, 1e6, 3350.0),
    "memory_reached": PART,
    "host_gb_per_s": SPEED,
    "disk_gb_per_s": SPEED,
    "peak": PART,
    "half": (0.0, 1e9, 128.0),
    "attention": PART,
    "quantized_reached": PART,
    "launch_us": (0.0, 1e9, 3.0),
    "clock_ghz": (0.0, 1e3, 1.75),
    "watts": (0.0, 1e6, 700.0),
    "alone": (1.0, 1e6, 1.0),
    "gb_per_s": SPEED,
    "reached": PART,
    "latency_us": (0.0, 1e9, 3.0),
}


class HardwareError(UsageError):
    """A kind of device that is not known, or a file that does not describe one, in one line.

    problem: what is wrong, to be read after the name; use: a name that may be meant, "" if none is
    """

    def __init__(self, name: str, problem: str, use: str = ""):
        self.problem, self.use = problem, use
        super().__init__(f"--hardware={shown(name)} {problem}", {"hardware": use} if use else {})


@dataclasses.dataclass(frozen=True)
class Tier:
    """Links of one kind.

    devices:    that they join; 0: any number
    gb_per_s, reached: the most that a device sends, one way, and the part that large collectives
                reach
    latency_us: of one step of a ring
    sides:      of the slice that is a torus of these links (torus_links.py); 0 for no torus
    """

    name: str
    devices: int
    gb_per_s: float
    reached: float = 1.0
    latency_us: float = 0.0
    sides: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that a device sends, one way, in a large collective."""
        return 1e9 * self.gb_per_s * self.reached


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The part of the peak that a product [m, k] · [k, n] reaches."""

    peak: float
    half: tuple[float, float, float]  # m, n, k

    def reached(self, m: float, n: float, k: float) -> float:
        """The part of the peak that a product of these sizes reaches; less than `peak`."""
        half_m, half_n, half_k = self.half
        return self.peak / (1 + half_m / max(m, 1) + half_n / max(n, 1) + half_k / max(k, 1))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A kind of device.

    peak_tflops:    dense, by the type of the operands
    memory_gib, memory_usable: memory, and the part of it that a program's arrays may take
    memory_gb_per_s, memory_reached: bandwidth, and the part that is reached
    matmul, attention: parts of the peak that products reach, and that a fused kernel of attention
                    reaches, forward and backward
    launch_us:      time between two operations of a program
    tiers:          links, from the fastest to the slowest
    sources:        of these figures
    quantized_reached: the part of its peak that a product of 8 or 4 bits reaches, over that of the
                    compute type
    watts:          power under load, for energy; 0: not known
    clock_ghz:      10⁹ cycles a second that a TPU's compiler counts in; 0: not known
    host_gb_per_s:  bandwidth of copies to or from the host's memory, one way
    disk_gb_per_s:  of a device's part of the local disks, both ways together
    alone:          the factor by which a device is faster while those that share its cores wait
    device_kind:    a pattern of jax's name of it; "" for none
    """

    name: str
    peak_tflops: Mapping[str, float]
    memory_gib: float
    memory_usable: float
    memory_gb_per_s: float
    memory_reached: float
    matmul: Matmul
    attention: tuple[float, float]
    launch_us: float
    tiers: tuple[Tier, ...]
    watts: float
    sources: tuple[str, ...]
    alone: float = 1.0
    host_gb_per_s: float = HOST
    disk_gb_per_s: float = DISK
    clock_ghz: float = 0.0
    quantized_reached: float = 1.0
    device_kind: str = ""

    def waited(self, busy: float, idle: float) -> float:
        """Seconds by which idle time lengthens the step. Simulated devices share cores, so the
        others use what an idle one leaves."""
        return max(0.0, (busy + idle) / self.alone - busy)

    def peak(self, dtype: str = "bfloat16") -> float:
        """Operations a second. Raises KeyError for a type whose peak is not known."""
        return 1e12 * self.peak_tflops[dtype]

    @property
    def platform(self) -> str:
        """The platform by jax's name: tpu, cpu or gpu."""
        family = self.name.lower()[:3]
        return family if family in (kernels.TPU, kernels.CPU) else kernels.GPU

    @property
    def memory(self) -> float:
        """Bytes that a program's arrays may take."""
        return GIB * self.memory_gib * self.memory_usable

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes a second of large copies to or from the host's memory, one way."""
        return 1e9 * self.host_gb_per_s * HOST_REACHED

    @property
    def disk_bytes_per_s(self) -> float:
        """Bytes a second that a device's state is read and written on the local disks."""
        return 1e9 * self.disk_gb_per_s * DISK_REACHED

    @property
    def streaming(self) -> float:
        """Bytes a second of a pass over large arrays."""
        return 1e9 * self.memory_gb_per_s * self.memory_reached


def known() -> tuple[str, ...]:
    """The names of the kinds of devices that have a file in FOLDER."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@functools.cache
def of_device(kind: str) -> Hardware | None:
    """The hardware whose pattern matches jax's name (`Device.device_kind`); None for a device that
    has no file, as any CPU."""
    patterned = (each for each in map(load, known()) if each.device_kind)
    matches = (each for each in patterned if re.search(each.device_kind, kind, re.IGNORECASE))
    return next(matches, None)


def load(name: str) -> Hardware:
    """The kind of device with this name, or of this JSON file. Raises HardwareError.

    >>> h100 = load("h100")
    >>> h100.peak("bfloat16"), round(h100.memory / 1e9)
    (989000000000000.0, 80)
    """
    path = pathlib.Path(name)
    if path.suffix != ".json":
        if name not in known():
            raise HardwareError(
                name, f"is not known ({', '.join(known())}, or a JSON file)", _nearest(name)
            )
        path = FOLDER / f"{name}.json"
    # a pipe would be waited for, a device has no end
    if os.path.exists(path) and not os.path.isfile(path):
        raise HardwareError(name, "is not a regular file")
    try:
        with path.open("rb") as file:  # it has some 2,000 bytes
            return from_json(_completed(json.loads(file.read(10**6))))
    except OSError as error:
        raise HardwareError(name, f"cannot be read ({os.strerror(error.errno or 0)})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = (
            f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        )
        raise HardwareError(
            name,
            f"does not describe a device ({what}; {FOLDER / known()[0]}.json does)",
        ) from None


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """A file's object with the figures of the kind that it is like. Raises ValueError for an
    unknown key, and where no kind has that name."""
    _check_keys(values, (*(field.name for field in dataclasses.fields(Hardware)), "like"), "")
    if "like" not in values:
        return values
    name = values["like"]
    if name not in known():
        near = _nearest(str(name)) or known()[0]
        raise ValueError(f"like={_shown(name)} is no kind of device, and {near!r} is")
    base = _completed(json.loads((FOLDER / f"{name}.json").read_bytes()))
    return {
        **base,
        "device_kind": "",
        "sources": [],
        **{key: value for key, value in values.items() if key != "like"},
    }


def _nearest(name: str) -> str:
    """The known name that has the longest text in common with this one, without punctuation; of
    several the shortest, of these the last. "" if that is less than three letters, and not all of
    one of them."""
    letters = lambda text: re.sub(r"[^a-z0-9]", "", text.lower())
    matcher = lambda kind: difflib.SequenceMatcher(None, letters(kind), letters(name))
    longest = lambda kind: matcher(kind).find_longest_match().size
    near = max(known(), key=lambda kind: (longest(kind), -len(letters(kind)), kind))
    enough = min(3, len(letters(near)), len(letters(name)))
    return near if longest(near) >= max(enough, 2) else ""


def from_json(values: Mapping[str, Any]) -> Hardware:
    """A kind of device from a file's object, without `like`. Raises KeyError for a missing key,
    ValueError for an unknown one or an impossible value."""
    return _record(Hardware, {"memory_usable": gpu_memory(os.environ), "sources": [], **values})


# --- figures of a file ----------------------------------------------------------------------------


def _record(kind: Any, values: Any, key: str = "") -> Any:
    """A dataclass of this kind from an object; fields that have a default may be left out."""
    fields = dataclasses.fields(kind)
    _check_keys(values, [field.name for field in fields], key)
    return kind(
        **{
            field.name: READERS.get(field.name, _figure)(
                values[field.name], f"{key}.{field.name}" if key else field.name
            )
            for field in fields
            if field.name in values or field.default is dataclasses.MISSING
        }
    )


def _figure(value: Any, key: str, figure: str = "") -> float:
    """The number of a key, within the limits of this figure, by default the key's last part. Raises
    ValueError for anything else."""
    least, most, usual = FIGURES[figure or key.rpartition(".")[2]]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and least <= value <= most:
        return float(value)
    use = most if is_number and value > most else usual
    raise ValueError(
        f"{key}={_shown(value)} must be a number from {least:g} to {most:g}, such as {use:g}"
    )


def _peaks(values: Any, key: str) -> dict[str, float]:
    """Peaks by type, one of DTYPES among them."""
    _check_keys(values, PEAKS, key)
    if not values.keys() & DTYPES:
        raise ValueError(f"{key} has none of {', '.join(DTYPES)}")
    return {dtype: _figure(peak, f"{key}.{dtype}", key) for dtype, peak in values.items()}


def _tiers(values: Any, key: str) -> tuple[Tier, ...]:
    """Links that join ever more devices, the last any number."""
    objects = enumerate(_list(lambda value, _: value, 0, values, key))
    tiers = tuple(_record(Tier, each, f"{key}[{at}]") for at, each in objects)
    sizes = [tier.devices for tier in tiers]
    if not sizes or sizes[-1]:
        raise ValueError("the last of tiers joins any number of devices: devices 0")
    if sizes[:-1] != sorted(set(sizes[:-1]) - {0}):
        raise ValueError(
            f"tiers have devices {', '.join(map(str, sizes))}, which must grow, and 0 for the last"
        )
    return tiers


def _whole(most: int, zero: str, value: Any, key: str) -> int:
    """A whole number up to the most. zero: what 0 stands for"""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(
            f"{key}={_shown(value)} must be a whole number up to {most:,}, and 0 for {zero}"
        )
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"{key}={_shown(value)} must be a text of one line, such as 'mine'")
    return value


def _shown(value: Any) -> str:
    """A value as messages have it, a long one cut."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_keys(values: Any, keys: Sequence[str], where: str) -> None:
    """Raises ValueError for what is no object, and for an object's first key that is not one of
    these, with the nearest that is."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the file'} must be an object of keys")
    for key in values:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1, 0.0)[0]
            raise ValueError(
                f"the key {_shown(key)}{f' of {where}' * bool(where)} is unknown, and "
                f"{near!r} is the nearest"
            )


def _pattern(value: Any, key: str) -> str:
    """A regular expression. Raises ValueError for anything else."""
    try:
        return re.compile(value).pattern
    except (re.error, TypeError) as error:
        raise ValueError(f"{key}={value!r} must be a regular expression: {error}") from None


def _list(read: Callable[[Any, str], T], length: int, values: Any, key: str) -> tuple[T, ...]:
    """The items of a list of this length, each read; 0: of any. Raises ValueError for anything
    else."""
    if not isinstance(values, (list, tuple)) or (length and len(values) != length):
        raise ValueError(f"{key} must be a list{f' of {length} numbers' * bool(length)}")
    return tuple(read(value, key) for value in values)


# Field → what reads its value, where that is no figure.
READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "name": _text,
    "device_kind": _pattern,
    "peak_tflops": _peaks,
    "matmul": functools.partial(_record, Matmul),
    "half": functools.partial(_list, _figure, 3),
    "attention": functools.partial(_list, _figure, 2),
    "tiers": _tiers,
    "devices": functools.partial(_whole, MOST_DEVICES, "the last tier"),
    "sides": functools.partial(_whole, 3, "links that are no torus"),
    "sources": functools.partial(_list, _text, 0),
}
