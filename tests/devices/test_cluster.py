"""cluster_environment.py on environments as cluster managers make them, and cluster.py in two real
processes."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import types

import jax
import pytest
from support import ROOT

from jaxtrain import config as configs
from jaxtrain.devices import cluster, cluster_environment
from jaxtrain.launch import free_port
from jaxtrain.run.exit_status import ExitStatus

WAITING = "waiting for the 4 processes of this run to meet at host:1, for 300 s at most\n"
ALONE = types.SimpleNamespace(coordinator="", processes=1, process_id=0)
BY_FLAGS = types.SimpleNamespace(coordinator="host:1", processes=4, process_id=3)


def slurm(tasks: int, per_node: str, node: int, local: int, **more: str) -> dict[str, str]:
    """The environment of a task that srun started."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_PROCID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **more,
    }


def open_mpi(size: int, local_size: int, local: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        **more,
    }


BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    "environment, processes",
    [
        ({}, 1),
        (slurm(8, "4(x2)", 0, 0), 8),
        (slurm(1, "1", 0, 0), 1),
        (BATCH_SCRIPT, 1),  # the allocation has 8 tasks, the script is alone
        # an interactive shell, which is a step of its own
        (slurm(1, "1", 0, 0) | {"SLURM_NTASKS": "8"}, 1),
        (open_mpi(4, 2, 1), 4),
        (open_mpi(1, 1, 0), 1),
    ],
)
def test_processes_that_the_environment_names(environment, processes):
    assert cluster_environment.environment_processes(environment) == processes
    assert cluster_environment.several_processes(ALONE, environment) == (processes > 1)
    assert cluster_environment.several_processes(BY_FLAGS, environment)


@pytest.mark.parametrize(
    "environment, visible, gpus",
    [
        ({}, 8, []),
        ({}, 0, []),
        (slurm(2, "1(x2)", 1, 0), 8, []),  # one task on a node: all of its GPUs
        (slurm(16, "8(x2)", 1, 3), 8, [3]),
        (slurm(4, "2(x2)", 0, 0), 8, [0, 1, 2, 3]),
        (slurm(4, "2(x2)", 0, 1), 8, [4, 5, 6, 7]),
        (slurm(5, "4,1", 1, 0), 8, []),  # the second node has one task
        (slurm(5, "4,1", 0, 1), 8, [2, 3]),
        (slurm(16, "8(x2)", 0, 5), 1, []),  # Slurm has bound one GPU to each
        (slurm(4, "2(x2)", 0, 1, SLURM_GPUS_PER_TASK="4"), 4, []),  # Slurm has bound four to each
        # four for each, but all are visible
        (slurm(4, "2(x2)", 0, 1, SLURM_GPUS_PER_TASK="h100:4"), 8, [4, 5, 6, 7]),
        (slurm(16, "8(x2)", 0, 5), 0, []),
        (BATCH_SCRIPT, 8, []),
        (open_mpi(4, 2, 1), 4, [2, 3]),
        (open_mpi(2, 1, 0), 4, []),
    ],
)
def test_gpus_of_a_process(environment, visible, gpus):
    assert cluster_environment.local_gpus(environment, visible) == gpus


STARTED = {"cpu_devices": 1, "dry_run": False, "process_id": 0}
BASE = {"data.tokenizer": "one/file", "train.init_from": "one"}


def alike(
    flags: dict | None = None,
    settings: dict | None = None,
    environment: dict | None = None,
    of_jax: dict | None = None,
) -> dict[str, str]:
    """What is compared of a process: without the places of the values, which may differ."""
    values = cluster_environment.alike(
        types.SimpleNamespace(**STARTED | (flags or {})),
        configs.replace(configs.Config(), BASE | (settings or {})),
        environment or {},
        {"jax_enable_x64": False, "jax_platforms": None} | (of_jax or {}),
    )
    return {name: text.partition(cluster_environment.PLACE)[0] for name, text in values.items()}


@pytest.fixture
def same_files(tmp_path, monkeypatch):
    """`one` and `two` have the same files, `three` others."""
    for name, text in (("one", "text"), ("two", "text"), ("three", "test")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name, change",
    [
        ("--cpu_devices", {"flags": {"cpu_devices": 2}}),
        ("--dry_run", {"flags": {"dry_run": True}}),
        ("--replay", {"flags": {"replay": 3}}),
        ("LIBTPU_INIT_ARGS --x", {"environment": {"LIBTPU_INIT_ARGS": "--x=1"}}),
        ("XLA_FLAGS --xla_a", {"environment": {"XLA_FLAGS": "--xla_a=false"}}),
        ("JAX_ENABLE_X64", {"of_jax": {"jax_enable_x64": True}}),
        ("JAX_PLATFORMS", {"of_jax": {"jax_platforms": "cpu"}}),
        ("optimizer.learning_rate", {"settings": {"optimizer.learning_rate": 0.5}}),
        ("checkpoint.local", {"settings": {"checkpoint.local": "/dev/shm/a"}}),
        ("parallel.offload_directory", {"settings": {"parallel.offload_directory": "/a"}}),
        ("data.tokenizer", {"settings": {"data.tokenizer": "three/file"}}),
        ("train.init_from", {"settings": {"train.init_from": "three"}}),
        ("pipeline.schedule", {"settings": {"pipeline.schedule": "csv:one/file"}}),
    ],
)
def test_what_processes_need_alike(same_files, name, change):
    before, after = alike(), alike(**change)
    assert [key for key in {**before, **after} if before.get(key) != after.get(key)] == [name]


@pytest.mark.parametrize(
    "change",
    [
        {"flags": {"process_id": 1, "workdir": "./w", "json": True}},
        {"settings": {"data.source": "b", "data.cache": "b", "data.prefetch": 7}},
        {"settings": {"checkpoint.directory": "/b"}},
        {"settings": {"data.tokenizer": "two/file", "train.init_from": "two/"}},
        {"environment": {"LIBTPU_INIT_ARGS": "--xla_dump_to=/b"}},
        {"environment": {"XLA_FLAGS": "--xla_dump_to=/b", "HOME": "/b", "TMPDIR": "/b"}},
        {"of_jax": {"jax_compilation_cache_dir": "/b", "jax_log_compiles": True}},
    ],
)
def test_what_may_differ(same_files, change):
    assert alike(**change) == alike()


def test_the_order_of_xla_s_flags_may_differ_and_the_last_counts():
    both = [alike(environment={"XLA_FLAGS": f}) for f in ("--a=1 --b=2", "--a=3 --b=2 --a=1")]
    assert both[0] == both[1] and both[0]["XLA_FLAGS --a"] == "1"


def test_folders_of_each_process_differ_though_not_whether_there_are_some():
    for name in ("checkpoint.local", "parallel.offload_directory"):
        assert alike(settings={name: "/a"}) == alike(settings={name: "/b"}) != alike()


def test_the_code_is_compared_by_content(tmp_path, monkeypatch):
    """Of code and tables, wherever the package lies; what Python has compiled does not count."""
    seen = []
    for folder, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / folder / "devices").mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(text)
        (tmp_path / folder / "module.pyc").write_text(folder)
        monkeypatch.setattr(
            cluster_environment, "__file__", str(tmp_path / folder / "devices" / "x.py")
        )
        seen.append(alike()["code"])
    assert seen[0] == seen[1] != seen[2] and all(len(code) == 12 for code in seen)


def test_the_versions_that_python_imports_are_compared(tmp_path, monkeypatch):
    """Those that come first on its path."""
    installed = alike()["jax"]
    (tmp_path / "jax-0.0.1.dist-info").mkdir()
    (tmp_path / "jax-0.0.1.dist-info" / "METADATA").write_text("Name: jax\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert alike()["jax"] == "0.0.1" != installed == jax.__version__


def test_every_setting_that_may_differ_is_one():
    assert cluster_environment.MAY_DIFFER.keys() <= configs.fields().keys()
    assert len(alike().keys() & configs.fields().keys()) == len(configs.fields())


@pytest.mark.parametrize("text, number", [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-a,GPU-b", 2)])
def test_visible_gpus(text, number):
    assert cluster_environment.visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == number


def test_what_jax_is_told():
    job = cluster_environment.job
    assert job(BY_FLAGS, {}) == {
        "coordinator_address": "host:1",
        "num_processes": 4,
        "process_id": 3,
    }
    assert job(BY_FLAGS, slurm(8, "8", 0, 0)) == job(BY_FLAGS, {})
    of_step = {"num_processes": 8, "process_id": 0}  # jax finds out the address
    assert job(ALONE, slurm(8, "4(x2)", 0, 0)) == of_step
    only_address = types.SimpleNamespace(coordinator="host:1", processes=1, process_id=0)
    address = {"coordinator_address": "host:1"}
    no_job = without(slurm(8, "4(x2)", 0, 0), "SLURM_JOB_ID", "SLURM_NTASKS")
    assert job(only_address, no_job) == address | of_step
    assert job(only_address, {}) == {
        "coordinator_address": "host:1",
        "num_processes": 1,
        "process_id": 0,
    }
    assert job(ALONE, open_mpi(4, 4, 2, OMPI_MCA_orte_hnp_uri="1.0;tcp://10.0.0.1:3")) == {
        "num_processes": 4,
        "process_id": 2,
    }


def test_open_mpi_5_has_no_address():
    same = [
        cluster_environment.job(ALONE, open_mpi(2, 2, i, PMIX_NAMESPACE="prterun-a@1"))
        for i in range(2)
    ]
    assert same[0]["coordinator_address"] == same[1]["coordinator_address"]
    assert same[0]["coordinator_address"].startswith("localhost:")
    with pytest.raises(
        cluster_environment.ClusterError, match="name it with --coordinator=HOST:PORT"
    ):
        cluster_environment.job(ALONE, open_mpi(4, 2, 0))


def jobset(index: int, processes: int = 4, **more: str) -> dict[str, str]:
    """As scripts/launch/jobset.yaml sets it."""
    own = {
        "JAX_COORDINATOR_ADDRESS": "run-hosts-0-0.run:29500",
        "JAX_NUM_PROCESSES": str(processes),
    }
    return own | {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"} | more


def skypilot(rank: int, nodes: int = 2, task: str = "sky-1", **more: str) -> dict[str, str]:
    ips = "\n".join(f"10.0.0.{7 + node}" for node in range(nodes))
    own = {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": ips,
        "SKYPILOT_TASK_ID": task,
    }
    return own | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"} | more


def test_what_engines_set_is_enough():
    """Address, number and id without any flag, as jax.distributed takes them."""
    job, several = cluster_environment.job, cluster_environment.several_processes
    address = "run-hosts-0-0.run:29500"
    assert job(ALONE, jobset(3)) == {
        "coordinator_address": address,
        "num_processes": 4,
        "process_id": 3,
    }
    kubeflow = jobset(0, JAX_PROCESS_ID="2")  # Kubeflow Trainer numbers processes itself
    assert job(ALONE, kubeflow) == {
        "coordinator_address": address,
        "num_processes": 4,
        "process_id": 2,
    }
    sky = [job(ALONE, skypilot(rank)) for rank in range(2)]
    assert [known["process_id"] for known in sky] == [0, 1] and {
        known["num_processes"] for known in sky
    } == {2}
    host, _, port = sky[0]["coordinator_address"].partition(":")
    assert sky[0]["coordinator_address"] == sky[1]["coordinator_address"] and host == "10.0.0.7"
    assert int(port) in cluster_environment.COORDINATOR_PORTS
    # two jobs of one cluster
    assert (
        job(ALONE, skypilot(1, task="sky-2"))["coordinator_address"]
        != sky[1]["coordinator_address"]
    )
    assert (
        job(ALONE, skypilot(1, JAX_COORDINATOR_ADDRESS="head:1"))["coordinator_address"] == "head:1"
    )
    assert all(several(ALONE, environment) for environment in (jobset(0), skypilot(0)))
    assert not any(
        several(ALONE, environment)
        for environment in (jobset(0, processes=1), skypilot(0, nodes=1))
    )


def test_what_is_started_within_comes_first():
    """mpirun or srun on a node of SkyPilot's, and flags everywhere."""
    job = cluster_environment.job
    assert (
        job(ALONE, skypilot(1) | open_mpi(4, 4, 2, OMPI_MCA_orte_hnp_uri="x"))["num_processes"] == 4
    )
    assert cluster_environment.environment_processes(skypilot(1) | slurm(8, "4(x2)", 0, 0)) == 8
    assert job(ALONE, skypilot(1) | slurm(8, "4(x2)", 0, 0))["num_processes"] == 8
    # the daemons of mpirun are tasks of a step
    daemon = slurm(2, "1(x2)", 0, 0) | open_mpi(8, 4, 3, OMPI_MCA_orte_hnp_uri="x")
    assert job(ALONE, daemon) == {"num_processes": 8, "process_id": 3}
    assert cluster_environment.environment_processes(daemon) == 8
    assert cluster_environment.local_gpus(daemon, 8) == [6, 7]
    for environment in (jobset(0), skypilot(0)):
        assert job(BY_FLAGS, environment) == {
            "coordinator_address": "host:1",
            "num_processes": 4,
            "process_id": 3,
        }


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            without(jobset(1), "JAX_COORDINATOR_ADDRESS"),
            "JAX_NUM_PROCESSES in the environment needs JAX_COORDINATOR_ADDRESS=HOST:PORT",
        ),
        (
            without(jobset(1), "JOB_COMPLETION_INDEX"),
            "JAX_PROCESS_ID is missing in the environment: a number from 0 to 3",
        ),
        (jobset(4), "JOB_COMPLETION_INDEX='4' in the environment is not a number from 0 to 3: set"),
        (
            jobset(0, JAX_NUM_PROCESSES="0"),
            "JAX_NUM_PROCESSES='0' in the environment is not a numb",
        ),
        (jobset(0, JAX_NUM_PROCESSES="9" * 30), "is not a number from 1 to 1048576"),
        (
            jobset(0, JAX_COORDINATOR_ADDRESS="host"),
            "JAX_COORDINATOR_ADDRESS='host' in the environ",
        ),
        (
            jobset(0, JAX_COORDINATOR_ADDRESS="host:99999"),
            "JAX_COORDINATOR_ADDRESS='host:99999' in the environment is not HOST:PORT",
        ),
        (
            jobset(0, JAX_NUM_PROCESSES="four"),
            "JAX_NUM_PROCESSES='four' in the environment is not a number",
        ),
        (
            without(skypilot(0), "SKYPILOT_NODE_IPS"),
            "SKYPILOT_NUM_NODES in the environment needs SKYPILOT_NODE_IPS",
        ),
        (
            without(skypilot(0), "SKYPILOT_NODE_RANK"),
            "SKYPILOT_NODE_RANK is missing in the environment: a number from 0 to 1",
        ),
        (skypilot(2), "SKYPILOT_NODE_RANK='2' in the environment is not a number from 0 to 1"),
        *(
            (without(slurm(4, "2(x2)", 0, 1), name), f"{name} is missing in the environment: a nu")
            for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_LOCALID")
        ),
        (
            slurm(4, "2(x2)", 0, 2),
            "SLURM_LOCALID='2' in the environment is not a number from 0 to 1",
        ),
        (slurm(4, "2(x2)", 0, 0, SLURM_PROCID="4"), "SLURM_PROCID='4' in the environment is not a"),
        (slurm(4, "2(x2)", 0, 0, SLURM_PROCID=""), "SLURM_PROCID is missing in the environment: a"),
        (
            slurm(4, "two", 0, 0),
            "SLURM_STEP_TASKS_PER_NODE='two' in the environment is not a number",
        ),
        (slurm(4, "2(x-2)", 0, 0), "SLURM_STEP_TASKS_PER_NODE='-2' in the environment is not a"),
        (slurm(4, "2(x2)", 0, 0, SLURM_NODEID="x"), "SLURM_NODEID='x' in the environment is not a"),
        (slurm(4, "2(x2)", 0, 0, SLURM_STEP_NUM_TASKS="x"), "SLURM_STEP_NUM_TASKS='x' in the env"),
        (
            without(open_mpi(2, 2, 0), "OMPI_COMM_WORLD_RANK"),
            "OMPI_COMM_WORLD_RANK is missing in the",
        ),
        (
            open_mpi(2, 2, 2),
            "OMPI_COMM_WORLD_RANK='2' in the environment is not a number from 0 to 1",
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            "PMI_SIZE=2 in the environment: only Open MPI's proces",
        ),
    ],
)
def test_half_of_an_environment_is_refused(environment, message):
    with pytest.raises(cluster_environment.ClusterError, match=re.escape(message)) as error:
        cluster_environment.job(ALONE, environment)
    assert error.value.status == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            without(open_mpi(2, 2, 1), "OMPI_COMM_WORLD_LOCAL_RANK"),
            "OMPI_COMM_WORLD_LOCAL_RANK is m",
        ),
        (open_mpi(2, 2, 2), "OMPI_COMM_WORLD_LOCAL_RANK='2' in the environment is not a number fr"),
    ],
)
def test_gpus_are_not_given_to_two_processes(environment, message):
    with pytest.raises(cluster_environment.ClusterError, match=f"^{message}"):
        cluster_environment.local_gpus(environment, 8)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"JAX_NUM_CPU_DEVICES": "abc"}, "JAX_NUM_CPU_DEVICES='abc' in the environment is not a"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=0"},
            "--xla_force_host_platform_device_count='0' in the environment is not a number from 1",
        ),
    ],
)
def test_simulated_devices_that_are_no_number(environment, message):
    flags = types.SimpleNamespace(**vars(ALONE), cpu_devices=0)
    with pytest.raises(cluster_environment.ClusterError, match=f"^{message}"):
        cluster_environment.simulated_devices(flags, environment | {"JAX_PLATFORMS": "cpu"}, 8)


@pytest.mark.parametrize("hosts, missing", [("a,b", True), ("a", False), ("", False)])
def test_a_tpu_slice_without_its_worker(monkeypatch, hosts, missing):
    with_tpus = types.SimpleNamespace(jax_platforms="tpu,cpu")
    monkeypatch.setattr(cluster, "jax", types.SimpleNamespace(config=with_tpus))
    with pytest.raises(cluster_environment.ClusterError) if missing else contextlib.nullcontext():
        cluster._on_tpu_vm({"TPU_WORKER_HOSTNAMES": hosts})


def test_what_jax_does_not_understand_is_a_line():
    message = (
        "^jax does not start with JAX_PLATFORMS='.*' and the other variables of this env.*: a b$"
    )
    with (
        pytest.raises(cluster_environment.ClusterError, match=message),
        cluster_environment.read_environment(),
    ):
        raise RuntimeError("a\n  b")
    with pytest.raises(jax.errors.JaxRuntimeError), cluster_environment.read_environment():
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


def test_one_process_starts_nothing():
    cluster.initialize(ALONE)
    cluster.barrier("alone")
    assert cluster.is_main()
    assert cluster.gather((1, None)) == [[1, None]] and cluster.least(3) == 3
    # as other processes get it
    assert cluster.from_main(lambda: {"steps": (1, 2)}, LookupError) == {"steps": [1, 2]}


PROGRAM = """
import sys
from jaxtrain import cli
from jaxtrain.config.flags import CLUSTER_FLAGS
from jaxtrain.devices.startup import start_jax
start_jax(cli.checked_flags(sys.argv[1:], "usage: x", CLUSTER_FLAGS, lambda flags: flags))
import jax
from jaxtrain.devices import cluster
me = jax.process_index()
print(
    jax.process_count(), jax.device_count(), cluster.is_main(),
    cluster.gather([me, "ä" * me]), cluster.least(me + 3),
)
def decide(text):
    assert me == 0, "the others do not decide"
    if text == "refuse":
        raise LookupError("in one line")
    return {"text": text, "numbers": [1, None]}
print(cluster.from_main(lambda: decide("ä"), LookupError))
try:
    cluster.from_main(lambda: decide("refuse"), LookupError)
except LookupError as error:
    print("refused:", error)
cluster.agree({"code": f"1f{cluster.PLACE}/folder/{me}", "seed": "0"})
try:
    cluster.agree({"code": "1f", "seed": str(me), "later": str(me)})
except cluster.ClusterError as error:
    print(int(error.status), error)
# Sums that are shared out, of all devices and of pairs: gloo's reduce-scatter is wrong at times.
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtrain.devices.mesh import make_mesh, psum_scatter
mesh = make_mesh((1, 2, 2, 1, 1, 1))
sums = lambda x: (
    psum_scatter(x[0], ("data", "stage"), 1),
    psum_scatter(x[0], "data", 1),
    psum_scatter(x[0], "stage", 1, [[0, 1]]),
)
both = P(None, ("data", "stage"))
program = jax.jit(jax.shard_map(
    sums, mesh=mesh, in_specs=P(("data", "stage")), out_specs=(both,) * 3, check_vma=False,
))
x = np.arange(4 * 3 * 8, dtype=np.float32).reshape(4, 3, 8) ** 2
shared = program.lower(x).compile()
print("reduce-scatters:", shared.as_text().count("reduce-scatter("))
whole, data, stage = x.sum(0), x[:2] + x[2:], x[::2] + x[1::2]
results = [
    whole,
    np.concatenate([data[0, :, :4], data[1, :, :4], data[0, :, 4:], data[1, :, 4:]], 1),
    np.concatenate([stage[0, :, :4], stage[0, :, 4:], stage[1, :, :4], stage[1, :, 4:]], 1),
]
for array, result in zip(program(x), results, strict=True):
    for shard in array.addressable_shards:
        assert (np.asarray(shard.data) == result[shard.index]).all(), (shard, result)
cluster.barrier("here")
if me == 1:
    raise ValueError("the reason")
cluster.barrier("there")
"""


def test_two_processes_agree_and_end_together(tmp_path):
    """What one knows, both know; an error in one ends the run at once, though the other waits for
    it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_", "OMPI_", "XLA_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain.launch", "--module=program", "--devices_per_process=2"],
        env=environment
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "JAXTRAIN_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    host = socket.gethostname()
    assert "[0] 2 4 True [[0, ''], [1, 'ä']] 3" in done.stdout.splitlines()
    assert "[1] 2 4 False [[0, ''], [1, 'ä']] 3" in done.stdout.splitlines()
    for number in (0, 1):
        assert f"[{number}] {{'text': 'ä', 'numbers': [1, None]}}" in done.stdout.splitlines()
        assert f"[{number}] refused: in one line" in done.stdout.splitlines()
        same = "all processes of a run need the same"
        differ = f"seed=1 on {host} (process 1), and 0 on {host} (process 0): {same}"
        assert f"[{number}] 2 {differ}" in done.stdout.splitlines()
        assert f"[{number}] reduce-scatters: 0" in done.stdout.splitlines()
    assert done.returncode == 1
    assert "process 1 failed with status 1; its last lines:" in done.stderr.splitlines()
    assert done.stderr.splitlines()[-1] == "ValueError: the reason"


UNEVEN = """
import sys, types
from jaxtrain.devices.startup import start_jax
from jaxtrain.run.exit_status import RunError
process, port = int(sys.argv[1]), sys.argv[2]
try:
    start_jax(types.SimpleNamespace(
        coordinator=f"localhost:{port}", processes=2, process_id=process,
        cpu_devices=1 if process == 1 else 2,
    ))
except RunError as error:
    print(int(error.status), error, flush=True)
import os
os._exit(0)  # jax's shutdown would wait
"""


def test_a_process_with_fewer_devices_is_named(tmp_path):
    """With its host, before anything is compiled."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_", "OMPI_", "XLA_"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "JAXTRAIN_CACHE": str(tmp_path)}
    port = str(free_port())
    commands = [[sys.executable, "-c", UNEVEN, str(process), port] for process in range(2)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert said[0].startswith(
        f"80 host {socket.gethostname()} (process 1) sees 1 of 2 devices: each process of a "
        "run has as many devices"
    )
    assert said[1] in (said[0], ""), "jax may abort it when process 0 has gone"


@pytest.mark.parametrize("seconds, said", [(0.0, WAITING), (60.0, "")])
def test_who_waits_long_for_the_others_says_so(capsys, seconds, said):
    met = threading.Event()
    with cluster.notice_of_waiting(4, "host:1", seconds):
        met.wait(0.2)
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("several, kind", [(True, cluster.DevicesError), (False, RuntimeError)])
def test_a_process_that_goes_while_devices_are_told_is_no_fault(monkeypatch, several, kind):
    """jax's error of several processes becomes a line and status 80; of one process it stays what
    it is."""

    def gone():
        raise RuntimeError("Unable to initialize backend 'cpu':\nDEADLINE_EXCEEDED: a task died")

    monkeypatch.setattr(cluster.jax, "devices", gone)
    monkeypatch.setattr(cluster.jax.distributed, "is_initialized", lambda: several)
    with pytest.raises(kind, match="DEADLINE_EXCEEDED") as raised:
        cluster.check_devices()
    assert not several or (
        raised.value.status == ExitStatus.LOST_PEER and "\n" not in str(raised.value)
    )
