"""What all tests share: 8 simulated CPU devices in this process; `--full`, `--part`, and the
slowest files at the end.

There is no cache of compiled programs: one that comes out of it can hang on several CPU devices
(jaxtrain/devices/startup.py: use_compilation_cache).

The environment is set before jax starts, and the processes that tests start inherit it. Helper
modules are in support/, and can be imported from every test folder.
"""

import os
import pathlib
import signal
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 8
sys.path += [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from support import COMPILE_QUICKLY, suite  # noqa: E402 (the path comes first)

from jaxtrain.devices.startup import set_xla_flags  # noqa: E402

# A shell's background job ignores Ctrl-C, one of nohup a terminal that hangs up, and what tests
# start would inherit that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_QUICKLY}"
set_xla_flags(os.environ, side_by_side=True)

import jax  # noqa: E402 (after its environment)
from support import train_runs  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_enable_compilation_cache", False)


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="also run the tests marked `full`, which take long"
    )
    parser.addoption("--kills", type=int, default=3, help="random kills of a run in tests/chaos")
    parser.addoption("--chaos_seed", type=int, default=0, help="of their moments")
    parser.addoption(
        "--part",
        type=suite.parse_part,
        default=(1, 1),
        metavar="K/N",
        help="run the K-th of N parts of the tests",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the recipe of support/train_runs.py, its corpus and the corpus's cache, and the
    workdirs of a module's tests."""
    folder = tmp_path_factory.mktemp("runs")
    train_runs.write_inputs(folder)
    return folder


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    part = config.getoption("--part")
    config.hook.pytest_deselected(
        items=[item for item in items if not suite.in_part(item.nodeid, part)]
    )
    items[:] = [item for item in items if suite.in_part(item.nodeid, part)]
    items.sort(key=lambda item: suite.turn(item.path))
    for item in items:  # a file's tests share what they have compiled, so they stay in one process
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="takes long: run with --full"))


def pytest_terminal_summary(terminalreporter, config):
    reports = [
        report
        for found in terminalreporter.stats.values()
        for report in found
        if isinstance(report, pytest.TestReport)
    ]
    if len({report.nodeid.partition("::")[0] for report in reports}) > 1:
        terminalreporter.section("cost")
        for line in suite.slowest_files(reports, config.getoption("numprocesses", None) or 1):
            terminalreporter.write_line(line)
