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
from jax.sharding import Mesh, NamedSharding

from jaxtrain.mesh import BATCH_AXES, CONTEXT
from jaxtrain.models.transformer import Parts, build
from jaxtrain.parallel.zero import Zero
from jaxtrain.pipeline.runtime import BATCH, Runtime
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.training.optimizer import learning_rate, make_optimizer
from jaxtrain.training.state import Layout, abstract_state

# XLA's options by platform, without which the program is not what it should be. Early permutes run beside a row's ops; an op with
# collectives in it is put beside another collective only if all together stay below this limit.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_experimental_parallel_collective_overlap_limit": 1024}
}


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The two programs of a run, as functions of arrays, and what they were made from.

    train:    (state, batch) → (state, {"loss", "grad_norm", "learning_rate", "tokens"}); donates the state
    evaluate: (params, batch) → (loss, tokens)
    gradients: (params, batch) → (loss, tokens, gradients), without an optimizer
    slot_bytes: () → of a pipeline, pool of slots → bytes of one on a device (Runtime.slot_bytes); traces a layer
    """

    parts: Parts
    layout: Layout
    setup: Setup
    optimizer: optax.GradientTransformation
    train: Any
    evaluate: Any
    gradients: Any
    slot_bytes: Callable[[], dict[str, int]]

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of a batch's arrays [microbatches, rows, tokens]."""
        return NamedSharding(self.mesh, BATCH)

    def abstract_state(self) -> dict:
        return abstract_state(self.layout, self.optimizer)


def make_step(config, mesh: Mesh) -> Step:
    """The step for a resolved config on a mesh; nothing is compiled yet. Raises ConfigError for a schedule that does not fit."""
    precision, setup = config.precision, make_setup(config)
    shared = setup.train is not None and setup.table.vocabulary == "parallel"
    parts = build(config.model, mesh.shape["model"], mesh.shape["stage"] if shared else 1, config.parallel.context)
    layout = Layout(parts, setup.placement, mesh, config.parallel.zero, jnp.dtype(precision.params))
    optimizer = make_optimizer(config.optimizer, config.train.steps, layout.specs)
    rate = learning_rate(config.optimizer, config.train.steps)
    zero = Zero(config.parallel.zero, config.parallel.gather, config.parallel.reduce, jnp.dtype(precision.reduce))
    runtime = functools.partial(
        Runtime, parts, setup.placement, mesh=mesh, reductions=layout.reductions, zero=zero, loss_chunk=config.model.loss_chunk
    )
    gradients = runtime(setup.train, remat=config.pipeline.remat, compute=jnp.dtype(precision.compute))
    evaluate = runtime(setup.evaluate, forward_only=True, compute=jnp.dtype(precision.compute))

    def train(state, batch):
        loss, tokens, grads = gradients(state["params"], batch)
        with jax.named_scope("optimizer"):
            # Each data shard updates its own part of the parameters, which are then gathered.
            mine = jax.tree.map(lax.with_sharding_constraint, state["params"], layout.scattered)
            updates, optimizer_state = optimizer.update(grads, state["optimizer"], mine)
            params = jax.tree.map(lax.with_sharding_constraint, optax.apply_updates(mine, updates), layout.shardings)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rate(state["step"]), "tokens": tokens}
        return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}, metrics

    state_shardings = jax.tree.map(lambda a: a.sharding, abstract_state(layout, optimizer))
    jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))
    jitted = jit(train, donate_argnums=0, out_shardings=(state_shardings, None))
    rows = config.data.batch_size // config.pipeline.microbatches // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    slot_bytes = functools.partial(
        gradients.slot_bytes, rows, config.data.sequence_length // mesh.shape[CONTEXT], not config.data.attend_across_documents
    )
    return Step(parts, layout, setup, optimizer, jitted, jit(evaluate), jit(gradients), slot_bytes)


def abstract_batch(config, step: Step) -> dict:
    """A batch's arrays as ShapeDtypeStructs."""
    m = config.pipeline.microbatches
    shape = (m, config.data.batch_size // m, config.data.sequence_length)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if not config.data.attend_across_documents:
        kinds |= {"segments": jnp.int32, "positions": jnp.int32}
    return {k: jax.ShapeDtypeStruct(shape, t, sharding=step.batch_sharding) for k, t in kinds.items()}
