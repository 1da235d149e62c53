"""What a start says about its step. tests/devices/test_host_memory.py has the lines about the
host's memory, tests/planner/programs/test_report.py those of a dry run."""

from support import small

from jaxtrain.phases.start_lines import introduction
from jaxtrain.training.step import make_step


def test_what_zero_cannot_share_out_is_said():
    def said(data: int, zero: int, **changes) -> list[str]:
        names = {f"model.{name}": value for name, value in changes.items()} | {
            "parallel.zero": zero,
            "data.batch_size": data,
        }
        config = small.config((data, 1, 1), microbatches=1, changes=names)
        lines = introduction(config, make_step(config, small.mesh_of(config)))
        return [line for line in lines if line.startswith("ZeRO")]

    whole = (
        "of the parameters are unsharded over all 7 devices: mesh.data=7 divides no free dimension "
        "of theirs (model.width=32)"
    )
    assert said(7, 3) == [f"ZeRO: 100% {whole}"]
    rest = 4 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 2 * 61 * 32 + 32
    table = 490 * 32  # 7 divides its rows
    assert said(7, 1, positions="learned", max_positions=490) == [
        f"ZeRO: {rest / (rest + table):.0%} {whole}"
    ]
    assert said(8, 3) == said(7, 0) == said(1, 1) == []


def test_experts_of_one_kind_have_a_capacity():
    kinds = {"model.pattern": ("full", "moe"), "model.kinds": ("moe.experts=4",)}
    config = small.config((1, 1, 1), changes=kinds | {"mesh.expert": 2})
    lines = introduction(config, make_step(config, small.mesh_of(config)))
    (line,) = (line for line in lines if line.startswith("experts:"))
    # each of the two devices may receive all tokens' choices
    assert line.endswith("2.00 times the mean (the worst case)")


def test_kernels_of_each_kind_are_said():
    """A line that is not of all kinds names its own."""
    kinds = {"model.pattern": ("window", "full"), "model.window": 4}
    said = []
    for changes in ({}, {"model.kinds": ("full.attention_kernel=xla",)}):
        config = small.config((1, 1, 1), changes=kinds | changes)
        lines = introduction(config, make_step(config, small.mesh_of(config)))
        said.append([line for line in lines if line.startswith("attention:")])
    chosen = "attention: plain XLA (splash is for TPUs, cudnn is for NVIDIA GPUs)"
    requested = "attention: plain XLA (model.attention_kernel=xla)"
    assert said == [
        [chosen],
        [f"{chosen} (layers of kind window)", f"{requested} (layers of kind full)"],
    ]
