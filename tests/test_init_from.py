"""`train.init_from`: runs of the real command that start from a published model. The state itself
is compared in hf/test_importing.py, on every layout and without a run."""

import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from support import ROOT, train_runs as runs
from support.hf_models import CONFIGS, llama_tensors, write_llama
from support.hub_server import HubServer

from jaxtrain import convert
from jaxtrain.run.exit_status import ExitStatus
from jaxtrain.run.metrics import read_metrics

SETTINGS = {
    "data.source": "corpus.txt",
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "pipeline.microbatches": 2,
    "optimizer.learning_rate": 0.01,
    "optimizer.warmup_steps": 0,
    "optimizer.schedule": "constant",
    "precision.compute": "float32",
    "train.eval_batches": 1,
    "metrics.log_every": 1,
    "metrics.tensorboard": False,
}
# a tokenizer with two words of the corpus
WORDS = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {"?": 0, "</s>": 1, "batch": 2, "stage": 3},
            "unk_token": "?",
        },
    }
)
MESH = {"mesh.data": 2, "mesh.stage": 2, "mesh.model": 2}
ONE = {"mesh.data": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A folder with a published model, a corpus, and runs."""
    folder = tmp_path_factory.mktemp("init_from")
    runs.write_inputs(folder)
    write_llama(folder / "model", bfloat16=True)
    (folder / "model" / "tokenizer.json").write_text(WORDS)
    return folder


def words(workdir: pathlib.Path, devices: int, settings: dict, *flags: str) -> list[str]:
    """The words of a training command with the shipped recipe."""
    return [
        "jaxtrain.train",
        "--config=from_hf",
        f"--workdir={workdir.name}",
        f"--cpu_devices={devices}",
        *runs.flags_of(SETTINGS | settings),
        *flags,
    ]


def train(workdir: pathlib.Path, devices: int, settings: dict, status: int = 0) -> runs.Done:
    with runs.running(workdir.parent, *words(workdir, devices, settings)) as command:
        return command.end(status)


@pytest.fixture(scope="module")
def started(folder) -> pathlib.Path:
    """A run of three steps on 2 × 2 × 2."""
    workdir = folder / "started"
    done = train(workdir, 8, MESH | {"train.steps": 3})
    assert f"starting: weights from {folder / 'model'}" in done.out
    ids = f"data.tokenizer={folder / 'model' / 'tokenizer.json'} has 4 of 260 ids"
    assert f"note: {ids}" in done.out
    return workdir


def test_as_from_a_checkpoint_of_step_0(folder, started):
    """Bit for bit; the checkpoint wins over the folder, which is passed over with a line."""
    workdir = folder / "converted"
    flags = runs.flags_of(SETTINGS | {"data.source": folder / "corpus.txt"})
    assert convert.main(["from_hf", str(folder / "model"), f"--workdir={workdir}", *flags]) == 0
    done = train(workdir, 8, MESH | {"train.steps": 3})
    passed_over = f"train.init_from={folder / 'model'} is passed over"
    assert f"continuing from step 0; {passed_over}" in done.out
    assert len(runs.losses(started)) == 3 and runs.losses(started) == runs.losses(workdir)
    validation = [
        [(r["step"], r["validation_loss"]) for r in read_metrics(run) if "validation_loss" in r]
        for run in (started, workdir)
    ]
    assert validation[0] == validation[1] and [step for step, _ in validation[0]] == [0, 3]
    of_run, of_convert = (
        {path.name: path.read_bytes() for path in (run / "hf").iterdir()}
        for run in (started, workdir)
    )
    assert of_run == of_convert and {*of_run} == {"config.json", "tensors.json", "tokenizer.json"}


@pytest.mark.full
def test_one_device_has_the_same_losses(folder, started):
    workdir = folder / "one"
    train(workdir, 1, ONE | {"train.steps": 3})
    runs.assert_same_trajectory(runs.losses(workdir), runs.losses(started))


def test_a_run_goes_on_without_the_folder(folder, started):
    """Its own config.json has all settings, and it has a copy of the tokenizer."""
    shutil.move(folder / "model", folder / "away")
    try:
        command = ["jaxtrain.train", "--config=started/config.json", "--cpu_devices=1"]
        changes = runs.flags_of({"train.steps": 4, "mesh.stage": 1, "mesh.model": 1, **ONE})
        with runs.running(folder, *command, *changes) as running:
            done = running.end()
    finally:
        shutil.move(folder / "away", folder / "model")
    assert f"continuing from step 3; train.init_from={folder / 'model'} is passed over" in done.out
    assert runs.last_step(started) == 4


def test_another_model_than_the_checkpoint_s(folder, started):
    write_llama(folder / "other")
    (folder / "other" / "tokenizer.json").write_text(WORDS)
    other = CONFIGS["llama"] | {"rms_norm_eps": 0.5}
    (folder / "other" / "config.json").write_text(json.dumps(other))
    settings = ONE | {"train.steps": 9, "train.init_from": "other"}
    done = train(started, 1, settings, ExitStatus.BAD_CONFIG)
    assert done.err == (
        f"error: train.init_from='{folder / 'other'}' is another model than that of "
        f"started/checkpoints: model.norm_epsilon=0.5 cannot continue a checkpoint of "
        f"model.norm_epsilon={CONFIGS['llama']['rms_norm_eps']}: use another --workdir\n"
    )


def test_a_contradiction_is_refused_by_name(folder):
    workdir = folder / "refused"
    settings = ONE | {"model.width": 32, "train.init_from": "model"}
    done = train(workdir, 1, settings, ExitStatus.BAD_CONFIG)
    rule = f"contradicts {folder / 'model' / 'config.json'}, which says 16"
    assert done.err == f"error: model.width=32 {rule}: use --config.model.width=16\n"
    done = train(workdir, 1, ONE | {"train.init_from": "none"}, ExitStatus.BAD_CONFIG)
    rule = "is no folder with a config.json of a published model"
    assert done.err == f"error: train.init_from='none' {rule}\n", "no other model is suggested"
    assert not workdir.exists()


@pytest.mark.parametrize("damage", ["nan", pytest.param("truncated", marks=pytest.mark.full)])
def test_damage_ends_all_processes(folder, damage):
    """One of them alone has read it; nothing is left of the run."""
    name, broken, workdir = "model.layers.2.mlp.down_proj.weight", folder / damage, folder / "none"
    down = llama_tensors()[name]
    down[-1, -1] = np.nan
    write_llama(broken, **{name.replace(".", "_"): down} if damage == "nan" else {})
    (broken / "tokenizer.json").write_text(WORDS)
    file = broken / "model.safetensors"
    if damage == "nan":
        line = f"{file}: {name} has numbers that are not finite"
    else:
        file.write_bytes(file.read_bytes()[:-1])
        line = f"{file} is no complete safetensors file"
    settings = {"mesh.model": 2, "metrics.rows": True, "train.init_from": damage}
    command = words(workdir, 1, settings)
    launch = ["jaxtrain.launch", "--processes=2", "--devices_per_process=1", "--", *command[1:]]
    launch.remove("--cpu_devices=1")
    with runs.running(folder, *launch) as running:
        done = running.end(ExitStatus.BAD_CONFIG)
    of_process = [text for text in done.err.splitlines() if text.startswith(("[0] ", "[1] "))]
    assert of_process and all(text[4:].startswith(f"error: {line}") for text in of_process)
    assert not workdir.exists()


@pytest.mark.full
def test_several_processes_and_independent_replicas(folder):
    """Two processes, each with a replica; one process has the same losses."""
    settings = {"mesh.replica": 2, "train.diloco_inner_steps": 2, "train.steps": 4}
    two, one = folder / "two", folder / "single"
    command = words(two, 2, settings)
    launch = ["jaxtrain.launch", "--processes=2", "--devices_per_process=2", "--", *command[1:]]
    launch.remove("--cpu_devices=2")
    with runs.running(folder, *launch) as running:
        running.end()
    train(one, 4, settings)
    runs.assert_same_trajectory(runs.losses(two), runs.losses(one))


@pytest.mark.full
def test_a_roll_back_without_checkpoints_begins_with_the_model(folder):
    """A loss that is not finite takes the run back to what it began with."""
    workdir = folder / "rolled_back"
    flags = {"train.on_nonfinite": "rollback", "train.nonfinite_limit": 1, "train.steps": 3}
    command = ["support.bad_batches", "nan:2", "--", *words(workdir, 1, ONE | flags)[1:]]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with runs.running(folder, *command, environment=path) as running:
        done = running.end()
    assert "back from step 3 to step 0, and on with batch 3" in done.err
    norms = [r["param_norm"] for r in read_metrics(workdir) if "param_norm" in r]
    squares = [np.square(a.astype(np.float64)).sum() for a in llama_tensors().values()]
    # three updates of at most 0.01 each
    assert len(norms) == 3 and norms == pytest.approx([np.sqrt(sum(squares))] * 3, rel=0.02)


@pytest.fixture(scope="module")
def hub(folder) -> Iterator[HubServer]:
    """A hub with the published model, and files beside it that are not read."""
    shutil.copytree(folder / "model", folder / "repository")
    (folder / "repository" / "pytorch_model.bin").write_bytes(bytes(5_000))
    (folder / "repository" / "README.md").write_text("a model")
    with HubServer() as hub:
        hub.publish("models/org/name", folder / "repository")
        (folder / "texts").mkdir()
        shutil.copy(folder / "corpus.txt", folder / "texts" / "a.txt")
        hub.publish("datasets/org/texts", folder / "texts")
        yield hub


def train_from_hub(
    hub: HubServer, workdir: pathlib.Path, settings: dict, **status: int
) -> runs.Done:
    """A run that starts from the hub's model, whose cache is beside it; settings: and HF_… of the
    environment"""
    variables = {name: text for name, text in settings.items() if name.startswith("HF_")}
    settings = {name: settings[name] for name in settings if name not in variables}
    command = words(workdir, 1, ONE | {"train.init_from": "org/name"} | settings)
    environment = hub.environment(workdir.parent / "hub") | variables
    with runs.running(workdir.parent, *command, environment=environment) as running:
        return running.end(**status)


OF_HUB = "hf://datasets/org/texts/*.txt"


@pytest.mark.full
def test_a_model_and_a_source_of_the_hub(folder, hub):
    """Their files alone are downloaded, and the run is pinned to their commits."""
    commit, workdir = hub.repos["models/org/name"].revisions["main"], folder / "of_hub"
    done = train_from_hub(hub, workdir, {"train.steps": 2, "data.source": OF_HUB})
    assert f"starting: weights from org/name@{commit}" in done.out and done.err == ""
    assert hub.files() == {"config.json", "tokenizer.json", "model.safetensors", "a.txt"}
    config = json.loads((workdir / "config.json").read_text())
    assert config["train"]["init_from"] == config["data"]["tokenizer"] == f"org/name@{commit}"
    commit = hub.repos["datasets/org/texts"].revisions["main"]
    assert config["data"]["source"] == OF_HUB.replace("texts/", f"texts@{commit}/")


@pytest.mark.full
def test_a_run_from_the_hub_goes_on(folder, hub):
    """The same command, with the cache alone, or with neither cache nor hub: the branch has moved,
    and its model is another one."""
    workdir, source = folder / "goes_on", {"data.source": OF_HUB}
    commit = hub.repos["models/org/name"].revisions["main"]
    train_from_hub(hub, workdir, {"train.steps": 1} | source)
    other = CONFIGS["llama"] | {"rms_norm_eps": 0.5}
    (folder / "repository" / "config.json").write_text(json.dumps(other))
    hub.publish("models/org/name", folder / "repository")
    shutil.copy(folder / "corpus.txt", folder / "texts_before.txt")
    (folder / "texts" / "a.txt").write_text("another text")
    hub.publish("datasets/org/texts", folder / "texts")
    hub.requests.clear()
    done = train_from_hub(hub, workdir, {"train.steps": 2} | source)
    note = f"note: train.init_from=org/name is org/name@{commit}, as in goes_on/config.json"
    assert note in done.out and "  train.init_from: " not in done.out and not hub.requests
    train_from_hub(hub, workdir, {"train.steps": 3, "HF_HUB_OFFLINE": "1"} | source)
    nowhere = {"HF_HOME": str(folder / "empty"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    train_from_hub(hub, workdir, {"train.steps": 4, "data.source": "texts_before.txt"} | nowhere)
    assert runs.last_step(workdir) == 4
    # the model that the branch has now is the checkpoint's no longer
    moved = f"org/name@{hub.repos['models/org/name'].revisions['main']}"
    done = train_from_hub(hub, workdir, {"train.init_from": moved}, status=ExitStatus.BAD_CONFIG)
    assert done.err.startswith(f"error: train.init_from='{moved}' is another model than that of ")


@pytest.mark.full
def test_other_commands_read_the_hub(folder, hub):
    """convert, plan and a dry run; of these convert alone needs the weights."""
    hub.publish("models/org/planned", folder / "model")
    environment = hub.environment(folder / "hub_of_plan")
    hub.requests.clear()
    for command in (
        *("jaxtrain.plan --config=from_hf --config.train.init_from=org/planned --devices=2",),
        *("jaxtrain.convert from_hf org/planned --workdir=converted_from_hub",),
    ):
        with runs.running(folder, *command.split(), environment=environment) as running:
            done = running.end()
        assert ("model.safetensors" in hub.files()) == ("convert" in command), done.out
    with runs.running(
        folder, *"jaxtrain.convert from_hf org/plan --workdir=none".split(), environment=environment
    ) as running:
        done = running.end(ExitStatus.BAD_CONFIG)
    assert done.err.startswith("error: from_hf='org/plan' is nothing here, and no repository of")


@pytest.mark.full
def test_a_repository_without_safetensors(folder, hub):
    shutil.copytree(folder / "model", folder / "pickled")
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    hub.publish("models/org/pickled", folder / "pickled")
    settings = {"train.init_from": "org/pickled"}
    done = train_from_hub(hub, folder / "none", settings, status=ExitStatus.BAD_CONFIG)
    assert "has neither model.safetensors nor model.safetensors.index.json" in done.err
    assert done.err.count("\n") == 1 and not (folder / "none").exists()


@pytest.mark.full
def test_a_plan_needs_no_weights_of_prediction_modules(folder, hub):
    """Whether the files have them is in the index."""
    model, shard = folder / "glm", "model-00001-of-00001.safetensors"
    values = CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 1}
    name = f"model.layers.{values['num_hidden_layers']}.eh_proj.weight"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(values))
    (model / "tokenizer.json").write_text(WORDS)
    (model / shard).write_bytes(bytes(1000))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: shard}}))
    hub.publish("models/org/glm", model)
    hub.requests.clear()
    command = "jaxtrain.plan --config=from_hf --config.train.init_from=org/glm --devices=2"
    environment = hub.environment(folder / "hub_of_glm")
    with runs.running(folder, *command.split(), environment=environment) as running:
        assert "prediction" not in running.end().err
    small = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert hub.files() == small
