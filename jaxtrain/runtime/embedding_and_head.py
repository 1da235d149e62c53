"""Embedding, head and loss of one microbatch inside the runtime's manual region, with their gradients.

end stages    the embedding is the first unit's stage's work, the head the last one's; every stage holds both tables
parallel      the tables' rows are split over stage × model, and all stages do an op together, each with its own rows: the embedding's
              rows are summed over `stage`, the head's input comes to all stages, and only the softmax's statistics and the gradient of
              that input are summed (vocabulary parallelism, Yeung et al. 2024). The logits of a microbatch are nowhere whole

Dense layers before the first unit run in the embedding's op, and once more in its gradient's. Where the model predicts tokens beyond the
next (DeepSeek-V3, arXiv:2412.19437, section 2.2), their modules run in the head's op, forward and backward, with the model's embedding and
output matrix. In both cases the vocabulary is on the end stages.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import DATA, STAGE, psum
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.transformer import Parts, add_position_gradient
from jaxtrain.parallel import context
from jaxtrain.parallel.vocabulary import add_lookup_gradient
from jaxtrain.parallel.zero import Zero, all_rows, gather, reduce_in_op, resized, to_own_columns, to_own_rows
from jaxtrain.runtime.loss import loss_and_gradients, loss_sum

State = dict[str, Any]


def take(a, i):
    """a[i] for a traced i."""
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def look_ahead(batch: dict[str, jax.Array], depth: int) -> dict[str, jax.Array]:
    """A batch of whole sequences, with what module d = 0, 1, … needs: "ahead_tokens{d}", each token's d + 1 places on, and the targets and
    weights of those places. The weights are 0 where a document or the sequence ends before."""
    made = dict(batch)
    for d in range(depth):
        on = lambda name, by=d + 1: jnp.pad(batch[name][..., by:], (*[(0, 0)] * (batch[name].ndim - 1), (0, by)))
        weights = on("weights")
        if "segments" in batch:
            weights = jnp.where(batch["segments"] == on("segments"), weights, 0)
        made |= {f"ahead_tokens{d}": on("tokens"), f"ahead_targets{d}": on("targets"), f"ahead_weights{d}": weights}
    return made


class Ends:
    """first, last: the stages of the model's first and last unit. `shared`: vocabulary parallel.

    `zero` and `how` (Reductions of all that is no layer) say what of the parameters is here, and what of their gradients stays.

    The methods read `embed`, `first`, `head`, `predictors` (parameters) and `batch` of a state, and take the microbatch `k`. In a shared op
    the arrays that only the first or the last stage has may hold anything elsewhere, and results are right on all stages.
    """

    def __init__(self, parts: Parts, loss_chunk: int, dtype, first: int, last: int, shared: bool, zero: Zero, how: dict):
        self.parts, self.loss_chunk, self.dtype, self.shared, self.zero = parts, loss_chunk, dtype, shared, zero
        self._how = how
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

    def _add(self, sums, gradients, how):
        """The sums with a microbatch's gradients."""
        if self.zero.reduces_in_ops:
            gradients = jax.tree.map(lambda g, h: reduce_in_op(g, h, self.zero.dtype), gradients, how)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)

    def _lookup(self, embed, tokens):
        """The tokens' rows of this stage's part of the table."""
        by_columns = self.zero.gathers_in_ops and self._how["embed"]["table"].over_data
        rows = (all_rows(tokens) if by_columns else tokens) - self._first_row(embed["table"])
        x = self.parts.embed(embed, rows, self.dtype, method="lookup")
        return to_own_rows(x) if by_columns else x

    def _add_lookup(self, table, tokens, g):
        """The table's sums with the gradient of `_lookup`."""
        first = self._first_row(table)
        if self.zero.reduces_in_ops and self._how["embed"]["table"].over_data:
            g, tokens = to_own_columns(g), all_rows(tokens)
        return add_lookup_gradient(table, tokens - first, g)

    # ------------------------------------------------------------------ the ops

    def embed(self, s: State, k):
        """→ the first unit's input [B, T, D]."""
        return self._first_layers(s, k, self._embed(s, k), lambda layer, params, x: layer(params, x))

    def _first_layers(self, s: State, k, x, run):
        """x = run(layer, its parameters, x) for each dense layer before the first unit."""
        extra = self.extra(s, k)
        for i in map(str, range(self.parts.cfg.dense_layers)):
            x = run(lambda p, x: self.parts.first(p, x, *extra), self._whole(s["first"][i], self._how["first"][i]), x)
        return x

    def _embed(self, s: State, k):
        """→ the first layer's input."""
        tokens, positions = self._tokens(s, k)
        params, how = dict(s["embed"]), self._how["embed"]
        x = self._lookup(params, tokens)
        if "positions" in params:
            params["positions"] = self._whole(params["positions"], how["positions"])
        return self.parts.embed(params, psum(x, self._over) if self.shared else x, positions, method="add_positions")

    def embed_gradient(self, s: State, k, g) -> State:
        """→ the gradient sums of the embedding, and of the dense layers behind it, with the gradient of `embed`'s result."""
        tokens, positions = self._tokens(s, k)
        more: State = {}
        if "first" in s:
            more["grad_first"], g = self._first_gradients(s, k, g)
        sums, how = s["grad_embed"], self._how["embed"]
        new = {**sums, "table": self._add_lookup(sums["table"], tokens, self._of(g, self._first))}
        if "positions" in sums:
            own = sums["positions"], how["positions"]
            added = add_position_gradient(self._open(*own, self.parts.specs["embed"]["positions"]), positions, self._only(g, self._first))
            new["positions"] = self._close(own[0], added, own[1])
        return {"grad_embed": new, **more}

    def _first_gradients(self, s: State, k, g) -> tuple[State, jax.Array]:
        """→ (gradient sums of the dense layers, which are run once more, gradient of the first one's input)."""
        backward = []

        def keep(layer, params, x):
            y, vjp = jax.vjp(layer, params, x)
            backward.append(vjp)
            return y

        self._first_layers(s, k, self._embed(s, k), keep)
        sums = dict(s["grad_first"])
        for i, vjp in reversed(list(enumerate(backward))):
            gradients, g = vjp(g)
            sums[str(i)] = self._add(sums[str(i)], gradients, self._how["first"][str(i)])
        return sums, g

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
        """→ (losses and gradient sums with this microbatch's, gradient of the last unit's output)."""
        params, sums = self._head_params(s), self._head_tree(s, "grad_")
        head, part = self._logits(params)
        targets, weights = self.batch(s, k, "targets", "weights")
        y = self._of(y, self._last)
        how = self._head_tree(self._how)
        opened = self._open(sums, how, self._head_tree(self.parts.specs))
        loss, added, g = loss_and_gradients(head, params, opened, y, targets, weights, self.loss_chunk, **part)
        new: State = {"loss": s["loss"] + self._only(loss, self._last)}
        lookups: list[tuple] = []
        if "predictors" in s:
            more, added, lookups, ahead_g = self._predict(s, k, y, params, added)
            new, g = new | more, g + ahead_g
        sums = self._close(sums, added, how)
        new["grad_head"] = sums["head"]
        if "table" in sums or lookups:
            table = sums.get("table", s["grad_embed"]["table"])
            for tokens, by_rows in lookups:
                table = self._add_lookup(table, tokens, by_rows)
            new["grad_embed"] = {**s["grad_embed"], "table": table}
        return new, psum(g, self._over) if self.shared else g

    def _predict(self, s: State, k, y, params: State, opened: State):
        """Of the tokens beyond the next → (loss and gradient sums of their modules, `opened` with the head's gradients, tokens looked up
        with the gradients of their rows, gradient of the last unit's output).

        A module goes on from the stream after the norm before it, the head's or that of the module before, which is why that norm has two
        gradients: by the logits, and by the next module."""
        (head, part), extra = self._logits(params), self.extra(s, k)
        follow = lambda norm, module, y, rows: self.parts.predictor(module, self.parts.norm(norm, y), rows, *extra)
        total, backward, norm = s["ahead_loss"], [], params["head"]["norm"]
        for d in map(str, range(self.parts.cfg.mtp_depth)):
            module = dict(self._whole(s["predictors"][d], self._how["predictors"][d]))
            before, norm = norm, module.pop("norm")
            tokens, targets, weights = self.batch(s, k, f"ahead_tokens{d}", f"ahead_targets{d}", f"ahead_weights{d}")
            y, vjp = jax.vjp(follow, before, module, y, self._lookup(s["embed"], tokens))
            sums = {**opened, "head": {**opened["head"], "norm": jax.tree.map(jnp.zeros_like, norm)}}
            whole = {**params, "head": {**params["head"], "norm": norm}}
            loss, sums, g = loss_and_gradients(head, whole, sums, y, targets, weights, self.loss_chunk, **part)
            total, opened = total + loss, {**sums, "head": {**sums["head"], "norm": opened["head"]["norm"]}}
            backward.append((d, tokens, vjp, g, sums["head"]["norm"]))
        new, lookups, after = dict(s["grad_predictors"]), [], jnp.zeros_like(y)
        by_next = jax.tree.map(jnp.zeros_like, norm)
        add = lambda sums, gradients: jax.tree.map(jnp.add, sums, gradients)
        for d, tokens, vjp, g, by_logits in reversed(backward):
            by_norm = add(by_logits, by_next)
            by_next, by_module, after, by_rows = vjp(g + after)
            new[d] = self._add(new[d], {**by_module, "norm": by_norm}, self._how["predictors"][d])
            lookups.append((tokens, by_rows))
        opened = {**opened, "head": {**opened["head"], "norm": add(opened["head"]["norm"], by_next)}}
        return {"ahead_loss": total, "grad_predictors": new}, opened, lookups, after
