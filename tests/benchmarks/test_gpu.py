"""benchmarks/gpu.py without a GPU and without torch: its cases, its order, its tables, what it says
to wrong flags."""

import json
import sys

import gpu
import gpu_cases
import gpu_kernels
import gpu_step
import gpu_table
import jax
import numpy as np
import pytest
import worker
from gpu_cases import CASES, KERNELS, OURS, TORCH

from jaxtrain.config import ConfigError
from jaxtrain.config.kernels import BLOCKS, PRODUCTS, TargetDevice, product_kernel
from jaxtrain.devices.mesh import make_mesh

BY_NAME = {case.name: case for case in CASES}
MIXTRAL = BY_NAME["mixtral_8x7b, 2 layers"]


# --- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tiny", [False, True], ids=["full", "tiny"])
def test_a_case_is_a_recipe_on_one_device(case, tiny):
    config = gpu_cases.config_of(case, tiny)
    m = config.mesh
    assert m.replica * m.data * m.stage * m.context * m.expert * m.model == 1
    assert (
        config.precision.compute == "bfloat16"
        and config.data.batch_size % config.pipeline.microbatches == 0
    )
    assert config.model.max_positions >= config.data.sequence_length


def test_the_shapes_are_those_of_the_models():
    xl = gpu_cases.config_of(BY_NAME["gpt3_xl"], False).model
    assert (xl.layers, xl.width, xl.heads, xl.head_dim, xl.vocab_size) == (24, 2048, 16, 128, 50257)
    mixtral = gpu_cases.config_of(MIXTRAL, False)
    m = mixtral.model
    assert (m.layers, m.width, m.heads, m.kv_heads, m.experts, m.expert_width) == (
        2,
        4096,
        32,
        8,
        8,
        14336,
    )
    assert not mixtral.data.attend_across_documents and mixtral.data.sequence_length == 8192
    small = gpu_cases.config_of(BY_NAME["gpt2_124m"], False)
    assert (small.data.batch_size, small.pipeline.microbatches, small.pipeline.remat) == (
        512,
        8,
        "full",
    )


@pytest.mark.parametrize(
    "path, text, said",
    [
        (
            "pipeline.remat",
            "selective",
            "pipeline.remat='selective' is nothing that benchmarks/torch_models.py has",
        ),
        (
            "model.router",
            "sigmoid",
            "model.router='sigmoid' is nothing that benchmarks/torch_models.py has",
        ),
        ("mesh.data", "2", "mesh"),
    ],
)
def test_what_torch_has_not_is_refused(path, text, said):
    with pytest.raises(ConfigError, match=said):
        gpu_cases.config_of(MIXTRAL, False, [(path, text)])


def test_a_case_travels_to_its_workers(tmp_path):
    config = gpu_cases.config_of(MIXTRAL, True)
    gpu_cases.write_case(tmp_path, config, steps=3, device="cpu")
    assert gpu_cases.read_case(tmp_path) == (config, {"steps": 3, "device": "cpu"})


def test_batches_are_packed_documents():
    config = gpu_cases.config_of(MIXTRAL, True, [("data.sequence_length", "512")])
    arrays = gpu_step.batches(config, 2)
    assert {name: a.shape for name, a in arrays.items()} == dict.fromkeys(arrays, (2, 2, 2, 512))
    assert set(arrays) == {"tokens", "targets", "weights", "segments", "positions"}
    assert (arrays["tokens"][..., 1:] == arrays["targets"][..., :-1]).all() and arrays[
        "segments"
    ].max() > 1
    begins = np.diff(arrays["segments"], axis=-1) > 0
    assert (arrays["weights"][..., :-1][begins] == 0).all() and (
        arrays["positions"][..., 1:][begins] == 0
    ).all()
    again = gpu_step.batches(config, 2)
    assert all((arrays[name] == again[name]).all() for name in arrays)


# --- the order, and the time ----------------------------------------------------------------------


def test_sides_take_turns_and_the_most_important_comes_first():
    a, b, *_ = CASES
    names = [job.name for job in gpu_cases.jobs([a, b], [OURS, TORCH, KERNELS], 2)]
    first = [
        f"{a.name}, jaxtrain",
        f"{a.name}, torch",
        "kernels",
        f"{b.name}, jaxtrain",
        f"{b.name}, torch",
    ]
    assert names == [
        *first,
        *(f"{case.name}, {side}, round 2" for case in (a, b) for side in (OURS, TORCH)),
    ]
    assert [job.side for job in gpu_cases.jobs([a, b], [OURS], 1)] == [OURS, OURS]


def test_a_round_is_expected_to_take_what_the_first_took():
    job = gpu_cases.Job(OURS, CASES[0], 2)
    assert gpu_cases.expected_seconds(job, {}) == CASES[0].seconds
    assert gpu_cases.expected_seconds(job, {(CASES[0].name, OURS): 12.0}) == 12.0
    assert gpu_cases.expected_seconds(gpu_cases.Job(KERNELS, None), {}) == gpu_cases.KERNEL_SECONDS


class Clock:
    """Workers that take as long as their cases expect, and time that passes with them."""

    def __init__(self, failing: str = ""):
        self.now, self.failing, self.ran = 0.0, failing, []

    def run_worker(self, command, environment, log, limit) -> worker.Outcome:
        name = log.stem
        self.ran.append(name)
        self.now += min(limit, 100.0)
        if self.failing and self.failing in name:
            return worker.Outcome(None, "out of memory", 100.0)
        (gpu.pathlib.Path(command[-1]) / gpu_cases.WEIGHTS).mkdir(exist_ok=True)
        return worker.Outcome(
            {
                "seconds": [0.5],
                "first_s": 3.0,
                "losses": [1.0],
                "norms": [1.0],
                "memory": 1,
                "versions": {},
            },
            "",
            100.0,
        )


def session(tmp_path, monkeypatch, minutes: float, **more) -> tuple[gpu.Session, Clock]:
    clock = Clock(**more)
    monkeypatch.setattr(gpu, "run_worker", clock.run_worker)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock.now)
    values = {flag.name: flag.default for flag in gpu.FLAGS} | {"sides": f"{OURS},{TORCH}"}
    cases = {case.name: (case, gpu_cases.config_of(case, False)) for case in CASES[:2]}
    made = gpu.Session(values, cases, tmp_path, deadline=60 * minutes)
    made.run()
    return made, clock


def test_it_ends_in_time_and_names_what_was_left_out(tmp_path, monkeypatch):
    made, clock = session(tmp_path, monkeypatch, minutes=7)
    assert len(clock.ran) == 4 and clock.now <= 420
    assert [remark.split(": left out: ")[0] for remark in made.remarks] == [
        f"{case.name}, {side}, round 2" for case in CASES[:2] for side in (OURS, TORCH)
    ]
    assert "15 s are left, and it takes about 100" in made.remarks[0]


def test_what_fails_is_one_line_and_the_others_go_on(tmp_path, monkeypatch):
    made, clock = session(tmp_path, monkeypatch, minutes=60, failing="gpt2_124m_jaxtrain")
    assert made.remarks[0] == "gpt2_124m, jaxtrain: out of memory"
    assert made.remarks[1].startswith(
        "gpt2_124m, torch: left out: it begins with the weights of jaxtrain's side"
    )
    assert made.remarks[2].endswith("round 2: left out: its first round failed")
    assert [name for name, *_ in made.results] == ["gpt3_xl"] * 4 and len(clock.ran) == 5


# --- workers --------------------------------------------------------------------------------------

REPORT = "import worker\nworker.report_result(lambda: {work})"


@pytest.mark.parametrize(
    "script, result, failure",
    [
        (REPORT.format(work="{'a': 1}") + "\nprint('more')", {"a": 1}, ""),
        (REPORT.format(work="1 / 0"), None, "ZeroDivisionError: division by zero"),
        (REPORT.format(work="bytearray(1 << 62)"), None, "out of memory"),
        (
            "import os, signal\nprint('so far', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)",
            None,
            "ended with status -9: so far",
        ),
        ("import time\ntime.sleep(60)", None, "stopped: the time is up"),
    ],
)
def test_what_a_worker_reports(tmp_path, script, result, failure):
    environment = {"PYTHONPATH": str(gpu.REPOSITORY / "benchmarks")}
    limit = 0.5 if "sleep" in script else 60
    outcome = worker.run_worker(
        [sys.executable, "-c", script], environment, tmp_path / "log", limit
    )
    assert (outcome.result, outcome.failure) == (result, failure)


def test_workers_on_a_gpu_do_not_go_on_with_a_cpu(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    values = {flag.name: flag.default for flag in gpu.FLAGS}
    environment = gpu.Session(values, {}, tmp_path, 0.0)._environment(gpu_cases.Job(KERNELS, None))
    assert environment["JAX_PLATFORMS"] == "cuda" and environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert (
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]
        == gpu.DEFAULTS["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    )
    environment = gpu.Session(values | {"device": "cpu"}, {}, tmp_path, 0.0)._environment(
        gpu_cases.Job(KERNELS, None)
    )
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_an_error_is_one_line():
    assert (
        worker.one_line(
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate\nmore"
        )
        == "out of memory"
    )
    assert worker.one_line("\nValueError: a\nb") == "ValueError: a"
    assert len(worker.one_line("x" * 1000)) == 200


# --- tables ---------------------------------------------------------------------------------------


def report(
    losses=(10.0, 9.0), norms=(1.0, 1.0), torch_losses=(10.0, 9.0), torch_norms=(1.0, 1.0)
) -> dict:
    """Of a case on an H200, whose model takes 1 GFLOP a token."""
    about = {
        "batch_size": 8,
        "sequence_length": 1000,
        "microbatches": 2,
        "remat": "full",
        "documents_apart": True,
        "compute": "bfloat16",
    }
    ours = {
        "case": "a",
        "side": OURS,
        "round": 1,
        "seconds": [0.010, 0.020, 0.030],
        "first_s": 1.0,
        "trace_s": 2.0,
        "compile_s": 3.0,
    }
    ours |= {
        "kernels": ["attention: cuDNN"],
        "memory": 2_000_000_000,
        "flops_per_token": 1e9,
        "losses": losses,
        "norms": norms,
    }
    theirs = {
        "case": "a",
        "side": TORCH,
        "round": 1,
        "seconds": [0.040] * 3,
        "first_s": 9.0,
        "memory": None,
    }
    theirs |= {"losses": torch_losses, "norms": torch_norms}
    again = {**ours, "round": 2, "seconds": [0.020] * 3}
    kernel = {"name": "attention", "flops": 1e12} | {
        side: {"value_error": 0.002, "gradient_error": 0.004, "seconds": s}
        for side, s in (("kernel", 0.004), ("fallback", 0.008))
    }
    return {
        "date": "2026-01-01",
        "minutes": 7.5,
        "tiny": False,
        "torch_compile": "blocks",
        "settings": {"a": about},
        "versions": {"jax": "1", "device": "NVIDIA H200", "torch device": "NVIDIA H200"},
        "rounds": [ours, theirs, again],
        "kernels": [kernel, {"name": "another", "failure": "out of memory"}],
        "remarks": ["b, torch: out of memory"],
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_steps_are_medians_over_all_rounds():
    found = gpu_table.sides(report())["a"]
    assert (
        found[OURS].seconds == 0.020
        and found[OURS].spread == pytest.approx(3.0)
        and found[OURS].start_s == 6.0
    )
    assert found[OURS].tokens_per_s == pytest.approx(400_000)
    assert found[OURS].mfu == pytest.approx(400_000 * 1e9 / 989e12) and found[
        TORCH
    ].mfu == pytest.approx(found[OURS].mfu / 2)


def test_tables_have_a_ratio_and_all_that_failed():
    text = gpu_table.text(report())
    ours, theirs = (
        cells(line)
        for line in text.splitlines()
        if line.startswith("| ") and " ms " not in line and "40.4%" in line or "20.2%" in line
    )
    assert ours[:6] == [
        "a",
        "8 × 1000 in 2, remat full, documents apart, bfloat16",
        "jaxtrain",
        "20.0",
        "3.00",
        "400,000",
    ]
    assert ours[7] == "2.00" and theirs[-1] == "2.00" and theirs[7] == ""
    assert (
        "| attention | 2.0e-03, 2.0e-03 | 4.0e-03, 4.0e-03 | 4.000 | 8.000 | 2.00 | 250.00 | "
        "125.00 |" in text
    )
    assert "| another | out of memory |" in text and text.endswith("- b, torch: out of memory")
    assert text.count("- attention: cuDNN: a\n") == 1
    widths = {len(cells(line)) for line in gpu_table.steps_table(report())}
    assert len(widths) == 1


@pytest.mark.parametrize(
    "changes, same",
    [
        ({}, True),
        ({"losses": (10.001, 9.01)}, True),
        ({"losses": (10.01, 9.0)}, False),
        ({"losses": (10.0, 9.1)}, False),
        ({"norms": (1.01, 1.0)}, False),
        ({"norms": (1.0, 1.05)}, False),
        ({"torch_losses": (10.0, float("nan"))}, False),
        ({"losses": (float("nan"), 9.0)}, False),
    ],
)
def test_losses_say_whether_the_models_are_the_same(changes, same):
    found = gpu_table.sides(report(**changes))["a"]
    assert gpu_table.are_same(found[OURS], found[TORCH], "bfloat16") is same
    assert ("| yes: " in gpu_table.text(report(**changes))) is same


def test_a_report_is_json():
    assert json.loads(json.dumps(report()))["rounds"]


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_chosen_product_is_beside_plain_products_and_beside_blocks_of_rows(
    monkeypatch, platform
):
    monkeypatch.setattr(
        "jaxtrain.parallel.target_device.target_device", lambda: TargetDevice(platform)
    )
    chosen = PRODUCTS[product_kernel(TargetDevice(platform)).kernel]
    names = [c.name for c in gpu_kernels.products("m", 64, 8, 8, 4)]
    besides = ["a plain product for each", PRODUCTS[BLOCKS]][
        : 1 if chosen == PRODUCTS[BLOCKS] else 2
    ]
    assert names == [f"product by groups, m: {chosen} beside {beside}" for beside in besides]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])  # megablox takes no shapes as small as these
def test_a_kernel_and_its_fallback_are_of_the_same_shapes(monkeypatch, platform):
    """Traced alone: what they compute is in test_gpu_torch.py."""
    monkeypatch.setattr(
        "jaxtrain.parallel.target_device.target_device", lambda: TargetDevice(platform)
    )
    with jax.set_mesh(make_mesh((1,) * 6, jax.devices()[:1])):
        for c in gpu_kernels.comparisons(True, "float32"):
            arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in c.shapes]
            value = jax.eval_shape(c.reference, *arrays, *c.fixed)
            for function in (c.function, c.reference):
                both = jax.eval_shape(
                    gpu_kernels.with_gradients(function, len(arrays)), value, *arrays, *c.fixed
                )
                assert both == (value, tuple(arrays))


def test_pairs_of_documents_are_counted():
    segments = np.array([[0, 0, 0, 1, 1], [4, 4, 4, 4, 4]], np.int32)
    mask = (segments[:, :, None] == segments[:, None, :]) & np.tril(np.ones((5, 5), bool))
    assert gpu_kernels.seen(segments) == mask.sum()


def test_every_kernel_of_the_shipped_recipes_is_compared():
    for tiny in (True, False):
        found = gpu_kernels.comparisons(tiny, "bfloat16")
        names = " ".join(c.name for c in found)
        assert all(
            words in names for words in ("attention, ", "documents apart", "product by groups")
        )
        assert all(c.flops > 0 for c in found) and len({c.name for c in found}) == len(found)
    groups = next(
        c for c in gpu_kernels.comparisons(False, "bfloat16") if c.name.startswith("product")
    )
    (sizes,) = groups.fixed
    assert sizes.sum() == groups.shapes[0][0] and (sizes == 0).any() and sizes.min() >= 0


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--device=cpu"], "use --device=cpu --tiny"),
        (["--device=tpu"], "--device='tpu' is none of cuda, cpu"),
        (["--cases=gpt5"], "--cases='gpt5' is none of gpt2_124m; "),
        (["--sides=torch"], "use --sides=jaxtrain,torch"),
        (["--sides=jaxtrain,flax"], "--sides='flax' is none of jaxtrain, torch, kernels"),
        (["--torch_compile=none"], "use --torch_compile=blocks"),
        (["--torch_compile=all", "--device=cpu", "--tiny"], "is none of blocks, model, none"),
        (["--torch_python=/nowhere/python"], "--torch_python=/nowhere/python does not run"),
        (["--sides=kernels"], "--device=cuda finds no NVIDIA GPU"),
        (["--minutes=0"], "--minutes=0 must be at least 0.1"),
        (["--config.pipeline.remat=selective"], "pipeline.remat='selective'"),
        (["--cases=gpt2_124m", "--config.model.heads=7"], "model.heads"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, said, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # where there is a GPU, too, nvidia-smi is not found
    with pytest.raises(SystemExit) as ended:
        gpu.main(flags)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1


def test_a_python_without_torch_is_refused(tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit):
        gpu.main([f"--torch_python={python}"])
    assert "has no torch: use " in capsys.readouterr().err
