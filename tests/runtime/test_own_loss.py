"""A loss of one's own: read and checked at the start, and by chunks like plain jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small

from jaxtrain.config import ConfigError
from jaxtrain.runtime.loss import LossInputs, LossRule, OutputHead, loss_and_gradients, loss_sum
from jaxtrain.runtime.own_loss import read_loss

FILE = """
import jax
import jax.numpy as jnp

CONSTANT = 3

def smoothed(logits, targets):
    log_p = jax.nn.log_softmax(logits)
    target = jnp.take_along_axis(log_p, targets[:, None], -1)[:, 0]
    return -0.9 * target - 0.1 * log_p.mean(-1)

def all_logits(logits, targets):
    return logits

def half(logits, targets):
    return logits[:, 0].astype(jnp.bfloat16)

def two(logits, targets):
    return logits[:, 0], targets

def branches(logits, targets):
    return logits[:, 0] if targets[0] > 1 else logits[:, 1]

def prints(logits, targets):
    jax.debug.print("{}", logits[0, 0])
    return logits[:, 0]

def of_logits(logits):
    return logits[:, 0]
"""
CALLED = ", called with logits float32 [3, 13] and targets int32 [3]"
FAULTS = {
    "smooth": "names smooth, which loss.py does not define: it has smoothed",
    "CONSTANT": f"raises TypeError{CALLED}: 'int' object is not callable",
    "all_logits": f"returns float32 [3, 13]{CALLED}, and a loss for each token is float32 [3]",
    "half": f"returns bfloat16 [3]{CALLED}, and a loss for each token is float32 [3]",
    "two": f"returns float32 [3], int32 [3]{CALLED}, and a loss for each token is float32 [3]",
    "branches": "decides in Python by a number that only the device knows: jnp.where selects",
    "prints": "has a side effect, such as a print or a callback",
    "of_logits": f"raises TypeError{CALLED}: of_logits() takes 1 positional argument but 2 were "
    "given",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "loss.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_one_line_about_each_fault(name):
    with pytest.raises(ConfigError) as error:
        read_loss(f"loss.py:{name}", 13)
    expected = f"train.loss='loss.py:{name}' {FAULTS[name]}: use --config.train.loss="
    assert str(error.value) == expected


def test_no_loss_is_read_for_an_empty_setting():
    assert read_loss("", 13) is None


@pytest.mark.parametrize("limit", small.named([4], [24, 1]))
def test_by_chunks_and_without_padding(limit):
    """The function sees 13 logits of a token, and not the 3 that pad them."""
    own = read_loss("loss.py:smoothed", 13)
    x, table = small.normal(0, 2, 12, 8), small.normal(1, 16, 8)
    random = np.random.default_rng(2)
    targets = jnp.asarray(random.integers(0, 13, (2, 12)), jnp.int32)
    weights = jnp.asarray(random.random((2, 12)), jnp.float32)
    rows = jnp.arange(16) < 13

    def head(table, x):
        return jnp.where(rows, jnp.einsum("bcd,vd->bcv", x, table), -jnp.inf)

    def plain(table, x):
        losses = jax.vmap(own)(jnp.einsum("bcd,vd->bcv", x, table[:13]), targets)
        return jnp.sum(losses * weights)

    chunked = OutputHead(head, limit, rule=LossRule(own=own, vocab_size=13))
    run = lambda x: (
        loss_and_gradients(chunked, table, jnp.zeros_like(table), LossInputs(x, targets, weights)),
        loss_sum(chunked, table, LossInputs(x, targets, weights)),
    )
    (sums, by_table, by_x), only = jax.jit(run)(x)
    value, wanted = jax.value_and_grad(plain, (0, 1))(jnp.asarray(table), jnp.asarray(x))
    np.testing.assert_allclose([sums.loss, only], [value, value], rtol=1e-6)
    assert sums.z_loss is None
    for got, right in zip((by_table, by_x), wanted, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-5)
