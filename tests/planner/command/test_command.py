"""`python -m jaxtrain.plan`: what it prints and what it refuses, in this process."""

import json
import math
import re
import shlex

import pytest
from by_hand.fuzz_configs import suggested

from jaxtrain.config import Config, replace, to_dict
from jaxtrain.config.errors import UsageError
from jaxtrain.config.flags import SHARED_FLAGS, apply, read_flags, settled
from jaxtrain.config.recipes import find_recipe, load_recipe
from jaxtrain.config.rules.checks import check_devices
from jaxtrain.planner.command.main import main
from jaxtrain.planner.layer.hardware import known, load
from jaxtrain.planner.search import layout_flag, layout_search, predict
from jaxtrain.planner.step.other_frameworks import FRAMEWORKS

KEYS = (
    "step_time_s model_tflops_per_device hardware_tflops_per_device mfu hfu attention_flops "
    "memory_gib_per_device fits "
    "bubble_fraction tokens_per_s train_days step_time_range_s tokens_per_s_range "
    "train_days_range validation note layout notes command"
).split()
PUBLISHED = (
    "data=8,stage=16,model=8,microbatch=1,repeats=2,remat=selective,zero=1,schedule=interleaved"
)
GPT3 = ("--config=gpt3_175b", "--hardware=a100-80gb")


@pytest.fixture
def plan(capsys):
    """(what the command printed, what it said of an error) for flags."""

    def run(*argv: str) -> tuple[str, str]:
        status = main(argv)
        out, err = capsys.readouterr()
        assert status == (2 if err else 0) and (
            not err or (err.count("\n") == 1 and err.startswith("error: ") and not out)
        )
        return out, err

    return run


def test_json(plan):
    figures = json.loads(
        plan(*GPT3, "--devices=1024", f"--layout={PUBLISHED}", "--tokens=300e9", "--json")[0]
    )
    assert list(figures) == KEYS
    tokens_per_s = 1536 * 2048 / figures["step_time_s"]
    assert figures["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert figures["train_days"] == pytest.approx(300e9 / tokens_per_s / 86400)
    peak = load("a100-80gb").peak_tflops["bfloat16"]
    assert (
        figures["mfu"] == pytest.approx(figures["model_tflops_per_device"] / peak)
        and 0 < figures["mfu"] <= figures["hfu"] < 1
    )
    assert figures["fits"] and 0 < figures["bubble_fraction"] < 0.2
    assert {key: str(value) for key, value in figures["layout"].items()}.items() >= dict(
        x.split("=") for x in PUBLISHED.split(",")
    ).items()


def test_layout_replaces_the_recipe_before_any_check(plan):
    """The recipe's own mesh and repeats do not fit 95 layers on 19 stages; the layout does."""
    layout = "--layout=data=2,stage=19,microbatch=1,schedule=1f1b"
    figures = json.loads(
        plan(*GPT3, "--config.model.layers=95", "--config.mesh.stage=7", layout, "--json")[0]
    )
    assert (
        figures["layout"]["stage"] == 19
        and figures["layout"]["repeats"] == 1
        and figures["layout"]["model"] == 1
    )
    assert figures["train_days"] is None


def test_a_layout_keeps_what_is_saved_with_its_recomputation():
    """mixtral_8x7b recomputes all from layers' inputs, the other one all but named values. It also
    keeps overlapped cells where its schedule has them."""
    mixtral, tiny = (load_recipe(find_recipe(name)) for name in ("mixtral_8x7b", "tiny"))
    named = replace(tiny, {"pipeline.remat": "selective", "pipeline.save": ("attention", "mlp_in")})
    saved = [
        [
            layout_flag.apply(recipe, layout_flag.read(f"stage=2,{word}")).pipeline.save
            for word in ("zero=1", "remat=full", "remat=selective:2", "remat=none", "remat=full:1")
        ]
        for recipe in (mixtral, named)
    ]
    inputs, names = ("layer_input",), ("attention", "mlp_in")
    assert saved == [[inputs, inputs, (), (), inputs], [names, (), names, (), ()]]
    overlaps = [
        layout_flag.apply(mixtral, layout_flag.read(f"stage=2,{word}")).pipeline.overlap
        for word in ("zero=1", "schedule=dualpipe_v", "schedule=zb_h1")
    ]
    assert overlaps == [True, True, False]


def test_layout_that_does_not_fit_is_evaluated(plan):
    figures = json.loads(plan(*GPT3, "--layout=data=8,microbatch=1", "--json")[0])
    assert (
        not figures["fits"] and figures["memory_gib_per_device"] > 80 and figures["step_time_s"] > 0
    )


def test_settings_change_the_model(plan):
    small, plain, scores = (
        json.loads(plan(*GPT3, f"--layout={PUBLISHED}", *flags, "--json")[0])
        for flags in (["--config.model.layers=64"], [], ["--config.model.attention_kernel=xla"])
    )
    assert 0.6 < small["step_time_s"] / plain["step_time_s"] < 0.75
    assert scores["step_time_s"] > 1.05 * plain["step_time_s"]  # they pass through memory
    assert scores["model_tflops_per_device"] < plain["model_tflops_per_device"]


@pytest.mark.parametrize("assume", FRAMEWORKS)
def test_programs(plan, assume):
    figures = json.loads(plan(*GPT3, f"--assume={assume}", f"--layout={PUBLISHED}", "--json")[0])
    assert 0.1 < figures["mfu"] < 0.9


ERRORS = [
    (["--layout=tp=8"], "--layout names 'tp', and its keys are .*: use --layout=model=8"),
    (["--layout=data=²"], "data='²', which must be a whole number from 1 on: use --layout=data=1"),
    (["--layout=data=8", "--hardware=h100:²"], "is not known .*: use --hardware=h100$"),
    (
        ["--layout=stage=2", "--hardware=h100:512,h200:0"],
        "has 'h200:0', which is no NAME:DEVICES: use --hardware=h100$",
    ),
    (
        ["--layout=data=8,microbatch=5"],
        "microbatch=5 does not divide the 192 sequences .*: use --layout=data=8,microbatch=4$",
    ),
    (
        ["--layout=data=7,stage=4,microbatch=5"],
        "does not divide it: use --layout=data=6,stage=4,microbatch=4$",
    ),
    (
        ["--layout=data=8,expert=2,microbatch=1"],
        "mesh.expert=2 .*: use --layout=data=8,expert=1,microbatch=1$",
    ),
    (
        ["--layout=data=7"],
        "cuts data.batch_size=1536 by data=7, .*: use --layout=data=6,microbatch=4$",
    ),
    (
        ["--layout=data=8,model=7"],
        "mesh.model=7 does not divide model.heads=96: use --layout=data=8,model=8",
    ),
    (["--layout=overlap=on"], "the choices are true, false: use --layout=overlap=false"),
    (["--layout=overlap="], "has no value for overlap: use --layout=overlap=false"),
    (["--layout=remat=sel"], "the choices are full, selective, none: use --layout=remat=selective"),
    (["--layout=data=x"], "data='x', which must be a whole number from 1 on: use --layout=data=1"),
    (["--layout=data=2,data=2"], "names data twice"),
    (
        ["--layout=data=8,stage=2,repeats=2,schedule=1f1b"],
        "does not fit pipeline.schedule='1f1b', .*: use --layout=.*repeats=1,",
    ),
    (
        ["--layout=data=8", "--devices=16"],
        "--devices=16 and --layout, which is for 8, .*: use --devices=8 .or data=16 in --layout.",
    ),
    (["--layout=data=8", "--hardware=a100"], "--hardware='a100' is not known .*: use --hardware="),
    (
        ["--layout=data=8", "--assume=megatron"],
        "--assume='megatron' is not known .*: use --assume=megatron",
    ),
    (
        ["--layout=data=8,microbatch=1", "--config.model.width=0"],
        "model.width=0 must be at least 1",
    ),
    (["--layout=data=8", "--device=16"], "--device is an unknown flag: use --devices=8"),
]


@pytest.mark.parametrize("argv, text", ERRORS, ids=[" ".join(argv) for argv, _ in ERRORS])
def test_errors(plan, argv, text):
    err = plan(*GPT3, *argv)[1]
    assert re.search(text, err), err
    if use := re.search(r": use (--layout=\S+)$", err):  # what is suggested works
        assert plan(*GPT3, use[1], "--json")[0]


def test_the_layout_of_auto_is_one(plan):
    """Which chooses how many chunks a stage has."""
    layout = "--layout=data=2,stage=2,microbatch=2,schedule=auto,repeats=0"
    found = json.loads(plan("--config=tiny", layout, "--json")[0])
    assert found["layout"]["repeats"] == 0
    assert (
        json.loads(plan("--config=tiny", f"--layout={layout_text(found['layout'])}", "--json")[0])
        == found
    )


# --- the command that trains a plan ---------------------------------------------------------------


def trained(command: str) -> Config:
    """The config of a printed command, with its placeholders."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "jaxtrain.train"] and words[4].startswith("--workdir=")
    reading = read_flags(words[3:], "", SHARED_FLAGS, with_config=True)
    assert not reading.errors
    settings = [word for word in words if word.startswith("--config.")]
    changes = [tuple(word.removeprefix("--config.").split("=", 1)) for word in settings]
    return apply(load_recipe(find_recipe(reading.values["config"])), changes)


TOKENS = [
    ("llama3_8b", "h100", "data=64,zero=3,microbatch=2", 1e12, 64),
    ("gpt3_175b", "a100-80gb", PUBLISHED, 299_999_999_999, 1024),
    ("gpt2_124m", "tpu-v5e", "data=8", 524_288, 8),
    ("gpt2_124m", "gb200", "data=8", 524_289, 8),
    ("gpt2_124m", "h100", "data=8", 1.5, 8),
    ("tiny", "", "data=4,stage=2,schedule=zb_h1,repeats=1", 12_345_678.9, 8),
]


@pytest.mark.parametrize("recipe, kind, layout, tokens, devices", TOKENS)
def test_the_command_trains_what_was_planned(plan, recipe, kind, layout, tokens, devices):
    """Tokens are reached by as few steps as possible, the layout is the planned one, and what only
    the user knows is refused until it is filled in."""
    flags = (f"--config={recipe}", f"--hardware={kind}", f"--layout={layout}")
    found = json.loads(plan(*flags, f"--tokens={tokens}", "--json")[0])
    config = trained(found["command"])
    size = config.data.batch_size * config.data.sequence_length
    assert (config.train.steps - 1) * size < tokens <= config.train.steps * size
    assert layout_flag.of(config.resolve()) == found["layout"]
    check_devices(config, devices, "tpu" if "tpu" in kind else "gpu")
    expected = ["--workdir=YOUR_WORKDIR"]
    if recipe != "tiny":
        expected += ["--config.data.source=YOUR_DATA", "--config.data.tokenizer=YOUR_TOKENIZER"]
    if devices > 8 or kind == "gb200":
        expected += ["--coordinator=YOUR_HOST:29500", "--processes=YOUR_PROCESSES"]
        expected += ["--process_id=YOUR_PROCESS_ID"]
    assert [word for word in shlex.split(found["command"]) if "YOUR_" in word] == expected
    reading = read_flags(shlex.split(found["command"])[3:], "", SHARED_FLAGS, with_config=True)
    with pytest.raises(UsageError) as refused:
        settled(reading, lambda reading: None)
    assert all(word in str(refused.value) for word in expected)
    assert (
        f"{config.train.steps:,} steps of {size:,} tokens" in plan(*flags, f"--tokens={tokens}")[0]
    )


def test_the_command_has_what_the_user_has_named(plan, tmp_path):
    """And the hardware's file, without which a run would not know the planned devices; simulated
    ones are simulated."""
    named = ("--config.data.source=my texts/*.txt", "--config.data.tokenizer=a'b.json")
    for name, flag, count in (("mine", "", ""), ("cpu", "--cpu_devices=4", ""), ("one", "", ":4")):
        file = tmp_path / f"{name} file.json"
        kind = {"name": name, "like": "h100", "device_kind": "H100 of mine"}
        file.write_text(json.dumps(kind))
        layout = "--layout=data=2,stage=2"
        found = json.loads(
            plan("--config=llama3_8b", f"--hardware={file}{count}", layout, *named, "--json")[0]
        )
        config = trained(found["command"])
        assert config.train.hardware == str(file) and config.train.steps == 250_000
        assert (config.data.source, config.data.tokenizer) == ("my texts/*.txt", "a'b.json")
        assert "YOUR_DATA" not in found["command"] and flag in found["command"]
        assert found["note"].startswith("how sure: no measured run of this kind")


def test_no_command_trains_more_steps_than_there_are(plan, tmp_path):
    flags = ("--config=tiny", "--layout=data=4", "--tokens=1e14")
    assert plan(*flags)[0].endswith("no command trains it: train.steps has at most 2,147,483,647\n")
    assert json.loads(plan(*flags, "--json")[0])["command"] is None
    path = tmp_path / "planned.py"
    assert re.search(r"train.steps=\d+ is larger than", plan(*flags, f"--recipe={path}")[1])
    assert not path.exists()
    # what a rule says of the steps is said before there is a command that it would refuse
    traced = plan(
        "--config=tiny", "--layout=data=4", "--tokens=9", "--config.train.profile_steps=2"
    )
    assert traced[1].endswith(": use --config.train.profile_steps=0\n")


def test_what_a_command_does_not_do_as_planned_is_said(plan):
    layout = "--layout=data=8,microbatch=1"
    assert "to train it, though it does not fit, 95,000 steps of" in plan(*GPT3, layout)[0]
    other = plan(*GPT3, f"--layout={PUBLISHED}", "--assume=megatron2021")[0]
    assert "to train it with jaxtrain, which this is no plan of, 95,000 steps" in other
    assert other.count("how sure: 7 measured runs of this kind") == 1


# --- the search -----------------------------------------------------------------------------------


def layout_text(layout: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in layout.items())


LARGE = [
    pytest.param([*GPT3, "--devices=4096"], marks=pytest.mark.full),
    pytest.param(
        ["--config=mixtral_8x7b", "--hardware=h100", "--devices=64"], marks=pytest.mark.full
    ),
    pytest.param(
        ["--config=llama3_8b", "--hardware=tpu-v5e", "--devices=48"], marks=pytest.mark.full
    ),
]
SMALL = [
    pytest.param(["--config=mixtral_tiny", "--devices=16"], marks=pytest.mark.full),
    ["--config=tiny_diloco", "--devices=8"],
    ["--config=tiny", "--devices=7"],
    ["--config=tiny", "--devices=1"],
]


@pytest.mark.parametrize("argv", [*LARGE, *SMALL])
def test_search(plan, argv, tmp_path):
    """The choice fits, is on all devices, is what --layout says of it, and is one that train takes,
    by its flags and as a recipe."""
    path = tmp_path / "planned.py"
    found = json.loads(plan(*argv, "--json", f"--recipe={path}")[0])
    assert found["fits"] and list(found) == KEYS
    recipe, devices = (
        next(a for a in argv if a.startswith("--config=")),
        int(argv[-1].partition("=")[2]),
    )
    hardware = [a for a in argv if a.startswith("--hardware")]
    again = json.loads(
        plan(
            recipe,
            *hardware,
            f"--devices={devices}",
            f"--layout={layout_text(found['layout'])}",
            "--json",
        )[0]
    )
    assert again == found
    planned = load_recipe(path)
    check_devices(planned, devices, "tpu" if "tpu" in str(hardware) else "gpu")
    assert plan(*argv)[0].splitlines()[-1].strip() == found["command"]
    assert to_dict(trained(found["command"])) == to_dict(planned)


@pytest.mark.full  # a search over 1,024 devices
def test_text(plan):
    lines = plan(*GPT3, "--devices=1024", "--tokens=300e9", "--price=2", "--kwh_price=0.1")[
        0
    ].splitlines()
    published = json.loads(plan(*GPT3, f"--layout={PUBLISHED}", "--json")[0])
    rows = lines[: lines.index("")]
    assert len(rows) == 11 and rows[0].split()[:3] == ["data", "stage", "model"]
    clocks = [float(row[: rows[0].index("seconds") + 7].split()[-1]) for row in rows[1:]]
    assert clocks == sorted(clocks)
    assert rows[1].endswith("the fastest") and all("memory" in row for row in rows[2:])
    text = "\n".join(lines)
    for part in (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "matmuls",
        "attention",
        "bubble",
        "MFU",
        "HFU",
    ):
        assert part in text
    # the fastest layout has no pipeline
    assert "by the exact clock" in plan(*GPT3, f"--layout={PUBLISHED}")[0]
    days, hours, dollars = re.search(
        r"run: 300 billion tokens take ([\d.]+) days \([\s\S]*device-hours: ([\d,]+) \("
        r"[\s\S]*cost: US\$([\d,]+) \([\d,]+ to [\d,]+\) at US\$2 a device-hour",
        text,
    ).groups()
    assert int(hours.replace(",", "")) == pytest.approx(float(days) * 24 * 1024, rel=0.01)
    assert int(dollars.replace(",", "")) == pytest.approx(2 * int(hours.replace(",", "")), rel=0.01)
    times = lines[next(at for at, line in enumerate(lines) if line.startswith("time: ")) :]
    parts = [
        found
        for line in times
        if (found := re.fullmatch(r"  \w+ +([\d.]+) (m?s) +[\d.]+%.*", line))
    ]
    whole = float(re.search(r"time: ([\d.]+) s \([\d.]+ to [\d.]+\) a step", text)[1])
    assert sum(
        float(part[1]) / (1000 if part[2] == "ms" else 1) for part in parts
    ) == pytest.approx(whole, rel=0.01)
    # the choice is at least as fast as the published layout
    assert whole <= published["step_time_s"]
    layout = layout_flag.read(
        next(line for line in lines if line.startswith("layout: ")).removeprefix("layout: ")
    )
    # and tensor parallelism stays inside the node
    assert layout["model"] <= load("a100-80gb").tiers[0].devices


NOTHING = [
    pytest.param(
        [*GPT3, "--devices=8"],
        r"no layout fits into .* GiB .*: use --devices=(\d+)",
        marks=pytest.mark.full,
    ),
    (
        ["--config=tiny", "--config.model.width=32768", "--devices=1"],
        r"no layout fits into .*: use --devices=(\d+)",
    ),
]


@pytest.mark.parametrize("argv, text", NOTHING)
def test_the_nearest_that_works(plan, argv, text):
    nearest = re.search(text, plan(*argv)[1])
    assert nearest and json.loads(plan(*argv[:-1], f"--devices={nearest[1]}", "--json")[0])["fits"]


def test_a_large_batch(plan):
    """Of one sequence a microbatch it would be more microbatches than a step may have."""
    assert (
        json.loads(
            plan("--config=tiny", "--config.data.batch_size=131072", "--devices=1", "--json")[0]
        )["layout"]["microbatch"]
        > 1
    )


def test_a_model_that_fits_nowhere(plan, monkeypatch):
    """The numbers that are named work."""
    monkeypatch.setattr(layout_search, "MOST_TIMES", 1)
    large = [
        "--config=tiny",
        "--config.model.width=4096",
        "--config.model.layers=512",
        "--devices=1",
        "--hardware=tpu-v5e",
    ]
    flags = plan(*large)[1].partition(": use ")[2].split()
    assert flags and all(flag.startswith("--config.") for flag in flags)
    assert json.loads(plan(*large, *flags, "--json")[0])["fits"]


def test_settings_of_one_layout_are_no_searchs(plan):
    assert plan("--config=tiny", "--devices=8", "--config.pipeline.chunk_layers=1,1")[1].endswith(
        "use --config.pipeline.chunk_layers= (or a --layout of one kind of devices)\n"
    )


def test_long_steps_are_timed_in_part(monkeypatch):
    """Two shorter steps say what the whole table says."""
    config = layout_flag.apply(
        load_recipe(find_recipe("gpt2_124m")),
        layout_flag.read("data=4,stage=4,microbatch=1,schedule=zb_h1"),
    )
    prediction = predict.predict(config.resolve(), load("h100"))
    microbatches = prediction.work.layout.microbatches
    assert microbatches > predict.LEAST_ROUNDS * 4
    monkeypatch.setattr(predict, "CELLS", 16 * microbatches)
    whole = predict.exactly(prediction)
    monkeypatch.setattr(predict, "CELLS", 0)
    part = predict.exactly(prediction)
    assert part.seconds == pytest.approx(
        whole.seconds, rel=1e-2
    ) and part.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=1e-2)
    assert part.time.exposed["matmuls"] == pytest.approx(whole.time.exposed["matmuls"], rel=1e-2)


def test_long_steps_of_auto_are_timed_in_part(monkeypatch):
    """One shorter step, after which the busiest stage does not wait, says nearly what the whole
    table says."""
    config = layout_flag.apply(
        load_recipe(find_recipe("gpt2_124m")),
        layout_flag.read("data=64,stage=2,microbatch=1,schedule=auto"),
    )
    whole = predict.exactly(predict.predict(config.resolve(), load("h100")))
    monkeypatch.setattr(predict, "AUTO_CELLS", 0)
    part = predict.exactly(predict.predict(config.resolve(), load("h100")))
    assert part.seconds != whole.seconds and part.seconds == pytest.approx(whole.seconds, rel=2e-2)


REFUSED = [
    (["--config=tiny"], "the recipe's mesh leaves the number open: use --devices=4"),
    (
        ["--config=tiny", "--devices=8", "--config.model.width=0"],
        "model.width=0 must be at least 1",
    ),
    (
        ["--config=tiny", "--devices=8", "--recipe=/nonexistent/planned.py"],
        "cannot be written .*: use --recipe=planned.py",
    ),
    (["--config=tiny", "--devices=8", "--tokens=inf"], "--tokens=inf is not a finite number$"),
    (
        ["--config=tiny", f"--devices={2**31 - 1}"],
        "no layout uses so many devices .*: use --devices=512$",
    ),
    (["--config=tiny", f"--devices={10**40}"], "must be at most 2147483647: use --devices=4$"),
    (
        ["--config=tiny", "--devices=4", f"--config.data.batch_size={2**61 - 1}"],
        "is larger than 2147483647: use --config.data.batch_size=16",
    ),
]


@pytest.mark.parametrize("value", ["x", "1.5", "", str(2**40)])
@pytest.mark.parametrize(
    "path",
    ["mesh.stage", "mesh.data", "pipeline.repeats", "parallel.expert_nodes", "parallel.zero"],
)
def test_values_that_no_setting_has_are_refused(plan, path, value):
    """Whether a layout replaces them or the search begins with them; what is suggested works."""
    flags = ["--config=tiny", f"--config.{path}={value}"]
    err = plan(*flags, "--devices=4")[1]
    assert f"{path}=" in err and err == plan(*flags, "--layout=data=4")[1]
    assert plan(*flags, "--layout=data=4", *suggested(err), "--json")[0]


ALL_AT_ONCE = [
    ["--assume=megatron", "--layout=data=8", "--config=tiny"],
    ["--devices=8.2", "--tokens=-1", "--price=-1"],
    ["--devices=8", "--hardware=h1000", "--recipe=/proc/x/y.py", "--png=/proc/x.png"],
    ["--hardware=h1000", "--assume=jax"],
    ["--config=tinny", "--layout=dp=8,stage=two,data=4,zero=9"],
    ["--hardware=h100:4,h200:x", "--price=2", "--devices=7"],
    ["--devices=8", "--config.model.width=0", "--config.mesh.stag=3"],
]


@pytest.mark.parametrize("argv", ALL_AT_ONCE, ids=" ".join)
def test_all_that_is_wrong_is_said_at_once(plan, tmp_path, monkeypatch, argv):
    """What is suggested works when it is put behind the rest, and nothing is written before."""
    monkeypatch.chdir(tmp_path)
    err = plan(*argv)[1]
    use = suggested(err)
    assert use and len(err.splitlines()) == 1 and not list(tmp_path.iterdir())
    out, err = plan(*argv, *use, "--json")
    assert out or (
        "--config.mesh.stag" in " ".join(argv) and "stag='3' is an unknown setting" in err
    ), err


def test_advice_without_a_meaning_for_flags(plan, tmp_path):
    """What no flag mends is said in words, behind the flags."""
    err = plan(f"--advise={tmp_path}", "--devices=8")[1]
    assert err.startswith(
        "error: --devices=8 has no meaning for --advise: use --devices=0 (and --advise="
    )
    assert (
        plan(f"--advise={tmp_path}", "--devices=8", "--devices=0")[1]
        .removeprefix("error: ")
        .strip()
        in err
    )


@pytest.mark.parametrize("argv, text", REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_refusals(plan, argv, text):
    assert re.search(text, plan(*argv)[1])


def test_large_and_small_numbers(plan):
    """Powers of ten in place of hundreds of digits or of zeros, and neither infinite numbers nor
    none."""
    layout = "--layout=data=8,stage=16,model=8,microbatch=1"
    for flags in (
        ("--tokens=1e308", "--price=1e308", "--kwh_price=1e308"),
        ("--tokens=1e-300", "--price=1e-300", "--kwh_price=5e-324"),
    ):
        text = plan(*GPT3, layout, *flags)[0].partition("\nrun: ")[2].partition("\nhow sure")[0]
        assert (
            all(len(line) < 120 for line in text.splitlines())
            and not re.search("inf|nan", text)
            and len(re.findall(r"\d\.?\d*e[+-]\d+", text)) == 18
        )
    usual = plan(*GPT3, layout, "--tokens=300e9", "--price=2", "--kwh_price=0.1")[0]
    of = r"\([\d.,]+ to [\d.,]+\)"
    assert re.search(
        rf"take \d\d\.\d days {of}\ndevice-hours: \d{{3}},000 {of}\nenergy: \d{{3}} MWh {of} .*\n"
        rf"cost: US\$1,\d\d0,000 {of} at US\$2 a device-hour\n"
        rf"cost of energy: US\$\d\d,\d00 {of} at US\$0.1 a kWh\n",
        usual,
    )
    groups = [
        *MIXED,
        "--layout=data=16,stage=8,model=8,microbatch=1,schedule=1f1b",
        "--tokens=1e308",
    ]
    assert re.search(
        r"^run: 1.00e\+296 trillion tokens take \d\.\d\de\+29\d years \(",
        plan(*groups)[0],
        re.MULTILINE,
    )


def test_devices_that_are_very_slow(plan, tmp_path):
    """JSON has no infinite numbers."""
    (tmp_path / "slow.json").write_text(
        json.dumps({"name": "slow", "like": "h100", "peak_tflops": {"bfloat16": 1e-9}})
    )
    flags = [
        "--config=gpt3_175b",
        f"--hardware={tmp_path / 'slow.json'}",
        "--layout=data=8,stage=16,model=8,microbatch=1",
        "--tokens=1.7e308",
    ]
    assert math.isfinite(json.loads(plan(*flags, "--json")[0])["train_days"])
    assert re.search(r"run: .* take \d\.\d+e\+30\d years", plan(*flags)[0])


@pytest.mark.parametrize("command, flag", [("--calibrate", "--out="), ("--compile", "--topology=")])
def test_commands_of_their_own(command, flag, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and flag in capsys.readouterr().out


MIXED = ["--config=gpt3_175b", "--hardware=a100-80gb:512,h100:512"]


def test_unequal_devices(plan, tmp_path):
    flags = [*MIXED, "--layout=data=16,stage=8,model=8,microbatch=1,schedule=1f1b"]
    lines = plan(*flags, "--tokens=300e9", f"--recipe={tmp_path / 'planned.py'}")[0].splitlines()
    assert lines[0].startswith("a100-80gb: stages 0 to 3 with ") and lines[1].startswith(
        "h100: stages 4 to 7 with "
    )
    assert lines[-3].startswith("to train it on one kind of devices, 95,368 steps of 3,145,728")
    layers = [int(n) for n in re.search(r"chunk_layers=(\S+)", lines[-1])[1].split(",")]
    assert sum(layers) == 96 and max(layers[:4]) < min(layers[4:])  # the slower devices have fewer
    config = trained(lines[-1])
    assert to_dict(config) == to_dict(load_recipe(tmp_path / "planned.py")) and check_devices(
        config, 1024
    )
    figures = json.loads(plan(*flags, "--tokens=300e9", "--json")[0])
    assert (
        list(figures) == [*KEYS[:-1], "layers", "command"]
        and figures["layers"] == layers
        and figures["fits"]
    )
    assert (
        f"take {figures['train_days']:.3g} days" in "\n".join(lines)
        and 0 < figures["bubble_fraction"] < figures["mfu"] < 1
    )


def test_unequal_devices_on_which_it_does_not_fit(plan):
    flags = ["--config=gpt3_175b", "--hardware=a100-80gb:4,h100:4", "--layout=stage=8,microbatch=1"]
    assert "does not fit: " in plan(*flags)[0] and not json.loads(plan(*flags, "--json")[0])["fits"]


@pytest.mark.parametrize(
    "argv, text",
    [
        ([], "over which a --layout is planned, and none is searched"),
        (
            ["--layout=data=8"],
            "--layout is for 8 devices, and --hardware='a100-80gb:512,h100:512' names 1024",
        ),
        (["--layout=data=128,model=8,microbatch=1"], "stage=1 does not share out 1024 devices"),
        (
            ["--layout=data=16,stage=8,model=8,microbatch=1,schedule=auto"],
            "schedule='auto' cuts chunks by itself",
        ),
        (["--config.data.batch_size=0"], "data.batch_size=0 must be at least 1"),
        (
            ["--layout=data=16,stage=8,model=8,microbatch=1", "--config.pipeline.layers_per_op=1"],
            "need them unsplit: .*layers_per_op=0",
        ),
        (
            ["--layout=data=16,stage=8,model=8,microbatch=1", "--devices=7"],
            "--devices=7 is not the 1024 of .*: use (--devices=1024)$",
        ),
        (
            ["--layout=data=16,stage=8,model=8,microbatch=1", "--price=2"],
            "--price=2.0 has no meaning for groups .*: use (--price=0.0)$",
        ),
    ],
)
def test_what_groups_refuse(plan, argv, text):
    """What is suggested works."""
    err = plan(*MIXED, *argv)[1]
    assert re.search(text, err) and (use := re.search(r": use (--.*)$", err))
    assert json.loads(plan(*MIXED, *argv, *shlex.split(use[1]), "--json")[0])["fits"]


def test_advice(plan, tmp_path):
    assert (
        "--json=true has no meaning for --advise: use --json=false"
        in plan(f"--advise={tmp_path}", "--json")[1]
    )
    # no run is there; test_what_if.py tests what is said of one
    assert str(tmp_path) in plan(f"--advise={tmp_path}")[1]


def test_every_kind_of_devices(plan):
    for kind in known():
        assert (
            json.loads(
                plan(
                    "--config=llama3_8b", f"--hardware={kind}", "--layout=data=64,zero=3", "--json"
                )[0]
            )["step_time_s"]
            > 0
        )


def test_a_precision_that_other_frameworks_alone_have(plan, tmp_path):
    flags = ("--config=llama3_8b", "--layout=data=8,zero=1", "--config.precision.matmul=nvfp4")
    rule = "precision.matmul='nvfp4' has no products in this trainer"
    assert plan(*flags, "--hardware=b200")[1].startswith(f"error: {rule}, only in plans of")
    theirs = (*flags, "--assume=megatron_core")
    refused = "'nvfp4' has no peak on h100: use --config.precision.matmul=fp8\n"
    assert plan(*theirs, "--hardware=h100")[1].endswith(refused)
    assert rule in plan(*theirs, "--hardware=b200", f"--recipe={tmp_path / 'recipe.py'}")[1]
    assert not list(tmp_path.iterdir())
    on_b200 = (*theirs, "--hardware=b200")
    assert plan(*on_b200)[0].splitlines()[-1].startswith(f"no command trains it: {rule}")
    found = json.loads(plan(*on_b200, "--json")[0])
    bfloat16 = json.loads(plan(*on_b200, "--config.precision.matmul=compute", "--json")[0])
    assert found["command"] is None and bfloat16["command"]
    assert found["step_time_s"] < 0.7 * bfloat16["step_time_s"]


def test_a_plan_names_what_it_does_not_follow(plan):
    flags = ("--config=llama3_8b", "--hardware=h100", "--layout=data=2,stage=4", "--json")
    theirs = "--assume=megatron_core", "--config.pipeline.layers_per_op=4"
    (note,) = json.loads(plan(*flags, *theirs)[0])["notes"]
    assert "megatron_core does not follow" in note and "pipeline.layers_per_op=4" in note
    assert f"note: {note}" in plan(*flags[:-1], *theirs)[0].splitlines()
    assert json.loads(plan(*flags, theirs[1])[0])["notes"] == []
    groups = (flags[0], "--hardware=h100:4,a100-80gb:4", *flags[2:], theirs[0])
    (note,) = json.loads(plan(*groups)[0])["notes"]
    assert note.endswith("does not follow data.attend_across_documents=false")


def test_settings_without_use_in_a_plan_are_named(plan):
    """As training names them; and saves that are not of the layout's recomputation."""
    flags = ("--config=llama3_8b", "--hardware=h100", "--json")
    notes = lambda *more: json.loads(plan(*flags, *more)[0])["notes"]
    idle = notes("--layout=data=8", "--config.model.capacity_factor=2")
    assert idle == ["model.capacity_factor=2.0 has no use with model.experts=0"]
    (dropped,) = notes(
        "--layout=data=2,stage=4,remat=selective", "--config.pipeline.save=layer_input:host"
    )
    assert dropped.startswith("pipeline.save=layer_input:host does not go with remat=selective")
    assert notes("--layout=data=2,stage=4,remat=full,repeats=1") == []
    # one chunk on one stage is the default, of which nothing needs to be said, searched or not
    assert notes("--layout=data=8,repeats=1") == notes("--devices=64") == []


def test_one_file_for_two_flags_is_refused(plan, tmp_path):
    flags = ("--config=tiny", "--hardware=h100", "--devices=8", f"--png={tmp_path / 'a'}")
    for other in ("html", "recipe"):
        error = plan(*flags, f"--{other}={tmp_path / 'a'}")[1]
        assert "is another flag's file: use --" in error and not list(tmp_path.iterdir())
