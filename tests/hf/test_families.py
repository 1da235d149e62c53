"""The rules of each family: they fill every parameter once, and a tensor that went through them is
the same bytes."""

import numpy as np
import pytest
from support import small
from support.hf_imported import fill, laid_out
from support.hf_models import CONFIGS, FIRST, OTHERS, llama_tensors, stored_array

from jaxtrain.hf import exporting
from jaxtrain.hf.exporting import tensor_rows
from jaxtrain.hf.families.family import COUNTERS
from jaxtrain.hf.tensor_rules import check_coverage

NAMES = small.named(FIRST, OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_rules_fill_every_parameter_once(name):
    rules, _, shapes = laid_out(CONFIGS[name])
    filled = {array: np.zeros(shape, int) for array, shape in shapes.items()}
    for rule in rules:
        filled[rule.array][rule.region] += 1
    for array, count in filled.items():
        assert (count == (0 if array.endswith(COUNTERS) else 1)).all(), array


@pytest.mark.parametrize("seed", small.named([0], [1, 2]))
@pytest.mark.parametrize("name", NAMES)
def test_tensors_in_pieces(monkeypatch, name, seed):
    """Blocks and pieces of random sizes give the bytes that the arrays were made of."""
    rules, tensors, shapes = laid_out(CONFIGS[name])
    random = np.random.default_rng(seed)
    numbers = {array: np.zeros(shape, np.float32) for array, shape in shapes.items()}
    published = {t.name: random.standard_normal(t.shape, np.float32) for t in tensors}
    for rule in rules:
        fill(numbers[rule.array], rule, published[rule.tensor])
    arrays = {
        array: stored_array(values, tuple(random.integers(1, n + 1) for n in values.shape))
        for array, values in numbers.items()
    }
    monkeypatch.setattr(exporting, "BLOCK_BYTES", int(random.integers(64, 2000)))
    monkeypatch.setattr(exporting, "PIECE_BYTES", int(random.integers(1, 2000)))
    for tensor in tensors:
        blocks = list(tensor_rows(tensor, arrays, np.dtype(np.float32)))
        assert np.concatenate(blocks).tobytes() == published[tensor.name].tobytes(), tensor.name
        row = published[tensor.name][0].nbytes
        assert max(block.nbytes for block in blocks) <= max(exporting.BLOCK_BYTES, row)


@pytest.mark.parametrize("name", NAMES)
def test_any_window_of_an_array(name):
    """From rows of the tensor that come one by one, whatever their order in the array is."""
    rules, tensors, shapes = laid_out(CONFIGS[name])
    shape_of = {tensor.name: tensor.shape for tensor in tensors}
    random = np.random.default_rng(0)
    for rule in rules:
        tensor = random.standard_normal(shape_of[rule.tensor], np.float32)
        inner = [range(size) for size in shapes[rule.array][len(rule.index) :]]
        complete = np.full([len(span) for span in inner], np.nan, np.float32)
        covered = rule.covers(inner)
        rule.store(tensor[as_slices(rule.source(covered))], rule.source(covered), complete, inner)
        assert np.isfinite(complete[as_slices(covered)]).all()
        window = [range(*sorted(random.integers(0, len(span) + 1, 2))) for span in inner]
        covered = rule.covers(window)
        if not all(covered):
            continue
        target = np.full([len(span) for span in covered], np.nan, np.float32)
        rows, *others = rule.source(covered)
        for row in rows:
            region = (range(row, row + 1), *others)
            rule.store(tensor[as_slices(region)], region, target, covered)
        assert target.tobytes() == np.ascontiguousarray(complete[as_slices(covered)]).tobytes()


def as_slices(region) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.stop) for span in region)


def test_a_llama_s_tensors():
    _, tensors, _ = laid_out(CONFIGS["llama"])
    shapes = {name: array.shape for name, array in llama_tensors().items()}
    assert {tensor.name: tensor.shape for tensor in tensors} == shapes


def test_counts_of_experts_are_no_tensors():
    _, tensors, shapes = laid_out(CONFIGS["mixtral"], **{"model.capacity_factor": 1.5})
    assert {f"layers/{name}" for name in COUNTERS} <= set(shapes)
    assert len(tensors) == 3 + 3 * (7 + 3 * 4)


def test_rotated_columns_are_pairs_or_halves():
    pairs, _, _ = laid_out(CONFIGS["deepseek_v3"])
    (key,) = [r for r in pairs if r.tensor.endswith("layers.1.self_attn.kv_a_proj_with_mqa.weight")]
    assert key.columns == (12, 12 + 10 + 6)
    assert list(key.taken) == [*range(10), 10, 12, 14, 11, 13, 15]
    (query,) = [r for r in pairs if r.tensor.endswith("layers.1.self_attn.q_b_proj.weight")]
    assert list(query.taken[14:28]) == [14 + c for c in (*range(8), 8, 10, 12, 9, 11, 13)]
    halves, _, _ = laid_out(CONFIGS["deepseek_v3 without latent queries"])
    (key,) = [
        r for r in halves if r.tensor.endswith("layers.1.self_attn.kv_a_proj_with_mqa.weight")
    ]
    assert list(key.taken) == [*range(16)]


def test_rules_that_do_not_fit():
    rules, _, shapes = laid_out(CONFIGS["llama"])
    with pytest.raises(ValueError, match="two rules fill"):
        check_coverage([*rules, rules[0]], shapes)
    with pytest.raises(ValueError, match=r"rules fill 0 of the 4160 of embed/table"):
        check_coverage(rules[1:], shapes)
