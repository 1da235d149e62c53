"""`train --dry_run` through the real command: what it prints, that it leaves nothing, and that a
step larger than the machine will do."""

import json
import re

import pytest
from support import hardware_file, train_runs as runs

from jaxtrain.config.flags import apply
from jaxtrain.config.recipes import load_recipe
from jaxtrain.config.rules.checks import check_devices
from jaxtrain.planner.layer.hardware import load
from jaxtrain.planner.programs.report import step_counts
from jaxtrain.planner.search.predict import predict


@pytest.fixture
def folder(tmp_path):
    """A recipe beside its corpus, and nothing else."""
    runs.write_inputs(tmp_path)
    return tmp_path


def test_lines(folder):
    hardware = hardware_file.write(folder)
    before = runs.contents(folder)
    lines = runs.train(
        folder / "never", "--dry_run", *runs.settings(train__hardware=hardware)
    ).out.splitlines()
    assert runs.contents(folder) == before and not (folder / "never").exists()
    assert (
        lines[0].startswith("op times in ms, planned for simulated: ")
        and lines[1] == "mesh: stage 2 (2 × cpu, 1 process)"
    )
    assert [
        x
        for x in lines
        if x.startswith("model: ")
        and x.endswith(" parameters; 3 layers on 2 pipeline stages: 2, 1")
    ]
    saved = next(x for x in lines if x.startswith("saved from forward to backward: "))
    slots = next(x for x in lines if x.startswith("slots of a device, MiB: activation "))
    sizes = [
        n * float(each)
        for n, each in ((int(n), e) for n, e in re.findall(r"(\d+) × ([\d.]+)", slots))
    ]
    assert float(re.search(r"[\d.]+", saved)[0]) == pytest.approx(sum(sizes), abs=0.06)
    assert [x for x in lines if x.startswith("table: 1f1b, ")]
    assert (
        len(
            [
                x
                for x in lines
                if re.match(r"planned step: [\d.]+ s for simulated, [\d,]+ tokens/s: \w+ \d+%", x)
            ]
        )
        == 1
    )
    memory = next(
        re.fullmatch(r"memory per device as compiled: ([\d.]+) MiB \(([\d.]+) of state, .*\)", x)
        for x in lines
        if "compiled:" in x
    )
    again = " s (again at each start: compiled programs are not kept)"
    assert [x for x in lines if x.startswith("traced in ") and x.endswith(again)]
    (why,) = [x for x in lines if "XLA's compiler for CPUs" in x]
    assert re.search(r"for a GPU or TPU believe the plan: [\d.]+ GiB on simulated$", why)
    kinds = next(x for x in lines if x.startswith("memory per device by kind, MiB: "))
    parameters, moments = (
        float(re.search(rf"{kind} ([\d.]+)", kinds)[1]) for kind in ("parameters", "moments")
    )
    assert 0 < float(memory[2]) < float(memory[1]) and parameters + moments == pytest.approx(
        float(memory[2]), abs=0.11
    )
    table = [
        line.split()
        for line in lines[
            lines.index(next(x for x in lines if x.startswith("collectives of a device"))) + 1 :
        ]
    ]
    assert table[0][:3] == ["op", "collective", "over"] and table[-1][:2] == ["in", "all"]
    assert ["permute", "collective-permute", "stage", "2"] in [row[:4] for row in table]


@pytest.mark.full
def test_json_alone_on_standard_output(folder):
    changes = {
        "parallel.zero": 3,
        "mesh.stage": 1,
        "mesh.data": 2,
        "pipeline.microbatches": 1,
        "train.hardware": "h100",
    }
    done = runs.train(folder / "never", "--dry_run", "--json", *runs.flags_of(changes))
    found = json.loads(done.out)
    config = apply(
        load_recipe(folder / "recipe.py"), [(path, str(value)) for path, value in changes.items()]
    )
    config = check_devices(config, 2).resolve()
    assert found["mesh"] == {
        "replica": 1,
        "data": 2,
        "stage": 1,
        "context": 1,
        "expert": 1,
        "model": 1,
        "devices": 2,
        "device": "cpu",
    }
    counts = step_counts(config, cpu=True)
    assert found["stage"] == counts.busiest_stage()
    rows = counts.volume(found["stage"])
    assert [
        (row["op"], row["kind"], tuple(row["axes"]), row["bytes"])
        for row in found["communication_volume"]
    ] == [(r.op, r.kind, r.axes, r.bytes) for r in rows]
    planned = predict(config, load("h100"))
    assert (
        found["planned"]["step_time_s"] == planned.seconds
        and found["planned"]["parts"] == planned.time.exposed
    )
    assert {"imports_s", "table_s", "tracing_s", "compiling_s", "start_up_s"} == {*found["seconds"]}
    assert (
        found["memory"]["state"]["moments"] > 0
        and found["memory"]["compiled"]["total"] > sum(found["memory"]["state"].values()) / 2
    )


def test_json_is_for_a_dry_run(folder):
    done = runs.train(folder / "never", "--json", status=2)
    assert (
        done.err
        == "error: --json=true is for --dry_run alone: use --dry_run=true (or --json=false)\n"
        and not done.out
    )


@pytest.mark.full
def test_a_step_larger_than_the_machine(folder):
    words = [
        "jaxtrain.train",
        f"--config={runs.ROOT / 'configs' / 'llama3_8b.py'}",
        "--cpu_devices=8",
        "--dry_run",
        "--json",
    ]
    with runs.running(folder, *words) as command:
        memory = json.loads(command.end().out)["memory"]
    assert (
        memory["state"]["parameters"] == pytest.approx(8.03e9 * 4 / 8, rel=0.01)
        and memory["compiled"]["total"] > 2**36
    )
