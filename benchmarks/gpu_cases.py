"""The cases of benchmarks/gpu.py, recipes cut for one device, and their order. No jax, no torch."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain import config as configs
from jaxtrain.config import Config, ConfigError, ResolvedConfig
from jaxtrain.config.flags import apply
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules import checks

OURS, TORCH, KERNELS = "jaxtrain", "torch", "kernels"
WEIGHTS, BATCHES = "weights", "batches.npz"  # in a case's folder


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe on one device.

    settings: changes of the recipe
    steps:    timed steps of a round, which follow the first one
    seconds:  the expected seconds of a side's first round, with start and compilation
    """

    name: str
    recipe: str
    settings: Mapping[str, Any]
    steps: int
    seconds: float


# On one device there are no stages; the learning rate begins at its peak, or the first steps would
# hardly move the loss.
ONE_DEVICE = {
    **{f"mesh.{axis}": 1 for axis in ("replica", "data", "stage", "context", "expert", "model")},
    **{"pipeline.schedule": "1f1b", "pipeline.repeats": 1, "optimizer.warmup_steps": 0},
    **{"pipeline.overlap": False, "pipeline.save": ()},
}
XL = {
    "model.layers": 24,
    "model.width": 2048,
    "model.heads": 16,
    "data.sequence_length": 2048,
    "data.batch_size": 64,
}
# The most important first.
CASES = (
    Case("gpt2_124m", "gpt2_124m", {}, steps=8, seconds=75),
    Case("gpt3_xl", "gpt2_124m", {**XL, "optimizer.learning_rate": 2e-4}, steps=6, seconds=80),
    Case(
        "mixtral_8x7b, 2 layers",
        "mixtral_8x7b",
        {"model.layers": 2, "data.batch_size": 4, "pipeline.microbatches": 2},
        6,
        90,
    ),
    Case(
        "gpt2_124m, nothing recomputed",
        "gpt2_124m",
        {"pipeline.remat": "none"},
        steps=8,
        seconds=75,
    ),
    Case(
        "llama3_8b, 4 layers",
        "llama3_8b",
        {"model.layers": 4, "data.batch_size": 8, "pipeline.microbatches": 4},
        6,
        80,
    ),
)
KERNEL_SECONDS = 90.0
# Of all cases with --tiny: shapes that a CPU runs in seconds, with a vocabulary that is padded and
# groups of heads. So narrow a model needs large weights, or its losses would hardly say what it
# computes.
TINY = {
    "model.init_std": 0.15,
    **{
        "model.layers": 2,
        "model.width": 64,
        "model.heads": 4,
        "model.vocab_size": 4099,
        "model.mlp_width": 96,
        "model.loss_chunk": 64,
    },
    **{"data.sequence_length": 64, "data.batch_size": 4, "pipeline.microbatches": 2},
}
TINY_GROUPED = {"model.kv_heads": 2}
TINY_EXPERTS = {"model.experts": 4, "model.expert_width": 48}
TINY_STEPS = 3


def config_of(case: Case, tiny: bool, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """A case's config, resolved and checked for one device; `overrides` are (setting's path, text).
    Raises ConfigError."""
    recipe = load_recipe(find_recipe(case.recipe))
    changes = {**ONE_DEVICE, **case.settings}
    if tiny:
        changes |= (
            TINY
            | (TINY_GROUPED if recipe.model.kv_heads else {})
            | (TINY_EXPERTS if recipe.model.experts else {})
        )
    config = checks.check_devices(apply(configs.replace(recipe, changes), overrides), 1).resolve()
    check_torch_has(config)
    return config


def check_torch_has(config: Config) -> None:
    """Raises ConfigError for a setting that benchmarks/torch_models.py has no counterpart for."""
    m = config.model
    only = {
        "model.attention": "gqa",
        "model.router": "softmax",
        "model.router_bias": False,
        "model.router_groups": 1,
        "model.shared_experts": 0,
        "model.dense_layers": 0,
        "model.mtp_depth": 0,
        "model.capacity_factor": 0.0,
        "model.qk_norm": False,
        "model.rope_scaling": "none",
        "model.rotary_dim": m.head_dim,
        "model.biases": tuple(part for part in m.biases if part != "router"),
        "parallel.offload": "none",
    }
    for path, value in only.items():
        if configs.get(config, path) != value and (
            m.experts or not path.startswith("model.router")
        ):
            raise ConfigError(
                path,
                configs.get(config, path),
                "is nothing that benchmarks/torch_models.py has",
                fixes=[{path: value}],
            )
    if config.pipeline.remat not in ("full", "none"):
        rule = "is nothing that benchmarks/torch_models.py has"
        raise ConfigError(
            "pipeline.remat",
            config.pipeline.remat,
            rule,
            fixes=[{"pipeline.remat": "full"}, {"pipeline.remat": "none"}],
        )


def write_case(folder: pathlib.Path, config: Config, **fields: Any) -> None:
    """case.json: what a case's workers read."""
    (folder / "case.json").write_text(
        json.dumps({"config": configs.to_dict(config), **fields}, indent=1)
    )


def read_case(folder: pathlib.Path) -> tuple[ResolvedConfig, dict]:
    """The config of a case's folder, and the other values of case.json."""
    rest = json.loads((folder / "case.json").read_text())
    return configs.from_dict(rest.pop("config")).resolve(), rest


# --- what there is time for -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """A worker's run: a side of a case in a round, or the kernels."""

    side: str
    case: Case | None
    round: int = 1

    @property
    def name(self) -> str:
        return (
            self.side
            if self.case is None
            else f"{self.case.name}, {self.side}"
            + (f", round {self.round}" if self.round > 1 else "")
        )


def jobs(cases: Sequence[Case], sides: Sequence[str], rounds: int) -> Iterator[Job]:
    """The jobs in their order: a first round of each case, both sides in turn, then further rounds.

    The kernels follow the first case.
    """
    both = [side for side in (OURS, TORCH) if side in sides]
    for number in range(1, rounds + 1):
        for index, case in enumerate(cases):
            yield from (Job(side, case, number) for side in both)
            if number == 1 and index == 0 and KERNELS in sides:
                yield Job(KERNELS, None)
    if not cases and KERNELS in sides:
        yield Job(KERNELS, None)


def expected_seconds(
    job: Job, measured: Mapping[tuple[str, str], float], tiny: bool = False
) -> float:
    """Seconds that a job is expected to take: those of a round before, or else the case's guess.

    measured: (case's name, side) → seconds of its last round; tiny: a second for each job
    """
    if tiny:
        return 1.0
    if job.case is None:
        return KERNEL_SECONDS
    return measured.get((job.case.name, job.side), job.case.seconds)
