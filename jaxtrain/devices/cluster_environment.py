"""The processes of a run, as flags and environment describe them: their number, the address of
process 0, and the GPUs of this process.

    set by                            read by this file                                read by jax
    Slurm's srun                      number, GPUs                                     address, id
    Open MPI's mpirun                 number, id, GPUs, address in part                address
    JobSet, Kubeflow Trainer, a user  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and
                                      JAX_PROCESS_ID or an indexed Job's
                                      JOB_COMPLETION_INDEX
    SkyPilot                          SKYPILOT_NUM_NODES, _NODE_RANK, _NODE_IPS
    a TPU slice                                                                        all

Flags have precedence over the environment, and a line of the table over those below it: processes
that mpirun starts on a SkyPilot node are mpirun's. All functions are pure functions of the flags'
namespace and of os.environ; cluster.py acts on their results. Standard library only, no jax.
"""

import glob
import importlib.metadata
import importlib.util
import types
from collections.abc import Mapping
from typing import Any

from jaxtrain.run.exit_status import ExitStatus, RunError

SIMULATED_DEVICES = 8  # without an accelerator and a number from the user
COORDINATOR_PORTS = range(20000, 30000)  # used if an engine names no port


class ClusterError(RunError):
    """An environment that leaves open what processes need to meet; the text is one line."""

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
        return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    names = ("OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES", "SKYPILOT_NUM_NODES")
    return next((_number(environment, name) for name in names if environment.get(name)), 1)


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    return "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment


def _number(environment: Mapping[str, str], name: str) -> int:
    """A variable's value. Raises ClusterError for text that is no number."""
    text = environment[name]
    if not text.isdecimal():
        raise ClusterError(
            f"{name}={text!r} in the environment is not a number: set it to one, or unset it"
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
    if namespace.cpu_devices:
        return namespace.cpu_devices * processes
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms != "cpu" and (platforms or _has_plugins()):
        return None
    option = "--xla_force_host_platform_device_count="
    asked = [
        word.removeprefix(option)
        for word in environment.get("XLA_FLAGS", "").split()
        if word.startswith(option)
    ]
    asked += filter(None, [environment.get("JAX_NUM_CPU_DEVICES")])
    if len(asked) > 1 or not all(number.isdecimal() and int(number) > 0 for number in asked):
        return None
    return (
        int(asked[0]) * processes
        if asked
        else processes
        if several_processes(namespace, environment)
        else by_default
    )


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
    if namespace.processes > 1:
        return {
            "coordinator_address": address,
            "num_processes": namespace.processes,
            "process_id": namespace.process_id,
        }
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _open_mpi_job(environment, address)
    arguments: dict[str, Any] = {"coordinator_address": address} if address else {}
    if _in_slurm_step(environment):
        return arguments
    if environment_processes(environment) > 1:
        return (
            _indexed_job(environment, address)
            if environment.get("JAX_NUM_PROCESSES")
            else _skypilot_job(environment, address)
        )
    return arguments | {"num_processes": 1, "process_id": 0} if namespace.coordinator else arguments


def _open_mpi_job(environment: Mapping[str, str], address: str) -> dict[str, Any]:
    """The keywords for a job of Open MPI. Version 5 does not tell the address of its launcher, so
    jax finds none: processes of one machine meet at a port made from the job's name, and those of
    several machines need --coordinator or JAX_COORDINATOR_ADDRESS."""
    if not address and "OMPI_MCA_orte_hnp_uri" not in environment:
        if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environment["OMPI_COMM_WORLD_SIZE"]:
            raise ClusterError(
                "Open MPI does not say where process 0 is: name it with "
                "--coordinator=HOST:PORT, a free port of its machine"
            )
        address = f"localhost:{_port_of(environment.get('PMIX_NAMESPACE', 'jaxtrain'))}"
    known = {
        "num_processes": int(environment["OMPI_COMM_WORLD_SIZE"]),
        "process_id": int(environment["OMPI_COMM_WORLD_RANK"]),
    }
    return known | ({"coordinator_address": address} if address else {})


def _indexed_job(environment: Mapping[str, str], address: str) -> dict[str, Any]:
    """The keywords for JAX_NUM_PROCESSES processes; the id is JAX_PROCESS_ID or, in an indexed Job
    of Kubernetes, JOB_COMPLETION_INDEX
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode)."""
    index = next(
        (name for name in ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX") if environment.get(name)), ""
    )
    processes = _number(environment, "JAX_NUM_PROCESSES")
    said = f"JAX_NUM_PROCESSES={processes} in the environment"
    if not address:
        raise ClusterError(
            f"{said} needs JAX_COORDINATOR_ADDRESS=HOST:PORT beside it (or --coordinator): "
            "set it, or unset both"
        )
    if not index:
        raise ClusterError(
            f"{said} needs JAX_PROCESS_ID or an indexed Job's JOB_COMPLETION_INDEX beside it: "
            "set one, or unset it"
        )
    if (process := _number(environment, index)) >= processes:
        raise ClusterError(
            f"{index}={process} in the environment is not below "
            f"JAX_NUM_PROCESSES={processes}: set those of one job"
        )
    return {"coordinator_address": address, "num_processes": processes, "process_id": process}


def _skypilot_job(environment: Mapping[str, str], address: str) -> dict[str, Any]:
    """The keywords for a SkyPilot task: one process a node, process 0 on the first node of
    SKYPILOT_NODE_IPS, at a port made from the task's name
    (https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html)."""
    ips, rank = (
        environment.get("SKYPILOT_NODE_IPS", "").split(),
        environment.get("SKYPILOT_NODE_RANK", ""),
    )
    if not rank or not (address or ips):
        missing = "SKYPILOT_NODE_IPS" if rank else "SKYPILOT_NODE_RANK"
        raise ClusterError(
            f"SKYPILOT_NUM_NODES in the environment needs {missing} beside it: unset "
            "SKYPILOT_NUM_NODES for a run of one process"
        )
    address = address or f"{ips[0]}:{_port_of(environment.get('SKYPILOT_TASK_ID', 'jaxtrain'))}"
    known = {
        "num_processes": _number(environment, "SKYPILOT_NUM_NODES"),
        "process_id": _number(environment, "SKYPILOT_NODE_RANK"),
    }
    return known | {"coordinator_address": address}


def _port_of(name: str) -> int:
    """A port for the job of this name, the same in every process."""
    return COORDINATOR_PORTS[sum(map(ord, name)) % len(COORDINATOR_PORTS)]


def local_gpus(environment: Mapping[str, str], visible: int) -> list[int]:
    """The GPUs of this process among those visible to it; [] is all of them.

    jax gives GPU i to process i of a node, and so GPU 0 alone to a single process. We divide the
    GPUs of a node evenly, in order: one task with 8 GPUs gets 8, two get 4 each. If Slurm has
    already bound GPUs to tasks, each task gets those.
    """
    slurm = environment_processes(environment) > 1 and "SLURM_LOCALID" in environment
    if slurm:
        tasks, index = _slurm_tasks_on_node(environment), int(environment["SLURM_LOCALID"])
        bound = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
        if bound.isdigit() and int(bound) == visible:
            return []
    else:
        tasks, index = (
            int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1),
            int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0),
        )
    if tasks == 1 or visible < tasks:
        return []
    share = visible // tasks
    return list(range(index * share, (index + 1) * share))


def _slurm_tasks_on_node(environment: Mapping[str, str]) -> int:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3"."""
    text = (
        environment.get("SLURM_STEP_TASKS_PER_NODE")
        or environment.get("SLURM_TASKS_PER_NODE")
        or "1"
    )
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID") or 0), len(counts) - 1)]


def visible_gpus(environment: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs that this process could use, without starting a driver."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return len(
            [
                d
                for d in environment["CUDA_VISIBLE_DEVICES"].split(",")
                if d.strip() not in ("", "-1")
            ]
        )
    return len(glob.glob("/dev/nvidia[0-9]*"))
