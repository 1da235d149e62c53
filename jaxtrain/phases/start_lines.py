"""The lines that a start logs about its step: mesh, model, kernels, table and saved bytes, with the
planned step; once it is compiled, its memory and times; and the source of the state."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax
from jax.stages import Compiled

from jaxtrain.checkpoint.resuming import StartPoint
from jaxtrain.config import ResolvedConfig, ResolvedModel, TrainConfig, kernels, models_of_kinds
from jaxtrain.config.saved_values import names_on_host
from jaxtrain.config.sizes import device_capacity
from jaxtrain.devices import cluster, mesh as meshes
from jaxtrain.models import mup, own_module
from jaxtrain.parallel.target_device import target_device_of
from jaxtrain.planner.for_training import plan_at_hand
from jaxtrain.run.wall_clock import Phase, WallClock
from jaxtrain.training.compiled_step import Programs, compiled_memory
from jaxtrain.training.state import bytes_on_disk, bytes_per_device
from jaxtrain.training.step import Step


def mebibytes(n: float) -> str:
    return f"{n / 2**20:,.1f}"


def _kernels(config: ResolvedConfig, device: kernels.TargetDevice) -> list[str]:
    """Lines about the kernels of the layers; those that are not of all kinds name theirs."""
    models, kinds_of_line = models_of_kinds(config.model), dict[str, list[str]]()
    attending = {kind: each for kind, each in models.items() if not (each.block or each.mixer)}
    for kind, model in attending.items():
        case = kernels.attention_case(
            device, model, config.data, config.mesh, config.parallel, config.precision
        )
        for line in kernels.describe(model, case):
            kinds_of_line.setdefault(line, []).append(kind)
    return [
        line if len(kinds) == len(attending) else f"{line} (layers of kind {', '.join(kinds)})"
        for line, kinds in kinds_of_line.items()
    ]


def introduction(config: ResolvedConfig, step: Step) -> list[str]:
    """Lines about a step, compiled or not: mesh, model, table, slots, the planned step."""
    d, m, device = config.data, config.model, step.mesh.devices.flat[0]
    parameters, placement = step.layout.parts.parameter_count, step.layout.placement
    lines = [
        *meshes.describe(step.mesh),
        f"model: {parameters:,} parameters; {placement.describe()}",
        *own_module.describe(m),
        *mup.describe(m),
        f"step: {d.batch_size * d.sequence_length:,} tokens in {config.pipeline.microbatches} "
        f"microbatches of {config.sequences_per_microbatch} sequences of {d.sequence_length}",
    ]
    if every := config.train.diloco_inner_steps:
        lines.append(
            f"replicas: {config.mesh.replica} train independently and exchange "
            f"{config.precision.outer} every {every} steps and after the last"
        )
    # Which kernels run depends on the device and the shapes, not on a setting alone, so a user
    # cannot tell from the config.
    target = target_device_of(device)
    lines += [*kernels.describe_products(config.precision, target), *_kernels(config, target)]
    # Below 1 % it is norms' scales and biases, which nobody would shard.
    if (unsharded := unsharded_over_data(step)) >= 0.01:
        data = config.mesh.data
        lines.append(
            f"ZeRO: {unsharded:.0%} of the parameters are unsharded over all {data} devices: "
            f"mesh.data={data} divides no free dimension of theirs (model.width={m.width})"
        )
    if config.mesh.expert > 1:
        routed = (each for each in models_of_kinds(m).values() if each.experts)
        dropless = (each for each in routed if not each.capacity_factor)
        lines += dict.fromkeys(_expert_capacity(config, each, step) for each in dropless)
    lines.append(f"table: {step.setup.describe()}")
    if pools := step.slot_pools():
        total = sum(n * each for n, each in pools.values())
        lines.append(f"saved from forward to backward: {mebibytes(total)} MiB a device")
    offloaded = []
    if step.layout.offload:
        size = mebibytes(bytes_per_device(step.abstract_state(), host=True))
        offloaded.append(f"{size} MiB of the optimizer's state")
    if slots := step.slots_on_host():
        offloaded.append(f"{mebibytes(sum(slots.values()))} MiB of slots {', '.join(slots)}")
    elif config.parallel.offload in ("activations", "both"):
        offloaded.append("what layers save for the backward")
    elif (names := names_on_host(config.pipeline.save)) and not step.setup.train:
        offloaded.append(f"{', '.join(names)} of layers")
    if offloaded:
        lines.append(f"in the host's memory, for each device: {'; '.join(offloaded)}")
    if step.layout.disk:
        lines.append(
            f"on disk in {config.parallel.offload_directory}, for each device: "
            f"{mebibytes(bytes_on_disk(step.abstract_state()))} MiB of the optimizer's state"
        )
    return lines + plan_at_hand(config, device.device_kind).lines()


def _expert_capacity(config: ResolvedConfig, m: ResolvedModel, step: Step) -> str:
    """A line with the most routed tokens that one device's experts can receive, for experts that
    are split over `expert`. m: of layers of one kind"""
    sizes = step.mesh.shape
    sequences = config.sequences_per_microbatch // meshes.batch_shards(sizes)
    tokens = sequences * (config.data.sequence_length // config.mesh.context)
    capacity = device_capacity(
        tokens, m.experts_per_token, m.experts, config.mesh.expert, m.expert_room
    )
    beyond = "the worst case"
    if m.expert_room:
        beyond = f"model.expert_room={m.expert_room:g}; tokens beyond it are dropped"
    return (
        f"experts: a device's capacity is {capacity:,} routed tokens, "
        f"{capacity / (tokens * m.experts_per_token):.2f} times the mean ({beyond})"
    )


def unsharded_over_data(step: Step) -> float:
    """The fraction of the parameters that ZeRO leaves unsharded, because `data` divides none of
    their dimensions."""
    layout = step.layout
    if not layout.zero or step.mesh.shape[meshes.DATA] == 1:
        return 0.0
    parameters = layout.parameters()
    unsharded = sum(each.size for each in parameters if not each.reduction.shard_axes)
    return unsharded / sum(each.size for each in parameters)


def as_compiled(step: Step, compiled: Compiled, tracing: float, compiling: float) -> list[str]:
    """Lines about a compiled step: its memory, if the platform reports it, and the seconds of
    tracing and compiling."""
    settings: Any = jax.config  # its attributes have no declared types
    not_kept = (
        ""
        if settings.jax_enable_compilation_cache
        else " (again at each start: compiled programs are not kept)"
    )
    traced = f"traced in {tracing:.1f} s, compiled in {compiling:.1f} s{not_kept}"
    return [*memory_lines(step, compiled), traced]


def memory_lines(step: Step, compiled: Compiled) -> list[str]:
    """A line about a compiled step's memory, if the platform reports it."""
    if not (memory := compiled_memory(compiled)):
        return []
    state = mebibytes(bytes_per_device(step.abstract_state()))
    return [
        f"memory per device as compiled: {mebibytes(memory['total'])} MiB ({state} of state, "
        f"{mebibytes(memory['temporary'])} temporary)"
    ]


def when_compiled(
    step: Step,
    clock: WallClock,
    compiling: concurrent.futures.Future[Programs],
    others: Sequence[concurrent.futures.Future] = (),
) -> Programs:
    """Waits for a step's programs, and logs their memory and times.

    others: compilations that have to end too: a GPU's compiler tries kernels out on the device,
    which has to be idle then.
    """
    # The step first, which takes longest: the others have mostly ended by then.
    programs = compiling.result()
    for other in others:
        other.result()
    clock.enter(Phase.STATE)
    tracing, seconds = clock.spent(Phase.TRACING), clock.spent(Phase.COMPILING)
    cluster.log(*as_compiled(step, programs.train, tracing, seconds))
    return programs


def beginning(train: TrainConfig, start: StartPoint) -> str:
    """A line with the source of the state."""
    origin = train.init_from or train.fork_from
    if start.resumes:
        setting = "init_from" if train.init_from else "fork_from"
        rest = f"; train.{setting}={origin} is passed over" if origin else ""
        return f"continuing from {start.source}{rest}"
    return f"starting: weights from {origin or f'seed {train.seed}'}"


def before_a_dry_run(
    config: ResolvedConfig, step: Step, compiled: Compiled, tracing: float, compiling: float
) -> list[str]:
    """All lines about a step that is compiled and not run, and the sizes of its slots."""
    pools = [f"{kind} {n} × {each / 2**20:,.2f}" for kind, (n, each) in step.slot_pools().items()]
    return [
        *introduction(config, step),
        *as_compiled(step, compiled, tracing, compiling),
        *[f"slots of a device, MiB: {', '.join(pools)}"] * bool(pools),
    ]
