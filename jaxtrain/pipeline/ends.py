"""Embedding, head and loss of one microbatch inside the runtime's manual region, with their gradients.

end stages    the embedding is the first unit's stage's work, the head the last one's; every stage holds both tables
parallel      the tables' rows are split over stage × model, and all stages do an op together, each with its own rows: the embedding's
              rows are summed over `stage`, the head's input comes to all stages, and only the softmax's statistics and the gradient of
              that input are summed (vocabulary parallelism, Yeung et al. 2024). The logits of a microbatch are nowhere whole
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.mesh import DATA, STAGE, psum
from jaxtrain.models.transformer import Parts, add_position_gradient
from jaxtrain.parallel import context
from jaxtrain.parallel.vocabulary import add_lookup_gradient
from jaxtrain.parallel.zero import Zero, all_rows, gather, reduce_in_op, resized, to_own_columns, to_own_rows
from jaxtrain.sharding import constrain
from jaxtrain.training.loss import loss_and_gradients, loss_sum

State = dict[str, Any]


def take(a, i):
    """a[i] for a traced i."""
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


class Ends:
    """first, last: the stages of the model's first and last unit. `shared`: vocabulary parallel.

    `zero` and `how` (Reductions of embed and head) say what of the parameters is here, and what of their gradients stays.

    The methods read `embed`, `head` (parameters) and `batch` of a state, and take the microbatch `k`. In a shared op the arrays that
    only the first or the last stage has may hold anything elsewhere, and results are right on all stages.
    """

    def __init__(self, parts: Parts, loss_chunk: int, dtype, first: int, last: int, shared: bool, zero: Zero, how: dict):
        self.parts, self.loss_chunk, self.dtype, self.shared, self.zero = parts, loss_chunk, dtype, shared, zero
        self._how = {k: how[k] for k in ("embed", "head")}
        self._first, self._last = first, last
        self._over = (STAGE,) if shared else ()

    # ------------------------------------------------------------------ the batch

    def batch(self, s: State, k, *names: str):
        """The microbatch's arrays; None for one that this batch does not have."""
        return [take(s["batch"][n], k) if n in s["batch"] else None for n in names]

    def extra(self, s: State, k):
        """What every layer needs beside its input: positions and, where documents are kept apart, segments."""
        return self._tokens(s, k)[1], self.batch(s, k, "segments")[0]

    def _tokens(self, s: State, k):
        tokens, positions = self.batch(s, k, "tokens", "positions")
        return tokens, context.positions(tokens.shape[1]) if positions is None else positions

    # ------------------------------------------------------------------ between stages

    def _of(self, x, stage: int):
        """One stage's array on all stages."""
        return psum(self._only(x, stage), self._over) if self.shared else x

    def _only(self, x, stage: int):
        return jnp.where(lax.axis_index(STAGE) == stage, x, jnp.zeros_like(x)) if self.shared else x

    def _first_row(self, table):
        """Of this stage's part of a table."""
        return lax.axis_index(STAGE) * table.shape[0] if self.shared else 0

    # ------------------------------------------------------------------ between data shards

    def _whole(self, params, how):
        return jax.tree.map(gather, params, how) if self.zero.gathers_in_ops else params

    def _open(self, sums, how, specs):
        """What a microbatch's gradients are added to: the sums, or whole zeros where these are this device's part of them."""
        if not self.zero.reduces_in_ops:
            return sums
        zeros = lambda a, h, s: constrain(jnp.zeros(resized(a.shape, h, lax.axis_size(DATA), up=True), a.dtype), s.axes)
        return jax.tree.map(lambda a, h, s: zeros(a, h, s) if h.over_data else a, sums, how, specs)

    def _close(self, sums, added, how):
        """The sums, after gradients were added to what `_open` gave."""
        if not self.zero.reduces_in_ops:
            return added
        return jax.tree.map(lambda a, new, h: a + reduce_in_op(new, h, self.zero.dtype) if h.over_data else new, sums, added, how)

    # ------------------------------------------------------------------ the ops

    def embed(self, s: State, k):
        """→ the first unit's input [B, T, D]."""
        tokens, positions = self._tokens(s, k)
        params, how = dict(s["embed"]), self._how["embed"]
        by_columns = self.zero.gathers_in_ops and how["table"].over_data
        rows = (all_rows(tokens) if by_columns else tokens) - self._first_row(params["table"])
        x = self.parts.embed(params, rows, self.dtype, method="lookup")
        x = to_own_rows(x) if by_columns else x
        if "positions" in params:
            params["positions"] = self._whole(params["positions"], how["positions"])
        return self.parts.embed(params, psum(x, self._over) if self.shared else x, positions, method="place")

    def embed_gradient(self, s: State, k, g) -> State:
        """→ the embedding's gradient sums with the gradient of `embed`'s result."""
        tokens, positions = self._tokens(s, k)
        sums, how = s["grad_embed"], self._how["embed"]
        whole, first = self._of(g, self._first), self._first_row(sums["table"])
        if self.zero.reduces_in_ops and how["table"].over_data:
            whole, tokens = to_own_columns(whole), all_rows(tokens)
        new = {**sums, "table": add_lookup_gradient(sums["table"], tokens - first, whole)}
        if "positions" in sums:
            own = sums["positions"], how["positions"]
            added = add_position_gradient(self._open(*own, self.parts.specs["embed"]["positions"]), positions, self._only(g, self._first))
            new["positions"] = self._close(own[0], added, own[1])
        return {"grad_embed": new}

    def _head_tree(self, tree: State, prefix: str = "") -> State:
        """The head's parameters, their gradient sums, or what is known of them: with the embedding table where the two are tied."""
        tied = {"table": tree[f"{prefix}embed"]["table"]} if self.parts.cfg.tied_embeddings else {}
        return {"head": tree[f"{prefix}head"], **tied}

    def _head_params(self, s: State) -> State:
        return self._whole(self._head_tree(s), self._head_tree(self._how))

    def _logits(self, params):
        """(head, what is known of its part of the vocabulary)."""
        first = self._first_row(params.get("table", params["head"].get("table")))
        return lambda p, x: self.parts.head(p["head"], x, p.get("table"), first), {"first_row": first, "over": self._over}

    def loss(self, s: State, k, y) -> State:
        """→ the loss with this microbatch's, from the last unit's output."""
        params = self._head_params(s)
        head, part = self._logits(params)
        targets, weights = self.batch(s, k, "targets", "weights")
        loss = loss_sum(lambda y: head(params, y), self._of(y, self._last), targets, weights, self.loss_chunk, **part)
        return {"loss": s["loss"] + self._only(loss, self._last)}

    def loss_and_gradients(self, s: State, k, y) -> tuple[State, jax.Array]:
        """→ (loss and gradient sums with this microbatch's, gradient of the last unit's output)."""
        params, sums = self._head_params(s), self._head_tree(s, "grad_")
        head, part = self._logits(params)
        targets, weights = self.batch(s, k, "targets", "weights")
        y = self._of(y, self._last)
        how = self._head_tree(self._how)
        opened = self._open(sums, how, self._head_tree(self.parts.specs))
        loss, added, g = loss_and_gradients(head, params, opened, y, targets, weights, self.loss_chunk, **part)
        sums = self._close(sums, added, how)
        new: State = {"loss": s["loss"] + self._only(loss, self._last), "grad_head": sums["head"]}
        if "table" in sums:
            new["grad_embed"] = {**s["grad_embed"], "table": sums["table"]}
        return new, psum(g, self._over) if self.shared else g
