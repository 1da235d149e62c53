"""Choosing tokens, the sampler's loop over them, and text as it becomes certain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small
from support.plain_model import plain_model

from jaxtrain.data.tokenizer import NoTokenizer
from jaxtrain.devices.mesh import make_mesh
from jaxtrain.generation import sampling
from jaxtrain.generation.sampling import Sampler, Sampling, choose, filter_tokens
from jaxtrain.generation.text import sample_text
from jaxtrain.models import transformer

VOCABULARY = 61


# --- the choice -----------------------------------------------------------------------------------


def left(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens of one row top-k and top-p leave, in numpy and one token after the other."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    weights = np.exp(np.float64(logits[order]) - logits.max())
    total, kept = 0.0, []
    for i, p in zip(order, weights / weights.sum(), strict=True):
        if total >= top_p and top_p < 1:
            break
        kept.append(i)
        total += p
    return np.isin(np.arange(len(logits)), kept)


@pytest.mark.parametrize("top_k", [0, 1, 3, 7, 100])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.77, 1.0])
def test_top_k_and_top_p_leave_the_reference_s_tokens(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(5, 23)).astype(np.float32) * 2
    expected = np.stack([left(row, top_k, top_p) for row in logits])
    assert 5 <= expected.sum() <= 5 * min(top_k or 23, 23)
    np.testing.assert_array_equal(filter_tokens(jnp.asarray(logits), top_k, top_p), expected)


def test_of_equal_logits_the_smaller_ids_are_left():
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0, 2.0, -jnp.inf]])
    assert filter_tokens(logits, 2, 1.0).tolist() == [[False, True, False, True, False, False]]
    keys, rule = jax.random.split(jax.random.key(0), 1), Sampling(0.0).arrays((), 6)
    assert choose(logits, keys, rule, greedy=True).tolist() == [1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.8), (0.7, 5, 0.9)],
)
def test_tokens_are_chosen_as_often_as_they_should_be(temperature, top_k, top_p):
    logits = np.random.default_rng(1).normal(size=8).astype(np.float32)
    logits[3] = -np.inf
    chance = np.where(left(logits / temperature, top_k, top_p), np.exp(logits / temperature), 0)
    chance /= chance.sum()
    n = 20_000
    keys = jax.random.split(jax.random.key(0), n)
    rule = Sampling(temperature, top_k, top_p)
    made = jax.jit(functools.partial(choose, filtered=rule.filtered))(
        jnp.broadcast_to(logits, (n, 8)), keys, rule.arrays((), 8)
    )
    often = np.bincount(made, minlength=8)
    assert (often[chance == 0] == 0).all()
    # Five standard deviations of a binomial count: one in 10⁶ by chance, and the seed is fixed.
    np.testing.assert_array_less(
        np.abs(often - n * chance), 5 * np.sqrt(n * chance * (1 - chance)) + 1e-9 + (chance == 0)
    )


def test_extreme_temperatures():
    logits, keys = jnp.array([[1.0, 3.0, -jnp.inf, 2.0]]), jax.random.split(jax.random.key(3), 1)
    cold, hot = (Sampling(temperature).arrays((), 4) for temperature in (1e-29, np.inf))
    assert choose(logits, keys, cold).tolist() == [1]
    many = choose(jnp.broadcast_to(logits, (200, 4)), jax.random.split(keys[0], 200), hot)
    assert set(many.tolist()) == {0, 1, 3}
    assert (
        Sampling(temperature=0).greedy
        and Sampling(temperature=1e-45).greedy
        and not Sampling(temperature=1e-29).greedy
    )


# --- the sampler ----------------------------------------------------------------------------------


@functools.cache
def model(mesh=(1, 1, 1), **changes):
    """A random model whose next tokens differ: (parts, parameters on the mesh, with layers in one
    stack)."""
    cfg = small.config(
        mesh,
        changes={"model.init_std": 0.3, "model.kv_heads": 4}
        | {f"model.{k}": v for k, v in changes.items()},
    )
    return plain_model(cfg)


@functools.cache
def sampler(mesh=(1, 1, 1), **changes) -> Sampler:
    return Sampler(*model(mesh, **changes))


def ids(sampler: Sampler, *args, **kwargs) -> np.ndarray:
    return np.concatenate(list(sampler.start(*args, **kwargs)), 1)


@functools.cache
def whole_forward(**changes):
    """int32 [1, 44] → logits of one row, [44, V]; what comes after a token changes nothing."""
    parts, params = model(**changes)
    return jax.jit(lambda tokens: transformer.logits(parts, params, tokens)[0])


def by_whole_forwards(prompt: list[int], tokens: int, **changes) -> list[int]:
    """Greedy continuation by a forward over the whole sequence for each token."""
    made = list(prompt)
    for _ in range(tokens):
        logits = whole_forward(**changes)(jnp.array([made + [0] * (44 - len(made))]))
        made.append(int(logits[len(made) - 1, :VOCABULARY].argmax()))
    return made[len(prompt) :]


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7], list(range(20))])
def test_greedy_is_the_argmax_of_whole_forwards(prompt):
    expected = by_whole_forwards(prompt, 24)
    assert len(set(expected)) > 5  # a model that repeats itself would hide mistakes
    assert ids(sampler(), prompt, 24, Sampling(temperature=0)).tolist() == [expected]


def test_a_prompt_longer_than_a_piece(monkeypatch):
    monkeypatch.setattr(sampling, "PIECE", 8)
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, VOCABULARY, 21)]
    assert ids(sampler(), prompt, 6, Sampling(temperature=0)).tolist() == [
        by_whole_forwards(prompt, 6)
    ]


@pytest.mark.parametrize("mesh", small.named([(1, 1, 1)], [(2, 1, 2)]))
def test_windows(mesh, monkeypatch):
    """A prompt in pieces, and tokens beyond the window."""
    monkeypatch.setattr(sampling, "PIECE", 8)
    changes = {"layers": 5, "pattern": ("window", "window", "nope"), "window": 6}
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, VOCABULARY, 21)]
    made = ids(sampler(mesh, **changes), prompt, 20, Sampling(temperature=0), samples=2)
    assert made.tolist() == [by_whole_forwards(prompt, 20, **changes)] * 2


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)])
def test_a_prompt_is_read_by_the_kernel(mesh, monkeypatch):
    """By splash, interpreted, in two pieces; tokens one by one in plain XLA."""
    monkeypatch.setattr(sampling, "PIECE", 128)
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, VOCABULARY, 200)]
    for changes in ({}, {"pattern": ("window", "full"), "window": 70}):
        expected = ids(sampler(**changes), prompt, 6, Sampling(temperature=0))
        by_splash = sampler(mesh, attention_kernel="splash", **changes)
        assert (ids(by_splash, prompt, 6, Sampling(temperature=0)) == expected).all()


def test_learned_positions_to_the_last_one():
    learned = {"positions": "learned", "max_positions": 20}
    assert ids(sampler(**learned), [1, 2, 3], 17, Sampling(temperature=0)).tolist() == [
        by_whole_forwards([1, 2, 3], 17, **learned)
    ]
    with pytest.raises(ValueError, match="18 tokens after a prompt of 3 must be from 1 to 17"):
        sampler(**learned).start([1, 2, 3], 18)


def test_samples_differ_and_are_the_same_again():
    random = Sampling(temperature=2.0, seed=7)
    two = ids(sampler(), [5, 6], 40, random, samples=2)
    assert two.shape == (2, 40) and (two[0] != two[1]).any()
    np.testing.assert_array_equal(ids(sampler(), [5, 6], 40, random, samples=2), two)
    # however many samples there are
    np.testing.assert_array_equal(ids(sampler(), [5, 6], 40, random), two[:1])
    assert (ids(sampler(), [5, 6], 40, Sampling(temperature=2.0, seed=8)) != two[0]).any()


@pytest.mark.parametrize("mesh", small.named([(2, 1, 2)], [(1, 1, 2), (2, 1, 4)]))
def test_the_mesh_changes_nothing(mesh):
    # In float32 the logits of two layouts differ by some 1e-6, the noise of two tokens far more.
    params = sampler(mesh).params
    assert not params["layers"]["attention"]["query"]["weight"].sharding.is_fully_replicated
    assert params["embed"]["table"].shape[0] == -(-VOCABULARY // mesh[2]) * mesh[2]
    random = Sampling(1.5, 20, 0.9, 5)
    np.testing.assert_array_equal(
        ids(sampler(mesh), [5, 6, 7], 20, random), ids(sampler(), [5, 6, 7], 20, random)
    )
    made = ids(sampler(mesh), [5, 6, 7], 20, Sampling(temperature=0))
    assert made.tolist() == [by_whole_forwards([5, 6, 7], 20)]


def test_latents_in_the_cache():
    latent = {
        "attention": "mla",
        "query_rank": 12,
        "kv_rank": 20,
        "rope_head_dim": 6,
        "value_head_dim": 10,
    }
    made = ids(sampler((2, 1, 2), **latent), [5, 6, 7], 12, Sampling(temperature=0))
    assert made.tolist() == [by_whole_forwards([5, 6, 7], 12, **latent)]


def test_fewer_key_value_heads_than_devices():
    """Each device keeps one, in its cache too."""
    made = ids(sampler((1, 1, 4), kv_heads=2), [5, 6, 7], 20, Sampling(temperature=0))
    assert made.tolist() == [by_whole_forwards([5, 6, 7], 20, kv_heads=2)]


def test_inside_another_mesh():
    """As at the end of a training run."""
    expected = by_whole_forwards([5, 6, 7], 8)
    with jax.set_mesh(make_mesh((1, 2, 2, 1, 1, 2))):
        assert ids(sampler(), [5, 6, 7], 8, Sampling(temperature=0)).tolist() == [expected]


def test_ids_that_pad_the_vocabulary_never_come():
    flat = Sampling(temperature=float("inf"))
    padded = sampler((1, 1, 2))
    assert padded.params["head"]["table"].shape[0] == 62
    made = ids(padded, [1], 60, flat, samples=32)
    # 1920 draws: none of 61 missing by chance, but for one in 10¹²
    assert set(made.ravel()) == set(range(VOCABULARY))
    assert set(ids(padded, [1], 60, flat, samples=32, vocabulary=5).ravel()) == set(range(5))


def test_a_sample_ends_at_its_stop_id():
    random = Sampling(temperature=3.0)
    free = ids(sampler(), [1], 80, random, samples=2)
    stop = int(free[0, 50])
    ends = [list(row).index(stop) if stop in row else 80 for row in free]
    assert ends[0] <= 50
    made = ids(sampler(), [1], 80, random, samples=2, stops=[260, stop])
    assert made.shape[1] == max(ends)
    for row, end, all_of_it in zip(made, ends, free, strict=True):
        assert (row[:end] == all_of_it[:end]).all() and (row[end:] == -1).all()


def test_prompts_of_different_lengths_share_programs():
    one = Sampler(*model())
    for prompt in ([3], [3] * 9, [3] * 15):
        ids(one, prompt, 40, Sampling(seed=len(prompt), temperature=0.5 + len(prompt)))
    assert (one._prefill._cache_size(), one._decode._cache_size()) == (1, 1)


@pytest.mark.parametrize(("prompt", "tokens"), [([], 1), ([VOCABULARY], 1), ([-1], 1), ([1], 0)])
def test_what_cannot_be_continued(prompt, tokens):
    with pytest.raises(ValueError):
        sampler().start(prompt, tokens)


def test_sample_text_fits_a_prompt_into_the_learned_positions():
    parts, params = model(positions="learned", max_positions=20)
    known = NoTokenizer(VOCABULARY)
    prompt = [1 + i % 60 for i in range(30)]
    one = Sampler(parts, params)
    made = sample_text(one, known, " ".join(map(str, prompt)), 8, Sampling(temperature=0.0))
    expected = by_whole_forwards(prompt[-12:], 8, positions="learned", max_positions=20)
    assert [int(i) for i in made.split()] == expected
    assert len(sample_text(one, known, "1", 50, Sampling()).split()) == 19
