"""What cuDNN is given for documents and what is made of its results, against plain XLA, with
cuDNN's two primitives played by numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attended
from support.attended import arrays, segments

from jaxtrain.parallel.attention import causal, cudnn, flash
from jaxtrain.parallel.attention.flash import CAUSAL, Inputs

CAUSAL_MASK, PADDING_CAUSAL = cudnn.cudnn.MaskType.CAUSAL, cudnn.cudnn.MaskType.PADDING_CAUSAL


class Primitive:
    """One of the two, as their documentation and XLA's cuda_dnn.cc have them: attention of each
    document that a length is given for, at its offset in numbers from the arrays' beginning. What
    no document covers is not a number."""

    def __init__(self, backward: bool):
        self.backward, self.masks = backward, []

    def bind(
        self,
        q,
        k,
        v,
        bias,
        lengths,
        key_lengths,
        offsets,
        key_offsets,
        *rest,
        scale,
        mask_type,
        sliding_window_length,
        **parameters,
    ):
        self.masks.append(mask_type)
        assert (
            mask_type in (CAUSAL_MASK, PADDING_CAUSAL)
            and (mask_type == PADDING_CAUSAL) == lengths.ndim - 1
        )
        rows = lengths.size if lengths.ndim > 1 else len(q)
        results = (
            (q, k, v)
            if self.backward
            else (jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),)
        )
        if not self.backward:
            results = (*results, jax.ShapeDtypeStruct((rows, q.shape[2], q.shape[1]), jnp.float32))
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), list(results))
        play = lambda *arrays: self.play(scale, sliding_window_length, *map(np.asarray, arrays))
        return jax.pure_callback(
            play, shapes, q, k, v, lengths, key_lengths, offsets, key_offsets, *rest[2:]
        )

    def play(
        self, scale, window, q, k, v, lengths, key_lengths, offsets, key_offsets, *rest
    ) -> list[np.ndarray]:
        batch, tokens, heads, size = q.shape
        if lengths.ndim == 1:
            rows = [
                (tokens, n * tokens * heads * size, n * tokens * k.shape[2] * size)
                for n in range(batch)
            ]
        else:
            assert (lengths == key_lengths).all()
            assert k.shape[3] == v.shape[3] == size, "keys and values have the same offsets"
            assert lengths.shape[1] + 1 == offsets.shape[1] == key_offsets.shape[1]
            rows = list(
                zip(*(np.ravel(a).tolist() for a in (lengths, offsets, key_offsets)), strict=False)
            )
        given = [np.array(a, np.float32) for a in (q, k, v, *rest)]
        shapes = [
            a.shape for a in ((q, k, v) if self.backward else (given[0][..., :1] + v[0, 0, 0],))
        ]
        results = [np.full(shape, np.nan, np.float32) for shape in shapes]
        stats = (
            given[3] if self.backward else np.full((len(rows), heads, tokens), np.nan, np.float32)
        )
        for row, (n, at, at_keys) in enumerate(rows):
            places = at, at_keys, at_keys // size * v.shape[3]
            own = [part(a, place, n) for a, place in zip(given, places, strict=False)]
            scores, lse = masked_scores(*own[:2], scale, window)
            if self.backward:
                # by the given log-sum-exp and output, which may be those with sinks
                weights = np.exp(scores - stats[row, :, :n, None])
                out, g = (part(a, at, n) for a in given[4:])
                found = gradients(*own[:3], out, g, weights, scale)
            else:
                stats[row, :, :n] = lse
                weights = np.exp(scores - lse[..., None])
                found, places = (
                    [np.einsum("nts,snv->tnv", weights, expanded(own[2], heads))],
                    (at // size * v.shape[3],),
                )
            for result, a, place in zip(results, found, places, strict=True):
                result.reshape(-1)[place : place + a.size] = a.reshape(-1)
        return results if self.backward else [*results, stats]


def part(a: np.ndarray, at: int, n: int) -> np.ndarray:
    """[n, heads, size] from number `at` on."""
    return a.reshape(-1)[at : at + n * a.shape[2] * a.shape[3]].reshape(n, *a.shape[2:])


def expanded(a: np.ndarray, heads: int) -> np.ndarray:
    """Keys or values for each query head."""
    return np.repeat(a, heads // a.shape[1], 1)


def masked_scores(q, k, scale, window) -> tuple[np.ndarray, np.ndarray]:
    """Scores [heads, T, T] and log-sum-exp [heads, T] of one document. window: the number of keys
    that a query sees, by the documentation the keys (position − window, position]; None: all"""
    scores = np.einsum("tnh,snh->nts", q, expanded(k, q.shape[1])) * scale
    seen = np.tril(np.ones(scores.shape[1:], bool))
    if window:
        seen &= ~np.tril(seen, -window)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, initial=-1e30)
    return scores, top + np.log(np.exp(scores - top[..., None]).sum(-1))


def gradients(q, k, v, out, g, weights, scale) -> list[np.ndarray]:
    """Of queries, keys and values of one document."""
    heads, by_group = (
        q.shape[1],
        lambda a, like: a.reshape(len(a), like.shape[1], heads // like.shape[1], a.shape[2]).sum(2),
    )
    by_weights = np.einsum("tnv,snv->nts", g, expanded(v, heads))
    delta = np.einsum("tnv,tnv->nt", g, out)[..., None]
    by_scores = weights * (by_weights - delta) * scale
    dk, dv = np.einsum("nts,tnh->snh", by_scores, q), np.einsum("nts,tnv->snv", weights, g)
    return [
        np.einsum("nts,snh->tnh", by_scores, expanded(k, heads)),
        by_group(dk, k),
        by_group(dv, v),
    ]


@pytest.fixture
def primitives(monkeypatch):
    made = Primitive(False), Primitive(True)
    monkeypatch.setattr(cudnn.cudnn, "_dot_product_attention_fwd_p", made[0])
    monkeypatch.setattr(cudnn.cudnn, "_dot_product_attention_bwd_p", made[1])
    return made


@jax.jit
def attend(q, k, v, g, own):
    documents = None if own is None else (own, own)
    return attended.with_gradients(
        lambda *a: flash.attend(cudnn.KERNEL, Inputs(*a, CAUSAL, documents)), q, k, v, g
    )


@pytest.mark.parametrize(
    "shape, documents, room",
    [
        ({}, 4, 4),  # grouped heads, two sizes of heads: values are padded
        ({"key": 32}, 0, 4),  # whole sequences
        ({"batch": 3}, 9, 3),  # more than a call has room for: three calls
        pytest.param({"key": 32, "kv_heads": 4}, 3, 8, marks=pytest.mark.full),
        pytest.param(
            {"key": 32, "value": 48, "kv_heads": 1, "batch": 4}, 2, 2, marks=pytest.mark.full
        ),
    ],
)
def test_same_as_plain_xla(primitives, monkeypatch, shape, documents, room):
    monkeypatch.setattr(cudnn, "DOCUMENTS", room)
    q, k, v, g = arrays(**{"tokens": 24, "heads": 4} | shape)
    own = segments(*q.shape[:2], documents) if documents else None
    got = attend(q, k, v, g, own)
    for a, b in zip(got, attended.plain(q, k, v, g, None, own, own), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert [p.masks for p in primitives] == [[PADDING_CAUSAL if documents else CAUSAL_MASK]] * 2


@pytest.mark.parametrize(
    "documents, softmax_sinks", [(0, False), pytest.param(4, True, marks=pytest.mark.full)]
)
def test_windows(primitives, documents, softmax_sinks):
    q, k, v, g = arrays(tokens=24, heads=4, key=32)
    own = segments(2, 24, documents) if documents else None
    sinks = jnp.arange(4.0) if softmax_sinks else None
    pair, scores = own if own is None else (own, own), flash.Scores(0.3, sinks=sinks)
    sight = dataclasses.replace(CAUSAL, window=5)
    fn = lambda *a: flash.attend(cudnn.KERNEL, Inputs(*a, sight, pair, None, scores))
    got = jax.jit(lambda *given: attended.with_gradients(fn, *given))(q, k, v, g)
    rule = functools.partial(attended.dense, sinks=sinks, own=own, window=5, scale=0.3)
    for a, b in zip(got, attended.with_gradients(rule, q, k, v, g), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_last_tokens_of_the_keys(primitives):
    """As `context` has them with a window: the first sequence has no neighbours before it, and the
    queries of the other's see them."""
    q, k, v, g = arrays(tokens=24, heads=4, key=32)
    own = jnp.asarray(np.stack([np.where(np.arange(24) < 6, -1, 0), np.zeros(24)]), jnp.int32)
    sight = dataclasses.replace(CAUSAL, window=7)
    inputs = lambda q, k, v: Inputs(q[:, 6:], k, v, sight, (own[:, 6:], own))
    fn = lambda *a: flash.attend(cudnn.KERNEL, inputs(*a))
    got = jax.jit(lambda *given: attended.with_gradients(fn, *given))(q, k, v, g[:, 6:])
    rule = lambda q, k, v: attended.dense(q, k, v, own=own, window=7)[:, 6:]
    for a, b in zip(got, attended.with_gradients(rule, q, k, v, g[:, 6:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_places_of_documents():
    """The example of the module's docstring."""
    own = jnp.array([[1, 1, 1, 1, 2, 2], [4, 4, 5, 6, 6, 6]])
    places = cudnn._documents(own, 4)
    np.testing.assert_array_equal(places.lengths.ravel(), [4, 2, 2, 1, 3, 0, 0, 0])
    np.testing.assert_array_equal(places.starts.ravel(), [0, 4, 6, 8, 9, 12, 12, 12, 12, 12])
    np.testing.assert_array_equal(places.document_BT, [[0, 0, 0, 0, 1, 1], [2, 2, 3, 4, 4, 4]])
    np.testing.assert_array_equal(places.position_BT, [[0, 1, 2, 3, 0, 1], [0, 1, 0, 0, 1, 2]])
    second = cudnn._documents(own, 2, 1)
    np.testing.assert_array_equal(second.lengths.ravel(), [3, 0, 0, 0])
    np.testing.assert_array_equal(second.starts.ravel(), [9, 12, 12, 12, 12, 12])
    np.testing.assert_array_equal(second.document_BT, [[4] * 6, [4, 4, 4, 0, 0, 0]])
    first = cudnn._documents(jnp.array([[7, 7, 7], [1, 2, 3]]), 2)
    np.testing.assert_array_equal(first.lengths.ravel(), [3, 1, 1, 1])  # one call for 1 and 3


def test_offsets_fit_into_32_bits():
    assert cudnn.is_addressable((3, 131072, 32, 128)) and not cudnn.is_addressable(
        (4, 131072, 32, 128)
    )


@pytest.mark.parametrize("sizes", [(8, 8), (24, 16), (16, 24)])
def test_by_a_mask_heads_of_two_sizes_are_filled_up(sizes, monkeypatch):
    """jax refuses values of another size than the queries', as latent attention has; output and
    gradients are plain XLA's."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, implementation, **named: plain(*args, **named),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 12, 4, sizes[0]), (2, 12, 2, sizes[0]), (2, 12, 2, sizes[1]))
    arrays = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    mask = jnp.tril(jnp.ones((12, 12), bool))[None, None]
    outputs, gradients = [], []
    for attend in (causal.attend_by_cudnn_mask, causal.attend):
        outputs.append(attend(*arrays, mask))
        gradients.append(
            jax.grad(lambda *a, f=attend: (f(*a, mask) ** 2).sum(), (0, 1, 2))(*arrays)
        )
    assert outputs[0].shape == (2, 12, 4, sizes[1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        (outputs[0], gradients[0]),
        (outputs[1], gradients[1]),
    )
