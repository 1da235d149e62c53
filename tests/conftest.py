"""What all tests share: 8 simulated CPU devices in this process, and `--full`.

There is no cache of compiled programs: one that comes out of it can hang on several CPU devices (jaxtrain/cli.py, use_compilation_cache).

The environment is set before jax starts, and the processes that tests start inherit it. Helper modules beside this file
(small.py, hlo.py) can be imported from every test folder.
"""

import os
import pathlib
import signal
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 8
sys.path += [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from jaxtrain.devices.startup import set_xla_flags  # noqa: E402 (the path comes first)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and what tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    # Compilation is what the suite costs. This is LLVM's level: XLA's passes, and so the programs that tests read, stay as they are.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
set_xla_flags(os.environ, side_by_side=True)

import jax  # noqa: E402 (after its environment)

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_enable_compilation_cache", False)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take long")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.parent != ROOT / "tests")  # whole runs take longest: at the end they would run alone
    for item in items:  # a file's tests share what they have compiled, so they stay in one process
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="takes long: run with --full"))
