"""The templates for Kubernetes, SkyPilot, TPU VMs and Ray: their rules are the exit statuses', and
they set what jaxtrain reads.

The JobSets are checked against the CustomResourceDefinition where its file is at hand. A cluster's
own is:

    kubectl get crd jobsets.jobset.x-k8s.io -o yaml >crd.yaml
    JAXTRAIN_JOBSET_CRD=crd.yaml python -m pytest tests/launch
"""

import ast
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import yaml
from support import ROOT, crd_schema

from jaxtrain.devices import cluster_environment
from jaxtrain.run.exit_status import ExitStatus

FOLDER = ROOT / "scripts" / "launch"
JOBSETS = ["jobset.yaml", "jobset_tpu.yaml"]
ALONE = types.SimpleNamespace(coordinator="", processes=1, process_id=0)
FOR_GOOD = {int(status) for status in ExitStatus if not status.goes_on and status}


def load(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


def job_of(jobset: dict) -> dict:
    """The specification of the only kind of Job."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def action_for(jobset: dict, message: str, reason: str = "PodFailurePolicy") -> str:
    """What a JobSet does when a Job fails with a reason and a message: the first rule that matches,
    else a restart that counts."""
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]
        ):
            return rule["action"]
    return "RestartJobSet"


def action_at(jobset: dict, status: int) -> str:
    """What happens to a JobSet when a container ends with a status, by the rules of the Job and of
    the JobSet together.

    The message is Kubernetes': "Container train for pod NAMESPACE/NAME failed with exit code 2
    matching FailJob rule at index 0".
    """
    for index, rule in enumerate(job_of(jobset)["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        if codes and status in codes["values"]:
            ended = f"Container {codes['containerName']} for pod x/y failed with exit code {status}"
            message = f"{ended} matching {rule['action']} rule at index {index}"
            return action_for(jobset, message)
    return action_for(jobset, "Job has reached the specified backoff limit", "BackoffLimitExceeded")


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_restarts_by_exit_status(name):
    jobset = load(name)
    for status in range(1, 256):
        goes_on = status in {
            int(known) for known in ExitStatus if known.goes_on
        } or status not in set(ExitStatus)
        expected = "RestartJobSet" if goes_on else "FailJobSet"
        assert action_at(jobset, status) == (
            "RestartJobSetAndIgnoreMaxRestarts" if status == ExitStatus.STOPPED else expected
        ), status
    evicted = "Pod x/y has condition DisruptionTarget matching FailJob rule at index 2"
    assert action_for(jobset, evicted) == "RestartJobSetAndIgnoreMaxRestarts"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize(("loss", "lost", "again"), [("gone", 74, True), ("taken", 2, False)])
def test_a_run_that_loses_its_lock_starts_again_unless_another_run_has_it(
    tmp_path, loss, lost, again
):
    """By the rules of the launcher, of JobSets and of SkyPilot. Slurm's: test_slurm.py."""
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    words = [
        "jaxtrain.launch",
        "--processes=1",
        "--devices_per_process=1",
        "--restarts=1",
        "--module=support.lock_loser",
        "--",
        loss,
    ]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    status = int(re.search(r"failed with status (\d+)", done.stderr)[1])
    assert (status, done.returncode, "restart 1 of 1" in done.stderr) == (
        lost,
        0 if again else lost,
        again,
    ), done
    assert (
        "Traceback" not in done.stderr + done.stdout
        and ("; the same command goes on" in done.stderr) == again
    )
    assert [action_at(load(name), status) for name in JOBSETS] == [
        "RestartJobSet" if again else "FailJobSet"
    ] * 2
    assert (
        status in load("skypilot.yaml")["resources"]["job_recovery"]["recover_on_exit_codes"]
    ) == again


@pytest.mark.parametrize("name", JOBSETS)
def test_what_pod_failure_policies_demand(name):
    """Kubernetes refuses a Job otherwise: Never, values in order, containers by their names; and
    each pod fails for good at once."""
    job = job_of(load(name))
    pod = job["template"]["spec"]
    assert (pod["restartPolicy"], job["completionMode"], job["backoffLimit"]) == (
        "Never",
        "Indexed",
        0,
    )
    assert job["parallelism"] == job["completions"]
    (container,) = pod["containers"]
    for rule in job["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert (
                codes["containerName"] == container["name"]
                and codes["values"] == sorted(set(codes["values"]))
                and 0 not in codes["values"]
            )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert container["command"][:3] == ["python", "-m", "jaxtrain.train"]


def environment_of_pod(jobset: dict, index: int) -> dict[str, str]:
    """A container's environment, as Kubernetes and JobSet make it: annotations by their paths,
    $(NAME) of variables before."""
    name, at = jobset["metadata"]["name"], jobset["spec"]["coordinator"]
    coordinator = f"{name}-{at['replicatedJob']}-{at['jobIndex']}-{at['podIndex']}.{name}"
    found = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    for variable in job_of(jobset)["template"]["spec"]["containers"][0]["env"]:
        if "valueFrom" in variable:
            assert (
                variable["valueFrom"]["fieldRef"]["fieldPath"]
                == "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
            )
            found[variable["name"]] = coordinator
        else:
            found[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"]
            )
    return found


def test_pods_of_a_jobset_find_each_other():
    jobset = load("jobset.yaml")
    hosts = job_of(jobset)["completions"]
    jobs = [
        cluster_environment.job(ALONE, environment_of_pod(jobset, index)) for index in range(hosts)
    ]
    address = {"coordinator_address": "jaxtrain-hosts-0-0.jaxtrain:29500", "num_processes": hosts}
    assert jobs == [address | {"process_id": index} for index in range(hosts)]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == (
        jobset["spec"]["coordinator"]["replicatedJob"],
        1,
    )
    assert (
        jobset["spec"]["network"]["enableDNSHostnames"]
        and jobset["spec"]["network"]["publishNotReadyAddresses"]
    )


def test_pods_of_a_sweep_train_a_run_each(tmp_path):
    """A verdict ends an index alone; what goes on starts again, after 75 as often as it happens;
    the sweep has as many runs as there are indices."""
    jobset = load("jobset_sweep.yaml")
    job = job_of(jobset)
    rules = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": []})["values"]
    }
    assert rules == dict.fromkeys(sorted(FOR_GOOD), "FailIndex") | {75: "Ignore"}
    assert (job["completionMode"], jobset["spec"]["failurePolicy"]["maxRestarts"]) == ("Indexed", 0)
    (container,) = job["template"]["spec"]["containers"]
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "3"}
    words = [*container["command"], *container["args"]]
    said = subprocess.run(words, env=own, capture_output=True, text=True, check=True).stdout
    command = ["-m", "jaxtrain", "sweep", *container["args"], "--index=3"]
    assert said.splitlines() == command
    listed = [sys.executable, *command[:-1], "--list"]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = subprocess.run(listed, env=own, capture_output=True, text=True, check=True).stdout
    assert len(runs.splitlines()) == job["completions"]


CRD = os.environ.get("JAXTRAIN_JOBSET_CRD")


@pytest.mark.skipif(not CRD, reason="needs JobSet's CRD: JAXTRAIN_JOBSET_CRD=FILE")
@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_has_the_form_of_its_crd(name):
    schema = crd_schema.schema_of(yaml.safe_load(pathlib.Path(CRD).read_text()), "v1alpha2")
    for form in (name, "jobset_sweep.yaml"):
        assert not list(crd_schema.problems(load(form), schema))
    broken = load(name)
    broken["spec"]["failurePolicy"]["rules"][0]["action"] = "Stop"
    job_of(broken)["completion"] = job_of(broken).pop("completions")
    job_of(broken)["template"]["spec"]["containers"][0].pop("name")
    found = list(crd_schema.problems(broken, schema))
    assert len(found) == 3 and "action: 'Stop' is none of" in found[0]


SCHEMA = {
    "type": "object",
    "required": ["kind"],
    "properties": {
        "kind": {"type": "string", "enum": ["A", "B"]},
        "count": {"type": "integer", "minimum": 1},
        "names": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]+$"},
            "maxItems": 2,
        },
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "amount": {"x-kubernetes-int-or-string": True},
        "metadata": {"type": "object"},
    },
}


@pytest.mark.parametrize(
    "value, said",
    [
        (
            {
                "kind": "A",
                "count": 2,
                "names": ["x"],
                "labels": {"y": "z"},
                "amount": "4Gi",
                "metadata": {"any": 1},
            },
            None,
        ),
        ({"kind": "C"}, ".kind: 'C' is none of"),
        ({}, ": kind is missing"),
        ({"kind": "A", "more": 1}, ".more: there is no such field"),
        ({"kind": "A", "count": "2"}, ".count: '2' is no integer"),
        ({"kind": "A", "count": True}, ".count: True is no integer"),
        ({"kind": "A", "count": 0}, ".count: 0 is out of bounds"),
        ({"kind": "A", "names": ["x", "Y"]}, ".names[1]: 'Y' does not match"),
        ({"kind": "A", "names": ["x", "y", "z"]}, ".names: 3 entries"),
        ({"kind": "A", "labels": {"y": 1}}, ".labels.y: 1 is no string"),
        ({"kind": "A", "amount": []}, ".amount: [] is neither"),
    ],
)
def test_what_a_crd_refuses(value, said):
    found = list(crd_schema.problems(value, SCHEMA))
    assert len(found) == (1 if said else 0) and (not said or found[0].startswith(said))


def test_skypilot_starts_again_what_goes_on():
    task = load("skypilot.yaml")
    recovered = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert set(recovered) == {int(status) for status in ExitStatus if status.goes_on}
    assert not set(recovered) & FOR_GOOD
    words, shared = task["run"].split(), next(iter(task["volumes"]))
    assert words[:3] == ["exec", "scripts/launch/process_per_gpu.sh", "scripts/train.sh"]
    assert {"$FLAGS", '--workdir="$WORKDIR"', '--config.data.source="$DATA"'} < {*words}
    assert all(task["envs"][name].startswith(shared) for name in ("WORKDIR", "DATA", "TOKENIZER"))


def per_gpu(command: str, rank: int = 0) -> subprocess.Popen:
    """process_per_gpu.sh with a command of bash, on one of two nodes with three GPUs."""
    sky = {"NUM_NODES": "2", "NODE_RANK": str(rank), "NUM_GPUS_PER_NODE": "3"}
    sky["NODE_IPS"] = "10.0.0.1\n10.0.0.2"
    environment = {"PATH": os.environ["PATH"]} | {f"SKYPILOT_{k}": v for k, v in sky.items()}
    words = [FOLDER / "process_per_gpu.sh", "bash", "-c", command]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_process_a_gpu_of_all_nodes():
    """jaxtrain takes their addresses, numbers and ids from the environment, before SkyPilot's."""
    names = "JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID JAX_LOCAL_DEVICE_IDS".split()
    out, _ = per_gpu(f"echo {' '.join(f'${name}' for name in names)}", rank=1).communicate()
    found = [dict(zip(names, line.split(), strict=True)) for line in sorted(out.splitlines())]
    assert [each["JAX_LOCAL_DEVICE_IDS"] for each in found] == ["0", "1", "2"]
    address = {"coordinator_address": "10.0.0.1:29500", "num_processes": 6}
    assert [
        cluster_environment.job(ALONE, each | {"SKYPILOT_NUM_NODES": "2"}) for each in found
    ] == [address | {"process_id": number} for number in (3, 4, 5)]


@pytest.mark.parametrize(
    "ends, status",
    [((0, 0, 0), 0), ((0, 74, 0), 74), ((137, 2, 0), 2), ((80, 137, 0), 80)],
)
def test_the_status_of_processes_of_a_node(ends, status):
    """The first that is not 0, a tenth of a second after each other; a verdict wherever there is
    one."""
    listed = " ".join(map(str, ends))
    command = f"ends=({listed}); sleep 0.$JAX_PROCESS_ID; exit ${{ends[JAX_PROCESS_ID]}}"
    process = per_gpu(command)
    process.communicate(timeout=30)
    assert process.returncode == status


def test_a_signal_reaches_every_process_of_a_node():
    process = per_gpu("trap 'exit 75' TERM; echo begun; while :; do sleep 0.05; done")
    assert [process.stdout.readline() for _ in range(3)] == ["begun\n"] * 3
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == ExitStatus.STOPPED


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_pyxis.sbatch"])
def test_slurm_starts_a_task_a_gpu(name):
    options = dict(
        re.findall(r"^#SBATCH --(\S+)=(\S+)$", (FOLDER / name).read_text(), re.MULTILINE)
    )
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_whoever_names_a_recipe_names_its_data(path):
    """A recipe's own corpus is Python's library, by bytes."""
    text = path.read_text() if path.is_file() else ""
    if "--config=llama3_8b" in text:
        assert ("data.source=" in text, "data.tokenizer=" in text) == (True, True)


def test_the_image_of_the_jobsets():
    """Its file copies what the installation needs, and installs by the script that is there."""
    text = (FOLDER / "Dockerfile").read_text()
    for name in JOBSETS:
        assert job_of(load(name))["template"]["spec"]["containers"][0]["image"] in text
    assert "scripts/install.sh" in text and (ROOT / "scripts" / "install.sh").is_file()
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    needed = ["jaxtrain", "configs", "scripts", "README.md", "pyproject.toml"]
    needed += ["requirements.txt", "requirements"]
    assert not {*needed} & {*ignored} and {".venv*", ".cache", "runs"} <= {*ignored}
    (python,) = re.findall(r"^FROM python:(\d\.\d+)-slim$", text, re.MULTILINE)
    assert python in ("3.11", "3.12", "3.13")


def test_tpu_vms_get_the_command_whole(tmp_path):
    """The flags reach a host's shell as they were given, by way of gcloud."""
    (tmp_path / "gcloud").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "gcloud").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TPU": "slice", "ZONE": "z"}
    flags = ["--config=tiny", "--config.train.sample_prompt=def main():"]
    done = subprocess.run(
        ["bash", FOLDER / "tpu_vm.sh", *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *words, command = done.stdout.splitlines()
    assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "slice"] and "--worker=all" in words
    shell = command.removeprefix("--command=").replace(
        "cd jaxtrain && env JAXTRAIN_EXTRAS=tpu scripts/train.sh", 'printf "%s\\n"'
    )
    assert (
        subprocess.run(["bash", "-c", shell], capture_output=True, text=True).stdout.splitlines()
        == flags
    )
    missing = subprocess.run(
        ["bash", FOLDER / "tpu_vm.sh"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert missing.returncode != 0 and "TPU: is the name of the slice" in missing.stderr


def test_ray_is_given_train():
    """The template parses, and what it imports of jaxtrain is there; the rest needs Ray, which
    rehearse_ray.py has."""
    tree = ast.parse((FOLDER / "ray_train.py").read_text())
    imported = {
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert ("jaxtrain", "train") in imported and (
        "ray.train.v2.jax",
        "JaxTrainer",
    ) in imported
