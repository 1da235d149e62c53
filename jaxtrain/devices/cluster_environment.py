"""What environment and flags say about a run of several processes: how many, where process 0 is, which GPUs are this process's.

Pure functions of the flags' namespace and of os.environ; cluster.py acts on them. Standard library only, no jax.
"""

import glob
import importlib.metadata
import importlib.util
import types
from collections.abc import Mapping
from typing import Any

SIMULATED_DEVICES = 8  # where nothing says how many and there is no accelerator


def several_processes(namespace: types.SimpleNamespace, environment: Mapping[str, str]) -> bool:
    """Whether flags or environment describe a run of several processes. A TPU slice is not counted: jax knows its size by itself."""
    return bool(namespace.coordinator) or environment_processes(environment) > 1


def environment_processes(environment: Mapping[str, str]) -> int:
    """The number of processes that a cluster manager started beside this one; 1 where there is none.

    Slurm: the tasks of the step, not of the allocation: in a batch script or an interactive shell this process is alone.
    """
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    return int(environment.get("OMPI_COMM_WORLD_SIZE") or 1)


def simulated_devices(namespace: types.SimpleNamespace, environment: Mapping[str, str], by_default: int) -> int | None:
    """The number of simulated CPU devices of the whole run, as jax will see it; None where jax has to be asked: it may find accelerators.

    by_default: in a single process that nothing tells how many.
    """
    processes = namespace.processes if namespace.processes > 1 else environment_processes(environment)
    if namespace.cpu_devices:
        return namespace.cpu_devices * processes
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms != "cpu" and (platforms or _has_plugins()):
        return None
    option = "--xla_force_host_platform_device_count="
    asked = [word.removeprefix(option) for word in environment.get("XLA_FLAGS", "").split() if word.startswith(option)]
    asked += filter(None, [environment.get("JAX_NUM_CPU_DEVICES")])
    if len(asked) > 1 or not all(number.isdecimal() and int(number) > 0 for number in asked):
        return None
    return int(asked[0]) * processes if asked else processes if several_processes(namespace, environment) else by_default


def _has_plugins() -> bool:
    """Whether something is installed by which jax might find GPUs or TPUs."""
    modules = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    return modules or bool(importlib.metadata.entry_points(group="jax_plugins"))


def job(namespace: types.SimpleNamespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """The address, number and id that jax.distributed.initialize takes as keywords: from the flags, else from Open MPI. jax finds out what
    is left out.

    Open MPI 5 no longer tells where its launcher is, so there jax finds no address: processes of one machine meet at a port made from
    the job's name, and those of several need --coordinator or JAX_COORDINATOR_ADDRESS.
    """
    address = namespace.coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    if namespace.processes > 1:
        return {"coordinator_address": address, "num_processes": namespace.processes, "process_id": namespace.process_id}
    arguments: dict[str, Any] = {"coordinator_address": address} if address else {}
    if "OMPI_COMM_WORLD_SIZE" in environment:
        arguments |= {"num_processes": int(environment["OMPI_COMM_WORLD_SIZE"]), "process_id": int(environment["OMPI_COMM_WORLD_RANK"])}
        if not address and "OMPI_MCA_orte_hnp_uri" not in environment:
            if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environment["OMPI_COMM_WORLD_SIZE"]:
                raise RuntimeError("Open MPI does not say where process 0 is: use --coordinator=HOST:PORT, with a free port of its machine")
            name = environment.get("PMIX_NAMESPACE", "jaxtrain")
            arguments["coordinator_address"] = f"localhost:{20000 + sum(map(ord, name)) % 10000}"
    elif namespace.coordinator and environment_processes(environment) == 1:
        return arguments | {"num_processes": 1, "process_id": 0}
    return arguments


def local_gpus(environment: Mapping[str, str], visible: int) -> list[int]:
    """The GPUs of this process among those visible to it; [] is all of them.

    jax by itself gives process i of a node GPU i, and so a single process of a node GPU 0 alone. Here the GPUs of a node are shared
    out evenly, in order: one task with 8 GPUs sees 8, two see 4 each. Where Slurm has already bound GPUs to tasks, each sees its own.
    """
    slurm = environment_processes(environment) > 1 and "SLURM_LOCALID" in environment
    if slurm:
        tasks, index = _slurm_tasks_on_node(environment), int(environment["SLURM_LOCALID"])
        bound = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
        if bound.isdigit() and int(bound) == visible:
            return []
    else:
        tasks, index = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1), int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)
    if tasks == 1 or visible < tasks:
        return []
    share = visible // tasks
    return list(range(index * share, (index + 1) * share))


def _slurm_tasks_on_node(environment: Mapping[str, str]) -> int:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3"."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID") or 0), len(counts) - 1)]


def visible_gpus(environment: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs that this process could use, without starting a driver."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return len([d for d in environment["CUDA_VISIBLE_DEVICES"].split(",") if d.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))
