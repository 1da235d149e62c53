"""What the config of an older checkpoint means today. Standard library only.

A checkpoint's meta has its run's whole config, and the VERSION of the code that wrote it. A setting
that has come since is missing there; it stands for what the code did then, which need not be its
default.

    version 1   (not written) groups of experts were scored by their best ceil(experts_per_token /
                router_group_limit); modules of multi-token prediction read the residual stream
                before the norm
    version 2   model.router_group_best; these modules read the stream after the norm
    version 3   (the same configs) a checkpoint has a manifest
"""

from typing import Any

from jaxtrain import config as cfg
from jaxtrain.config import Config, ConfigError, ModelConfig, checks
from jaxtrain.config.surroundings import NOTHING, Surroundings

VERSION = 3


def stored_config(values: dict[str, Any], version: int) -> Config:
    """The config that a checkpoint's meta holds as `values`, written by `version`. Settings that
    have come since are what the code did.

    Raises ConfigError for what is no config.
    """
    config = cfg.from_dict(values)
    return (
        config
        if version > 1
        else cfg.replace(config, {"model.router_group_best": _group_best_1(config.model)})
    )


def _group_best_1(m: ModelConfig) -> int:
    """Of version 1: the experts of a group whose scores were added up. The default where it makes
    no difference."""
    if not m.experts or m.router_group_limit >= m.router_groups or m.router_groups == m.experts:
        return m.router_group_best
    return -(-m.experts_per_token // m.router_group_limit)


def refuse_to_continue(
    values: dict[str, Any], version: int, config: Config, around: Surroundings = NOTHING
) -> None:
    """Raises ConfigError naming the first field for which a run of this config cannot continue a
    checkpoint.

    values, version: of the checkpoint, as in `stored_config`; config: as it was asked for, not
    resolved; around: what a suggestion has to fit.
    """
    checks.refuse_to_continue(stored_config(values, version), config, around)
    if version < 2 and config.model.mtp_depth:
        rule = (
            "cannot continue a checkpoint whose modules of prediction read the stream before the "
            "norm, as they did before version 2"
        )
        raise ConfigError(
            "model.mtp_depth", config.model.mtp_depth, rule, "--workdir=runs/again (or any other)"
        )
