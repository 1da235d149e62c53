"""benchmarks/gpu.py with torch on this CPU: its models are ours, and one that is not is found; the
whole command, on tiny shapes.

In float32 losses agree to 1e-5 in the first step and 1e-4 in later ones, which begin with weights
that differ by rounding.
"""

import json
import os
import subprocess
import sys

import gpu_cases
import gpu_kernels
import gpu_step
import gpu_table
import pytest
from gpu_cases import CASES, OURS, TORCH
from support import ROOT

pytestmark = pytest.mark.full
torch = pytest.importorskip(
    "torch", reason="torch is not installed: benchmarks/requirements-gpu.txt"
)

import torch_models  # noqa: E402 (torch comes first)
import torch_step  # noqa: E402

NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A case's name → the folder that our side has left, in float32, and its result."""
    made: dict[str, tuple] = {}

    def of(name: str) -> tuple:
        if name not in made:
            folder = tmp_path_factory.mktemp("case")
            config = gpu_cases.config_of(
                next(case for case in CASES if case.name == name),
                True,
                [("precision.compute", "float32")],
            )
            gpu_cases.write_case(
                folder, config, device="cpu", tiny=True, steps=3, torch=True, torch_compile="none"
            )
            made[name] = folder, gpu_step.run(folder)
        return made[name]

    return of


def are_same(ours: dict, theirs: dict) -> bool:
    sides = [
        gpu_table.Side(1.0, 1.0, 1.0, None, None, 0.0, r["losses"], r["norms"])
        for r in (ours, theirs)
    ]
    return gpu_table.are_same(*sides, "float32")


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2], NAMES[4]])
def test_both_sides_are_the_same_model(written, name):
    folder, ours = written(name)
    theirs = torch_step.run(folder)
    assert len(ours["losses"]) == len(theirs["losses"]) == 4 and len(theirs["seconds"]) == 3
    assert are_same(ours, theirs), (
        ours["losses"],
        theirs["losses"],
        ours["norms"],
        theirs["norms"],
    )


def no_rotation(patch) -> None:
    patch.setattr(torch_models, "rotate", lambda x, angles: x)


def another_base(patch) -> None:
    angles = torch_models.rotary_angles
    patch.setattr(
        torch_models,
        "rotary_angles",
        lambda positions, size, base: angles(positions, size, base / 2),
    )


def documents_together(patch) -> None:
    whole = lambda segments: torch.ones(
        segments.shape[1], segments.shape[1], dtype=torch.bool
    ).tril()
    patch.setattr(torch_step, "document_mask", whole)


def no_causality(patch) -> None:
    attend = torch_models.F.scaled_dot_product_attention
    patch.setattr(
        torch_models,
        "attend",
        lambda q, k, v, mask=None: attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1]),
    )


def another_activation(patch) -> None:
    patch.setattr(torch_models.F, "gelu", lambda x, approximate: torch_models.F.silu(x))


def another_epsilon(patch) -> None:
    forward = torch_models.Norm.forward

    def changed(self, x):
        self.epsilon = 1e-4
        return forward(self, x)

    patch.setattr(torch_models.Norm, "forward", changed)


def router(change):
    def made(patch) -> None:
        forward = torch_models.Router.forward
        patch.setattr(torch_models.Router, "forward", lambda self, x: change(*forward(self, x)))

    return made


even_gates = router(lambda gates, chosen, loss: (torch.full_like(gates, 0.5), chosen, loss))
no_balance_loss = router(lambda gates, chosen, loss: (gates, chosen, 0 * loss))


def another_rate(patch) -> None:
    step = torch_step.Training.step

    def changed(self, number):
        self.rates = [0.9 * rate for rate in self.rates]
        return step(self, number)

    patch.setattr(torch_step.Training, "step", changed)


GPT2 = [no_causality, another_activation, another_epsilon, another_rate]
MIXTRAL = [no_rotation, another_base, documents_together, even_gates, no_balance_loss]


@pytest.mark.parametrize(
    "name, change", [*((NAMES[0], c) for c in GPT2), *((NAMES[2], c) for c in MIXTRAL)]
)
def test_another_model_is_found(written, name, change, monkeypatch):
    folder, ours = written(name)
    change(monkeypatch)
    assert not are_same(ours, torch_step.run(folder))


def test_documents_by_flex_attention_are_those_of_the_whole_mask():
    segments = torch.tensor([[1] * 40 + [2] * 88, [1] * 128])
    shapes = ((2, 4, 128, 16), (2, 2, 128, 16), (2, 2, 128, 16))
    torch.manual_seed(0)
    arrays = [torch.randn(shape) for shape in shapes]
    by_blocks = torch_models.attend(*arrays, torch_models.block_mask(segments))
    torch.testing.assert_close(
        by_blocks, torch_models.attend(*arrays, torch_models.document_mask(segments))
    )


def test_rows_of_experts_are_in_whole_groups():
    torch.manual_seed(0)
    chosen = torch.randint(0, 3, (50,)) * 2  # two of five experts without any
    choice, row, ends = torch_models.rows_of(chosen, 5)
    assert (choice[row] == torch.arange(50)).all() and (choice == 50).sum() == len(choice) - 50
    begins = [0, *ends.tolist()]
    assert all(end % torch_models.GROUP_ROWS == 0 for end in begins) and begins[-1] < len(choice)
    expert = torch.searchsorted(ends, row, right=True)
    assert (expert == chosen).all()


def test_products_are_the_same_by_the_kernel_and_by_the_loop():
    """grouped_mm is for bfloat16."""
    if torch_models.GROUPED_MM is None:
        pytest.skip("this torch has no grouped_mm")
    torch.manual_seed(0)
    ends = torch.tensor([16, 16, 64], dtype=torch.int32)
    results = []
    for product in (torch_models.product, torch_models.product_by_loop):
        torch.manual_seed(1)
        x, weights = (
            torch.randn(shape).bfloat16().requires_grad_() for shape in ((80, 32), (3, 24, 32))
        )
        y = product(x, weights, ends)[:64]
        y.backward(torch.randn(y.shape).bfloat16())
        results.append((y, x.grad[:64], weights.grad))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_kernels_are_what_their_fallbacks_are():
    """On a CPU attention is its own fallback; the products by groups are not."""
    import jax

    from jaxtrain.devices.mesh import make_mesh

    with jax.set_mesh(make_mesh((1,) * 6, jax.devices()[:1])):
        for comparison in gpu_kernels.comparisons(tiny=True, dtype="float32"):
            row = gpu_kernels.compare(comparison, "float32")
            for side in ("kernel", "fallback"):
                assert (
                    row[side]["value_error"] < 1e-6
                    and row[side]["gradient_error"] < 1e-6
                    and row[side]["seconds"] > 0
                )


def test_the_command(tmp_path):
    """All of it, on a CPU; with bfloat16, as the recipes have it."""
    file = tmp_path / "figures.json"
    flags = [
        "--device=cpu",
        "--tiny",
        "--cases=gpt2_124m;mixtral_8x7b, 2 layers",
        "--minutes=20",
        f"--json={file}",
    ]
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", *flags],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert {(r["case"], r["side"]) for r in found["rounds"]} == {
        (name, side) for name in (NAMES[0], NAMES[2]) for side in (OURS, TORCH)
    }
    assert (
        found["remarks"] == []
        and len(found["kernels"]) == 3
        and {"jax", "jaxlib", "torch", "device"} <= found["versions"].keys()
    )
    assert done.stdout.count("| yes: ") == 2
