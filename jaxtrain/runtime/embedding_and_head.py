"""Embedding, head and loss of one microbatch inside the runtime's manual region, with their
gradients.

Begin with the public methods of `EmbeddingAndHead`: `embed` and `embed_gradient`, `loss` (in
evaluation) and `loss_and_gradients`. Before the class are the functions for parameters and sums
that ZeRO shards. The vocabulary lies on the stages in one of two ways:

end stages    the first unit's stage computes the embedding, the last unit's stage the head; every
              stage has both tables in memory
parallel      the tables' rows are split over stage × model, and all stages compute an op together,
              each with its own rows: the embedding's vectors are summed over `stage`, the head's
              input is sent to all stages, and only the softmax's statistics and the gradient of
              that input are summed (vocabulary parallelism, Yeung et al. 2024). No device has all
              logits of a token

Dense layers before the first unit run in the embedding's op, and are recomputed in that of its
gradient. If the model predicts tokens beyond the next (DeepSeek-V3, arXiv:2412.19437, section 2.2),
these modules run in the head's op, forward and backward, with the model's embedding and output
matrix. With either of them the vocabulary is on the end stages.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.groups.layer_kinds import kinds_of_layers
from jaxtrain.devices.mesh import STAGE, psum
from jaxtrain.devices.sharding import constrain
from jaxtrain.models.transformer import ModelParts, add_position_gradient, scaled
from jaxtrain.parallel import fp8
from jaxtrain.parallel.dropout import EMBEDDINGS, dropout, layer_noise
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
from jaxtrain.runtime.batch import extra_inputs, take
from jaxtrain.runtime.loss import (
    LossInputs,
    LossRule,
    OutputHead,
    VocabularyShard,
    loss_and_gradients,
    loss_sum,
)
from jaxtrain.runtime.tick_state import Constants, ModelTree, TickState, Tree


class HeadTree(NamedTuple):
    """The head's part of a ModelTree. table: the embedding table if the head is tied to it, else
    None."""

    head: Tree
    table: Any

    def with_norm(self, norm: Tree) -> "HeadTree":
        """Replaces the norm before the output matrix."""
        return self._replace(head={**self.head, "norm": norm})


class _Lookup(NamedTuple):
    """Tokens int32 [B, T], and the gradient of their embeddings [B, T, D]."""

    tokens: jax.Array
    gradient: jax.Array


class _Module(NamedTuple):
    """A module of multi-token prediction after its forward and its loss.

    backward: gradient of its stream → gradients of (the module without its norm, the norm before,
        the stream before, the tokens' embeddings)
    by_stream, by_norm: the gradients of its loss by its stream and by its norm
    """

    name: str
    tokens: jax.Array
    backward: Callable
    by_stream: jax.Array
    by_norm: Any


class _Predictions(NamedTuple):
    """The losses and gradients of a microbatch's modules of multi-token prediction.

    loss: the sum so far, with theirs
    sums: gradient sums of the modules
    head_sums: gradient sums of the head, with the modules' share
    by_output: the gradient of the last unit's output
    """

    loss: jax.Array
    sums: Tree
    head_sums: HeadTree
    lookups: list[_Lookup]
    by_output: jax.Array


# ---------------------------------------------------------------------- ZeRO inside the ops


def _gathered(zero: Zero, params, reductions):
    """The parameters of ZeRO's stage 3, unsharded; others as they are."""
    if not zero.gathers_in_ops:
        return params
    return jax.tree.map(lambda reduction, a: gather(a, reduction), reductions, params)


def _opened(zero: Zero, sums, reductions, specs, mesh_sizes: Mapping[str, int]):
    """An accumulator for a microbatch's gradients: the sums, or zeros of the full shape where the
    sums are this device's shards. `_closed` is its reverse."""
    # Gradients of all chunks of tokens are added up in full, and reduced once for the microbatch:
    # one collective for each parameter, and none inside the loop over chunks.

    def zeros(a, reduction, spec):
        # A parameter of which no dimension divides is not sharded, and reduced after the step.
        if not reduction.shard_axes:
            return a
        shape = unsharded_shape(a.shape, reduction, mesh_sizes)
        return constrain(jnp.zeros(shape, a.dtype), spec.axes)

    return jax.tree.map(zeros, sums, reductions, specs) if zero.reduces_in_ops else sums


def _closed(zero: Zero, sums, added, reductions):
    """The sums, after gradients were added to the accumulator of `_opened`."""

    def reduced(a, full, reduction):
        if not reduction.shard_axes:
            return full
        return a + reduce_in_op(full, reduction, zero.dtype)

    if not zero.reduces_in_ops:
        return added
    return jax.tree.map(reduced, sums, added, reductions)


def _added(zero: Zero, sums, gradients, reductions):
    """The sums with a microbatch's gradients, which have the full shape."""
    if zero.reduces_in_ops:
        gradients = jax.tree.map(lambda g, r: reduce_in_op(g, r, zero.dtype), gradients, reductions)
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)


def _in_turn(zero: Zero, reduced, gradients):
    """Returns (reduced, gradients). Where ops reduce gradients, these wait for the sums that were
    reduced before them."""
    # XLA's GPU compiler would join all collectives to one at the op's end, which overlaps with no
    # product.
    if not zero.reduces_in_ops:
        return reduced, gradients
    return lax.optimization_barrier((reduced, gradients))


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingAndHead:
    """The ops before the first and after the last unit.

    first_stage, last_stage: the stages of the model's first and last unit
    shared: all stages do an op together, each with its rows of the vocabulary. Arguments that only
        the first or the last stage has may have any value on the others, and results are valid on
        all stages
    loss_chunk: tokens whose logits may exist at a time; loss_rule: the loss of a token
    dtype: of activations
    zero, reductions: how parameters before and after the layers are sharded, and their gradients
        reduced
    mesh_sizes: axis of the mesh → its size

    The methods take the microbatch's index, a traced int32. x, y and gradients g are activations
    [B, T, D].
    """

    parts: ModelParts
    loss_chunk: int
    loss_rule: LossRule
    dtype: jnp.dtype
    first_stage: int
    last_stage: int
    shared: bool
    zero: Zero
    reductions: ModelTree
    mesh_sizes: Mapping[str, int]

    # ------------------------------------------------------------------ between stages

    def _broadcast(self, x, stage: int):
        """One stage's array on all stages."""
        return self._sum(self._on_stage(x, stage))

    def _sum(self, x):
        """The sum over stages, where they share the vocabulary."""
        return psum(x, (STAGE,)) if self.shared else x

    def _on_stage(self, x, stage: int):
        """The array on one stage, zeros on the others."""
        # A collective over `stage` takes an array of every stage, and the others' is of another
        # microbatch or not filled.
        return jnp.where(lax.axis_index(STAGE) == stage, x, jnp.zeros_like(x)) if self.shared else x

    def _first_row(self, table):
        """The row of the vocabulary at which this stage's rows of a table begin."""
        return lax.axis_index(STAGE) * table.shape[0] if self.shared else 0

    def _lookup(self, embed: Tree, tokens):
        """The tokens' vectors from this stage's rows of the table; zeros for tokens of other
        rows."""
        # Where ZeRO shards the table's columns, vectors travel and not the table: each device reads
        # its columns for the tokens of all, and an all-to-all gives each its sequences' vectors.
        axes = self._table_axes if self.zero.gathers_in_ops else ()
        local = (gather_sequences(tokens, axes) if axes else tokens) - self._first_row(
            embed["table"]
        )
        x = self.parts.embedder(embed).lookup(local, self.dtype)
        return columns_to_sequences(x, axes) if axes else x

    @property
    def _table_axes(self) -> tuple[str, ...]:
        """The axes that shard columns of the embedding table."""
        return self.reductions.embed["table"].shard_axes

    def _add_lookup(self, table, lookup: _Lookup):
        """The table's sums with the gradient of `_lookup`."""
        first_row, tokens = self._first_row(table), lookup.tokens
        g = scaled(lookup.gradient, self.parts.cfg.embedding_scale)
        axes = self._table_axes if self.zero.reduces_in_ops else ()
        # the reverse of the all-to-all in `_lookup`: a device has the sums of its columns
        if axes:
            g, tokens = sequences_to_columns(g, axes), gather_sequences(tokens, axes)
        return add_lookup_gradient(table, tokens - first_row, g)

    # ------------------------------------------------------------------ the embedding

    def embed(self, constants: Constants, microbatch) -> jax.Array:
        """The first unit's input."""
        extra = extra_inputs(constants.batch, microbatch)
        x = self._embedded(constants, take(constants.batch["tokens"], microbatch), extra)
        # Each dense layer has arrays of its own and no stack, so there is no loop over them.
        for i in self._dense_layers:
            x = self._dense_layer(i, extra, self._dense_params(constants, i), x)
        return x

    def _dense_layer(self, i: str, extra, params: Tree, x: jax.Array) -> jax.Array:
        kind = kinds_of_layers(self.parts.cfg)[int(i)]
        return self.parts.dense_blocks[kind](params)(x, *layer_noise(extra, int(i)))

    @property
    def _dense_layers(self) -> Iterable[str]:
        return map(str, range(self.parts.cfg.dense_layers))

    def _dense_params(self, constants: Constants, i: str) -> Tree:
        return _gathered(self.zero, constants.params.first[i], self.reductions.first[i])

    def _embedded(self, constants: Constants, tokens, extra) -> jax.Array:
        """The embeddings of a microbatch's tokens, with positions: the first layer's input. extra:
        `extra_inputs`"""
        params = dict(constants.params.embed)
        x = self._lookup(params, tokens)
        if "positions" in params:
            reduction = self.reductions.embed["positions"]
            params["positions"] = _gathered(self.zero, params["positions"], reduction)
        x = self.parts.embedder(params).add_positions(self._sum(x), extra[0])
        return self._dropped(x, extra)

    def _dropped(self, x: jax.Array, extra) -> jax.Array:
        """The embeddings, or their gradient, after dropout."""
        return dropout(x, EMBEDDINGS, self.parts.cfg.dropout_embedding, *extra[2:])

    def embed_gradient(
        self, sums: ModelTree, constants: Constants, microbatch, g: jax.Array
    ) -> ModelTree:
        """The gradient sums of the embedding and of the dense layers behind it, with those of a
        microbatch. g: the gradient of `embed`'s result."""
        tokens = take(constants.batch["tokens"], microbatch)
        extra = extra_inputs(constants.batch, microbatch)
        dense, embed = sums.first, dict(sums.embed)
        # The reverse of `embed`: first the dense layers, then the lookup. The op has no slots for
        # residuals, so the layers' forward runs again from the tokens.
        if dense:
            backward, x = [], self._embedded(constants, tokens, extra)
            for i in self._dense_layers:
                layer = functools.partial(self._dense_layer, i, extra)
                x, vjp = fp8.vjp(layer, self._dense_params(constants, i), x)
                backward.append((i, vjp))
            dense, previous = dict(dense), ""
            for i, vjp in reversed(backward):
                added, g = vjp(g)
                if previous:
                    dense[previous], added = _in_turn(self.zero, dense[previous], added)
                dense[i] = _added(self.zero, dense[i], added, self.reductions.first[i])
                previous = i
        g = self._dropped(g, extra)
        lookup = _Lookup(tokens, self._broadcast(g, self.first_stage))
        embed["table"] = self._add_lookup(embed["table"], lookup)
        if "positions" in embed:
            before, reduction = embed["positions"], self.reductions.embed["positions"]
            opened = _opened(
                self.zero,
                before,
                reduction,
                self.parts.specs["embed"]["positions"],
                self.mesh_sizes,
            )
            # Every stage has the positions' table. The first one alone adds to its sums, which are
            # added up over `stage` after the step.
            added = add_position_gradient(opened, extra[0], self._on_stage(g, self.first_stage))
            embed["positions"] = _closed(self.zero, before, added, reduction)
        return ModelTree(embed=embed, first=dense)

    # ------------------------------------------------------------------ the head

    def _head_tree(self, tree: ModelTree) -> HeadTree:
        tied = self.parts.cfg.tied_embeddings
        return HeadTree(tree.head, tree.embed["table"] if tied else None)

    def _head_params(self, constants: Constants) -> HeadTree:
        return _gathered(
            self.zero, self._head_tree(constants.params), self._head_tree(self.reductions)
        )

    def _output_head(self, params: HeadTree) -> OutputHead:
        table = params.head["table"] if params.table is None else params.table
        first_row = self._first_row(table)
        logits = lambda params, x: self.parts.head(params.head)(x, params.table, first_row)
        shard = VocabularyShard(first_row, (STAGE,) if self.shared else ())
        return OutputHead(logits, self.loss_chunk, shard, self.loss_rule)

    def _head_sums(self, sums: HeadTree, added: HeadTree, reductions: HeadTree) -> HeadTree:
        """The head's gradient sums, from its accumulator `added`."""
        if sums.table is not None or not self.parts.cfg.mtp_depth:
            return _closed(self.zero, sums, added, reductions)
        close = lambda names, added: {
            name: _closed(self.zero, sums.head[name], added[name], reductions.head[name])
            for name in names
        }
        # The output matrix's gradient is reduced first, so that its collective overlaps with the
        # prediction modules' backward. The norm's gradient is known only after that.
        names = [name for name in sums.head if name != "table"]
        tables, others = _in_turn(
            self.zero, close(["table"], added.head), {name: added.head[name] for name in names}
        )
        return sums._replace(head={**close(names, others), **tables})

    def _loss_inputs(self, batch: Tree, microbatch, y: jax.Array) -> LossInputs:
        targets, weights = (take(batch[name], microbatch) for name in ("targets", "weights"))
        return LossInputs(self._broadcast(y, self.last_stage), targets, weights)

    def loss(self, constants: Constants, microbatch, y: jax.Array) -> jax.Array:
        """The microbatch's loss, from the last unit's output: a float32 scalar, 0 on all but one
        stage."""
        params = self._head_params(constants)
        inputs = self._loss_inputs(constants.batch, microbatch, y)
        loss = loss_sum(self._output_head(params), params, inputs)
        return self._on_stage(loss, self.last_stage)

    def loss_and_gradients(
        self, state: TickState, constants: Constants, microbatch, y: jax.Array
    ) -> tuple[TickState, jax.Array]:
        """Returns (the state with the microbatch's losses and the head's gradients, the gradient of
        the last unit's output y).

        Of the state it reads and changes `loss`, `further` and `gradients`.
        """
        # The loss and its gradients are one op: no logits wait for a backward.
        params, sums = self._head_params(constants), self._head_tree(state.gradients)
        head, inputs = self._output_head(params), self._loss_inputs(constants.batch, microbatch, y)
        reductions = self._head_tree(self.reductions)
        specs = self._head_tree(ModelTree(**self.parts.ends))
        opened = _opened(self.zero, sums, reductions, specs, self.mesh_sizes)
        losses, added, g = loss_and_gradients(head, params, opened, inputs)
        embed, predictors = state.gradients.embed, state.gradients.predictors
        further, lookups = dict(state.further), []
        if self.parts.cfg.mtp_depth:
            predicted = self._predict(state, constants, microbatch, inputs.x_BTD, params, added)
            predictors, lookups = predicted.sums, predicted.lookups
            further["mtp_loss"] = predicted.loss
            added, g = predicted.head_sums, g + predicted.by_output
        sums = self._head_sums(sums, added, reductions)
        # The table's sums last: a tied head adds to them, and each module looked tokens up.
        if sums.table is not None or lookups:
            table = embed["table"] if sums.table is None else sums.table
            for lookup in lookups:
                table = self._add_lookup(table, lookup)
            embed = {**embed, "table": table}
        gradients = dataclasses.replace(
            state.gradients, embed=embed, head=sums.head, predictors=predictors
        )
        # All stages of a shared vocabulary have the same loss, and losses are added up over `stage`
        # after the step. The gradient of y is a sum over the stages' rows of the vocabulary.
        losses = jax.tree.map(lambda a: self._on_stage(a, self.last_stage), losses)
        if losses.z_loss is not None:
            further["z_loss"] += losses.z_loss
        loss = state.loss + losses.loss
        state = dataclasses.replace(state, loss=loss, further=further, gradients=gradients)
        return state, self._sum(g)

    # ------------------------------------------------------------------ multi-token prediction

    def _predict(
        self,
        state: TickState,
        constants: Constants,
        microbatch,
        y,
        params: HeadTree,
        head_sums: HeadTree,
    ) -> _Predictions:
        """The losses of the tokens beyond the next, and their gradients, from the last unit's
        output y. They have no z-loss.

        A module continues from the stream after the norm before it, the head's or that of the
        module before. So that norm has two gradients: by the logits, and by the next module.
        """
        head, extra = self._output_head(params), extra_inputs(constants.batch, microbatch)
        head = head._replace(rule=dataclasses.replace(head.rule, z_loss=0.0))
        follow = lambda number, module, norm, y, embedded: self.parts.predictor(module)(
            self.parts.norm(norm)(y), embedded, *layer_noise(extra, number)
        )
        all_reductions, embed = self.reductions.predictors, constants.params.embed
        loss, stream, norm = state.further["mtp_loss"], y, params.head["norm"]
        # Forward through the modules, each followed at once by its loss and the gradients of that:
        # logits of one module exist at a time.
        modules: list[_Module] = []
        for d in map(str, range(self.parts.cfg.mtp_depth)):
            module = dict(_gathered(self.zero, constants.params.predictors[d], all_reductions[d]))
            norm_before, norm = norm, module.pop("norm")
            batch = {name: take(a, microbatch) for name, a in constants.batch["mtp"][d].items()}
            embedded = self._lookup(embed, batch["tokens"])
            of_module = functools.partial(follow, len(kinds_of_layers(self.parts.cfg)) + int(d))
            stream, vjp = fp8.vjp(of_module, module, norm_before, stream, embedded)
            # The output matrix is the head's, with the sums of all modules; the norm is the
            # module's own, whose gradient is in `added` alone.
            opened = head_sums.with_norm(jax.tree.map(jnp.zeros_like, norm))
            inputs = LossInputs(stream, batch["targets"], batch["weights"])
            losses, added, by_stream = loss_and_gradients(
                head, params.with_norm(norm), opened, inputs
            )
            loss, head_sums = loss + losses.loss, added.with_norm(head_sums.head["norm"])
            modules.append(_Module(d, batch["tokens"], vjp, by_stream, added.head["norm"]))
        # Backward from the last module to the first. `by_next` is the gradient of a module's stream
        # by the module after it, `norm_by_next` that of its norm.
        sums, lookups, by_next = dict(state.gradients.predictors), [], jnp.zeros_like(stream)
        norm_by_next = jax.tree.map(jnp.zeros_like, norm)
        for name, tokens, backward, by_stream, by_norm in reversed(modules):
            by_norm = jax.tree.map(jnp.add, by_norm, norm_by_next)
            by_module, norm_by_next, by_next, by_embedded = backward(by_stream + by_next)
            gradients = {**by_module, "norm": by_norm}
            sums[name] = _added(self.zero, sums[name], gradients, all_reductions[name])
            lookups.append(_Lookup(tokens, by_embedded))
        by_norm = jax.tree.map(jnp.add, head_sums.head["norm"], norm_by_next)
        return _Predictions(loss, sums, head_sums.with_norm(by_norm), lookups, by_next)
