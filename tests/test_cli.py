"""cli.py: flags in, a checked Config out; one line and status 2 for anything wrong, with nothing
written and jax not imported."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
import types

import pytest
from jaxlib import xla_client
from support import ROOT

from jaxtrain import __version__, cli, config as cfg, train_command as train
from jaxtrain.checkpoint import steps
from jaxtrain.config import flags
from jaxtrain.config.recipes import load_recipe
from jaxtrain.config.sizes import GPU_MEMORY, gpu_memory
from jaxtrain.devices import startup
from jaxtrain.planner.layer import hardware

EXTRA = (
    flags.Flag("prompt", "", "a text"),
    flags.Flag("greedy", False, "a boolean"),
    flags.Flag("temperature", 1.0, "a number", at_least=0),
)


PLAIN = """
from jaxtrain.config import *
def get_config():
    return Config(model=ModelConfig(layers=8, heads=4), mesh=MeshConfig(stage=2, model=2))
"""


DEVICES_1 = (
    "mesh.stage=2 does not fit: mesh.stage=2 × mesh.model=2 = 4 does not divide the 1 device"
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path_factory, monkeypatch):
    """Every test runs in a folder with a recipe of its own, PLAIN: the shipped ones may change."""
    monkeypatch.setattr(cli, "has_devices", lambda: False)  # other tests may have used jax
    folder = tmp_path_factory.mktemp("folder")
    (folder / "configs").mkdir()
    (folder / "configs" / "tiny.py").write_text(PLAIN)
    monkeypatch.chdir(folder)


def parse(*argv: str):
    return cli.parse(["--config=configs/tiny.py", *argv], "usage: test\n\nA test.", EXTRA)


def error(capsys, *argv: str) -> str:
    """The one line that a wrong command line ends with."""
    with pytest.raises(cli.FlagsError) as ended:
        parse(*argv)
    assert ended.value.status == 2 and "\n" not in str(ended.value)
    assert capsys.readouterr() == ("", "")
    return str(ended.value).strip()


def test_no_flags_is_the_shipped_tiny_recipe():
    """Also in a folder with a configs/tiny.py of its own."""
    config, flags = cli.parse([], "usage: test", EXTRA)
    assert config == load_recipe(ROOT / "configs" / "tiny.py")
    assert pathlib.Path(flags.config) == ROOT / "configs" / "tiny.py"
    assert (flags.workdir, flags.cpu_devices, flags.greedy) == (
        os.path.join("runs", "tiny"),
        0,
        False,
    )


@pytest.mark.parametrize(
    "argv, path, value",
    [
        (["--config.mesh.stage=4"], "mesh.stage", 4),
        (["--config.mesh.stage", "4"], "mesh.stage", 4),
        (["--config.mesh.stage=4", "--config.mesh.stage=1"], "mesh.stage", 1),
        (["--config.mesh.data", "-1"], "mesh.data", -1),
        (["--config.train.profile_steps=3"], "train.profile_steps", 3),
        (["--config.optimizer.learning_rate=1"], "optimizer.learning_rate", 1.0),
        (["--config.optimizer.learning_rate", "1e-3"], "optimizer.learning_rate", 1e-3),
        (["--config.model.qk_norm"], "model.qk_norm", True),
        (["--config.model.qk_norm", "--greedy"], "model.qk_norm", True),
        (["--config.model.qk_norm", "true"], "model.qk_norm", True),
        (["--config.model.biases=qkv, out"], "model.biases", ("qkv", "out")),
        (["--config.model.biases="], "model.biases", ()),
        (["--config.model.tied_embeddings=false"], "model.tied_embeddings", False),
        (["--config.train.sample_prompt=a = b, 'c'"], "train.sample_prompt", "a = b, 'c'"),
        (["--config.train.sample_prompt="], "train.sample_prompt", ""),
        (["--config.train.sample_prompt=3"], "train.sample_prompt", "3"),
        (["--config.data.text_fields=prompt"], "data.text_fields", ("prompt",)),
        (["--config.data.text_fields=prompt, answer"], "data.text_fields", ("prompt", "answer")),
        (
            ["--config.data.text_fields", '("prompt", "answer")'],
            "data.text_fields",
            ("prompt", "answer"),
        ),
        (["--config.data.text_fields=['prompt']"], "data.text_fields", ("prompt",)),
        (['--config.data.text_fields="prompt"'], "data.text_fields", ("prompt",)),
        (["--config.data.loss_mask="], "data.loss_mask", ()),
        (
            ["--config.data.text_fields=prompt,answer", '--config.data.loss_mask=("prompt",)'],
            "data.loss_mask",
            ("prompt",),
        ),
        (
            ["--config.data.text_fields=prompt,answer", "--config.data.loss_mask=prompt"],
            "data.loss_mask",
            ("prompt",),
        ),
    ],
)
def test_overrides(argv, path, value):
    found = cfg.get(parse(*argv)[0], path)
    assert found == value and type(found) is type(value)


def test_other_flags():
    _, flags = parse(
        "--prompt", "a b", "--greedy", "--temperature=2", "--workdir", "x y", "--cpu_devices=4"
    )
    assert (flags.prompt, flags.greedy, flags.temperature, flags.workdir, flags.cpu_devices) == (
        "a b",
        True,
        2.0,
        "x y",
        4,
    )
    assert isinstance(flags.temperature, float)
    _, flags = parse(
        "--coordinator=localhost:123", "--processes=2", "--process_id=1", "--cpu_devices=4"
    )
    assert (flags.coordinator, flags.processes, flags.process_id) == ("localhost:123", 2, 1)


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--config.mesh.stag=4"],
            "mesh.stag='4' is an unknown setting: use --config.mesh.stage=4",
        ),
        (
            ["--config.mesh.stag=3"],
            "mesh.stag='3' is an unknown setting: use --config.mesh.stage=2",
        ),
        (
            ["--config.mesh.stag=x"],
            "mesh.stag='x' is an unknown setting: use --config.mesh.stage=2",
        ),
        (
            ["--config.mesh=4"],
            "mesh='4' is a group of settings, such as mesh.replica: use --config.mesh.replica=1",
        ),
        (["--config.steps=4"], "steps='4' is an unknown setting: use --config.train.steps=4"),
        (
            ["--config.mesh.stage.x=4"],
            "mesh.stage.x='4' is an unknown setting: use --config.mesh.stage=4",
        ),
        (
            ["--config.mesh.stage=abc"],
            "mesh.stage='abc' is not an integer: use --config.mesh.stage=2",
        ),
        (
            ["--config.mesh.stage=2.5"],
            "mesh.stage='2.5' is not an integer: use --config.mesh.stage=2",
        ),
        (["--config.mesh.stage="], "mesh.stage='' is not an integer: use --config.mesh.stage=2"),
        (
            ["--config.train.steps=1e3"],
            "train.steps='1e3' is not an integer: use --config.train.steps=1000",
        ),
        (
            ["--config.optimizer.b1=x"],
            "optimizer.b1='x' is not a number",
        ),
        (
            ["--config.optimizer.b1=nan"],
            "optimizer.b1=nan is not a finite number: use --config.optimizer.b1=0.9",
        ),
        (
            ["--config.model.qk_norm=maybe"],
            "model.qk_norm='maybe' is not a boolean (true or false)",
        ),
        (
            ["--config.model.biases=true"],
            "model.biases=('true',) names 'true', which is none of qkv, out, mlp, router, norm, "
            "experts: use --config.model.biases=",
        ),
        (
            ["--config.data.loss_mask=(1,)"],
            "data.loss_mask='(1,)' is not a tuple of strings: use --config.data.loss_mask=1 "
            "--config.data.text_fields=1,text",
        ),
        (
            ['--config.data.loss_mask=("a"'],
            "data.loss_mask='(\"a\"' is not a tuple of strings: use --config.data.loss_mask=a "
            "--config.data.text_fields=a,text",
        ),
        (
            ["--config.mesh.model=3"],
            "mesh.model=3 does not divide model.heads=4: use --config.mesh.model=2 (or 1, 4)",
        ),
        (
            ["--config.optimizer.name=adamv"],
            "optimizer.name='adamv' is unknown: use --config.optimizer.name=adamw",
        ),
        (["--config.mesh.stage"], "--config.mesh.stage has no value: use --config.mesh.stage=2"),
        (
            ["--config.mesh.stage", "--greedy"],
            "--config.mesh.stage has no value: use --config.mesh.stage=2",
        ),
        (
            ["--config.data.source=no/such"],
            "data.source='no/such' is neither 'stdlib' nor an existing path",
        ),
        (
            ["--config.data.source=a,b"],
            "data.source='a,b' is neither 'stdlib' nor an existing path, nor a list: files of one "
            "corpus are a folder or a pattern",
        ),
        (
            ["--config.data.tokenizer=a,b"],
            "data.tokenizer='a,b' is neither 'bytes' nor an existing path",
        ),
        *(
            (
                [f"--config.{path}=10"],
                f"{path}='10' is an unknown setting: use --help, which lists all settings",
            )
            for path in (
                "metrics.wandb",
                "checkpoint.steps",
                "model.hidden_size",
                "train.max_steps",
            )
        ),
        (
            ["--config.train.steps=300k"],
            "train.steps='300k' is not an integer: use --config.train.steps=300000",
        ),
        (
            ["--config.train.batch_size=4"],
            "train.batch_size='4' is an unknown setting: use --config.data.batch_size=4",
        ),
        (["--workdir"], "--workdir has no value: use --workdir="),
        (["--wrkdir=x y"], "--wrkdir is an unknown flag: use --workdir='x y'"),
        (["--qqqq"], "--qqqq is an unknown flag: use --help, which lists all flags"),
        (["--stage=3"], "--stage is an unknown flag: use --config.mesh.stage=2"),
        (["--mesh.stage=4"], "--mesh.stage is an unknown flag: use --config.mesh.stage=4"),
        (["mesh.stage=4"], "argument 'mesh.stage=4' belongs to no flag: use --config.mesh.stage=4"),
        (
            ["--config.train.sample_prompt=def", "main():"],
            "argument 'main():' belongs to no flag: use --config.train.sample_prompt='def main():'",
        ),
        (["--prompt=a", "b", "c"], "argument 'b' belongs to no flag: use --prompt='a b c'"),
        (
            ["--greedy=true", "junk"],
            "argument 'junk' belongs to no flag: use two dashes before a NAME=VALUE, and "
            "quotes around a value with spaces",
        ),
        (
            ["--greedy", "junk"],
            "argument 'junk' belongs to no flag: use two dashes before a NAME=VALUE, and "
            "quotes around a value with spaces",
        ),
        (
            ["--greedy=true", "-x"],
            "argument '-x' belongs to no flag: use two dashes before a NAME=VALUE, and quotes "
            "around a value with spaces",
        ),
        (["--greedy=maybe"], "--greedy='maybe' is not a boolean: use --greedy=true (or false)"),
        (["--temperature=hot"], "--temperature='hot' is not a number"),
        (["--temperature=nan"], "--temperature=nan must be at least 0: use --temperature=0.0"),
        (["--cpu_devices=-1"], "--cpu_devices=-1 must be at least 0: use --cpu_devices=0"),
        (
            ["--cpu_devices=1.5"],
            "--cpu_devices='1.5' is not an integer: use --cpu_devices=2 --config.mesh.stage=1",
        ),
        (
            ["--coordinator=host", "--cpu_devices=4"],
            "--coordinator='host' is not host:port: use --coordinator=localhost:29500",
        ),
        (
            ["--coordinator=s3://b/x", "--cpu_devices=4"],
            "--coordinator='s3://b/x' is not host:port: use --coordinator=localhost:29500",
        ),
        (
            ["--processes=2", "--cpu_devices=4"],
            "--processes=2 needs --coordinator=HOST:PORT (on one machine: python -m "
            "jaxtrain.launch): use --coordinator=localhost:29500",
        ),
        (["--process_id=1"], "--process_id=1 is not below --processes=1: use --process_id=0"),
        (
            [
                "--temperature=-1",
                "--config=tinny.py",
                "--config.train.steps=2k",
                "--config.mesh.data=3",
                "--config.model.norm=rmsnrm",
            ],
            "--temperature=-1 must be at least 0: use --temperature=0.0 --config=tiny "
            "--config.model.norm=rmsnorm "
            "--config.mesh.data=2 --config.train.steps=2000",
        ),
        (["--cpu_devices=1"], DEVICES_1 + ": use --config.mesh.stage=1 --config.mesh.model=1"),
        (
            ["--cpu_devices=6", "--config.mesh.model=3"],
            "mesh.model=3 does not divide model.heads=4: use --config.mesh.model=2 "
            "--config.mesh.stage=3",
        ),
        (
            [
                "--coordinator=localhost:1",
                "--processes=3",
                "--cpu_devices=2",
                "--config.mesh.stage=4",
            ],
            "mesh.stage=4 does not fit: mesh.stage=4 × mesh.model=2 = 8 does not divide the 6 "
            "devices: use --config.mesh.stage=3",
        ),
        (
            ["--config=tinny"],
            "--config='tinny' is neither a file nor a recipe of jaxtrain's: use --config=tiny",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_flags(capsys, argv, message):
    assert error(capsys, *argv) == message


@pytest.mark.parametrize(
    ("argv", "use"),
    [
        (["--dry_run=x", "--replay=1"], "--dry_run=true --replay=0"),
        (["--json", "--replay=2"], "--dry_run=true --replay=0"),
        (
            ["--json=x", "--config.train.steps=1k"],
            "--json=true --dry_run=true --config.train.steps=1000",
        ),
        (["--processes=9223372036854775808", "--cpu_devices=-1"], "--processes=1 --cpu_devices=0"),
        (["--workdir=configs/tiny.py/x", "--process_id=1"], "--process_id=0 --workdir=runs/x"),
        (
            ["--workdir=" + "a" * 5000, "--process_id=1"],
            "--process_id=0 --workdir=runs/" + "a" * 100,
        ),
        (
            ["--config.mesh.model=3", "--workdir=s3://bucket/x"],
            "--workdir=runs/x --config.mesh.model=2",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_train_suggests_works(argv, use):
    """All that is wrong is said at once, of several flags in a circle, too."""
    call = lambda *more: cli.parse(
        ["--config=configs/tiny.py", *argv, *more], "usage: x", train.FLAGS, check=train.check_flags
    )
    with pytest.raises(cli.FlagsError) as refused:
        call()
    suggested = str(refused.value).rpartition(": use ")[2]
    assert suggested == use
    call(*shlex.split(suggested))


NO_SOURCE = "(and data.source='/absent' is neither 'stdlib' nor an existing path)"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--config.mesh.stage=3", f": use --config.mesh.stage=2 {NO_SOURCE}"),
        ("--config.mesh.stage=3 --config.model.heads=3", NO_SOURCE),
        ("--config.train.steps=x --config.mesh.stage=3", "train.steps='x' is not an integer"),
        (
            "--config.model.norm=none --config.optimizer.parameter_scale=2",
            ": use --config.model.norm=rmsnorm (and optimizer.parameter_scale='2' is not a "
            "boolean (true or false))",
        ),
        ("--json=true", f"--json=true is for --dry_run alone: use --dry_run=true {NO_SOURCE}"),
        ("", "data.source='/absent' is neither 'stdlib' nor an existing path"),
    ],
)
def test_what_no_flag_mends_hides_no_flags_of_others(argv, says):
    words = ["--cpu_devices=4", "--config.data.source=/absent", *argv.split()]
    with pytest.raises(cli.FlagsError) as refused:
        cli.parse(words, "", train.FLAGS, check=train.check_flags)
    assert str(refused.value).endswith(says)


ONE_STAGE = [
    *("--config.mesh.stage=1", "--config.mesh.model=1", "--config.pipeline.microbatches=1"),
    "--config.model.layers=2",
]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--cpu_devices=3", *ONE_STAGE],
            "data.batch_size=8 is no multiple of mesh.data=3, that is 3: use --cpu_devices=2",
        ),
        (
            ["--cpu_devices=4", *ONE_STAGE, "--config.mesh.stage=3"],
            ": use --config.mesh.stage=2",
        ),
        (
            ["--cpu_devices=4", *ONE_STAGE, "--config.data.batch_size=6"],
            ": use --config.data.batch_size=8",
        ),
    ],
)
def test_what_a_run_resumes_from_decides_what_is_suggested(argv, says, monkeypatch, tmp_path):
    """A batch of 8 is the checkpoint's, and no other may be suggested."""
    stored, _ = parse("--cpu_devices=4", "--config.data.batch_size=8", *ONE_STAGE)
    resumed = steps.StepChoice(step=4, meta=steps.Meta(cfg.to_dict(stored)))
    monkeypatch.setattr(steps, "choose", lambda folder, needs: resumed)
    with pytest.raises(cli.FlagsError) as refused:
        parse("--config.data.batch_size=8", f"--workdir={tmp_path}", *argv)
    assert str(refused.value).endswith(says)
    monkeypatch.setattr(steps, "choose", lambda folder, needs: steps.StepChoice())
    with pytest.raises(cli.FlagsError) as refused:
        parse("--config.data.batch_size=8", f"--workdir={tmp_path}", *argv)
    assert ": use --config." in str(refused.value)


def test_places_that_no_flag_mends_are_said_with_the_flags(tmp_path):
    """They are looked at where something else is wrong, too."""
    argv = [
        "--config=configs/tiny.py",
        "--process_id=1",
        "--config.checkpoint.directory=configs/tiny.py",
    ]
    with pytest.raises(
        cli.FlagsError,
        match=r"use --process_id=0 \(and checkpoint.directory='configs/tiny.py' is not a folder: ",
    ):
        cli.parse(argv, "usage: x", train.FLAGS, check=train.check_flags)


@pytest.mark.parametrize(
    "argv",
    [
        ["--config.mesh.stage=x", "--config.mesh.stage=4"],
        ["--workdir", "--workdir=x"],
        ["--config.mesh.stage", "--config.mesh.stage=4"],
        ["--cpu_devices=x", "--cpu_devices=8"],
        ["--config=none.py", "--config=configs/tiny.py"],
        ["--config.data.loss_mask=(", "--config.data.loss_mask="],
    ],
    ids=str,
)
def test_what_is_put_behind_a_wrong_flag_counts(argv):
    parse(*argv)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--config.data.source=YOUR_DATA"], "--config.data.source=YOUR_DATA is a placeholder"),
        (["--config", "YOUR_RECIPE.py"], "--config=YOUR_RECIPE.py is a placeholder"),
        (
            ["--workdir=/a/YOUR_RUN", "--process_id=YOUR_ID", "--config.train.steps=YOUR_STEPS"],
            "--workdir=/a/YOUR_RUN, --process_id=YOUR_ID, --config.train.steps=YOUR_STEPS are "
            "placeholders",
        ),
        (
            ["--config.train.init_from=YOUR_MODEL", "--coordinator=YOUR_HOST:29500", "--stages=4"],
            "--config.train.init_from=YOUR_MODEL, --coordinator=YOUR_HOST:29500 are placeholders",
        ),
        (
            ["--config.parallel.compiler_options=a=1,b=YOUR_VALUE"],
            "--config.parallel.compiler_options=a=1,b=YOUR_VALUE is a placeholder",
        ),
    ],
    ids=str,
)
def test_placeholders_are_refused_by_name(argv, named):
    """Before all else, which may follow from them; no flag is suggested in their place."""
    with pytest.raises(cli.FlagsError) as refused:
        parse(*argv)
    assert str(refused.value) == f"{named}: use what you have in place of each YOUR_…"
    assert refused.value.status == 2


def test_placeholders_of_a_recipe_are_refused_until_flags_replace_them(tmp_path):
    (tmp_path / "planned.py").write_text(
        "from jaxtrain.config import Config, DataConfig\n"
        "def get_config(): return Config(data=DataConfig(source='YOUR_DATA', batch_size=16))\n"
    )
    recipe = f"--config={tmp_path}/planned.py"
    with pytest.raises(cli.FlagsError, match=r"^--config\.data\.source=YOUR_DATA is a placeholder"):
        parse(recipe)
    config, _ = parse(recipe, "--config.data.source=stdlib")
    assert config.data.source == "stdlib"
    # what is put behind counts, and a prompt is no placeholder
    prompt = "YOUR_NAME: a name"
    config, _ = parse("--workdir=YOUR_RUN", "--workdir=x", f"--config.train.sample_prompt={prompt}")
    assert config.train.sample_prompt == prompt


def test_devices_that_jax_alone_knows(capsys, monkeypatch):
    """Where accelerators may be found, jax is asked before anything is suggested."""
    monkeypatch.setattr(cli.cluster_environment, "simulated_devices", lambda *_: None)
    started = []
    monkeypatch.setattr(cli, "start_jax", lambda namespace, config: started.append(namespace))
    parse("--config.mesh.model=4")
    assert not started
    assert error(capsys, "--config.mesh.model=3", "--config.mesh.data=4").endswith(
        "use --config.mesh.model=1"
    )
    assert started


RECIPES = {
    "raises": (
        "def get_config():\n    x = 1\n    return x / 0\n",
        ", line 3, raises ZeroDivisionError: division by zero",
    ),
    "syntax": ("def get_config(:\n", ", line 1, raises SyntaxError"),
    "import": ("import nothing_like_it\n", ", line 1, raises ModuleNotFoundError"),
    "exits": ("import sys\nsys.exit('bye\\nbye')\n", "raises SystemExit: bye bye"),
    "none": (
        "x = 1\n",
        "defines no function get_config(), which returns a jaxtrain.config.Config: use "
        "--config=tiny",
    ),
    "number": (
        "def get_config():\n    return 3\n",
        "get_config() returns int, not a jaxtrain.config.Config: use --config=tiny",
    ),
    "group": (
        "from jaxtrain.config import Config\ndef get_config():\n    return Config(mesh=3)\n",
        "mesh=3 is not a MeshConfig: use --config=tiny",
    ),
    "field": (
        "from jaxtrain.config import *\ndef get_config():\n    return "
        "Config(mesh=MeshConfig(stag=3))\n",
        "line 3, raises TypeError: MeshConfig.__init__() got an unexpected keyword argument 'stag'",
    ),
    "type": (
        "from jaxtrain.config import *\ndef get_config():\n    return "
        "Config(mesh=MeshConfig(stage='3'))\n",
        "mesh.stage='3' is not an integer: use --config.mesh.stage=1",
    ),
    "rule": (
        "from jaxtrain.config import *\ndef get_config():\n    return "
        "Config(mesh=MeshConfig(model=3))\n",
        "mesh.model=3 does not divide model.heads=4: use --config.mesh.model=2 (or 1, 4)",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_wrong_recipes(capsys, tmp_path, name):
    source, message = RECIPES[name]
    (tmp_path / "recipe.py").write_text(source)
    assert message in error(capsys, f"--config={tmp_path / 'recipe.py'}")
    assert os.listdir(tmp_path) == ["recipe.py"]


def test_integers_for_floats_in_a_recipe_can_be_overridden(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxtrain.config import *\ndef get_config():\n    return "
        "Config(optimizer=OptimizerConfig(learning_rate=1))\n"
    )
    config, flags = parse(
        f"--config={tmp_path / 'mine.py'}", "--config.optimizer.learning_rate=0.5"
    )
    assert config.optimizer.learning_rate == 0.5
    assert flags.workdir == os.path.join("runs", "mine")


def test_help_names_everything(capsys):
    for argv in (["--help"], ["-h"], ["--config.mesh.stag=1", "--help"]):
        with pytest.raises(SystemExit) as ended:
            parse(*argv)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    text = " ".join(out.split())
    for path, field in cfg.fields().items():
        assert f"--config.{path}: {cfg.plain_type(field.type)} = " in text
        assert cfg.setting_of(field).doc in text
    for flag in (*flags.SHARED_FLAGS, *EXTRA):
        assert f"--{flag.name}=" in text and flag.doc in text


@pytest.mark.parametrize(
    "call",
    [
        lambda: parse("--version"),
        lambda: flags.read_flags(["--version"], "usage: x", EXTRA, with_config=False),
    ],
)
def test_version(capsys, call):
    with pytest.raises(SystemExit) as ended:
        call()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"jaxtrain {__version__}\n")


def test_flags_without_a_recipe(capsys):
    read = cli.command(lambda argv: cli.checked_flags(argv, "usage: x", EXTRA, lambda _: 0))
    assert read(["--prompt=x"]) == 0
    assert read(["--config.mesh.stage=3"]) == 2
    assert "error: --config.mesh.stage is an unknown flag" in capsys.readouterr().err


IN_ANOTHER_PROCESS = """
import json, sys
from jaxtrain import cli
status = 0
try:
    cli.parse(sys.argv[1:], "usage: x")
except cli.FlagsError as error:
    status = error.status
print(json.dumps([status, sorted(
    {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax", "optax", "orbax"}
)]))
"""


@pytest.mark.parametrize(
    "flag",
    ["--config.mesh.stage=2", "--config.mesh.stage=x", "--config.mesh.stag=2", "--config=none.py"],
)
def test_jax_is_not_imported_and_nothing_is_written(tmp_path, flag):
    start = time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, flag],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    status, modules = json.loads(done.stdout)
    assert (status, modules) == (0 if flag == "--config.mesh.stage=2" else 2, [])
    assert os.listdir(tmp_path) == []
    assert time.monotonic() - start < 5


def test_devices_of_a_program_that_has_started_jax_distributed(monkeypatch):
    """The environment says how many this process simulates, and nothing of the others: jax is
    believed alone. So it is where it has devices, here eight."""
    import jax

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    with pytest.raises(cli.FlagsError, match=DEVICES_1):
        parse()
    with monkeypatch.context() as changed:
        changed.setattr(jax.distributed, "is_initialized", lambda: True)
        parse()
    monkeypatch.setattr(cli, "has_devices", lambda: True)
    parse()


def test_a_refused_setting_is_an_error_of_the_run():
    with (
        pytest.raises(cli.FlagsError, match="^mesh.data=3 bad$") as refused,
        cli.refused_settings(),
    ):
        raise cfg.ConfigError("mesh.data", 3, "bad")
    assert refused.value.status == 2


# --- what start_jax sets before jax is there ------------------------------------------------------


def test_xla_flags_are_added_where_the_user_says_nothing():
    environment = {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=7 --xla_dump_to=x"}
    startup.set_xla_flags(environment)
    assert environment["XLA_FLAGS"].split() == [
        "--xla_cpu_collective_timeout_seconds=7",
        "--xla_dump_to=x",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3000",
        "--xla_cpu_collective_call_terminate_timeout_seconds=3000",
        "--xla_gpu_memory_limit_slop_factor=100",
        "--xla_gpu_enable_command_buffer=-CUDNN",
    ]
    once = dict(environment)
    startup.set_xla_flags(environment)
    assert environment == once
    startup.set_xla_flags(environment, side_by_side=True)
    assert environment == once | {"NPROC": "32"}
    startup.set_xla_flags(own := {"NPROC": "5"}, side_by_side=True)
    assert own["NPROC"] == "5"


@pytest.mark.parametrize(
    "user",
    [
        {},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": ""},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # the fraction bounds what is taken by and by
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "Platform"},
    ],
    ids=str,
)
def test_jax_takes_as_much_of_a_gpus_memory_as_plans_count_with(monkeypatch, user):
    """By what jaxlib makes of the environment; both of its names at once would be its error."""
    for name in (*startup.MEMORY_FRACTION, "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XLA_FLAGS", "")
    before = dict(os.environ)
    startup.set_xla_flags(environment := dict(before))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = xla_client.generate_pjrt_gpu_plugin_options()
    is_platform = options["allocator"] == "platform"
    own = 0.5 if "0.5" in user.values() else GPU_MEMORY
    assert options.get("memory_fraction") == (None if is_platform else own)
    h100 = hardware.load("h100")
    assert h100.memory == own * h100.memory_gib * 2**30


@pytest.mark.parametrize("text, fraction", [("4.0", 1.0), ("0", GPU_MEMORY), ("x", GPU_MEMORY)])
def test_a_fraction_that_is_none_of_a_gpus_memory(text, fraction):
    """More is memory of the host; jax refuses a text."""
    assert gpu_memory({"XLA_CLIENT_MEM_FRACTION": text}) == fraction


@pytest.mark.parametrize(
    "file, name, extra",
    [("/dev/nvidia0", "an NVIDIA GPU", "cuda13"), ("/dev/accel0", "a TPU", "tpu")],
)
def test_an_accelerator_without_its_package_is_one_line(monkeypatch, file, name, extra):
    flags = lambda devices: types.SimpleNamespace(cpu_devices=devices)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    said = startup.unused_accelerator(flags(0), lambda path: path == file)
    assert said.startswith(
        f"{name} is here, and jax has no working package for it: JAXTRAIN_EXTRAS={extra} "
        "scripts/train.sh"
    )
    assert (ROOT / f"requirements/{extra}.txt").is_file() and "\n" not in said
    assert not startup.unused_accelerator(flags(8), lambda path: path == file)
    assert not startup.unused_accelerator(flags(0), lambda path: False)


def test_compilation_cache_folder():
    assert startup.compilation_cache({"JAXTRAIN_CACHE": "/x"}) == os.path.join("/x", "xla")
    assert startup.compilation_cache({}).startswith(os.path.expanduser("~"))


START = """
import sys
from jaxtrain import cli
from jaxtrain.config.flags import CLUSTER_FLAGS
from jaxtrain.devices.startup import start_jax
flags = cli.checked_flags(sys.argv[1:], "usage: x", CLUSTER_FLAGS, lambda flags: flags)
start_jax(flags)
import jax
print(
    jax.device_count(), jax.default_backend(),
    jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir,
)
"""


@pytest.mark.parametrize(
    "argv, xla_flags, devices",
    [
        ([], "", 8),
        (["--cpu_devices=3"], "", 3),
        ([], "--xla_force_host_platform_device_count=2", 2),
        (["--cpu_devices=1"], "", 1),
    ],
)
def test_start_jax_on_a_machine_without_accelerator(tmp_path, argv, xla_flags, devices):
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_", "OMPI_"))
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": xla_flags,
        "JAX_PLATFORMS": "cpu",
        "JAXTRAIN_CACHE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", START, *argv],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *said, found = done.stdout.splitlines()
    # programs of several CPU devices are not kept: out of the cache they can hang
    assert found == (f"{devices} cpu False None" if devices > 1 else f"1 cpu True {tmp_path}/xla")
    expected = [
        "no accelerator found: simulating 8 CPU devices (--cpu_devices=N for another number)"
    ]
    assert said == (expected if not argv and not xla_flags else [])


def test_compiled_programs_that_cannot_be_kept_cost_a_line(monkeypatch, capsys):
    """Not a warning of jax's for each program."""
    import jax

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setenv("JAXTRAIN_CACHE", "/proc/nothing")
    startup.use_compilation_cache()
    line = (
        "warning: compiled programs are not kept: /proc/nothing/xla cannot be written (No such "
        "file or directory)\n"
    )
    assert "".join(capsys.readouterr()) == line and jax.config.jax_compilation_cache_dir is None
    monkeypatch.delenv("JAXTRAIN_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home folder
    startup.use_compilation_cache()
    line = "warning: compiled programs are not kept: there is no home folder (set HOME)\n"
    assert "".join(capsys.readouterr()) == line and not os.path.exists("~")
