"""Marks for tests that compile ahead of time: for --full, and skipped where the compiler is not
installed."""

import pytest

from jaxtrain.planner.programs.topology import INSTALL_COMMAND, PLATFORMS

KINDS = ("v5p", "h100")  # a TPU and a GPU


def needs(platform: str) -> list[pytest.MarkDecorator]:
    """The marks of a test for a platform."""
    missing = pytest.mark.skipif(
        PLATFORMS[platform].missing, reason=f"no compiler for {platform} here: {INSTALL_COMMAND}"
    )
    return [pytest.mark.full, missing]


def compiled_for(*platforms: str):
    """The test's parameter `platform`."""
    return pytest.mark.parametrize(
        "platform", [pytest.param(name, marks=needs(name)) for name in platforms]
    )
