"""The training step and the evaluation as programs for a mesh, and the metrics of a step, which
run/metrics.py describes."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered, Wrapped
from jax.typing import ArrayLike

from jaxtrain.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    ResolvedConfig,
)
from jaxtrain.config.saved_values import names_of, names_on_host
from jaxtrain.config.sizes import remat_of
from jaxtrain.devices import cluster, host_memory
from jaxtrain.devices.compiler_options import (
    DENSE,
    FP8,
    GATHERS,
    GATHERS_WHOLE,
    SIDE_BY_SIDE,
    compiler_options,
)
from jaxtrain.devices.host_memory import is_on_host
from jaxtrain.devices.mesh import CONTEXT, REPLICA, batch_shards, platform_of
from jaxtrain.devices.sharding import BATCH_SPEC, mesh_axes
from jaxtrain.devices.state_file import StateFile
from jaxtrain.models.transformer import ModelParts, build
from jaxtrain.parallel import replicas
from jaxtrain.parallel.fp8 import Fp8, fp8_of
from jaxtrain.parallel.zero import Zero
from jaxtrain.pipeline.setup import Setup, make_setup
from jaxtrain.run.metrics import METRICS, host
from jaxtrain.runtime.runtime import LossesAndGradients, Runtime
from jaxtrain.runtime.state_plan import SlotBytes
from jaxtrain.training.initial_values import random_keys
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.several_steps import StepsTogether, train_several
from jaxtrain.training.state import (
    TrainState,
    abstract_state,
    bytes_on_disk,
    bytes_per_device,
)
from jaxtrain.training.update import balance, diloco
from jaxtrain.training.update.optimizer import (
    Optimizer,
    learning_rate,
    make_optimizer,
    updates_made,
)
from jaxtrain.training.update.streamed_update import (
    CompiledUpdate,
    Guard,
    StreamedUpdate,
    UpdateSettings,
    streamed_update,
)

# The use of random keys that the initial values have not (random_keys).
ROUNDING = 1

# Float32 scalars by their names in METRICS; of independent replicas arrays [replicas].
StepMetrics = dict[str, jax.Array]


def step_metrics(**values: jax.Array | None) -> StepMetrics:
    """The metrics that are not None. Raises KeyError for one that METRICS lacks, ValueError for one
    that METRICS does not combine over replicas."""
    for name in values:
        if METRICS[name].combine is host:
            raise ValueError(f"{name} is a number of the host (run/metrics.py)")
    return {name: value for name, value in values.items() if value is not None}


def combine_replicas(each: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step from those of each independent replica, [replicas], jax or numpy."""
    tokens = each["weighted_tokens"]
    return {name: METRICS[name].combine(values, tokens) for name, values in each.items()}


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

    parts: ModelParts
    layout: ParameterLayout
    setup: Setup
    optimizer: Optimizer
    train: Wrapped
    streamed: "StreamedStep | None"
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
        if layout.independent_replicas:
            kinds["anchor"] = bytes_per_device(state.anchor)
            kinds["outer_momentum"] = bytes_per_device(state.outer_momentum)
        accumulated = 0
        for keys, _, size, reduction in layout.parameters():
            in_ops = reduces_in_ops or (layout.shards_ends and keys[0] != "layers")
            parts = reduction.sharded if in_ops else reduction.unsharded
            accumulated += size // math.prod(sizes[axis] for p in parts for axis in mesh_axes(p))
        kinds["accumulators"] = 4 * accumulated  # of 32 bits
        host = {
            "moments": bytes_per_device(state.optimizer, host=True),
            "masters": bytes_per_device(state.params, host=True),
        }
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
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        alone = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        return self.several.lower(state, (batch,) * self.steps_per_program, alone)


def make_layout(
    setup: Setup,
    mesh: Mesh,
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    batch_size: int,
    independent_replicas: bool,
) -> ParameterLayout:
    """The layout of a resolved model's parameters on a mesh, which may be abstract.

    batch_size: sequences in a step, of all replicas together
    """
    # sequences whose losses are added up
    sequences = batch_size // (replicas.count(mesh) if independent_replicas else 1)
    vocabulary_stages = mesh.shape["stage"] if setup.shares_vocabulary else 1
    parts = build(
        model,
        mesh.shape["model"],
        vocabulary_stages,
        parallel.context,
        sequences,
        parallel.expert_nodes,
    )
    return ParameterLayout(
        parts,
        setup.placement,
        mesh,
        parallel.zero,
        precision,
        independent_replicas,
        offload=parallel.offload_to("optimizer") == "host",
        disk=StateFile(parallel.offload_directory)
        if parallel.offload_to("optimizer") == "disk"
        else None,
        shards_ends=parallel.ends == "sharded",
    )


def make_step(config: ResolvedConfig, mesh: Mesh, setup: Setup | None = None) -> Step:
    """The step of a config on a mesh; nothing is compiled yet.

    setup: the config's tables, built now if not given.

    Raises ConfigError for a schedule that does not fit, and for devices that cannot use the host's
    memory.
    """
    _check_host_memory(config.parallel, config.pipeline.save, mesh)
    setup = setup or make_setup(config)
    model, data, parallel, precision = config.model, config.data, config.parallel, config.precision
    steps, skips = config.train.steps, config.train.on_nonfinite != "stop"
    independent = config.train.diloco_inner_steps > 0
    compute = jnp.dtype(precision.compute)
    layout = make_layout(setup, mesh, model, parallel, precision, data.batch_size, independent)
    layout = dataclasses.replace(layout, optimizer=config.optimizer)
    keys = random_keys(layout, config.train.seed, ROUNDING)
    optimizer = make_optimizer(
        config.optimizer, steps, layout.specs, precision.moments, layout.offload, keys
    )
    zero = Zero(parallel.zero, parallel.gather, parallel.reduce, jnp.dtype(precision.reduce))
    fp8 = fp8_of(precision, independent)
    runtime_of = _runtime_of(
        layout, setup, zero, model.loss_chunk, compute, fp8, parallel.collective_matmul
    )
    runtime = runtime_of(
        setup.train,
        remat=remat_of(config.pipeline.remat),
        save=config.pipeline.save,
        independent_replicas=independent,
        offload_activations=parallel.offload_to("activations") == "host",
    )
    table = setup.table
    does = {
        GATHERS: zero.gathers_in_ops and mesh.shape["stage"] == 1,
        GATHERS_WHOLE: zero.gathers_in_ops and mesh.shape["stage"] * mesh.shape["model"] == 1,
        SIDE_BY_SIDE: mesh.shape["model"] == 1
        and (table.overlaps or (table.saves_inputs and model.experts > 0)),
        FP8: bool(fp8),
        DENSE: not model.experts,
    }
    options = compiler_options(
        mesh.devices.flat[0], [name for name, yes in does.items() if yes], parallel.compiler_options
    )
    jit = functools.partial(jax.jit, compiler_options=options)
    abstract = abstract_state(layout, optimizer)
    state_shardings = jax.tree.map(lambda a: a.sharding, abstract)
    exchange = combine_metrics = None
    if independent:
        exchange, combine_metrics = _exchange(layout, state_shardings, precision.outer, jit)
    learning_rates = learning_rate(config.optimizer, steps)
    train: Wrapped
    streamed = several = None
    if layout.disk:
        settings = UpdateSettings(
            layout, config.optimizer, steps, precision.moments, keys, skips, model.balance_rate
        )
        train, streamed = _streamed(settings, abstract, runtime, learning_rates, jit)
    else:
        of_replicas = NamedSharding(mesh, replicas.leading(PartitionSpec()))
        one_step = _train(layout, optimizer, runtime, learning_rates, skips, model.balance_rate)
        train = jit(
            one_step,
            donate_argnums=0,
            out_shardings=(state_shardings, of_replicas if independent else None),
        )
        if setup.train_several:
            tables = dataclasses.replace(runtime, slotted=setup.train_several)
            together = StepsTogether(layout, tables, config.optimizer, steps, learning_rates, skips)
            shardings = state_shardings, NamedSharding(mesh, PartitionSpec())
            run = train_several(together, one_step)
            several = jit(run, donate_argnums=0, out_shardings=shardings)
    return Step(
        layout.parts,
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


def _exchange(
    layout: ParameterLayout, state_shardings: TrainState, dtype: str, jit: Callable[..., Wrapped]
) -> tuple[Wrapped, Wrapped]:
    """`Step.exchange` and `Step.combine_metrics` of independent replicas. dtype: of what they
    exchange"""
    outer_step = functools.partial(
        diloco.exchange,
        layout=layout,
        rate=layout.optimizer.outer_learning_rate,
        momentum=layout.optimizer.outer_momentum,
        dtype=dtype,
    )
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    return (
        jit(outer_step, donate_argnums=0, out_shardings=state_shardings),
        jit(combine_replicas, out_shardings=everywhere),
    )


def _streamed(
    settings: UpdateSettings,
    abstract: TrainState,
    runtime: Runtime,
    learning_rates: Callable[[ArrayLike], jax.Array],
    jit: Callable[..., Wrapped],
) -> tuple[Wrapped, "StreamedStep"]:
    """`Step.train` and `Step.streamed` of an optimizer whose state is on disk."""
    layout, everywhere = settings.layout, NamedSharding(settings.layout.mesh, PartitionSpec())
    gradients = _gradients(layout, runtime, learning_rates, settings.skips)
    finish = _finish(layout, settings.skips)
    return (
        jit(gradients, out_shardings=(layout.scattered, everywhere, everywhere)),
        StreamedStep(
            streamed_update(settings, abstract, jit), jit(finish, out_shardings=everywhere)
        ),
    )


def _runtime_of(
    layout: ParameterLayout,
    setup: Setup,
    zero: Zero,
    loss_chunk: int,
    compute: jnp.dtype,
    fp8: Fp8 | None,
    collective_matmul: str,
) -> Callable[..., Runtime]:
    """The runtime of this layout's model without its table and what only training has."""
    return functools.partial(
        Runtime,
        layout.parts,
        setup.placement,
        mesh=layout.mesh,
        reductions=layout.reductions,
        zero=zero,
        zero_of_ends=Zero(3, dtype=zero.dtype, reduce="microbatch") if layout.shards_ends else zero,
        shares_vocabulary=setup.shares_vocabulary,
        loss_chunk=loss_chunk,
        compute=compute,
        fp8=fp8,
        collective_matmul=collective_matmul,
    )


def _train(
    layout: ParameterLayout,
    optimizer: Optimizer,
    runtime: Runtime,
    rate: Callable[[ArrayLike], jax.Array],
    skips: bool,
    balance_rate: float,
) -> Callable[[TrainState, dict], tuple[TrainState, StepMetrics]]:
    """The function of a step: gradients, then the optimizer, separately in each replica if replicas
    are independent.

    rate: step → learning rate; balance_rate: of the experts' biases.
    skips: an update whose loss or gradients are not finite is computed and discarded by selects,
        for a conditional would copy the state. The learning rate then depends on the number of
        updates, not of steps.
    """

    on_tpu = platform_of(layout.mesh.devices.flat[0]) == "tpu"

    def train(state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        def update(params, optimizer_state, results: LossesAndGradients):
            with_counts = results.gradients
            gradients = balance.without_counts(layout.specs, with_counts)
            guard, metrics = _before_update(
                layout, results, optimizer_state, state.step, rate, skips
            )
            # Each data shard updates its part of the parameters; then they are gathered.
            scattered = _shards(layout, params)
            updated, params, after = optimizer.update(
                gradients, optimizer_state, scattered, guard.finite, guard.norm
            )
            moved = balance.move(layout.specs, updated, with_counts, balance_rate, guard.finite)
            on_device = layout.as_held(moved)
            params = jax.tree.map(lambda a, b: a if is_on_host(a) else b, params, on_device)
            metrics |= _after_update(layout.norm(moved), after, state.step + 1, skips)
            return params, after, layout.working(moved), metrics

        params = state.params
        if on_tpu and layout.zero in (1, 2) and not layout.independent_replicas:
            # What an update reads of them is cut off before the layers run: else XLA's TPU compiler
            # copies all parameters first, and keeps both.
            params, batch = lax.optimization_barrier((_shards(layout, params), batch))
        results = runtime.losses_and_gradients(state.read, batch)
        with jax.named_scope("optimizer"):
            update_each = replicas.in_each(update) if layout.independent_replicas else update
            params, optimizer_state, working, metrics = update_each(
                params, state.optimizer, results
            )
        return dataclasses.replace(
            state,
            params=params,
            optimizer=optimizer_state,
            step=state.step + 1,
            working=working,
        ), metrics

    return train


def _shards(layout: ParameterLayout, params: Any) -> Any:
    """Each data shard's part of the parameters, which it updates; those on the host as they are."""
    return jax.tree.map(
        lambda a, s: a if is_on_host(a) else lax.with_sharding_constraint(a, s),
        params,
        layout.scattered,
    )


def _before_update(
    layout: ParameterLayout,
    results: LossesAndGradients,
    optimizer_state: Any,
    step: jax.Array,
    rate: Callable[[ArrayLike], jax.Array],
    skips: bool,
) -> tuple[Guard, StepMetrics]:
    """What an update needs of all gradients, and the metrics that are known before it; arguments as
    of `_train`. step: the number of steps before this one"""
    losses, with_counts = results.losses, results.gradients
    gradients = balance.without_counts(layout.specs, with_counts)
    norm = layout.norm(gradients)
    finite = jnp.isfinite(losses.loss) & jnp.isfinite(norm) if skips else None
    metrics = step_metrics(
        loss=losses.loss,
        grad_norm=norm,
        learning_rate=rate(updates_made(optimizer_state) if skips else step),
        weighted_tokens=losses.tokens,
        mtp_loss=losses.mtp_loss,
        expert_load=balance.expert_load(layout.specs, with_counts),
        dropped=balance.dropped(layout.specs, with_counts),
    )
    return Guard(norm, finite), metrics


def _after_update(
    param_norm: jax.Array, optimizer_state: Any, step: jax.Array, skips: bool
) -> StepMetrics:
    """The metrics that need the updated state. step: the number of steps, with this one"""
    skipped = (step - updates_made(optimizer_state)).astype(jnp.float32) if skips else None
    return step_metrics(param_norm=param_norm, skipped=skipped)


def _gradients(
    layout: ParameterLayout,
    runtime: Runtime,
    rate: Callable[[ArrayLike], jax.Array],
    skips: bool,
) -> Callable[[TrainState, dict], tuple[Any, Guard, StepMetrics]]:
    """The function of a step whose update is streamed, up to the gradients; arguments as of
    `_train`."""

    def gradients(state: TrainState, batch: dict) -> tuple[Any, Guard, StepMetrics]:
        results = runtime.losses_and_gradients(state.read, batch)
        with jax.named_scope("optimizer"):
            guard, metrics = _before_update(
                layout, results, state.optimizer, state.step, rate, skips
            )
        return results.gradients, guard, metrics

    return gradients


def _finish(
    layout: ParameterLayout, skips: bool
) -> Callable[[TrainState, jax.Array | None], tuple[jax.Array, StepMetrics]]:
    """The function of the end of a step whose update is streamed: (the updated state, the squares
    of masters) → (number of steps, the metrics that need that state)."""

    def finish(state: TrainState, squares: jax.Array | None) -> tuple[jax.Array, StepMetrics]:
        if squares is None:
            norm = layout.norm(
                jax.tree.map(lax.with_sharding_constraint, state.params, layout.scattered)
            )
        else:
            norm = jnp.sqrt(squares)
        step = state.step + 1
        return step, _after_update(norm, state.optimizer, step, skips)

    return finish


def _check_host_memory(parallel: ParallelConfig, save: Sequence[str], mesh: Mesh) -> None:
    """Raises ConfigError if `parallel.offload` or `pipeline.save` needs the host's memory and
    devices cannot use it. save: `pipeline.save`"""
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


# --- its programs, compiled ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedStep:
    """The rest of a step whose program ends with the gradients, jitted and not yet compiled.

    finish: the updated state → (number of steps, StepMetrics)
    """

    update: StreamedUpdate
    finish: Wrapped

    def lower(self) -> Callable[[Compiled], "CompiledStreamedStep"]:
        """Traces the programs. The function compiles them, and joins them to the compiled program
        of the gradients."""
        layout = self.update.layout
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        squares = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
        updates = self.update.lower()
        finish = self.finish.lower(self.update.state, squares if layout.masters else None)

        def compile_all(gradients: Compiled) -> CompiledStreamedStep:
            compiled = {
                program: cluster.compile_everywhere(f"update {number}", lowered)
                for number, (program, lowered) in enumerate(updates.items())
            }
            update = CompiledUpdate(self.update, compiled)
            end = cluster.compile_everywhere("end of a step", finish)
            return CompiledStreamedStep(gradients, update, end)

        return compile_all


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStreamedStep:
    """The compiled programs of a step whose update is streamed."""

    gradients: Compiled
    update: CompiledUpdate
    finish: Compiled

    def __call__(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        """Returns when the last layer's update is dispatched; donates the state's parameters.
        Raises StateFileError."""
        gradients, guard, metrics = self.gradients(state, batch)
        leaves = jax.tree.leaves(gradients)
        del gradients  # each is freed when its parameter is updated
        state, squares = self.update(state, leaves, guard)
        step, others = self.finish(state, squares)
        return dataclasses.replace(state, step=step), metrics | others


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a step.

    train:    all of it, or its gradients if the update is streamed; of several steps if a program
              has several
    take:     (TrainState, batch) → (TrainState, StepMetrics); the state may not be used afterwards
    exchange: None if replicas are not independent
    several:  None if a program has one step
    """

    train: Compiled
    take: Callable[[TrainState, dict], tuple[TrainState, StepMetrics]]
    exchange: Compiled | None
    several: "CompiledSteps | None" = None


@dataclasses.dataclass(frozen=True)
class CompiledSteps:
    """The compiled program of `number` steps."""

    program: Compiled
    number: int

    def together(
        self, state: TrainState, batches: Sequence[dict]
    ) -> tuple[TrainState, StepMetrics]:
        """The state after `number` steps and their metrics, arrays [number]. The table of several
        steps has them if none is clipped or skipped."""
        return self._run(state, batches, 0)

    def alone(self, state: TrainState, batches: Sequence[dict]) -> tuple[TrainState, StepMetrics]:
        """The state after up to `number` steps, run one at a time, and their metrics, arrays
        [number] with 0 for steps that are not run."""
        # the program reads the others' shapes alone
        unused = [batches[-1]] * (self.number - len(batches))
        return self._run(state, [*batches, *unused], len(batches))

    def take(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        """One step, as `Programs.take`."""
        state, metrics = self.alone(state, [batch])
        return state, {name: a[0] for name, a in metrics.items()}

    def _run(
        self, state: TrainState, batches: Sequence[dict], alone: int
    ) -> tuple[TrainState, StepMetrics]:
        return self.program(state, tuple(batches), np.int32(alone))


def start_compiling(
    step: Step, executor: concurrent.futures.Executor
) -> concurrent.futures.Future[Programs]:
    """Traces the programs of a step; the future has them compiled."""
    train = step.lower()
    exchange = step.exchange.lower(step.abstract_state()) if step.exchange else None
    compile_streamed = step.streamed.lower() if step.streamed else None

    def compile_all() -> Programs:
        compiled = cluster.compile_everywhere("step", train)
        several = CompiledSteps(compiled, step.steps_per_program) if step.several else None
        take = compile_streamed(compiled) if compile_streamed else compiled
        return Programs(
            compiled,
            several.take if several else take,
            cluster.compile_everywhere("exchange", exchange) if exchange else None,
            several,
        )

    return executor.submit(compile_all)


def compiled_memory(compiled: Compiled) -> dict[str, int] | None:
    """Bytes of a compiled program in one device's memory, {"arguments", "temporary", "results",
    "total"}; None if the platform does not report them. Results are those that reuse no
    argument's memory."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    return parts | {"total": sum(parts.values())}
