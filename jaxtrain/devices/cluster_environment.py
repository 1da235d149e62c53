"""What environment and flags say about a run of several processes: how many, where process 0 is,
which GPUs are this process's.

    set by                            read here                                        by jax
    Slurm's srun                      how many, which GPUs                             the rest
    Open MPI's mpirun                 how many, which, which GPUs, where in part       where
    JobSet, Kubeflow Trainer, a user  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and
                                      JAX_PROCESS_ID or an indexed Job's
                                      JOB_COMPLETION_INDEX
    SkyPilot                          SKYPILOT_NUM_NODES, _NODE_RANK, _NODE_IPS
    a TPU slice                                                                        all

Flags come before the environment, and what is further up before what is further down: what is
started within a SkyPilot node by mpirun is mpirun's. Pure functions of the flags' namespace and of
os.environ; cluster.py acts on them. Standard library only, no jax.
"""

import glob
import importlib.metadata
import importlib.util
import types
from collections.abc import Mapping
from typing import Any

from jaxtrain.run.exit_status import ExitStatus, RunError

SIMULATED_DEVICES = 8  # where nothing says how many and there is no accelerator
COORDINATOR_PORTS = range(20000, 30000)  # where an engine names no port


class ClusterError(RunError):
    """An environment that leaves open what processes need to meet; the text is one line."""

    status = ExitStatus.BAD_CONFIG


def several_processes(namespace: types.SimpleNamespace, environment: Mapping[str, str]) -> bool:
    """Whether flags or environment describe a run of several processes. A TPU slice is not counted:
    jax knows its size by itself."""
    return bool(namespace.coordinator) or environment_processes(environment) > 1


def environment_processes(environment: Mapping[str, str]) -> int:
    """The number of processes that a cluster manager started beside this one; 1 where there is
    none.

    Slurm: the tasks of the step, not of the allocation: in a batch script or an interactive shell
    this process is alone.
    """
    if _in_slurm_step(environment):
        return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    names = ("OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES", "SKYPILOT_NUM_NODES")
    return next((_number(environment, name) for name in names if environment.get(name)), 1)


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    return "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment


def _number(environment: Mapping[str, str], name: str) -> int:
    """A variable's value. ClusterError where it is no number."""
    text = environment[name]
    if not text.isdecimal():
        raise ClusterError(
            f"{name}={text!r} in the environment is not a number: set it to one, or unset it"
        )
    return int(text)


def simulated_devices(
    namespace: types.SimpleNamespace, environment: Mapping[str, str], by_default: int
) -> int | None:
    """The number of simulated CPU devices of the whole run, as jax will see it; None where jax has
    to be asked: it may find accelerators.

    by_default: in a single process that nothing tells how many.
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
    """Whether something is installed by which jax might find GPUs or TPUs."""
    modules = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    return modules or bool(importlib.metadata.entry_points(group="jax_plugins"))


def job(namespace: types.SimpleNamespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """The address, number and id that jax.distributed.initialize takes as keywords, from the flags,
    else from the environment. jax finds out what is left out.

    Raises ClusterError, naming the variable, for an environment that says half of it.
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
    """Open MPI 5 no longer tells where its launcher is, so there jax finds no address: processes of
    one machine meet at a port made from the job's name, and those of several need --coordinator or
    JAX_COORDINATOR_ADDRESS."""
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
    """JAX_NUM_PROCESSES says how many; a process knows its own number from JAX_PROCESS_ID or, in an
    indexed Job of Kubernetes, from JOB_COMPLETION_INDEX
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
    """One process a node; process 0 is on the first of SKYPILOT_NODE_IPS, one a line, at a port
    made from the task's name
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

    jax by itself gives process i of a node GPU i, and so a single process of a node GPU 0 alone.
    Here the GPUs of a node are shared out evenly, in order: one task with 8 GPUs sees 8, two see 4
    each. Where Slurm has already bound GPUs to tasks, each sees its own.
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
