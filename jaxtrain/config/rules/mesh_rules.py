"""The sizes of the mesh: the size of an axis that is −1, the adaptation of an elastic mesh
(`mesh.elastic`) to the devices, and the rules about what each axis splits. Standard library only.

An elastic mesh gives up replicas first, then data shards; with more devices it gains them in the
opposite order. All other axes keep their sizes, because they split the model. The batch keeps its
size too: if fewer shards split it, more microbatches do, so a device has as many sequences in a
microbatch as before, and needs as much memory for them.
"""

import itertools
import math
from collections.abc import Iterator

from jaxtrain.config import (
    Config,
    DataConfig,
    FilledConfig,
    MeshConfig,
    MeshedConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ResolvedModel,
    TrainConfig,
    get,
    has_experts,
    replace,
)
from jaxtrain.config.kernels import QUANTIZED
from jaxtrain.config.rules.rules import SettingChanges, Violation, divisors, near, values_for
from jaxtrain.config.sizes import MX_BLOCK
from jaxtrain.schedule.orders import CSV

AXES = tuple(MeshConfig().sizes())
REPLICA, DATA, MICROBATCHES = "mesh.replica", "mesh.data", "pipeline.microbatches"
CUTS_THE_MODEL = ("stage", "context", "expert", "model")


def filled(config: Config, devices: int | None) -> Config:
    """The config with a size instead of the mesh's -1, after an elastic mesh was adapted to the
    devices; unchanged if their number is None or no size fits."""
    if devices is None:
        return config
    if config.mesh.elastic:
        config = adapted(config, devices)
    sizes = config.mesh.sizes()
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) != 1 or fixed < 1 or devices % fixed:
        return config
    return replace(config, {f"mesh.{open_axes[0]}": devices // fixed})


def on_mesh(config: Config, devices: int | None) -> MeshedConfig:
    """The config on the mesh that it has with this number of devices, or of its own sizes if that
    is None. Raises ValueError if no size fits; `mesh_uses_devices` is the rule about that.

    >>> from jaxtrain import load_recipe
    >>> on_mesh(load_recipe("tiny"), devices=16).mesh.data  # stage=2, model=2
    4
    """
    return filled(config, devices).on_own_mesh()


# --- elastic --------------------------------------------------------------------------------------


def adapted(config: Config, devices: int) -> Config:
    """The config of an elastic mesh with replica, data and microbatches for this many devices;
    unchanged if its own sizes fit, or if none do."""
    mesh = config.mesh
    cuts = math.prod(getattr(mesh, axis) for axis in CUTS_THE_MODEL)
    bad_sizes = min(mesh.replica, mesh.data) < -1 or 0 in (mesh.replica, mesh.data)
    if bad_sizes or cuts < 1 or devices % cuts:
        return config
    independent = config.train.diloco_inner_steps > 0
    for replica, data in _elastic_sizes(mesh, devices // cuts, independent):
        shards = replica * data * mesh.expert
        if config.pipeline.schedule.startswith(CSV):  # a file's table has its own number
            numbers = [config.pipeline.microbatches]
        else:
            numbers = _elastic_microbatches(
                mesh, replica * data, config.pipeline.microbatches, config.data.batch_size
            )
        for microbatches in numbers:
            if config.data.batch_size % (shards * microbatches) == 0:
                return replace(config, {REPLICA: replica, DATA: data, MICROBATCHES: microbatches})
    return config


def _elastic_sizes(mesh: MeshConfig, shards: int, independent: bool) -> list[tuple[int, int]]:
    """The pairs (replica, data) whose product is the number of shards, the best first.

    independent: replicas have parameters of their own (DiLoCo), so their number must stay
    """
    replica, data = mesh.replica, mesh.data
    sizes = [(shards // size, size) for size in divisors(shards)]
    if independent:
        sizes = [pair for pair in sizes if pair[0] == replica]
    # the axis that is -1 follows the devices; the other one shrinks only if it must
    if -1 in (replica, data):
        at, size = (0, replica) if data == -1 else (1, data)
        return sorted(sizes, key=lambda pair: (pair[at] > size, abs(pair[at] - size)))
    if shards <= replica * data:
        return sorted(
            sizes, key=lambda pair: (pair[0] > replica or pair[1] > data, -min(pair[1], data))
        )

    def shrinks(pair: tuple[int, int]) -> bool:
        """True if an axis shrinks, or if replicas grow from one: data shards grow then."""
        return pair[0] < replica or pair[1] < data or (replica == 1 and pair[0] != 1)

    return sorted(sizes, key=lambda pair: (shrinks(pair), abs(pair[1] - data)))


def _elastic_microbatches(
    mesh: MeshConfig, shards: int, microbatches: int, batch: int
) -> list[int]:
    """Numbers of microbatches, the best first: those with as many sequences in a device's
    microbatch as requested, then with fewer, then with more.

    mesh, microbatches: as requested; shards: replicas × data shards; batch: its sequences
    """
    before = mesh.replica * mesh.data
    if shards == before or before < 1:
        return [microbatches]
    pieces = microbatches * before
    sequences = max(1, batch // (shards * mesh.expert))
    return sorted(
        divisors(sequences), key=lambda n: (n * shards < pieces, abs(n * shards - pieces))
    )


def elastic_notes(requested: Config, config: MeshedConfig) -> list[str]:
    """A line with the settings of the requested config that an elastic mesh has changed; [] if it
    has changed none."""
    pairs = {
        path: (get(requested, path), get(config, path)) for path in (REPLICA, DATA, MICROBATCHES)
    }
    changed = [
        f"{path} {before} → {after}"
        for path, (before, after) in pairs.items()
        if before not in (after, -1)
    ]
    if not changed:
        return []
    devices = math.prod(config.mesh.sizes().values())
    return [
        f"elastic: {', '.join(changed)} for the {devices} device{'s'[: devices > 1]} at hand; a "
        f"step still has {config.data.batch_size} sequences"
    ]


# --- rules of the devices -------------------------------------------------------------------------


def axes_have_sizes(mesh: MeshConfig) -> Iterator[Violation]:
    """Sizes are at least 1, and one may be -1."""
    sizes = mesh.sizes()
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            path = f"mesh.{axis}"
            yield Violation(
                path,
                "must be at least 1, or -1 for the remaining devices",
                values_for(path, [1, -1]),
            )
    open_axes = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        yield Violation(
            open_axes[-1],
            f"is the second -1, after {open_axes[0]}: only one axis may be -1",
            [{open_axes[-1]: 1}],
        )


def mesh_uses_devices(mesh: MeshConfig, devices: int) -> Iterator[Violation]:
    """The product of the sizes is the number of devices, or divides it if one of them is -1."""
    sizes = {axis: size for axis, size in mesh.sizes().items() if size != -1}
    product = math.prod(sizes.values())
    is_open = len(sizes) < len(AXES)
    if product == devices or (is_open and devices % product == 0):
        return
    large = {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}
    # sizes that do not divide the devices on their own come first
    blamed = sorted(large, key=lambda axis: devices % large[axis] == 0)
    text = " × ".join(f"mesh.{axis}={size}" for axis, size in large.items())
    total = f" = {product}" if len(large) > 1 else ""
    yield Violation(
        f"mesh.{blamed[0]}",
        f"does not fit: {text}{total} {'does not divide' if is_open else 'is not'} the {devices} "
        f"device{'s'[: devices != 1]}",
        _mesh_fixes(blamed, sizes, devices, is_open),
        show=4,
    )


def _mesh_fixes(
    blamed: list[str], sizes: dict[str, int], devices: int, is_open: bool
) -> Iterator[SettingChanges]:
    """Changes with which the mesh fits: of the size of one axis, then of two, …, the nearest first.

    blamed: axes whose sizes may be wrong, the likeliest first; is_open: a further axis is -1
    """
    others = [axis for axis in ("data", "stage", "model") if axis in sizes and axis not in blamed]
    for number in range(1, len(blamed) + 1):
        for axes in itertools.combinations([*blamed, *(others if number == 1 else ())], number):
            rest = math.prod(size for axis, size in sizes.items() if axis not in axes)
            candidates = (near(sizes[axis], divisors(devices)) for axis in axes)
            for values in itertools.product(*candidates):
                product = rest * math.prod(values)
                if product == devices or (is_open and devices % product == 0):
                    yield {f"mesh.{axis}": n for axis, n in zip(axes, values, strict=True)}


# --- rules of what an axis cuts -------------------------------------------------------------------


def kv_heads_fit(m: ResolvedModel, size: int) -> bool:
    """True if `size` devices of the model axis split the key/value heads, or share each of them
    evenly."""
    return m.kv_heads % size == 0 or (
        size % m.kv_heads == 0 and m.head_dim % (size // m.kv_heads) == 0
    )


def mlp_widths(m: ResolvedModel) -> dict[str, int]:
    """Field → the width of each MLP of the model that the model axis splits."""
    names = ["expert_width"] * bool(m.experts) + ["mlp_width"] * (
        not m.experts or m.dense_layers > 0
    )
    return {name: getattr(m, name) for name in names}


def context_axis_divides(
    mesh: MeshConfig, parallel: ParallelConfig, model: ResolvedModel, data: DataConfig
) -> Iterator[Violation]:
    """The sequence is cut into two chunks for each device of `context`, which `model` splits
    further. Ulysses splits heads over both axes."""
    size, tensor = mesh.context, max(mesh.model, 1)
    if size <= 1:
        return
    tokens, parts = data.sequence_length, 2 * size * tensor
    fits = [n for n in near(size, divisors(tokens)) if tokens % (2 * n * tensor) == 0]
    if tokens % parts:
        over = f", each cut by mesh.model={tensor}" if tensor > 1 else ""
        longer = [parts * n for n in (tokens // parts, tokens // parts + 1) if n]
        yield Violation(
            "mesh.context",
            f"cuts a sequence into two chunks for each device{over}: {parts} parts, which do "
            f"not divide data.sequence_length={tokens}",
            [
                *values_for("mesh.context", fits or [1]),
                *values_for("data.sequence_length", longer),
            ],
        )
    heads = math.gcd(model.heads, model.kv_heads)
    if parallel.context == "ulysses" and heads % (size * tensor):
        path, number = (
            ("model.kv_heads", model.kv_heads)
            if model.heads % (size * tensor) == 0
            else ("model.heads", model.heads)
        )
        over = f"mesh.context={size}" + (f" · mesh.model={tensor}" if tensor > 1 else "")
        smaller = [n for n in fits if heads % (n * tensor) == 0]
        yield Violation(
            "parallel.context",
            f"cuts heads, and {over} does not divide {path}={number}",
            [{"parallel.context": "all_gather"}, *values_for("mesh.context", smaller)],
        )
    if parallel.context == "ring" and model.dropout_attention:
        yield Violation(
            "parallel.context",
            f"drops no weights of attention, and model.dropout_attention={model.dropout_attention}",
            [{"parallel.context": "all_gather"}, {"model.dropout_attention": 0.0}],
        )


def expert_axis_has_experts(mesh: MeshConfig, config: FilledConfig) -> Iterator[Violation]:
    if mesh.expert > 1 and not has_experts(config.model):
        yield Violation(
            "mesh.expert",
            "splits experts, and model.experts=0",
            [{"mesh.expert": 1}, {"model.experts": mesh.expert}],
        )


def expert_axis_divides(mesh: MeshConfig, model: ResolvedModel) -> Iterator[Violation]:
    size, experts = mesh.expert, model.experts
    if size > 1 and experts % size:
        fixes = values_for("mesh.expert", near(size, divisors(experts)))
        yield Violation(
            "mesh.expert",
            f"does not divide model.experts={experts}",
            [*fixes, {"model.experts": size}],
            show=4,
        )


def expert_nodes_divide(
    parallel: ParallelConfig, mesh: MeshConfig, model: ResolvedModel
) -> Iterator[Violation]:
    """A node has several devices of `expert`, and numbers of tokens between nodes are not fixed."""
    path, nodes, size = "parallel.expert_nodes", parallel.expert_nodes, mesh.expert
    if nodes <= 1 or size <= 1:
        return
    fixes = values_for(path, near(nodes, [n for n in divisors(size) if n < size]))
    if size % nodes:
        yield Violation(path, f"does not divide mesh.expert={size}", fixes, show=4)
    elif nodes == size:
        yield Violation(
            path,
            f"leaves a node one device of mesh.expert={size}, which one step reaches",
            fixes,
            show=4,
        )
    if model.capacity_factor:
        yield Violation(
            path,
            f"works only with model.capacity_factor=0, not {model.capacity_factor}: numbers of "
            "tokens between nodes are not fixed",
            [{path: 1}, {"model.capacity_factor": 0.0}],
        )


def model_axis_divides(
    mesh: MeshConfig, model: ResolvedModel, data: DataConfig
) -> Iterator[Violation]:
    """`model` splits heads, the MLP, and the sequence between the blocks."""
    size = mesh.model
    if size < 1:
        return
    cut = {
        "model.heads": model.heads,
        **{f"model.{name}": n for name, n in mlp_widths(model).items()},
        "data.sequence_length": data.sequence_length,
    }
    sizes = near(size, divisors(math.gcd(*cut.values())))
    fixes = values_for("mesh.model", [n for n in sizes if kv_heads_fit(model, n)])
    for path, length in cut.items():
        if length % size:
            yield Violation("mesh.model", f"does not divide {path}={length}", fixes, show=4)
    if not kv_heads_fit(model, size):
        rule = f"neither divides model.kv_heads={model.kv_heads} nor is a multiple of it"
        if size % model.kv_heads == 0:
            rule = (
                f"makes {size // model.kv_heads} devices share a head, which does not divide "
                f"model.head_dim={model.head_dim}"
            )
        yield Violation("mesh.model", rule, fixes, show=4)


def products_over_model_are_built(
    parallel: ParallelConfig, mesh: MeshConfig, precision: PrecisionConfig
) -> Iterator[Violation]:
    """Products over `model` beside their messages."""
    path = "parallel.collective_matmul"
    if parallel.collective_matmul != "on" or mesh.model <= 1:
        return
    if mesh.stage > 1:
        yield Violation(
            path,
            f"works only with mesh.stage=1, not {mesh.stage}: its permutes wait for all devices",
            [{path: "auto"}],
        )
    if precision.matmul in QUANTIZED:
        yield Violation(
            path,
            f"sends numbers of precision.compute, and precision.matmul={precision.matmul!r}",
            [{path: "auto"}, {"precision.matmul": "compute"}],
        )


def reductions_fit(
    parallel: ParallelConfig, train: TrainConfig, mesh: MeshConfig
) -> Iterator[Violation]:
    """Gradients over `data`, and the outer steps of independent replicas (DiLoCo)."""
    path, steps = "train.diloco_inner_steps", train.diloco_inner_steps
    if parallel.reduce == "last" and mesh.stage == 1:
        yield Violation(
            "parallel.reduce",
            "reduces gradients in a pipeline's last W, and mesh.stage=1",
            values_for("parallel.reduce", ["step", "microbatch"]),
        )
    if parallel.reduce in ("microbatch", "last") and parallel.zero == 0:
        yield Violation(
            "parallel.reduce",
            "leaves gradients sharded, and parallel.zero=0 shards nothing",
            [{"parallel.reduce": "step"}, {"parallel.zero": 2}],
        )
    if parallel.ends == "sharded" and parallel.zero == 0:
        yield Violation(
            "parallel.ends",
            "leaves parameters sharded, and parallel.zero=0 shards nothing",
            [{"parallel.ends": "replicated"}, {"parallel.zero": 1}],
        )
    if steps and mesh.replica == 1:
        yield Violation(
            path,
            "is for independent replicas, and mesh.replica=1",
            [{path: 0}, {"mesh.replica": 2}],
        )
    if steps and parallel.offload in ("optimizer", "both"):
        on_devices = {"parallel.offload": "activations" if parallel.offload == "both" else "none"}
        if parallel.offload_directory:
            on_devices["parallel.offload_directory"] = ""
        yield Violation(
            "parallel.offload",
            f"offloads the optimizer's state, which independent replicas ({path}={steps}) keep on "
            "their devices",
            [on_devices, {path: 0}],
        )


def batch_divides(
    data: DataConfig, mesh: MeshConfig, pipeline: PipelineConfig
) -> Iterator[Violation]:
    batch, micro = data.batch_size, pipeline.microbatches
    axes = {axis: max(getattr(mesh, axis), 1) for axis in ("replica", "data", "expert")}
    shards = math.prod(axes.values())
    unit = shards * micro
    if batch % unit == 0:
        return
    over = "".join(f" × mesh.{axis}={size}" for axis, size in axes.items() if size > 1)
    multiples = [unit * n for n in (batch // unit, batch // unit + 1) if n > 0]
    batches = values_for("data.batch_size", multiples)
    others = unit // axes["data"]
    shares = [n for n in near(axes["data"], divisors(batch)) if batch % (n * others) == 0]
    if batch % shards == 0:
        micros = values_for(MICROBATCHES, near(micro, divisors(batch // shards)))
        yield Violation(
            MICROBATCHES,
            f"{over} does not divide data.batch_size={batch}",
            [*micros, *batches],
            show=4,
        )
    micro_text = f" × pipeline.microbatches={micro}" if micro > 1 else ""
    pieces = (over + micro_text).removeprefix(" × ")
    yield Violation(
        "data.batch_size",
        f"is no multiple of {pieces}, that is {unit}",
        [*batches, *values_for(DATA, shares)],
        show=2,
    )


def blocks_divide(
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    mesh: MeshConfig,
    model: ResolvedModel,
    data: DataConfig,
) -> Iterator[Violation]:
    """A block of numbers with one scale lies on one device, along each dimension that products
    contract. Two chunks of a sequence are apart where `context` splits it."""
    path = "precision.matmul"
    if precision.matmul != "mxfp8" or model.experts or min(mesh.sizes().values()) < 1:
        return
    chunks = 2 * mesh.context if mesh.context > 1 else 1
    shards = mesh.data if parallel.zero == 3 else 1
    heads = "model.head_dim"
    cut = [
        ("model.width", model.width, shards, 1),
        (heads, model.heads * model.head_dim, mesh.model, model.heads),
        (heads, model.kv_heads * model.head_dim, mesh.model, model.kv_heads),
        ("model.mlp_width", model.mlp_width, mesh.model, 1),
        ("data.sequence_length", data.sequence_length, chunks * mesh.model, 1),
    ]
    for name, size, parts, each in cut:
        if size % (MX_BLOCK * parts) == 0:
            continue
        of = f"{each} · {name}={size // each}" if each > 1 else f"{name}={size}"
        step = MX_BLOCK * parts // math.gcd(MX_BLOCK * parts, each)
        floor = size // each // step * step
        over = f" in {parts} parts" if parts > 1 else ""
        yield Violation(
            path,
            f"has blocks of {MX_BLOCK} numbers, which do not divide {of}{over}",
            [
                *values_for(name, near(size // each, [n for n in (floor, floor + step) if n])),
                *values_for(path, ["fp8", "compute"]),
            ],
            show=4,
        )
