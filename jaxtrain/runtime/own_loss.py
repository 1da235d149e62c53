"""A loss of one's own (`train.loss`): a function of the logits of some tokens,

    def loss(logits, targets):    # float32 [tokens, vocabulary], int32 [tokens]
        ...
        return losses             # float32 [tokens]

Weights of tokens, the mean over them and the chunks of tokens whose logits exist at a time are the
runtime's. `read_loss` checks the function before anything is compiled.

Shape suffixes: B batch, C tokens of a chunk, V vocabulary (in memory: padded).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.config import ConfigError, one_line, own_code
from jaxtrain.devices.sharding import constrain, reshard

# (logits float32 [tokens, vocabulary], targets int32 [tokens]) → losses float32 [tokens]
OwnLoss = Callable[[jax.Array, jax.Array], jax.Array]
VOCABULARY_SPLIT, TOKENS_SPLIT = ("batch", "token", "vocab"), ("batch", "sequence", None)


def losses_of(own: OwnLoss, vocab_size: int, logits_BCV, targets_BC) -> jax.Array:
    """The losses [B, C]. vocab_size: rows of the vocabulary without padding"""
    # The function sees the whole vocabulary: logits that `model` splits by it go to the devices of
    # their tokens, as between layers, and their gradients come back.
    logits_BCV = reshard(logits_BCV, VOCABULARY_SPLIT, TOKENS_SPLIT)[..., :vocab_size]
    return jax.vmap(own)(logits_BCV, constrain(targets_BC, TOKENS_SPLIT[:2]))


def read_loss(text: str, vocab_size: int) -> OwnLoss | None:
    """The function that `train.loss` names; None if that is empty. Raises ConfigError for one that
    is not there or does not fit."""
    try:
        return _checked(own_code.load(text), vocab_size) if text else None
    except own_code.OwnCodeError as error:
        raise ConfigError("train.loss", text, str(error), fixes=[{"train.loss": ""}]) from None


def _checked(own: OwnLoss, vocab_size: int) -> OwnLoss:
    """The function, which was traced with its gradient for a few tokens. Raises OwnCodeError."""
    tokens = 3
    logits = jax.ShapeDtypeStruct((tokens, vocab_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    called = f"called with logits float32 [{tokens}, {vocab_size}] and targets int32 [{tokens}]"

    def with_gradient(logits, targets):
        losses, vjp = jax.vjp(lambda logits: own(logits, targets), logits)
        return losses, vjp(jax.tree.map(jnp.ones_like, losses))

    try:
        traced, (losses, _) = jax.make_jaxpr(with_gradient, return_shape=True)(logits, targets)
    except jax.errors.ConcretizationTypeError:
        raise own_code.OwnCodeError(
            "decides in Python by a number that only the device knows: jnp.where selects"
        ) from None
    except Exception as error:
        raise own_code.OwnCodeError(
            one_line(f"raises {type(error).__name__}, {called}: {error}")
        ) from None
    returned = ", ".join(f"{a.dtype} {list(a.shape)}" for a in jax.tree.leaves(losses))
    if returned != f"float32 [{tokens}]":
        raise own_code.OwnCodeError(
            f"returns {returned}, {called}, and a loss for each token is float32 [{tokens}]"
        )
    if traced.effects:
        raise own_code.OwnCodeError("has a side effect, such as a print or a callback")
    return own
