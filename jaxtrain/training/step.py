"""One training step and one evaluation, compiled ahead of time for a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import ConfigError
from jaxtrain.config.pipeline_setup import Setup, make_setup
from jaxtrain.devices.mesh import BATCH_AXES, CONTEXT
from jaxtrain.devices.sharding import BATCH_SPEC
from jaxtrain.models.transformer import Parts, build
from jaxtrain.parallel import host_memory, replicas
from jaxtrain.parallel.zero import Zero
from jaxtrain.runtime.runtime import LossesAndGradients, Runtime
from jaxtrain.training import balance, diloco
from jaxtrain.training.optimizer import learning_rate, make_optimizer
from jaxtrain.training.state import Layout, abstract_state

# XLA's options by platform, without which the program is not what it should be. Early permutes run beside a row's ops; an op with
# collectives in it is put beside another collective only if all together stay below this limit.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_experimental_parallel_collective_overlap_limit": 1024}
}


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The programs of a run, as functions of arrays, and what they were made from.

    train:    (state, batch) → (state, {"loss", "grad_norm", "learning_rate", "tokens", with model.mtp_depth "mtp_loss", of experts those of
              balance.metrics}); donates the state
    evaluate: (params, batch) → Losses, of state[trained]
    exchange: state → state, where replicas train apart (training/diloco.py), or None; donates the state
    mean:     a step's metrics, one of each replica then → those of the step
    gradients: (params, batch) → LossesAndGradients, without an optimizer
    slot_bytes: () → of a pipeline, pool of slots → bytes of one on a device (Runtime.slot_bytes); traces a layer
    host_pools: those in the host's memory
    """

    parts: Parts
    layout: Layout
    setup: Setup
    optimizer: optax.GradientTransformation
    train: Any
    evaluate: Any
    exchange: Any
    mean: Any
    gradients: Any
    slot_bytes: Callable[[], dict[str, int]]
    host_pools: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def trained(self) -> str:
        """The name in the state of what is evaluated and used."""
        return "anchor" if self.layout.apart else "params"

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of a batch's arrays [microbatches, rows, tokens]."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    def abstract_state(self) -> dict:
        return abstract_state(self.layout, self.optimizer)


def make_layout(config, setup: Setup, mesh: Mesh) -> Layout:
    """Where the parameters of a resolved config lie."""
    apart = config.train.diloco_inner_steps > 0
    together = config.data.batch_size // (replicas.count(mesh) if apart else 1)  # sequences whose losses are added up
    parts = build(
        config.model, mesh.shape["model"], mesh.shape["stage"] if setup.shares_vocabulary else 1, config.parallel.context, together
    )
    return Layout(
        parts, setup.placement, mesh, config.parallel.zero, jnp.dtype(config.precision.params), apart, "optimizer" in _offloaded(config)
    )


def zero_of(config) -> Zero:
    return Zero(config.parallel.zero, config.parallel.gather, config.parallel.reduce, jnp.dtype(config.precision.reduce))


def make_step(config, mesh: Mesh) -> Step:
    """The step for a resolved config on a mesh; nothing is compiled yet. Raises ConfigError for a schedule that does not fit, and for
    devices that cannot use the host's memory."""
    precision, setup, apart = config.precision, make_setup(config), config.train.diloco_inner_steps > 0
    _check_memories(config, mesh)
    layout = make_layout(config, setup, mesh)
    parts = layout.parts
    optimizer = make_optimizer(config.optimizer, config.train.steps, layout.specs, layout.offload)
    rate = learning_rate(config.optimizer, config.train.steps)
    zero = zero_of(config)
    runtime = functools.partial(
        Runtime,
        parts,
        setup.placement,
        mesh=mesh,
        reductions=layout.reductions,
        zero=zero,
        shares_vocabulary=setup.shares_vocabulary,
        loss_chunk=config.model.loss_chunk,
        compute=jnp.dtype(precision.compute),
    )
    offload = "activations" in _offloaded(config)
    gradients = runtime(setup.train, remat=config.pipeline.remat, independent_replicas=apart, offload_activations=offload)
    evaluate = runtime(setup.evaluate)

    def train(state, batch):
        def update(params, optimizer_state, results: LossesAndGradients):
            losses, found = results.losses, results.gradients
            grads = balance.gradients(layout.specs, found)
            # Each data shard updates its own part of the parameters, which are then gathered.
            mine = jax.tree.map(lax.with_sharding_constraint, params, layout.scattered)
            updates, optimizer_state = optimizer.update(grads, optimizer_state, mine)
            new = balance.move(layout.specs, optax.apply_updates(mine, updates), found, config.model.balance_rate)
            params = jax.tree.map(lax.with_sharding_constraint, new, layout.shardings)
            metrics = {"loss": losses.loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rate(state["step"])}
            metrics |= {"tokens": losses.tokens} | ({"mtp_loss": losses.mtp_loss} if config.model.mtp_depth else {})
            return {"params": params, "optimizer": optimizer_state}, metrics | balance.metrics(layout.specs, found)

        results = gradients.losses_and_gradients(state["params"], batch)
        with jax.named_scope("optimizer"):
            new, metrics = (replicas.in_each(update) if apart else update)(state["params"], state["optimizer"], results)
        return state | new | {"step": state["step"] + 1}, metrics

    state_shardings = jax.tree.map(lambda a: a.sharding, abstract_state(layout, optimizer))
    jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))
    exchange = mean = own = None
    if apart:
        own, whole = (NamedSharding(mesh, spec) for spec in (replicas.leading(PartitionSpec()), PartitionSpec()))
        outer = config.optimizer.outer_learning_rate, config.optimizer.outer_momentum, precision.outer
        exchange = jit(lambda state: diloco.exchange(state, layout, *outer), donate_argnums=0, out_shardings=state_shardings)
        mean = jit(diloco.mean_metrics, out_shardings=whole)
    jitted = jit(train, donate_argnums=0, out_shardings=(state_shardings, own))
    rows = config.data.batch_size // config.pipeline.microbatches // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    slot_bytes = functools.partial(
        gradients.slot_bytes, rows, config.data.sequence_length // mesh.shape[CONTEXT], not config.data.attend_across_documents
    )
    programs = jitted, jit(evaluate.losses), exchange, mean, jit(gradients.losses_and_gradients)
    return Step(parts, layout, setup, optimizer, *programs, slot_bytes, gradients.host_pools)


def _offloaded(config) -> tuple[str, ...]:
    """What lies in the host's memory."""
    choice = config.parallel.offload
    return {"none": (), "both": ("optimizer", "activations")}.get(choice, (choice,))


def _check_memories(config, mesh: Mesh) -> None:
    """ConfigError where something is to lie in the host's memory, of which the devices have no part."""
    if _offloaded(config) and (has := host_memory.missing(mesh)):
        device = mesh.devices.flat[0].device_kind
        rule = f"needs memory of kind {host_memory.KIND}, and {device} has {has} alone"
        raise ConfigError("parallel.offload", config.parallel.offload, rule, fixes=[{"parallel.offload": "none"}])


def abstract_batch(config, step: Step) -> dict:
    """A batch's arrays as ShapeDtypeStructs."""
    m = config.pipeline.microbatches
    shape = (m, config.data.batch_size // m, config.data.sequence_length)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if not config.data.attend_across_documents:
        kinds |= {"segments": jnp.int32, "positions": jnp.int32}
    return {k: jax.ShapeDtypeStruct(shape, t, sharding=step.batch_sharding) for k, t in kinds.items()}
