"""The command `jaxtrain data`: corpora prepared in shards, and sequences as training reads them."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from support import ROOT

from jaxtrain.config.phases import spans
from jaxtrain.config.recipes import load_recipe
from jaxtrain.data import __main__ as command
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.data.corpora import prepare_all
from jaxtrain.data.preparing import parts
from jaxtrain.data.reading import extents
from jaxtrain.run.files import read_json

RECIPE = """
from jaxtrain.config import Config, DataConfig, ModelConfig, TrainConfig

def get_config():
    return Config(
        model=ModelConfig(layers=1),
        data=DataConfig(
            sources=("web=web.jsonl", "web.filter=mine.py:keep", "code=code", "code.weight=0.25"),
            duplicates="exact", sequence_length=16, batch_size=4, cache="cache",
            attend_across_documents=False,
        ),
        train=TrainConfig(steps=100),
    )
"""


@pytest.fixture
def recipe(write, tmp_path, monkeypatch):
    """The path of a recipe with a mixture of two sources, whose parts are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "PART", 2000)
    monkeypatch.setattr(extents, "BLOCK", 64)
    monkeypatch.setenv("COLUMNS", "80")
    texts = [f"web\tpage {i * i} " * 4 for i in range(200)]
    write("web.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[7]]))
    for i in range(5):
        write(f"code/{i}.py", f"x = {i}\n" * 90 * (i + 1))
    write("mine.py", "def keep(text):\n    return '9' in text\n")
    return str(write("recipe.py", RECIPE))


def run(capsys, *words):
    """The status of a command, and the lines of standard output and standard error."""
    status = command.main(words)
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_prepare_says_what_is_in_each_source_and_writes_a_report(recipe, capsys):
    status, out, _ = run(capsys, "prepare", f"--config={recipe}")
    assert status == 0
    kept = [line for line in pathlib.Path("web.jsonl").read_text().splitlines() if "9" in line]
    tokens = sum(len(json.loads(line)["text"]) + 1 for line in kept) - 49
    (first,) = [i for i, line in enumerate(out) if line.startswith("web.jsonl: ")]
    folder = out[first + 3].strip()
    report = read_json(os.path.join(folder, "report.json"))
    assert out[first : first + 3] == [
        f"web.jsonl: {report['tokens']:,} tokens, {report['bytes_per_token']:.2f} bytes each, "
        f"{report['held_out']:,} of them held out",
        f"  documents: {report['documents']:,}, of {report['tokens'] / report['documents']:.0f} "
        "tokens in the mean, half of them below 64",
        f"  left out: {201 - len(kept):,} (filter), 1 (exact)",
    ]
    assert (report["documents"], report["tokens"]) == (len(kept) - 1, tokens)
    assert report["tokens_by_file"] == {"web.jsonl": tokens}
    assert sum(report["documents_by_length"]) == report["documents"]
    assert sum(report["tokens_by_length"]) == report["tokens"]
    trained = report["tokens"] - report["held_out"]
    times = 100 * 4 * 16 * 0.8 / trained
    assert out[first + 4] == f"  web, weight 1: 100 steps read it {times:.3g} times"
    assert (pathlib.Path(folder) / "report.png").read_bytes().startswith(b"\x89PNG")
    (code,) = [i for i, line in enumerate(out) if line.startswith("code: ")]
    report = read_json(os.path.join(out[code + 3].strip(), "report.json"))
    assert list(report["tokens_by_file"]) == [f"code/{i}.py" for i in range(5)]
    assert report["tokens_by_file"]["code/1.py"] == 6 * 90 * 2 + 1


def test_shards_say_what_is_missing_and_make_the_same_corpus(recipe, capsys):
    source = "--config.data.source=web.jsonl"
    _, whole, _ = run(capsys, "prepare", source, "--config.data.cache=cache")
    for shard, missing in (("2/3", "0/3, 1/3"), ("0/3", "1/3"), ("1/3", "")):
        here = ["prepare", source, "--config.data.cache=other", f"--shard={shard}"]
        _, out, _ = run(capsys, *here)
        assert missing == "" or out[-1].endswith(f" missing, those of --shard={missing}")
    assert [line.replace("/other/", "/cache/") for line in out[-5:]] == whole[-5:]
    assert not os.path.exists("runs")


def test_show_prints_what_training_reads(recipe, capsys):
    config = load_recipe(recipe)
    _, out, err = run(capsys, "show", f"--config={recipe}", "--row=1000006", "--rows=2")
    assert any("prepared web.jsonl" in line for line in err)
    batches = TrainingBatches(prepare_all(config.data, 257, progress=False), spans(config))
    for place, lines in ((2, out[:18]), (3, out[18:])):
        draw = batches.draw(250_001, place)
        arrays = draw.arrays()
        assert lines[0] == (
            f"row {1_000_004 + place}: batch 250001, place {place}; source {draw.source}, ordinal "
            f"{draw.ordinal}, epoch {draw.epoch}, sequence {draw.number} of {len(draw.sequences)}"
        )
        assert lines[1].split() == "document position id target weight text".split()
        columns = [line.split(maxsplit=5) for line in lines[2:]]
        names = ("segments", "positions", "tokens", "targets", "weights")
        for column, name in enumerate(names):
            read = np.array([float(values[column]) for values in columns])
            assert np.array_equal(read, arrays[name]), name
        texts = [bytes([i] if i < 256 else []).decode() for i in arrays["tokens"]]
        assert [values[5] for values in columns] == [
            repr(text) if text else "end of document" for text in texts
        ]


def test_control_characters_and_marks_are_visible(recipe, capsys, tokenizer_file):
    _, out, _ = run(
        capsys,
        "show",
        "--config.data.source=web.jsonl",
        f"--config.data.tokenizer={tokenizer_file()}",
        "--config.model.vocab_size=300",
        "--config.data.sequence_length=200",
        "--config.data.cache=cache",
    )
    texts = [line.split(maxsplit=5)[5] for line in out[2:]]
    assert {"'\\t'", "<|endoftext|>"} <= {*texts} and len(texts) == 200
    assert {line.split()[0] for line in out[2:]} == {"1"}  # documents are not told apart


@pytest.mark.parametrize(
    "words, message",
    [
        (["shw"], "'shw' is no command of jaxtrain data: use jaxtrain data prepare or jaxtrain"),
        (["--row=3"], "'--row=3' is no command of jaxtrain data: use"),
        (["show", "--row=-1"], "--row=-1 must be at least 0: use --row=0"),
        (["show", "--shard=0/1"], "--shard is an unknown flag"),
        (
            ["prepare", "--shard=7/7"],
            "--shard=7/7 is not I/N with I from 0 to N - 1: use --shard=6/7",
        ),
        (["prepare", "--shard=1"], "--shard=1 is not I/N with I from 0 to N - 1: use --shard=0/1"),
        (["prepare", "--config.data.source=absent"], "data.source='absent' is neither"),
        (["show", "--config.mesh.model=3"], "mesh.model=3 does not divide model.heads=4: use"),
        (
            ["prepare", "--config=recipe.py", "--config.data.sources.web.filter=recipe.py:RECIPE"],
            "data.sources.web.filter='recipe.py:RECIPE' names RECIPE, which recipe.py does not",
        ),
        (
            ["prepare", "--config=recipe.py", "--config.data.sources.web.filter=absent.py:keep"],
            "data.sources=('web=web.jsonl', 'web.filter=absent.py:keep', 'code=code', "
            "'code.weight=0.25') makes data.filter='absent.py:keep', which names no file:",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_one_line_about_what_cannot_work(recipe, capsys, words, message):
    status, out, err = run(capsys, *words)
    assert status == 2 and len(out) <= 1 and err[-1].startswith(f"error: {message}")
    assert not os.path.exists("cache") and not os.path.exists("runs")


def test_a_recipe_s_filter_lies_beside_it(recipe, tmp_path, monkeypatch):
    assert load_recipe(recipe).data.sources[1] == "web.filter=mine.py:keep"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_recipe(recipe).data.sources[1] == f"web.filter={tmp_path}/mine.py:keep"


@pytest.mark.full
def test_no_device_is_used(recipe):
    code = (
        "import sys; from jaxtrain.data.__main__ import main; status = main(sys.argv[1:]); "
        "assert not {'jax', 'flax', 'grain'} & {*sys.modules}, status; "
        "status += main(['show', *sys.argv[2:]]); "
        "from jax._src import xla_bridge; sys.exit(status or len(xla_bridge._backends))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "prepare", "--config=recipe.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
