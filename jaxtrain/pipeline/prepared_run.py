"""A run before it begins, as it is known after each step of its preparation. No jax.

    Config ──check_run──▶ CheckedRun ──prepare──▶ PreparedRun ──▶ loop.run, replay, dry_run

Both keep the config as it was requested: where something does not fit later on, the flags that an
error suggests are changes of that one (config/rules/checks.py).
"""

import dataclasses
import pathlib

from jaxtrain.config import Config, MeshedConfig, ResolvedConfig
from jaxtrain.config.rules.checks import Environment
from jaxtrain.pipeline.setup import Setup


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedRun:
    """A config that keeps every rule in an environment.

    requested: as read from recipe and flags
    on_mesh:   with the sizes that its mesh has on the environment's devices
    """

    requested: Config
    environment: Environment
    on_mesh: MeshedConfig


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedRun:
    """A run that can begin.

    requested:   the config as read from recipe and flags
    environment: what the requested config was checked against
    config:      the config that is run, with the op times by which its tables were made
    setup:       the tables
    folder:      the run's
    """

    requested: Config
    environment: Environment
    config: ResolvedConfig
    setup: Setup
    folder: pathlib.Path
