"""One training step and one evaluation, as programs for a mesh."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxtrain.config import Config, ConfigError
from jaxtrain.costs.collectives import FLOAT32, StepCollectives
from jaxtrain.costs.step_counts import StepCounts
from jaxtrain.costs.step_time import bytes_of
from jaxtrain.devices.compiler_options import compiler_options
from jaxtrain.devices.mesh import AXES, CONTEXT, batch_shards, sizes_of
from jaxtrain.devices.sharding import BATCH_SPEC
from jaxtrain.models.transformer import Parts, build
from jaxtrain.parallel import host_memory, replicas
from jaxtrain.parallel.zero import Zero
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.pipeline.step_model import layout_of, transformer_of
from jaxtrain.runtime.loss import cut_count
from jaxtrain.runtime.runtime import LossesAndGradients, Runtime
from jaxtrain.training import balance, diloco
from jaxtrain.training.metrics import StepMetrics, mean_over_replicas
from jaxtrain.training.optimizer import learning_rate, make_optimizer, updates_made
from jaxtrain.training.parameters import parameters_of
from jaxtrain.training.state import OUTER, Layout, TrainState, abstract_state, bytes_per_device


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The programs of a run, jitted and not yet compiled, and what they were made from.

    train:        (TrainState, batch) → (TrainState, StepMetrics); donates the state
    evaluate:     (params, batch) → Losses, of TrainState.trained
    gradients:    (params, batch) → LossesAndGradients, without an optimizer
    exchange:     TrainState → TrainState, of independent replicas (training/diloco.py), or None;
                  donates the state
    mean_metrics: StepMetrics of each replica → those of the step; None where replicas are not
        independent
    slot_bytes:   () → of a pipeline, pool of slots → bytes of one slot on a device
                  (Runtime.slot_bytes); traces a layer
    host_pools:   the pools in the host's memory
    """

    parts: Parts
    layout: Layout
    setup: Setup
    optimizer: optax.GradientTransformation
    train: Wrapped
    evaluate: Wrapped
    gradients: Wrapped
    exchange: Wrapped | None
    mean_metrics: Wrapped | None
    slot_bytes: Callable[[], dict[str, int]]
    host_pools: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch's arrays [microbatches, sequences, tokens]."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        return abstract_state(self.layout, self.optimizer)


def make_layout(config: Config, setup: Setup, mesh: Mesh) -> Layout:
    """Where the parameters of a resolved config lie."""
    independent = config.train.diloco_inner_steps > 0
    # sequences whose losses are added up
    together = config.data.batch_size // (replicas.count(mesh) if independent else 1)
    vocabulary_stages = mesh.shape["stage"] if setup.shares_vocabulary else 1
    parts = build(
        config.model, mesh.shape["model"], vocabulary_stages, config.parallel.context, together
    )
    return Layout(
        parts,
        setup.placement,
        mesh,
        zero=config.parallel.zero,
        dtype=jnp.dtype(config.precision.params),
        independent_replicas=independent,
        offload="optimizer" in _offloaded(config),
    )


def zero_of(config: Config) -> Zero:
    return Zero(
        config.parallel.zero,
        config.parallel.gather,
        config.parallel.reduce,
        jnp.dtype(config.precision.reduce),
    )


def make_step(config: Config, mesh: Mesh, setup: Setup | None = None) -> Step:
    """The step for a resolved config on a mesh; nothing is compiled yet.

    setup: the config's tables, made now if not given.

    Raises ConfigError for a schedule that does not fit, and for devices that cannot use the host's
    memory.
    """
    _check_memories(config, mesh)
    setup = setup or make_setup(config)
    layout = make_layout(config, setup, mesh)
    skips = config.train.on_nonfinite != "stop"
    optimizer = make_optimizer(
        config.optimizer, config.train.steps, layout.specs, layout.offload, skips
    )
    runtime, evaluation = _runtimes(config, setup, layout)
    sequences = config.sequences_per_microbatch // batch_shards(mesh.shape)
    tokens, documents = (
        config.data.sequence_length // mesh.shape[CONTEXT],
        not config.data.attend_across_documents,
    )

    gathers = zero_of(config).gathers_in_ops and mesh.shape["stage"] == 1
    options = compiler_options(mesh.devices.flat[0], gathers, config.parallel.compiler_options)
    jit = functools.partial(jax.jit, compiler_options=options)
    state_shardings = jax.tree.map(lambda a: a.sharding, abstract_state(layout, optimizer))
    metrics_sharding = exchange = mean_metrics = None
    if layout.independent_replicas:
        metrics_sharding = NamedSharding(mesh, replicas.leading(PartitionSpec()))
        outer = (
            config.optimizer.outer_learning_rate,
            config.optimizer.outer_momentum,
            config.precision.outer,
        )
        exchange = jit(
            lambda state: diloco.exchange(state, layout, *outer),
            donate_argnums=0,
            out_shardings=state_shardings,
        )
        mean_metrics = jit(mean_over_replicas, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return Step(
        layout.parts,
        layout,
        setup,
        optimizer,
        train=jit(
            _train(config, layout, optimizer, runtime),
            donate_argnums=0,
            out_shardings=(state_shardings, metrics_sharding),
        ),
        evaluate=jit(evaluation.losses),
        gradients=jit(runtime.losses_and_gradients),
        exchange=exchange,
        mean_metrics=mean_metrics,
        slot_bytes=functools.partial(runtime.slot_bytes, sequences, tokens, documents),
        host_pools=runtime.host_pools,
    )


def _runtimes(config: Config, setup: Setup, layout: Layout) -> tuple[Runtime, Runtime]:
    """What gives a batch's loss and gradients, and what gives its loss alone."""
    runtime = functools.partial(
        Runtime,
        layout.parts,
        setup.placement,
        mesh=layout.mesh,
        reductions=layout.reductions,
        zero=zero_of(config),
        shares_vocabulary=setup.shares_vocabulary,
        loss_chunk=config.model.loss_chunk,
        compute=jnp.dtype(config.precision.compute),
    )
    training = runtime(
        setup.train,
        remat=config.pipeline.remat,
        independent_replicas=layout.independent_replicas,
        offload_activations="activations" in _offloaded(config),
    )
    return training, runtime(setup.evaluate)


def _train(
    config: Config, layout: Layout, optimizer: optax.GradientTransformation, runtime: Runtime
) -> Callable[[TrainState, dict], tuple[TrainState, StepMetrics]]:
    """The function of a step: gradients, then the optimizer, which of independent replicas is each
    one's own.

    Where the config says so, an update whose loss or gradients are not finite is computed and
    thrown away by selects, for a conditional would copy the state. The learning rate then goes by
    the updates that were made, not by the steps.
    """
    rate, skips = (
        learning_rate(config.optimizer, config.train.steps),
        config.train.on_nonfinite != "stop",
    )

    def train(state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        def update(params, optimizer_state, results: LossesAndGradients):
            losses, with_counts = results.losses, results.gradients
            gradients = balance.without_counts(layout.specs, with_counts)
            # Each data shard updates its own part of the parameters, which are then gathered.
            scattered = jax.tree.map(lax.with_sharding_constraint, params, layout.scattered)
            guard = (
                {"finite": jnp.isfinite(losses.loss) & jnp.isfinite(optax.tree.norm(gradients))}
                if skips
                else {}
            )
            updates, after = optimizer.update(gradients, optimizer_state, scattered, **guard)
            moved = balance.move(
                layout.specs,
                optax.apply_updates(scattered, updates),
                with_counts,
                config.model.balance_rate,
            )
            if skips:
                moved = jax.tree.map(
                    functools.partial(jnp.where, guard["finite"]), moved, scattered
                )
            params = jax.tree.map(lax.with_sharding_constraint, moved, layout.shardings)
            metrics = StepMetrics(
                losses.loss,
                grad_norm=optax.tree.norm(gradients),
                learning_rate=rate(updates_made(optimizer_state) if skips else state.step),
                tokens=losses.tokens,
                mtp_loss=losses.mtp_loss,
                expert_load=balance.expert_load(layout.specs, with_counts),
                dropped=balance.dropped(layout.specs, with_counts),
                skipped=(state.step + 1 - updates_made(after)).astype(jnp.float32)
                if skips
                else None,
            )
            return params, after, metrics

        results = runtime.losses_and_gradients(state.params, batch)
        with jax.named_scope("optimizer"):
            update_each = replicas.in_each(update) if layout.independent_replicas else update
            params, optimizer_state, metrics = update_each(state.params, state.optimizer, results)
        return dataclasses.replace(
            state, params=params, optimizer=optimizer_state, step=state.step + 1
        ), metrics

    return train


def _offloaded(config: Config) -> tuple[str, ...]:
    """What lies in the host's memory."""
    choice = config.parallel.offload
    return {"none": (), "both": ("optimizer", "activations")}.get(choice, (choice,))


def _check_memories(config: Config, mesh: Mesh) -> None:
    """ConfigError where something is to lie in the host's memory, of which the devices have no
    part."""
    if _offloaded(config) and (has := host_memory.missing(mesh)):
        device = mesh.devices.flat[0].device_kind
        rule = f"needs memory of kind {host_memory.KIND}, and {device} has {has} alone"
        raise ConfigError(
            "parallel.offload", config.parallel.offload, rule, fixes=[{"parallel.offload": "none"}]
        )


def abstract_batch(config: Config, step: Step) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch's arrays as ShapeDtypeStructs."""
    m = config.pipeline.microbatches
    shape = (m, config.sequences_per_microbatch, config.data.sequence_length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if not config.data.attend_across_documents:
        dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=step.batch_sharding)
        for name, dtype in dtypes.items()
    }


def state_memory(config: Config, step: Step) -> dict[str, int]:
    """Bytes on a device by kind: parameters, the optimizer's moments, gradient sums; what replicas
    that train apart keep; slots. Those in the host's memory come after, as "moments on the
    host"."""
    state, reduced = step.abstract_state(), config.parallel.reduce == "microbatch"
    kinds = {
        "parameters": bytes_per_device(state.params),
        "moments": bytes_per_device(state.optimizer),
    }
    kinds |= {
        name: bytes_per_device(getattr(state, name))
        for name in OUTER
        if step.layout.independent_replicas
    }
    parameters = (p for group in parameters_of(step.layout).values() for p in group.values())
    kinds["accumulators"] = (
        sum(int(p.size) // (config.mesh.data if reduced and p.over_data else 1) for p in parameters)
        * FLOAT32
    )
    host = {"moments": bytes_per_device(state.optimizer, host=True)}
    if step.setup.train:
        pools = {kind: number * each for kind, (number, each) in slot_pools(step).items()}
        host["slots"] = sum(size for kind, size in pools.items() if kind in step.host_pools)
        kinds["slots"] = sum(pools.values()) - host["slots"]
    return kinds | {f"{kind} on the host": n for kind, n in host.items() if n}


def step_counts(config: Config, cpu: bool = False) -> StepCounts:
    """The counts of the step of a resolved config whose mesh is known. cpu: as XLA's CPU backend
    lowers collectives."""
    setup, layout = make_setup(config), layout_of(config)
    # No device is needed: layouts ask a mesh for its sizes alone.
    state = make_layout(config, setup, AbstractMesh(sizes_of(config.mesh), AXES))  # type: ignore[arg-type]
    tokens = config.data.sequence_length // config.mesh.context
    collectives = StepCollectives(
        transformer_of(config),
        layout,
        item=bytes_of(config.precision.compute),
        read=bytes_of(config.precision.compute),
        reduced=FLOAT32 if cpu else bytes_of(config.precision.reduce),
        updated=FLOAT32,
        context=config.parallel.context,
        shares_vocabulary=setup.shares_vocabulary,
        gathers_in_ops=config.parallel.zero == 3 and config.parallel.gather == "layer",
        reduces_in_ops=config.parallel.reduce == "microbatch",
        documents=not config.data.attend_across_documents,
        loss_cuts=cut_count(layout.microbatch, tokens, config.mesh.model, config.model.loss_chunk),
        cpu=cpu,
        outer_int8=config.precision.outer == "int8",
    )
    return StepCounts(
        collectives, parameters_of(state), setup.placement, setup.train, state.independent_replicas
    )


def slot_pools(step: Step) -> dict[str, tuple[int, int]]:
    """Kind of slot → how many a device has, bytes of each; nothing with one stage."""
    if not step.setup.train:
        return {}
    size = step.slot_bytes()
    return {
        kind: (number, size[kind]) for kind, number in step.setup.train.pool_sizes.items() if number
    }
