"""Token ids from a model: the prompt is read into the key/value cache, then a loop chooses the
tokens.

      prompt's ids ── prefill: all but the last, in pieces ──► cache
                   ── decode: up to BURST tokens a call ──► ids as they come

Both programs depend only on rounded sizes, so prompts of different lengths share them. The random
numbers depend on seed, position, sample and token id, not on the mesh or the padding of the
vocabulary. generation/decode.py has the model with its cache, generation/text.py makes text from
ids, generation/output.py prints it.

Shape suffixes: B sequences (samples, rounded up to the mesh), T tokens, V vocabulary.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.devices.mesh import AXES, make_mesh
from jaxtrain.devices.sharding import named, shards
from jaxtrain.generation.decode import cache_shardings, empty_cache, extend, next_logits, tied_table
from jaxtrain.models.transformer import ModelParts
from jaxtrain.parallel.attention.kv_cache import SLOT

BURST = 32  # the most tokens that one call of the decoding program makes
# the most tokens of a prompt that one call reads: its attention scores are [heads, PIECE, slots]
PIECE = 1024
SLOTS = 128  # the cache's length is a multiple of this on each device that shares it
BURST_S = 0.05  # target seconds of a call, between two pieces of streamed text


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The rule by which a token is chosen from its logits.

    temperature: divides the logits; 0: the most likely token is chosen
    top_k: number of most likely tokens to choose among; 0: all
    top_p: after top_k, the fewest most likely tokens whose probabilities sum to at least this are
        the ones to choose among (Holtzman et al. 2020); above 0, 1: all
    seed: seed of the random numbers, below 2³²
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-30  # smaller ones are flushed to 0 on the way

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def arrays(self, stops: Sequence[int], vocabulary: int) -> "SamplingArrays":
        """This rule as arguments of a compiled program."""
        return SamplingArrays(
            np.uint32(self.seed),
            np.float32(self.temperature),
            np.int32(self.top_k),
            np.float32(self.top_p),
            stops=np.array(stops, np.int32),
            vocabulary=np.int32(vocabulary),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state that decoding carries from token to token.

    cache:    keys and values of the tokens before the newest one (generation/decode.py)
    last:     the newest token of each sequence, int32 [B]
    done:     bool [B], True for a sequence that has ended
    position: position of the newest token, int32
    """

    cache: Any
    last: Any
    done: Any
    position: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """`Sampling` as arguments of the compiled program, which so serves any rule, with two more.

    stops: the ids that end a sample; vocabulary: number of ids that can be chosen.
    """

    seed: np.uint32
    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    stops: np.ndarray
    vocabulary: np.int32


def filter_tokens(
    logits_BV: jax.Array, top_k: jax.Array | np.int32, top_p: jax.Array | np.float32
) -> jax.Array:
    """The tokens that remain after top-k and then top-p, bool [B, V]: at least the most likely one.
    Smaller ids come first among equal logits.

    top_k: int32 scalar; 0: all. top_p: float32 scalar above 0; 1: all.
    """
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    ranked_BV = jnp.take_along_axis(logits_BV, order_BV, -1)
    rank_V = jnp.arange(logits_BV.shape[-1])
    allowed_BV = jnp.broadcast_to(
        rank_V < jnp.where(top_k > 0, top_k, rank_V.size), logits_BV.shape
    )
    chance_BV = jax.nn.softmax(jnp.where(allowed_BV, ranked_BV, -jnp.inf), -1)
    before_BV = jnp.cumsum(chance_BV, -1) - chance_BV
    allowed_BV &= (before_BV < top_p) | (top_p >= 1)  # a sum of many may round to 1 too early
    sequence_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    return jnp.zeros_like(allowed_BV).at[sequence_B1, order_BV].set(allowed_BV)


def choose(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    rule: SamplingArrays,
    greedy: bool = False,
    filtered: bool = True,
) -> jax.Array:
    """A token id for each sequence, int32 [B], from float32 logits (−inf: never chosen) and a
    random key each.

    rule: its temperature, top_k and top_p; may be traced.
    greedy, filtered: of the rule, fixed when compiled. `greedy` takes the largest logit without
        random numbers; without `filtered`, top-k and top-p are left out.
    """
    if greedy:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    scaled_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / rule.temperature
    # With an infinite temperature −∞ has become NaN.
    scaled_BV = jnp.where(jnp.isneginf(logits_BV), -jnp.inf, scaled_BV)
    if filtered:
        scaled_BV = jnp.where(filter_tokens(scaled_BV, rule.top_k, rule.top_p), scaled_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, scaled_BV).astype(jnp.int32)


class Sampler:
    """Continues token ids with one model, on the devices where its parameters are.

    Args:
      parts: the model, built for as many vocabulary shards as the parameters are padded for.
      params: {"embed", "layers" (leaves [L, ...]), "head"}, on one device or on a mesh of the six
        axes.
      dtype: of activations, matmuls and the cache.
    """

    def __init__(self, parts: ModelParts, params: dict, dtype=jnp.float32):
        self.parts, self.params, self.dtype = parts, params, jnp.dtype(dtype)
        sharding = jax.tree.leaves(params)[0].sharding
        on_mesh = (
            isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.axis_names == AXES
        )
        self.mesh = (
            sharding.mesh if on_mesh else make_mesh((1,) * len(AXES), list(sharding.device_set))
        )
        with jax.set_mesh(self.mesh):
            # The devices that split batch and sequence must divide a call's sequences and tokens:
            # spare ones fill it up.
            self._batch_unit, self._width = shards("batch"), shards("sequence")
            self._slots_unit = SLOTS * shards(SLOT)
        cache = cache_shardings(parts, self.mesh)
        of_batch, replicated = named(self.mesh, ("batch",)), named(self.mesh, ())
        state = DecodeState(cache, last=of_batch, done=of_batch, position=replicated)
        compiled = functools.partial(jax.jit, out_shardings=state)
        self._begin = compiled(self._begin_program, static_argnames=("slots",))
        self._prefill = compiled(self._prefill_program, donate_argnames=("state",))
        self._spread = compiled(self._spread_program, static_argnames=("batch",))
        self._decode = jax.jit(
            self._decode_program,
            out_shardings=(state, replicated),
            donate_argnames=("state",),
            static_argnames=("greedy", "filtered"),
        )

    def start(
        self,
        prompt: Sequence[int],
        tokens: int,
        sampling: Sampling = Sampling(),
        samples: int = 1,
        stops: Sequence[int] = (),
        vocabulary: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Reads the prompt, compiles the programs, and returns an iterator that makes tokens as it
        is asked for them.

        Args:
          prompt: at least one id of the model's vocabulary.
          tokens: number of tokens to make for each sample, at least 1.
          samples: continuations of the one prompt; sample i does not depend on their number.
          stops: the ids that end a sample.
          vocabulary: number of ids that can be chosen, without those that pad the vocabulary.

        Yields:
          int32 [samples, n], n up to BURST: the next ids, −1 from a stop on. It ends early when all
          samples have.

        Raises:
          ValueError: no prompt, ids that the model does not know, or more tokens than learned
            positions.
        """
        cfg, ids = self.parts.cfg, np.asarray(prompt, np.int64)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= cfg.vocab_size:
            raise ValueError(f"a prompt is one or more ids from 0 to {cfg.vocab_size - 1}")
        most = self.parts.capacity(len(ids))
        if not 1 <= tokens <= most:
            raise ValueError(
                f"{tokens} tokens after a prompt of {len(ids)} must be from 1 to {most}"
            )
        state = self._read_prompt(ids, tokens, samples)
        rule = sampling.arrays(stops, cfg.vocab_size if vocabulary is None else vocabulary)
        decode = functools.partial(
            self._decode, self.params, rule=rule, greedy=sampling.greedy, filtered=sampling.filtered
        )
        with jax.set_mesh(self.mesh):
            state, no_tokens = decode(state=state, limit=np.int32(0))
        jax.block_until_ready(no_tokens)  # then the prompt is read and everything compiled
        return self._tokens(decode, state, tokens, samples)

    def _read_prompt(self, ids: np.ndarray, tokens: int, samples: int) -> DecodeState:
        """The state after the prompt, whose cache has slots for `tokens` more tokens of each of
        `samples` samples."""
        pieces = list(_pieces(ids[:-1].astype(np.int32), self._width))
        slots = max(sum(piece.size for piece, _ in pieces), len(ids) + tokens + self._width)
        batch = -(-samples // self._batch_unit) * self._batch_unit
        with jax.set_mesh(self.mesh):
            state = self._begin(slots=-(-slots // self._slots_unit) * self._slots_unit)
            for piece, count in pieces:
                state = self._prefill(self.params, state, piece[None], np.int32(count))
            return self._spread(state, np.int32(ids[-1]), np.int32(samples), batch=batch)

    def _tokens(
        self, decode: Callable, state: DecodeState, tokens: int, samples: int
    ) -> Iterator[np.ndarray]:
        """The iterator of `start`. Bursts get longer while the model is faster than a reader."""
        remaining, size = tokens, 1
        while remaining:
            count, began = min(remaining, size), time.perf_counter()
            with jax.set_mesh(self.mesh):
                state, burst = decode(state=state, limit=np.int32(count))
            ids = np.asarray(burst)[:samples, :count]
            if time.perf_counter() - began < BURST_S / 2:
                size = min(2 * size, BURST)
            ids = ids[:, (ids >= 0).any(0)]
            if ids.size:
                yield ids
            if ids.shape[1] < count:
                return
            remaining -= count

    # --- the programs -----------------------------------------------------------------------------

    def _begin_program(self, slots: int) -> DecodeState:
        """The state before the prompt, for as few sequences as the mesh allows."""
        batch = self._batch_unit
        return DecodeState(
            cache=empty_cache(self.parts, batch, slots, self.dtype),
            last=jnp.zeros(batch, jnp.int32),
            done=jnp.zeros(batch, bool),
            position=jnp.int32(0),
        )

    def _prefill_program(
        self, params: dict, state: DecodeState, tokens_1T: jax.Array, count: jax.Array
    ) -> DecodeState:
        """The state with `count` tokens of the prompt in its cache; the others of T are padding."""
        tokens_BT = jnp.broadcast_to(tokens_1T, (self._batch_unit, tokens_1T.shape[1]))
        _, cache = extend(
            self.parts, params, tokens_BT, state.cache, state.position, self.dtype, count
        )
        return dataclasses.replace(state, cache=cache, position=state.position + count)

    def _spread_program(
        self, state: DecodeState, last: jax.Array, samples: jax.Array, batch: int
    ) -> DecodeState:
        """The prompt's state copied to each of `batch` sequences.

        last: the prompt's last token; samples: number of sequences that are wanted: the others fill
        up the batch and are done at once.
        """
        cache = jax.tree.map(lambda c: jnp.repeat(c, batch // self._batch_unit, 1), state.cache)
        return dataclasses.replace(
            state, cache=cache, last=jnp.full(batch, last), done=jnp.arange(batch) >= samples
        )

    def _decode_program(
        self,
        params: dict,
        state: DecodeState,
        limit: jax.Array,
        rule: SamplingArrays,
        greedy: bool,
        filtered: bool,
    ) -> tuple[DecodeState, jax.Array]:
        """Makes up to `limit` tokens. Returns the state after them, and the ids, int32 [B, BURST],
        −1 where there is none."""
        batch, table_VD = state.last.shape[0], tied_table(self.parts, params, self.dtype)

        def unfinished(carry: tuple[jax.Array, DecodeState, jax.Array]) -> jax.Array:
            count, state, _ = carry
            return (count < limit) & ~state.done.all()

        def token(
            carry: tuple[jax.Array, DecodeState, jax.Array],
        ) -> tuple[jax.Array, DecodeState, jax.Array]:
            count, state, burst = carry
            tokens_BT = jnp.broadcast_to(state.last[:, None], (batch, self._width))
            x_BTD, cache = extend(
                self.parts, params, tokens_BT, state.cache, state.position, self.dtype, count=1
            )
            logits_BV = next_logits(self.parts, params, x_BTD, table_VD)
            logits_BV = jnp.where(
                jnp.arange(logits_BV.shape[1]) < rule.vocabulary, logits_BV, -jnp.inf
            )
            key = jax.random.fold_in(jax.random.key(rule.seed), state.position)
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
            chosen_B = choose(logits_BV, keys_B, rule, greedy, filtered)
            done = state.done | jnp.isin(chosen_B, rule.stops)
            burst = lax.dynamic_update_slice(
                burst, jnp.where(done, -1, chosen_B)[:, None], (0, count)
            )
            return count + 1, DecodeState(cache, chosen_B, done, state.position + 1), burst

        _, state, burst = lax.while_loop(
            unfinished, token, (jnp.int32(0), state, jnp.full((batch, BURST), -1, jnp.int32))
        )
        return state, burst


def _pieces(ids: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, int]]:
    """Cuts ids into pieces: pairs of a zero-padded array and the number of ids in it. The arrays
    have few different lengths, all multiples of `width`."""
    largest = -(-PIECE // width) * width
    for at in range(0, len(ids), largest):
        piece = ids[at : at + largest]
        units = -(-max(len(piece), 16) // width)
        size = largest if len(ids) > largest else min(largest, width << (units - 1).bit_length())
        yield np.pad(piece, (0, size - len(piece))), len(piece)
