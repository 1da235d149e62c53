"""Windows, soft caps, sinks and scales in every kernel, against attention by its definition; and
the work of a window."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attended, small
from support.attended import arrays, segments

from jaxtrain.config import splash_backward
from jaxtrain.parallel.attention import blockwise, splash
from jaxtrain.parallel.attention.causal import AttentionSettings, attend_causal
from jaxtrain.parallel.attention.flash import Inputs, Scores, Sight
from jaxtrain.planner.programs.program import Program


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention to `tokens`, as of the arguments of attended.dense."""

    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    documents: bool = False
    scale: float = 0.0
    tokens: int = 40


SHORT = {  # all scores at once
    "window": Case(7),
    "capped, sinks, documents": Case(9, 3.0, True, True),
    "own scale, sinks, no window": Case(0, 0.0, True, False, 0.3),
    "window of one": Case(1, 0.0, True),
    "window of all": Case(40, 2.0),
    "in four blocks of queries": Case(100, 0.0, True, True, tokens=512),
}
BLOCKS = {  # an odd number of tokens: the last block is filled up
    "window, capped, sinks, documents": Case(33, 3.0, True, True, tokens=131),
    "window": Case(50, 0.0, False, False, 0.4, tokens=96),
    "no window, capped, sinks": Case(0, 3.0, True, tokens=96),
    "window of one": Case(1, tokens=64),
    "one less than all": Case(95, 0.0, True, tokens=96),
}
SPLASH = {
    "window, capped, sinks, documents": Case(129, 3.0, True, True, tokens=512),
    "window": Case(100, 0.0, False, False, 0.2, tokens=384),
    "no window, capped, sinks": Case(0, 3.0, True, tokens=256),
    "one less than all": Case(255, 0.0, True, tokens=256),
}


def assert_same_as_dense(case: Case, **settings) -> None:
    q, k, v, g = arrays(tokens=case.tokens, key=24, value=16)
    given = [q, k, v]
    if case.sinks:
        given.append(jnp.asarray(np.random.default_rng(2).normal(size=q.shape[2]), jnp.float32))
    own = segments(2, case.tokens, 5) if case.documents else None
    scores = Scores(case.scale, case.softcap)
    chosen = AttentionSettings(window=case.window, scores=scores, **settings)
    rule = dataclasses.asdict(case) | {"own": own}
    del rule["sinks"], rule["documents"], rule["tokens"]
    attend = lambda q, k, v, *sinks: attend_causal(q, k, v, own, chosen, None, *sinks)
    got, expected = (
        jax.jit(functools.partial(attended.with_gradients, fn))(*given, g)
        for fn in (attend, functools.partial(attended.dense, **rule))
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHORT)
def test_all_scores_at_once(name):
    assert_same_as_dense(SHORT[name], kernel="xla")


@pytest.mark.parametrize("name", small.named([*BLOCKS][:1], [*BLOCKS][1:]))
def test_by_blocks(name, monkeypatch):
    monkeypatch.setattr(blockwise, "LEAST_KEYS", 1)
    monkeypatch.setattr(blockwise, "LEAST_BLOCK", 8)
    assert_same_as_dense(BLOCKS[name], kernel="xla")


@pytest.mark.parametrize("backward", ["auto", "two_kernels", "several calls"])
@pytest.mark.parametrize("name", small.named([*SPLASH][:1], [*SPLASH][1:]))
def test_splash(name, backward, monkeypatch):
    monkeypatch.setattr(splash, "MOST", splash.LANES)
    if backward == "several calls":  # one for each block of keys
        monkeypatch.setattr(splash_backward, "SUM_BYTES", 128 * 40 * 4)
        monkeypatch.setattr(splash_backward, "MOST", splash.LANES)
        backward = "auto"
    assert_same_as_dense(SPLASH[name], kernel="splash", backward=backward)


def window_inputs(window: int, tokens: int, keys: int | None = None) -> Inputs:
    """Shapes alone."""
    shape = lambda t: jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
    given = shape(tokens), shape(keys or tokens), shape(keys or tokens)
    return Inputs(*given, Sight((0,), window=window))


def scores_of(window: int, tokens: int) -> int:
    """The scores that a window needs."""
    return window * tokens - window * (window - 1) // 2


@pytest.mark.parametrize("window", [512, 521, 600, 1024, 1030, 2048, 4096])
def test_blocks_cost_the_work_of_a_window(window):
    pairs = blockwise._BlockPairs(window_inputs(window, 8 * window))
    assert pairs.steps * pairs.size**2 <= 1.3 * scores_of(window, 8 * window)


@pytest.mark.parametrize("window", [512, 640, 768, 1024, 1536, 2048, 4096])
def test_splash_costs_the_work_of_a_window(window):
    """In each direction, with no more steps that are not computed than for the first blocks."""
    pairs = splash._block_pairs(window_inputs(window, 8 * window), 1024, 1024)
    for steps in (pairs.by_queries().block_mask, pairs.by_keys().block_mask):
        ran = int(np.sum(steps)) * pairs.queries * pairs.keys
        assert ran <= 1.3 * scores_of(window, 8 * window)
        assert steps.size * pairs.queries * pairs.keys <= 1.5 * scores_of(window, 8 * window)


def test_the_compiled_loops_are_those_of_a_window():
    """In the forward and in the backward, at 8 windows of 512 tokens."""
    q, k, v, g = arrays(batch=1, tokens=4096, heads=1, kv_heads=1, key=8, value=8)
    settings = AttentionSettings(kernel="xla", window=512)
    fn = lambda *given: attend_causal(*given, None, settings)
    step = jax.jit(functools.partial(attended.with_gradients, fn))
    program = Program(step.lower(q, k, v, g).compile().as_text())
    loops = [i for i in program.inline(program.entry) if i.opcode == "while"]
    pairs = blockwise._BlockPairs(window_inputs(512, 4096))
    assert [program.trip_count(loop) for loop in loops] == [pairs.steps] * 2


def test_keys_of_entire_blocks():
    """Neighbours' keys are filled up to entire blocks of the queries' size."""
    pairs = splash._block_pairs(window_inputs(512, 1024, 1024 + 512), 1024, 1024)
    assert (pairs.queries, pairs.keys, pairs.own_block) == (128, 128, 4)
    assert splash_backward.filled_up(1024, 1024 + 511, 512) == 1024 + 512
    assert np.sum(pairs.by_queries().block_mask) == 8 * 5
