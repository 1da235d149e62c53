"""The processes of a run, as flags and environment describe them: their number, the address of
process 0, and the GPUs of this process.

    set by                            read by this file                                read by jax
    Open MPI's mpirun                 number, id, GPUs, address in part                address
    Slurm's srun                      number, id, GPUs                                 address
    JobSet, Kubeflow Trainer, a user  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and
                                      JAX_PROCESS_ID or an indexed Job's
                                      JOB_COMPLETION_INDEX
    SkyPilot                          SKYPILOT_NUM_NODES, _NODE_RANK, _NODE_IPS
    a TPU slice                                                                        all

Flags have precedence over the environment, and a line of the table over those below it: processes
that mpirun starts in a step of Slurm's are mpirun's. A launcher's variable that is missing, no
number or out of its bounds is refused by its name. All functions are pure functions of the flags'
namespace and of os.environ; cluster.py acts on their results, and
compares what `alike` has. No jax.
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtrain import config as cfg
from jaxtrain.run.exit_status import ExitStatus, RunError
from jaxtrain.schedule.orders import CSV

SIMULATED_DEVICES = 8  # without an accelerator and a number from the user
COORDINATOR_PORTS = range(20000, 30000)  # used if an engine names no port
MOST = 2**20  # processes, or devices of one, that a variable may ask for
HOST_AND_PORT = r".+:[0-9]{1,5}"


@contextlib.contextmanager
def read_environment() -> Iterator[None]:
    """A context in which jax is imported or reads the environment: what it does not understand, or
    what is not there, is a ClusterError. Errors of a running jax (a meeting that failed, say) stay
    what they are."""
    try:
        yield
    except (AssertionError, LookupError, RuntimeError, ValueError) as error:
        if type(error).__name__ == "JaxRuntimeError":  # jax may not be there yet
            raise
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ClusterError(
            f"jax does not start with JAX_PLATFORMS={platforms!r} and the other variables of this "
            f"environment: {' '.join(str(error).split()) or 'no such plugin or device'}"
        ) from error


class ClusterError(RunError):
    """An environment that leaves open what processes need to meet, or processes that differ; the
    text is one line."""

    status = ExitStatus.BAD_CONFIG


def several_processes(namespace: types.SimpleNamespace, environment: Mapping[str, str]) -> bool:
    """True if flags or environment describe a run of several processes. A TPU slice is not counted:
    jax knows its size by itself."""
    return bool(namespace.coordinator) or environment_processes(environment) > 1


def environment_processes(environment: Mapping[str, str]) -> int:
    """The number of processes that a cluster manager started, this one included; 1 without a
    manager.

    Slurm: the tasks of the step, not of the allocation: a batch script or an interactive shell is
    one process.
    """
    if _in_slurm_step(environment):
        return number(environment, _slurm_tasks(environment), 1, default="1")
    names = ("OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES", "PMI_SIZE", "SKYPILOT_NUM_NODES")
    return next((number(environment, name, 1) for name in names if environment.get(name)), 1)


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    of_step = environment.get("SLURM_STEP_NODELIST") and "SLURM_PROCID" in environment
    return bool(of_step) and not environment.get("OMPI_COMM_WORLD_SIZE")


def number(
    environment: Mapping[str, str], name: str, least: int = 0, most: int = MOST, default: str = ""
) -> int:
    """A variable's value, from `least` to `most`. Raises ClusterError for one that is missing or
    empty without a default, for text that is no number, and out of these bounds."""
    text = environment.get(name) or default
    if not (re.fullmatch(r"[0-9]{1,18}", text) and least <= int(text) <= most):
        said = f"={text!r} in the environment is not" if text else " is missing in the environment:"
        raise ClusterError(
            f"{name}{said} a number from {least} to {most}: set it as the job's launcher does, or "
            "unset the launcher's variables for a run of one process"
        )
    return int(text)


def simulated_devices(
    namespace: types.SimpleNamespace, environment: Mapping[str, str], by_default: int
) -> int | None:
    """The number of simulated CPU devices of all processes, as jax will see it; None if jax has to
    be asked, because it may find accelerators.

    by_default: for a single process without a number in the environment
    """
    processes = (
        namespace.processes if namespace.processes > 1 else environment_processes(environment)
    )
    option = "--xla_force_host_platform_device_count"
    asked = [
        number({option: word.partition("=")[2]}, option, 1)
        for word in environment.get("XLA_FLAGS", "").split()
        if word.startswith(option)
    ]
    if environment.get("JAX_NUM_CPU_DEVICES"):
        asked.append(number(environment, "JAX_NUM_CPU_DEVICES", 1))
    if namespace.cpu_devices:
        return namespace.cpu_devices * processes
    platforms = environment.get("JAX_PLATFORMS", "")
    if len(asked) > 1 or (platforms != "cpu" and (platforms or _has_plugins())):
        return None
    if asked:
        return asked[0] * processes
    return processes if several_processes(namespace, environment) else by_default


def _has_plugins() -> bool:
    """True if a package is installed with which jax may find GPUs or TPUs."""
    modules = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    return modules or bool(importlib.metadata.entry_points(group="jax_plugins"))


def job(namespace: types.SimpleNamespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """The address, number and id that jax.distributed.initialize takes as keywords, from the flags,
    else from the environment. jax detects those that are missing.

    Raises ClusterError, naming the variable, for an environment with only a part of them.
    """
    address = namespace.coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    if address and not (
        re.fullmatch(HOST_AND_PORT, address) and 0 < int(address.rpartition(":")[2]) < 65536
    ):
        raise ClusterError(
            f"JAX_COORDINATOR_ADDRESS={address!r} in the environment is not HOST:PORT"
        )
    if namespace.processes > 1:
        return {
            "coordinator_address": address,
            "num_processes": namespace.processes,
            "process_id": namespace.process_id,
        }
    if environment.get("OMPI_COMM_WORLD_SIZE"):
        return _open_mpi_job(environment, address)
    arguments: dict[str, Any] = {"coordinator_address": address} if address else {}
    if _in_slurm_step(environment):
        number(environment, "SLURM_LOCALID", most=_slurm_tasks_on_node(environment) - 1)
        if not address:  # jax makes it of these
            number(environment, "SLURM_JOB_ID", most=10**18)
            number(environment, "SLURM_NTASKS", 1)
        return arguments | _process(environment, _slurm_tasks(environment), "SLURM_PROCID")
    if environment_processes(environment) > 1:
        if environment.get("JAX_NUM_PROCESSES"):
            return _indexed_job(environment, address)
        if environment.get("PMI_SIZE"):
            raise ClusterError(
                f"PMI_SIZE={environment['PMI_SIZE']} in the environment: only Open MPI's processes "
                "find each other: pass --coordinator, --processes and --process_id=$PMI_RANK"
            )
        return _skypilot_job(environment, address)
    return arguments | {"num_processes": 1, "process_id": 0} if namespace.coordinator else arguments


def _slurm_tasks(environment: Mapping[str, str]) -> str:
    """The variable with the number of a step's tasks."""
    return "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def _process(environment: Mapping[str, str], processes: str, *names: str) -> dict[str, Any]:
    """The keywords for the number of processes and for this one's, from the variable `processes`
    and the first of `names` that is set."""
    count = number(environment, processes, 1)
    name = next(filter(environment.get, names), names[0])
    return {"num_processes": count, "process_id": number(environment, name, most=count - 1)}


def _open_mpi_job(environment: Mapping[str, str], address: str) -> dict[str, Any]:
    """The keywords for a job of Open MPI. Version 5 does not tell the address of its launcher, so
    jax finds none: processes of one machine meet at a port made from the job's name, and those of
    several machines need --coordinator or JAX_COORDINATOR_ADDRESS."""
    known = _process(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not address and "OMPI_MCA_orte_hnp_uri" not in environment:
        if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environment["OMPI_COMM_WORLD_SIZE"]:
            raise ClusterError(
                "Open MPI does not say where process 0 is: name it with "
                "--coordinator=HOST:PORT, a free port of its machine"
            )
        address = f"localhost:{_port_of(environment.get('PMIX_NAMESPACE', 'jaxtrain'))}"
    return known | ({"coordinator_address": address} if address else {})


def _indexed_job(environment: Mapping[str, str], address: str) -> dict[str, Any]:
    """The keywords for JAX_NUM_PROCESSES processes; the id is JAX_PROCESS_ID or, in an indexed Job
    of Kubernetes, JOB_COMPLETION_INDEX
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode)."""
    if not address:
        raise ClusterError(
            "JAX_NUM_PROCESSES in the environment needs JAX_COORDINATOR_ADDRESS=HOST:PORT beside "
            "it (or --coordinator): set it, or unset both"
        )
    return {
        "coordinator_address": address,
        **_process(environment, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
    }


def _skypilot_job(environment: Mapping[str, str], address: str) -> dict[str, Any]:
    """The keywords for a SkyPilot task: one process a node, process 0 on the first node of
    SKYPILOT_NODE_IPS, at a port made from the task's name
    (https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html)."""
    ips = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not (address or ips):
        raise ClusterError(
            "SKYPILOT_NUM_NODES in the environment needs SKYPILOT_NODE_IPS beside it: unset "
            "SKYPILOT_NUM_NODES for a run of one process"
        )
    port = _port_of(environment.get("SKYPILOT_TASK_ID", "jaxtrain"))
    return {
        "coordinator_address": address or f"{ips[0]}:{port}",
        **_process(environment, "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    }


def _port_of(name: str) -> int:
    """A port for the job of this name, the same in every process."""
    return COORDINATOR_PORTS[sum(map(ord, name)) % len(COORDINATOR_PORTS)]


def local_gpus(environment: Mapping[str, str], visible: int) -> list[int]:
    """The GPUs of this process among those visible to it; [] is all of them.

    jax gives GPU i to process i of a node, and so GPU 0 alone to a single process. We divide the
    GPUs of a node evenly, in order: one task with 8 GPUs gets 8, two get 4 each. If Slurm has
    already bound GPUs to tasks, each task gets those.
    """
    if _in_slurm_step(environment) and environment_processes(environment) > 1:
        tasks = _slurm_tasks_on_node(environment)
        index = number(environment, "SLURM_LOCALID", most=tasks - 1)
        bound = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
        if bound.isdigit() and int(bound) == visible:
            return []
    else:
        tasks = number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, default="1")
        index = number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0, tasks - 1, "0"[: tasks == 1])
    if tasks == 1 or visible < tasks:
        return []
    share = visible // tasks
    return list(range(index * share, (index + 1) * share))


def _slurm_tasks_on_node(environment: Mapping[str, str]) -> int:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3"."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = next(filter(environment.get, names), "")
    counts: list[int] = []
    for part in environment.get(name, "1").split(","):
        tasks, _, nodes = part.rstrip(")").partition("(x")
        counts += [number({name: tasks}, name, 1)] * number({name: nodes}, name, 1, default="1")
    return counts[min(number(environment, "SLURM_NODEID", default="0"), len(counts) - 1)]


def visible_gpus(environment: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs that this process could use, without starting a driver."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = environment["CUDA_VISIBLE_DEVICES"].split(",")
        return sum(name.strip() not in ("", "-1") for name in names)
    return len(glob.glob("/dev/nvidia[0-9]*"))


# --- what the processes of a run have alike -------------------------------------------------------

PLACE = "\v"  # in a value, before its place, which may differ
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin"),
)
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO")
FLAGS_OF_XLA = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# parts of the names of jax's settings and XLA's flags that change no number, or are one process's
NOT_COMPARED = (
    *("address", "cache", "default_device", "dump", "_log_", "_logging", "pprint", "proxy"),
    *("timeout", "traceback", "visible"),
)


def _of_files(text: str) -> str:
    """The digest of the file, or of the files of the folder, that a setting names: of sizes and
    first MiB. The text if it names none."""
    path, digest = pathlib.Path(os.path.expanduser(text.removeprefix(CSV))), hashlib.sha256()
    for file in sorted(path.iterdir()) if text and path.is_dir() else [path]:
        if file.is_file():
            with contextlib.suppress(OSError), file.open("rb") as opened:
                digest.update(f"{file.stat().st_size} ".encode() + opened.read(2**20))
    return f"{digest.hexdigest()[:12]}{PLACE}{text}" if text and path.exists() else text


# Setting that may differ → what of it is compared: its file, whether it is set, or nothing: the
# content of folders and of the corpus is compared later, and the rest is the host's own.
MAY_DIFFER: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(
        ("data.tokenizer", "pipeline.schedule", "train.hardware", "train.init_from"), _of_files
    ),
    **dict.fromkeys(("checkpoint.local", "parallel.offload_directory"), bool),
    **dict.fromkeys(
        ("checkpoint.directory", "data.source", "data.cache", "data.prefetch"), lambda text: ""
    ),
}


def alike(
    namespace: types.SimpleNamespace,
    config: cfg.Config,
    environment: Mapping[str, str],
    jax_settings: Mapping[str, Any],
) -> dict[str, str]:
    """Name → text of all that a process of a run is started with and has to have like the others,
    in the order in which cluster.agree compares it: code, packages, flags, environment, settings.

    A process may have its own number, current folder, home, caches and temporary files, its own
    path of the recipe and the workdir, another order of flags, and the settings of MAY_DIFFER.
    """
    folder = pathlib.Path(__file__).parents[1]
    sources = (path for path in sorted(folder.rglob("*.*")) if path.suffix in (".py", ".json"))
    code = b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in sources)
    settings = {name.upper(): str(value) for name, value in jax_settings.items()}
    settings |= {  # the last counts
        f"{variable} {name}": value
        for variable in FLAGS_OF_XLA
        for word in environment.get(variable, "").split()
        for name, _, value in [word.partition("=")]
    }
    return {
        "code": f"{hashlib.sha256(code).hexdigest()[:12]}{PLACE}{folder}",
        "Python": platform.python_version(),
        **{
            name: package.version
            for name in PACKAGES
            for package in reversed([*importlib.metadata.distributions(name=name)])
        },
        **{
            f"--{name}": str(getattr(namespace, name, ""))
            for name in ("dry_run", "replay", "old_nccl", "cpu_devices")
        },
        **{name: environment.get(name, "") for name in VARIABLES},
        **{
            name: value
            for name, value in sorted(settings.items())
            if not any(part in name.lower() for part in NOT_COMPARED)
        },
        **{
            path: str(MAY_DIFFER.get(path, str)(cfg.value_text(cfg.get(config, path))))
            for path in cfg.fields()
        },
    }
