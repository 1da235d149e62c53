"""A config, and the states that it goes through; each is a type.

    Config ──on_own_mesh──▶ MeshedConfig        a recipe and flags; each mesh axis has a size
       │                        │
      fill                   resolve
       ▼                        ▼
    FilledConfig            ResolvedConfig      and every dependent default is filled in

rules/mesh_rules.py: on_mesh gives the mesh its sizes on a number of devices. A CheckedRun has a
MeshedConfig, a PreparedRun a ResolvedConfig (pipeline/prepared_run.py).

In some settings, as their docs say, 0, "" or auto means a default that depends on other settings.
A checkpoint has a StoredConfig, which is filled. `replace` (paths.py) changes settings and returns
a Config whatever it began with.

A recipe (configs/*.py) returns a `Config`; a field's path in it (`mesh.stage`) is its name in
flags, errors and logs (paths.py). rules/ has the rules between settings, flags.py the flags. No
jax.
"""

import dataclasses
from typing import TypeVar

from jaxtrain.config.groups.layout_settings import (
    MeshConfig,
    ParallelConfig,
    PipelineConfig,
    shards_ends,
)
from jaxtrain.config.groups.model_settings import ModelConfig, ResolvedModel
from jaxtrain.config.groups.phase_settings import spans_of
from jaxtrain.config.groups.run_settings import (
    CheckpointConfig,
    DataConfig,
    MetricsConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxtrain.config.groups.setting import as_type, with_values
from jaxtrain.schedule.orders import default_repeats


@dataclasses.dataclass(frozen=True)
class Config:
    """A run: what a recipe's `get_config()` returns. Its construction checks nothing;
    `checks.check(config)` does.

    >>> from jaxtrain import Config, ModelConfig, TrainConfig
    >>> config = Config(model=ModelConfig(layers=2), train=TrainConfig(steps=10))
    >>> config.model.layers, config.mesh.data, config.data.sequence_length
    (2, -1, 128)
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self) -> None:
        # dataclasses.replace comes here, too: it would keep a state that changed settings lack.
        if type(self) is not Config:
            raise TypeError(
                f"a {type(self).__name__} is made by methods of Config; jaxtrain.config.replace "
                "changes its settings and returns a Config"
            )

    @property
    def sequences_per_microbatch(self) -> int:
        """Sequences of a microbatch, over all devices."""
        return self.data.batch_size // self.pipeline.microbatches

    @property
    def has_one_microbatch(self) -> bool:
        """True if data shards have one stage and one microbatch, whose gradients are the step's."""
        return self.mesh.data != 1 and self.mesh.stage == self.pipeline.microbatches == 1

    def as_read(self) -> "Config":
        """A plain config with the same settings."""
        if type(self) is Config:
            return self
        return as_type(Config, self, model=as_type(ModelConfig, self.model))

    def fill(self) -> "FilledConfig":
        """This config with its dependent defaults filled in, as far as they are known while a mesh
        axis may be -1."""
        return _filled(FilledConfig, self)

    def to_store(self) -> "StoredConfig":
        """This config as a checkpoint keeps it."""
        return _filled(StoredConfig, self)

    def on_own_mesh(self) -> "MeshedConfig":
        """This config, whose mesh has a size for each axis. Raises ValueError if it has not."""
        for axis, size in self.mesh.sizes().items():
            if size < 1:
                raise ValueError(f"mesh.{axis}={size} is no number of devices")
        return as_type(MeshedConfig, self.as_read())

    def resolve(self) -> "ResolvedConfig":
        """This config, whose mesh has a size for each axis, with its dependent defaults filled in
        (kv_heads and the sizes of heads, rotary_dim, mlp_width, expert_width, max_positions,
        latent_norm_epsilon, router_normalize; reduce, ends; repeats, vocabulary). Raises
        ValueError as `on_own_mesh`.

        >>> from jaxtrain import Config, MeshConfig, ModelConfig
        >>> config = Config(model=ModelConfig(width=64, heads=4), mesh=MeshConfig(data=2))
        >>> resolved = config.resolve()
        >>> config.model.mlp_width, resolved.model.mlp_width, resolved.model.head_dim
        (0, 256, 16)
        """
        return _filled(ResolvedConfig, self.on_own_mesh())


class MeshedConfig(Config):
    """A config whose mesh has a size for each axis. Its other settings are as read."""


class FilledConfig(Config):
    """A config with its dependent defaults filled in. A mesh axis may still be -1."""

    model: ResolvedModel


class ResolvedConfig(MeshedConfig, FilledConfig):
    """A config of which nothing is open: each mesh axis has a size, and every dependent default is
    filled in. Steps and plans are made from it."""

    def with_times(self, times: tuple[float, ...]) -> "ResolvedConfig":
        """This config with other op times (`pipeline.times`), on which no default depends."""
        return with_values(self, pipeline=with_values(self.pipeline, times=times))


class StoredConfig(FilledConfig):
    """The config of a checkpoint. A setting that its version of jaxtrain did not know has its
    default. The mesh is that of the run which wrote it; an axis may be -1 where no run did, but
    `convert from_hf`."""


Filled = TypeVar("Filled", bound=FilledConfig)


def _filled(kind: type[Filled], config: Config) -> Filled:
    """The config in the given state, with its dependent defaults filled in."""
    pipeline = with_values(
        config.pipeline,
        repeats=config.pipeline.repeats or default_repeats(config.pipeline.schedule),
    )
    if config.train.loss and pipeline.vocabulary == "auto":
        # a loss of one's own reads all logits of a token
        pipeline = with_values(pipeline, vocabulary="end_stages")
    parallel = config.parallel
    if parallel.reduce == "auto":
        in_ops = parallel.zero > 1 or (parallel.zero == 1 and config.has_one_microbatch)
        parallel = with_values(parallel, reduce="microbatch" if in_ops else "step")
    if parallel.ends == "auto":
        sharded = parallel.zero and shards_ends(config.model, config.mesh.stage, config.pipeline)
        parallel = with_values(parallel, ends="sharded" if sharded else "replicated")
    longest = max(span.sequence_length for span in spans_of(config.data, config.train))
    model = config.model.resolve(longest)
    return as_type(kind, config, model=model, parallel=parallel, pipeline=pipeline)
