"""benchmarks/import_memory.py on a small model, and the bound that it measures against."""

import import_memory
import pytest


def test_the_bound():
    figures = {"parameters": 1000, "optimizer": 7, "before": 5, "peak": 6}
    assert import_memory.bound_of(figures, largest=100) == 1300 + 100 + 256 * 10**6 + 7


@pytest.mark.full
def test_an_import_stays_far_below_its_bound(tmp_path):
    """A process holds its shards, and one array twice: with so small a model most of the bound is
    its constant, so this one is smaller."""
    model = tmp_path / "model"
    size, _ = import_memory.write_model(model, 0.4e9)
    processes = import_memory.launched(model, ["--config.mesh.model=8"])
    assert len(processes) == import_memory.PROCESSES
    for figures in processes:
        # float32 for bfloat16; norms are on all devices, tables padded
        assert figures["parameters"] == pytest.approx(2 * size / 8, rel=0.02)
        assert figures["peak"] < 1.3 * figures["parameters"] + 64 * 10**6
