"""The step of a run: what it consists of, its jitted programs, and bytes of its arrays.

Begin with `make_step`. It lays out the parameters (training/parameter_layout.py), makes the
optimizer (training/update/optimizer.py) and the runtime (runtime/runtime.py), and jits programs of
one of three kinds:

    _one_step            a step is one program (training/one_step.py)
    StepsTogether        a program of several steps besides it (training/several_steps.py)
    streamed_step        the optimizer's state is on disk: the gradients are a program, and the
                         updates a loop of the host (training/update/streamed_update.py)

training/compiled_step.py compiles them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered, Wrapped

from jaxtrain.config import ConfigError, DataConfig, ParallelConfig, ResolvedConfig, has_experts
from jaxtrain.config.optimizers import record_of
from jaxtrain.config.phases import RateLine, Span, config_of, rate_lines
from jaxtrain.config.saved_values import names_of, names_on_host
from jaxtrain.config.sizes import remat_of
from jaxtrain.devices import host_memory
from jaxtrain.devices.compiler_options import (
    DENSE,
    FP8,
    GATHERS,
    GATHERS_WHOLE,
    MATRICES,
    SIDE_BY_SIDE,
    compiler_options,
)
from jaxtrain.devices.mesh import CONTEXT, REPLICA, batch_shards
from jaxtrain.devices.sharding import BATCH_SPEC, mesh_axes
from jaxtrain.devices.state_file import StateFile
from jaxtrain.models.transformer import build
from jaxtrain.parallel import replicas
from jaxtrain.parallel.fp8 import fp8_of
from jaxtrain.parallel.zero import Zero
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.runtime.loss import LossRule
from jaxtrain.runtime.own_loss import read_loss
from jaxtrain.runtime.runtime import Runtime
from jaxtrain.runtime.state_plan import SlotBytes
from jaxtrain.training.initial_values import random_keys
from jaxtrain.training.one_step import OneStep, combine_replicas
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.several_steps import StepsTogether
from jaxtrain.training.state import (
    TrainState,
    abstract_state,
    bytes_on_disk,
    bytes_per_device,
)
from jaxtrain.training.update import diloco
from jaxtrain.training.update.optimizer import Optimizer, check_own_optimizer
from jaxtrain.training.update.streamed_update import StreamedStep, streamed_step

# Random keys are for initial values, or for this use (initial_values.random_keys).
ROUNDING = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The programs of a run, jitted and not yet compiled, and what they were built from.

    train:        (TrainState, batch) → (TrainState, StepMetrics); donates the state. With the
                  optimizer's state on disk it ends before the update: (TrainState, batch) →
                  (gradients, Guard, StepMetrics), and donates nothing
    streamed:     the rest of such a step, or None
    several:      the program of `steps_per_program` steps (training/several_steps.py), which runs
                  single ones too; None for one step
    evaluate:     (params, batch) → Losses, of TrainState.trained
    gradients:    (params, batch) → LossesAndGradients, without an optimizer
    exchange:     TrainState → TrainState, of independent replicas (training/update/diloco.py), or
                  None; donates the state
    combine_metrics: StepMetrics of each replica → those of the step; None if replicas are not
        independent
    abstract_batch: a batch's arrays [microbatches, sequences, tokens] as ShapeDtypeStructs
    slot_bytes:   () → of a pipeline, pool of slots → bytes of one slot, of a device
                  (Runtime.slot_bytes); traces a layer
    """

    layout: ParameterLayout
    setup: Setup
    optimizer: Optimizer
    train: Wrapped
    streamed: StreamedStep | None
    several: Wrapped | None
    evaluate: Wrapped
    gradients: Wrapped
    exchange: Wrapped | None
    combine_metrics: Wrapped | None
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    slot_bytes: Callable[[], dict[str, SlotBytes]]
    steps_per_program: int = 1

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def separate_replicas(self) -> int:
        """The number of replicas that train separately; 1 where none do."""
        return self.mesh.shape[REPLICA] if self.layout.independent_replicas else 1

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch's arrays [microbatches, sequences, tokens]."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    def slot_pools(self) -> dict[str, tuple[int, int]]:
        """Kind of slot → their number of a device, bytes of each; empty with one stage."""
        return {kind: (number, each.all) for kind, (number, each) in self._slots.items()}

    def slots_on_host(self) -> dict[str, int]:
        """Kind of slot → bytes that a device has of it in the host's memory, if any; empty with one
        stage."""
        sizes = {kind: number * each.on_host for kind, (number, each) in self._slots.items()}
        return {kind: size for kind, size in sizes.items() if size}

    @functools.cached_property
    def _slots(self) -> dict[str, tuple[int, SlotBytes]]:
        if not self.setup.train:
            return {}
        size = self.slot_bytes()
        sizes = self.setup.train.pool_sizes
        return {kind: (number, size[kind]) for kind, number in sizes.items() if number}

    def state_memory(self, reduces_in_ops: bool) -> dict[str, int]:
        """Bytes on a device by kind: the parameters that ops read, their masters, the optimizer's
        moments, anchor and momentum of independent replicas, gradient accumulators, slots; then
        those in the host's memory, such as "moments on the host", and the optimizer's state on
        disk.

        reduces_in_ops: gradients cross `data` each microbatch, so accumulators hold a shard.
        """
        state, layout, sizes = self.abstract_state(), self.layout, self.mesh.shape
        kinds = {
            "parameters": bytes_per_device(state.read),
            "moments": bytes_per_device(state.optimizer),
        }
        if layout.masters:
            copies = bytes_per_device((state.params, state.working))
            kinds["masters"] = copies - kinds["parameters"]
        if state.ema:
            kinds["average"] = bytes_per_device(state.ema)
        if layout.independent_replicas:
            kinds["anchor"] = bytes_per_device(state.anchor)
            kinds["outer_momentum"] = bytes_per_device(state.outer_momentum)
        # Gradients are added up in float32, in arrays like the parameters: of a device's own shard
        # if they cross `data` in each microbatch, otherwise of all shards, which are reduced at the
        # end.
        accumulated = 0
        for keys, _, size, reduction in layout.parameters():
            in_ops = reduces_in_ops or (layout.shards_ends and keys[0] != "layers")
            parts = reduction.sharded if in_ops else reduction.unsharded
            accumulated += size // math.prod(sizes[axis] for p in parts for axis in mesh_axes(p))
        kinds["accumulators"] = 4 * accumulated  # of 32 bits
        host = {
            "moments": bytes_per_device(state.optimizer, host=True),
            "average": bytes_per_device(state.ema, host=True),
            "masters": bytes_per_device(state.params, host=True),
        }
        # One stage has no slots: a microbatch's backward follows its forward.
        if self.setup.train:
            pools = {kind: number * each for kind, (number, each) in self.slot_pools().items()}
            host["slots"] = sum(self.slots_on_host().values())
            kinds["slots"] = sum(pools.values()) - host["slots"]
        kinds |= {f"{kind} on the host": n for kind, n in host.items() if n}
        on_disk = bytes_on_disk(state)
        return kinds | ({"optimizer on disk": on_disk} if on_disk else {})

    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        return abstract_state(self.layout, self.optimizer)

    def lower(self) -> Lowered:
        """Traces the program that a run goes by: `several` if there is one, else `train`."""
        state, batch = self.abstract_state(), self.abstract_batch
        if self.several is None:
            return self.train.lower(state, batch)
        # An argument and not a constant, so that one program runs steps together and alone.
        alone = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.layout.everywhere)
        return self.several.lower(state, (batch,) * self.steps_per_program, alone)


def make_layout(config: ResolvedConfig, mesh: Mesh, setup: Setup) -> ParameterLayout:
    """The layout of a config's parameters on a mesh, which may be abstract."""
    parallel = config.parallel
    independent = config.train.diloco_inner_steps > 0
    # Independent replicas have a loss each, of their own share of the batch.
    sequences_of_a_loss = config.data.batch_size // (replicas.count(mesh) if independent else 1)
    parts = build(
        config.model,
        mesh.shape["model"],
        mesh.shape["stage"] if setup.shares_vocabulary else 1,
        parallel.context,
        sequences_of_a_loss,
        parallel.expert_nodes,
    )
    offload = parallel.offload_to("optimizer")
    return ParameterLayout(
        parts,
        setup.placement,
        mesh,
        parallel.zero,
        config.precision,
        independent,
        offload=offload == "host",
        disk=StateFile(parallel.offload_directory) if offload == "disk" else None,
        optimizer=config.optimizer,
        shards_ends=parallel.ends == "sharded",
        evaluates_ema=config.train.eval_ema,
    )


def _optimizer(
    config: ResolvedConfig, layout: ParameterLayout, lines: Sequence[RateLine]
) -> Optimizer:
    """The optimizer of a config for the parameters of a layout. lines: of the run's phases"""
    return Optimizer(
        config.optimizer,
        config.train.steps,
        layout.specs,
        config.precision.moments,
        layout.offload,
        random_keys(layout, config.train.seed, ROUNDING),
        tuple(lines),
        layout.scattered,
        config.precision.compute,
    )


def make_step(
    config: ResolvedConfig, mesh: Mesh, setup: Setup | None = None, span: Span | None = None
) -> Step:
    """The step of a config on a mesh; nothing is compiled yet.

    setup: the config's tables, built now if not given.
    span: whose batches it takes; None: those of the config's own sizes

    Raises ConfigError for a schedule that does not fit, or devices without the host's memory.
    """
    lines, config = rate_lines(config), config_of(config, span).resolve() if span else config
    model, data, parallel, precision = config.model, config.data, config.parallel, config.precision
    # First what may be refused: tables of large pipelines take seconds.
    _check_host_memory(parallel, config.pipeline.save, mesh)
    check_own_optimizer(config.optimizer)
    own_loss = read_loss(config.train.loss, model.vocab_size)
    setup = setup or make_setup(config)

    # The state: where parameters lie, and the optimizer that updates them.
    layout = make_layout(config, mesh, setup)
    optimizer = _optimizer(config, layout, lines)
    abstract = abstract_state(layout, optimizer)
    shardings = jax.tree.map(lambda a: a.sharding, abstract)

    # The model on its devices, which runs a table. Evaluation has a table of its own, of forwards.
    zero = Zero(parallel.zero, parallel.gather, parallel.reduce, jnp.dtype(precision.reduce))
    runtime_of = functools.partial(
        Runtime,
        layout.parts,
        setup.placement,
        mesh=mesh,
        reductions=layout.reductions,
        zero=zero,
        zero_of_ends=Zero(3, dtype=zero.dtype, reduce="microbatch") if layout.shards_ends else zero,
        shares_vocabulary=setup.shares_vocabulary,
        loss_chunk=model.loss_chunk,
        compute=jnp.dtype(precision.compute),
        fp8=fp8_of(precision, layout.independent_replicas),
        collective_matmul=parallel.collective_matmul,
        seed=config.train.seed,
        loss_rule=LossRule(config.train.z_loss, own_loss, model.vocab_size),
    )
    # remat, saved values and offload are about the backward, which evaluation has not.
    runtime = runtime_of(
        setup.train,
        remat=remat_of(config.pipeline.remat),
        save=config.pipeline.save,
        independent_replicas=layout.independent_replicas,
        offload_activations=parallel.offload_to("activations") == "host",
    )

    # The programs.
    options = _compiler_options(runtime, setup, optimizer, parallel.compiler_options)
    jit = functools.partial(jax.jit, compiler_options=options)
    one = OneStep(
        layout, optimizer, runtime, config.train.on_nonfinite != "stop", model.balance_rate
    )
    streamed = several = exchange = combine_metrics = None
    if layout.disk:
        train, streamed = streamed_step(one, abstract, jit)
    else:
        train = _one_step(one, shardings, jit)
    if setup.train_several and not layout.disk:
        tables = dataclasses.replace(runtime, slotted=setup.train_several)
        # Rules allow no independent replicas here: the metrics are those of all devices.
        several = jit(
            StepsTogether(one, tables).train,
            donate_argnums=0,
            out_shardings=(shardings, layout.everywhere),
        )
    if layout.independent_replicas:
        exchange, combine_metrics = _exchange(layout, shardings, precision.outer, jit)
    return Step(
        layout,
        setup,
        optimizer,
        train=train,
        streamed=streamed,
        several=several,
        evaluate=jit(runtime_of(setup.evaluate).losses),
        gradients=jit(runtime.losses_and_gradients),
        exchange=exchange,
        combine_metrics=combine_metrics,
        abstract_batch=_abstract_batch(data, config.pipeline.microbatches, mesh),
        slot_bytes=functools.partial(
            runtime.slot_bytes,
            config.sequences_per_microbatch // batch_shards(mesh.shape),
            data.sequence_length // mesh.shape[CONTEXT],
            not data.attend_across_documents,
        ),
        steps_per_program=setup.several.steps if setup.several else 1,
    )


def _compiler_options(
    runtime: Runtime, setup: Setup, optimizer: Optimizer, changes: tuple[str, ...]
) -> dict[str, Any]:
    """XLA's options for the programs of a step, by what it does. changes:
    `parallel.compiler_options`"""
    sizes, table = runtime.mesh.shape, setup.table
    gathers, experts = runtime.zero.gathers_in_ops, has_experts(runtime.parts.cfg)
    # Most options help one kind of program and harm others (devices/compiler_options.py has the
    # reasons), so each goes by what this step does.
    does = {
        GATHERS: gathers and sizes["stage"] == 1,
        GATHERS_WHOLE: gathers and sizes["stage"] * sizes["model"] == 1,
        SIDE_BY_SIDE: sizes["model"] == 1 and (table.overlaps or (table.saves_inputs and experts)),
        FP8: bool(runtime.fp8),
        DENSE: not experts,
        MATRICES: record_of(optimizer.settings.name).rest is not None,
    }
    names = [name for name, yes in does.items() if yes]
    return compiler_options(runtime.mesh.devices.flat[0], names, changes)


def _one_step(one: OneStep, shardings: TrainState, jit: Callable[..., Wrapped]) -> Wrapped:
    """`Step.train` as one program. shardings: of the state; jit: jax.jit with compiler options"""
    of_replicas = NamedSharding(one.layout.mesh, replicas.leading(PartitionSpec()))
    return jit(
        one.train,
        # The new state takes the memory of the old one: a device has no room for two.
        donate_argnums=0,
        # Given for the state, since XLA might choose others, with which the next call would not
        # fit the compiled program. Each replica's metrics stay on its own devices, so that replicas
        # do not wait for each other.
        out_shardings=(shardings, of_replicas if one.layout.independent_replicas else None),
    )


def _exchange(
    layout: ParameterLayout, shardings: TrainState, dtype: str, jit: Callable[..., Wrapped]
) -> tuple[Wrapped, Wrapped]:
    """`Step.exchange` and `Step.combine_metrics` of independent replicas. dtype: of what they
    exchange; other arguments as of `_one_step`"""
    outer_step = functools.partial(
        diloco.exchange,
        layout=layout,
        rate=layout.optimizer.outer_learning_rate,
        momentum=layout.optimizer.outer_momentum,
        dtype=dtype,
    )
    return (
        jit(outer_step, donate_argnums=0, out_shardings=shardings),
        jit(combine_replicas, out_shardings=layout.everywhere),
    )


def _check_host_memory(parallel: ParallelConfig, save: tuple[str, ...], mesh: Mesh) -> None:
    """Raises ConfigError if `parallel.offload` or `pipeline.save` needs the host's memory and
    devices cannot use it."""
    if not (has := host_memory.missing(mesh)):
        return
    device = mesh.devices.flat[0].device_kind
    rule = f"needs memory of kind {host_memory.KIND}, and {device} has {has} alone"
    if "host" in (parallel.offload_to("optimizer"), parallel.offload_to("activations")):
        path, value = "parallel.offload", parallel.offload
        raise ConfigError(
            path, value, rule, fixes=[{path: "optimizer" if parallel.offload_directory else "none"}]
        )
    if names_on_host(save):
        path = "pipeline.save"
        raise ConfigError(path, ",".join(save), rule, fixes=[{path: names_of(save)}])


def _abstract_batch(
    data: DataConfig, microbatches: int, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (microbatches, data.batch_size // microbatches, data.sequence_length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if not data.attend_across_documents:
        dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in dtypes.items()
    }
