"""Embedding, head and loss of one microbatch inside the runtime's manual region, with their
gradients.

end stages    the embedding is the first unit's stage's work, the head the last one's; every stage
              holds both tables
parallel      the tables' rows are split over stage × model, and all stages do an op together, each
              with its own rows: the embedding's rows are summed over `stage`, the head's input
              comes to all stages, and only the softmax's statistics and the gradient of that input
              are summed (vocabulary parallelism, Yeung et al. 2024). The logits of a microbatch are
              nowhere whole

Dense layers before the first unit run in the embedding's op, and once more in its gradient's. Where
the model predicts tokens beyond the next (DeepSeek-V3, arXiv:2412.19437, section 2.2), their
modules run in the head's op, forward and backward, with the model's embedding and output matrix. In
both cases the vocabulary is on the end stages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import DATA, STAGE, psum
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.transformer import Parts, add_position_gradient
from jaxtrain.parallel import context
from jaxtrain.parallel.tensor import add_lookup_gradient
from jaxtrain.parallel.zero import (
    Zero,
    columns_to_sequences,
    gather,
    gather_sequences,
    reduce_in_op,
    sequences_to_columns,
    unsharded_shape,
)
from jaxtrain.runtime.loss import VocabularyPart, loss_and_gradients, loss_sum
from jaxtrain.runtime.tick_state import Constants, TickState

Tree = dict[str, Any]


def take(a, i):
    """a[i] for a traced i."""
    return lax.dynamic_index_in_dim(a, i, 0, keepdims=False)


def _later(a: jax.Array, places: int) -> jax.Array:
    """[..., T] → each token's value so many places on, 0 behind the end."""
    return jnp.pad(a[..., places:], (*[(0, 0)] * (a.ndim - 1), (0, places)))


def look_ahead(batch: Tree, depth: int) -> Tree:
    """A batch of whole sequences [..., T] with what the modules of multi-token prediction need, if
    there are any, under "mtp": for module d = "0", "1", … the tokens d + 1 places on, and the
    targets and weights of those places. The weights are 0 where a document or the sequence ends
    before."""
    if not depth:
        return batch
    modules = {}
    for d in range(depth):
        tokens, targets, weights = (
            _later(batch[name], d + 1) for name in ("tokens", "targets", "weights")
        )
        if "segments" in batch:
            weights = jnp.where(batch["segments"] == _later(batch["segments"], d + 1), weights, 0)
        modules[str(d)] = {"tokens": tokens, "targets": targets, "weights": weights}
    return {**batch, "mtp": modules}


def _add_trees(a, b):
    return jax.tree.map(jnp.add, a, b)


def _with_norm(tree: Tree, norm) -> Tree:
    """The head's parameters or sums with another last norm."""
    return {**tree, "head": {**tree["head"], "norm": norm}}


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """tokens int32 [B, T], and the gradient of their rows [B, T, D]."""

    tokens: jax.Array
    gradient: jax.Array


@dataclasses.dataclass(frozen=True)
class _Module:
    """A module of multi-token prediction after its forward and its loss.

    backward: gradient of its stream → gradients of (the norm before, the module without its norm,
        the stream before, the tokens' rows)
    by_stream, by_norm: the gradients of its loss by its stream and by its norm
    """

    name: str
    tokens: jax.Array
    backward: Callable
    by_stream: jax.Array
    by_norm: Any


@dataclasses.dataclass(frozen=True)
class _Predictions:
    """What a microbatch's modules of multi-token prediction have made.

    loss: the sum so far, with theirs; sums: their gradient sums; head_sums: the head's, with the
        gradients of theirs
    by_output: the gradient of the last unit's output
    """

    loss: jax.Array
    sums: Tree
    head_sums: Tree
    lookups: list[_Lookup]
    by_output: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingAndHead:
    """The ops before the first and after the last unit.

    first_stage, last_stage: the stages of the model's first and last unit
    shared: all stages do an op together, each with its part of the vocabulary. Arrays that only the
        first or the last stage has may hold anything on the others, and results are right on all
        stages
    loss_chunk: tokens whose logits may exist at a time
    dtype: of activations
    zero, reductions: what of the parameters is on this device, and what of their gradients stays;
        `reductions` is in the parameters' tree

    The methods take the microbatch's index, a traced int32. x, y and gradients g are activations
    [B, T, D].
    """

    parts: Parts
    loss_chunk: int
    dtype: jnp.dtype
    first_stage: int
    last_stage: int
    shared: bool
    zero: Zero
    reductions: Tree

    @property
    def _shared_axes(self) -> tuple[str, ...]:
        return (STAGE,) if self.shared else ()

    # ------------------------------------------------------------------ the batch

    def extra(self, batch: Tree, microbatch) -> tuple[jax.Array, jax.Array | None]:
        """What every layer needs beside its input: positions [B or 1, T] and, where documents are
        kept apart, segments [B, T]."""
        tokens = take(batch["tokens"], microbatch)
        return self._positions(batch, microbatch, tokens), take(
            batch["segments"], microbatch
        ) if "segments" in batch else None

    def _positions(self, batch: Tree, microbatch, tokens) -> jax.Array:
        return (
            take(batch["positions"], microbatch)
            if "positions" in batch
            else context.positions(tokens.shape[1])
        )

    # ------------------------------------------------------------------ between stages

    def _of_stage(self, x, stage: int):
        """One stage's array on all stages."""
        return psum(self._on_stage(x, stage), self._shared_axes) if self.shared else x

    def _on_stage(self, x, stage: int):
        """The array on one stage, zeros on the others."""
        return jnp.where(lax.axis_index(STAGE) == stage, x, jnp.zeros_like(x)) if self.shared else x

    def _first_row(self, table):
        """Of this stage's part of a table."""
        return lax.axis_index(STAGE) * table.shape[0] if self.shared else 0

    # ------------------------------------------------------------------ between data shards

    def _whole(self, params, reductions):
        return jax.tree.map(gather, params, reductions) if self.zero.gathers_in_ops else params

    def _open(self, sums, reductions, specs):
        """What a microbatch's gradients are added to: the sums, or whole zeros where these are this
        device's part of them."""
        if not self.zero.reduces_in_ops:
            return sums

        def opened(a, reduction, spec):
            if not reduction.over_data:
                return a
            return constrain(
                jnp.zeros(unsharded_shape(a.shape, reduction, lax.axis_size(DATA)), a.dtype),
                spec.axes,
            )

        return jax.tree.map(opened, sums, reductions, specs)

    def _close(self, sums, added, reductions):
        """The sums, after gradients were added to what `_open` gave."""
        if not self.zero.reduces_in_ops:
            return added

        def closed(a, whole, reduction):
            return (
                a + reduce_in_op(whole, reduction, self.zero.dtype)
                if reduction.over_data
                else whole
            )

        return jax.tree.map(closed, sums, added, reductions)

    def _add(self, sums, gradients, reductions):
        """The sums with a microbatch's gradients."""
        if self.zero.reduces_in_ops:
            gradients = jax.tree.map(
                lambda g, r: reduce_in_op(g, r, self.zero.dtype), gradients, reductions
            )
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)

    def _lookup(self, embed: Tree, tokens):
        """The tokens' rows of this stage's part of the table."""
        by_columns = self.zero.gathers_in_ops and self.reductions["embed"]["table"].over_data
        rows = (gather_sequences(tokens) if by_columns else tokens) - self._first_row(
            embed["table"]
        )
        x = self.parts.embed(embed, rows, self.dtype, method="lookup")
        return columns_to_sequences(x) if by_columns else x

    def _add_lookup(self, table, lookup: _Lookup):
        """The table's sums with the gradient of `_lookup`."""
        first_row, g, tokens = self._first_row(table), lookup.gradient, lookup.tokens
        if self.zero.reduces_in_ops and self.reductions["embed"]["table"].over_data:
            g, tokens = sequences_to_columns(g), gather_sequences(tokens)
        return add_lookup_gradient(table, tokens - first_row, g)

    # ------------------------------------------------------------------ the embedding

    def embed(self, constants: Constants, microbatch) -> jax.Array:
        """The first unit's input."""
        x = self._first_layer_input(constants, microbatch)
        return self._first_layers(
            constants, microbatch, x, lambda layer, params, x: layer(params, x)
        )

    def _first_layers(self, constants: Constants, microbatch, x, run: Callable):
        """x = run(layer, its parameters, x) for each dense layer before the first unit."""
        extra = self.extra(constants.batch, microbatch)
        layer = lambda params, x: self.parts.first(params, x, *extra)
        for i in map(str, range(self.parts.cfg.dense_layers)):
            x = run(
                layer, self._whole(constants.params["first"][i], self.reductions["first"][i]), x
            )
        return x

    def _first_layer_input(self, constants: Constants, microbatch):
        tokens = take(constants.batch["tokens"], microbatch)
        positions = self._positions(constants.batch, microbatch, tokens)
        params, reductions = dict(constants.params["embed"]), self.reductions["embed"]
        x = self._lookup(params, tokens)
        if "positions" in params:
            params["positions"] = self._whole(params["positions"], reductions["positions"])
        return self.parts.embed(
            params,
            psum(x, self._shared_axes) if self.shared else x,
            positions,
            method="add_positions",
        )

    def embed_gradient(self, sums: Tree, constants: Constants, microbatch, g: jax.Array) -> Tree:
        """The gradient sums of the embedding, and of the dense layers behind it, with those of a
        microbatch: "embed", and "first" if any.

        sums: the gradient sums so far; g: the gradient of `embed`'s result.
        """
        tokens = take(constants.batch["tokens"], microbatch)
        positions = self._positions(constants.batch, microbatch, tokens)
        changed: Tree = {}
        if "first" in sums:
            changed["first"], g = self._first_gradients(sums["first"], constants, microbatch, g)
        embed, reductions = dict(sums["embed"]), self.reductions["embed"]
        embed["table"] = self._add_lookup(
            embed["table"], _Lookup(tokens, self._of_stage(g, self.first_stage))
        )
        if "positions" in embed:
            before, reduction = embed["positions"], reductions["positions"]
            opened = self._open(before, reduction, self.parts.specs["embed"]["positions"])
            added = add_position_gradient(opened, positions, self._on_stage(g, self.first_stage))
            embed["positions"] = self._close(before, added, reduction)
        return {"embed": embed, **changed}

    def _first_gradients(
        self, sums: Tree, constants: Constants, microbatch, g
    ) -> tuple[Tree, jax.Array]:
        """(gradient sums of the dense layers, which are run once more; gradient of the first one's
        input)."""
        backward = []

        def keep(layer, params, x):
            y, vjp = jax.vjp(layer, params, x)
            backward.append(vjp)
            return y

        self._first_layers(
            constants, microbatch, self._first_layer_input(constants, microbatch), keep
        )
        sums = dict(sums)
        for i, vjp in reversed(list(enumerate(backward))):
            gradients, g = vjp(g)
            sums[str(i)] = self._add(sums[str(i)], gradients, self.reductions["first"][str(i)])
        return sums, g

    # ------------------------------------------------------------------ the head

    def _head_tree(self, tree: Tree) -> Tree:
        """Of the parameters' tree, or of one like it, what the head reads: with the embedding table
        where the two are tied."""
        tied = {"table": tree["embed"]["table"]} if self.parts.cfg.tied_embeddings else {}
        return {"head": tree["head"], **tied}

    def _head_params(self, constants: Constants) -> Tree:
        return self._whole(self._head_tree(constants.params), self._head_tree(self.reductions))

    def _head(self, params: Tree) -> tuple[Callable, VocabularyPart]:
        """(head: (params, x) → logits, its part of the vocabulary)."""
        first_row = self._first_row(params.get("table", params["head"].get("table")))
        head = lambda params, x: self.parts.head(params["head"], x, params.get("table"), first_row)
        return head, VocabularyPart(first_row, self._shared_axes)

    def loss(self, constants: Constants, microbatch, y: jax.Array) -> jax.Array:
        """The microbatch's loss, from the last unit's output: a float32 scalar, 0 on all but one
        stage."""
        params = self._head_params(constants)
        head, part = self._head(params)
        targets, weights = (
            take(constants.batch[name], microbatch) for name in ("targets", "weights")
        )
        y = self._of_stage(y, self.last_stage)
        return self._on_stage(
            loss_sum(lambda x: head(params, x), y, targets, weights, self.loss_chunk, part),
            self.last_stage,
        )

    def loss_and_gradients(
        self, state: TickState, constants: Constants, microbatch, y: jax.Array
    ) -> tuple[TickState, jax.Array]:
        """(the state with the microbatch's losses and the head's gradients, the gradient of the
        last unit's output y).

        Of the state it reads and changes `loss`, `mtp_loss` and `gradients`.
        """
        params, sums = self._head_params(constants), self._head_tree(state.gradients)
        head, part = self._head(params)
        targets, weights = (
            take(constants.batch[name], microbatch) for name in ("targets", "weights")
        )
        y = self._of_stage(y, self.last_stage)
        reductions = self._head_tree(self.reductions)
        opened = self._open(sums, reductions, self._head_tree(self.parts.specs))
        loss, added, g = loss_and_gradients(
            head, params, opened, y, targets, weights, self.loss_chunk, part
        )
        gradients, mtp_loss, lookups = dict(state.gradients), state.mtp_loss, []
        if self.parts.cfg.mtp_depth:
            predictions = self._predict(state, constants, microbatch, y, params, added)
            gradients["predictors"], mtp_loss, lookups = (
                predictions.sums,
                predictions.loss,
                predictions.lookups,
            )
            added, g = predictions.head_sums, g + predictions.by_output
        sums = self._close(sums, added, reductions)
        gradients["head"] = sums["head"]
        if "table" in sums or lookups:
            table = sums.get("table", gradients["embed"]["table"])
            for lookup in lookups:
                table = self._add_lookup(table, lookup)
            gradients["embed"] = {**gradients["embed"], "table": table}
        loss = state.loss + self._on_stage(loss, self.last_stage)
        state = dataclasses.replace(state, loss=loss, mtp_loss=mtp_loss, gradients=gradients)
        return state, psum(g, self._shared_axes) if self.shared else g

    # ------------------------------------------------------------------ multi-token prediction

    def _predict(
        self, state: TickState, constants: Constants, microbatch, y, params: Tree, head_sums: Tree
    ) -> _Predictions:
        """The losses of the tokens beyond the next, and their gradients, from the last unit's
        output y.

        A module goes on from the stream after the norm before it, the head's or that of the module
        before, which is why that norm has two gradients: by the logits, and by the next module.
        """
        head, part = self._head(params)
        extra = self.extra(constants.batch, microbatch)
        follow = lambda norm, module, y, rows: self.parts.predictor(
            module, self.parts.norm(norm, y), rows, *extra
        )
        loss, stream, norm = state.mtp_loss, y, params["head"]["norm"]
        modules: list[_Module] = []
        for d in map(str, range(self.parts.cfg.mtp_depth)):
            parameters = dict(
                self._whole(constants.params["predictors"][d], self.reductions["predictors"][d])
            )
            norm_before, norm = norm, parameters.pop("norm")
            batch = {name: take(a, microbatch) for name, a in constants.batch["mtp"][d].items()}
            stream, vjp = jax.vjp(
                follow,
                norm_before,
                parameters,
                stream,
                self._lookup(constants.params["embed"], batch["tokens"]),
            )
            opened = _with_norm(head_sums, jax.tree.map(jnp.zeros_like, norm))
            added_loss, added, by_stream = loss_and_gradients(
                head,
                _with_norm(params, norm),
                opened,
                stream,
                batch["targets"],
                batch["weights"],
                self.loss_chunk,
                part,
            )
            loss, head_sums = loss + added_loss, _with_norm(added, head_sums["head"]["norm"])
            modules.append(_Module(d, batch["tokens"], vjp, by_stream, added["head"]["norm"]))
        sums, lookups, by_next = dict(state.gradients["predictors"]), [], jnp.zeros_like(stream)
        norm_by_next = jax.tree.map(jnp.zeros_like, norm)
        for module in reversed(modules):
            by_norm = _add_trees(module.by_norm, norm_by_next)
            norm_by_next, by_module, by_next, by_rows = module.backward(module.by_stream + by_next)
            reductions = self.reductions["predictors"][module.name]
            sums[module.name] = self._add(
                sums[module.name], {**by_module, "norm": by_norm}, reductions
            )
            lookups.append(_Lookup(module.tokens, by_rows))
        head_sums = _with_norm(head_sums, _add_trees(head_sums["head"]["norm"], norm_by_next))
        return _Predictions(loss, sums, head_sums, lookups, by_next)
