"""What all tests share: 8 simulated CPU devices in this process, a cache of compiled programs, and `--full`.

The environment is set before jax starts, and the processes that tests start inherit it. Helper modules beside this file
(small.py, hlo.py) can be imported from every test folder.
"""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 8
sys.path += [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from jaxtrain.cli import set_xla_flags  # noqa: E402 (the path comes first)

os.environ["JAX_PLATFORMS"] = "cpu"
# XLA sizes its thread pools by this. On two cores one run in two of the suite once stopped for ever in a collective.
os.environ.setdefault("NPROC", "16")
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    # Compilation is what the suite costs. This is LLVM's level: XLA's passes, and so the programs that tests read, stay as they are.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
set_xla_flags(os.environ)

import jax  # noqa: E402 (after its environment)

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(ROOT / ".cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take long")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        for item in items:
            if "full" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes long: run with --full"))
