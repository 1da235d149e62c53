"""Text from a model: the choice of the next token, a prompt read into the key/value cache, and the loop over tokens.

      prompt ids ── prefill: all but the last, in pieces ──► cache ── decode: up to CHUNK tokens a call ──► ids ──► text as it comes

Both programs depend on rounded sizes alone, so prompts of different lengths share them. The random numbers depend on seed, position,
sample and token id, never on the mesh or on how the vocabulary is padded. The model over the cache is in generation/decode.py, flags
and printing in generate.py.

Shape suffixes: B rows (samples, rounded up to the mesh), T tokens, V vocabulary.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.data.tokenizer import DataError, Tokenizer
from jaxtrain.devices.mesh import AXES, make_mesh
from jaxtrain.devices.sharding import named, shards
from jaxtrain.generation.decode import cache_axes, empty_cache, extend, next_logits, tied_table
from jaxtrain.models.transformer import Parts

CHUNK = 32  # most tokens that one call of the decoding program makes
PIECE = 1024  # most tokens of a prompt that one call reads: its attention scores are [heads, PIECE, slots]
SLOTS = 128  # the cache's length is a multiple of this
PATIENCE = 0.05  # seconds between pieces of streamed text, where the model is fast enough
NOT_TEXT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits.

    temperature: divides the logits; 0 takes the most likely token always
    top_k: only the k most likely tokens can be chosen; 0 means all
    top_p: only the most likely tokens that together have at least this probability (Holtzman et al. 2020), after top_k
    seed: of the random numbers, below 2³²
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


def likely(logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens top-k and then top-p leave, bool [B, V]: at least the most likely one. Of equal logits the smaller ids come first."""
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    ranked_BV = jnp.take_along_axis(logits_BV, order_BV, -1)
    rank_V = jnp.arange(logits_BV.shape[-1])
    kept_BV = jnp.broadcast_to(rank_V < jnp.where(top_k > 0, top_k, rank_V.size), logits_BV.shape)
    chance_BV = jax.nn.softmax(jnp.where(kept_BV, ranked_BV, -jnp.inf), -1)
    before_BV = jnp.cumsum(chance_BV, -1) - chance_BV
    kept_BV &= (before_BV < top_p) | (top_p >= 1)  # a sum of many may round to 1 too early
    rows = jnp.arange(logits_BV.shape[0])[:, None]
    return jnp.zeros_like(kept_BV).at[rows, order_BV].set(kept_BV)


def choose(logits_BV: jax.Array, keys_B: jax.Array, temperature, top_k, top_p, greedy: bool = False, filtered: bool = True) -> jax.Array:
    """A token id for each row, int32 [B], from float32 logits (−inf: never). `greedy` and `filtered` are fixed when compiled:
    they leave out what `Sampling` does not need."""
    if greedy:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    scaled_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / temperature
    scaled_BV = jnp.where(jnp.isneginf(logits_BV), -jnp.inf, scaled_BV)  # also for an infinite temperature
    if filtered:
        scaled_BV = jnp.where(likely(scaled_BV, top_k, top_p), scaled_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, scaled_BV).astype(jnp.int32)


class Sampler:
    """Continues token ids with one model, on the devices where its parameters are.

    Args:
      parts: the model, built for as many vocabulary shards as the parameters are padded for.
      params: {"embed", "layers" (leaves [L, ...]), "head"}, on one device or on a mesh of the six axes.
      dtype: of activations, matmuls and the cache.
    """

    def __init__(self, parts: Parts, params: dict, dtype=jnp.float32):
        self.parts, self.params, self.dtype = parts, params, jnp.dtype(dtype)
        sharding = jax.tree.leaves(params)[0].sharding
        on_mesh = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.axis_names == AXES
        self.mesh = sharding.mesh if on_mesh else make_mesh((1,) * len(AXES), list(sharding.device_set))
        with jax.set_mesh(self.mesh):
            # A call must divide over the devices that split the batch and the sequence: spare rows and tokens fill it up.
            self._rows_unit, self._width = shards("batch"), shards("sequence")
        cache = tuple(named(self.mesh, axes) for axes in cache_axes(parts.cfg))
        row, whole = named(self.mesh, ("batch",)), named(self.mesh, ())
        self._state = {"cache": cache, "last": row, "done": row, "position": whole}
        compiled = functools.partial(jax.jit, out_shardings=self._state)
        self._begin = compiled(self._begin_program, static_argnames=("slots",))
        self._prefill = compiled(self._prefill_program, donate_argnames=("state",))
        self._spread = compiled(self._spread_program, static_argnames=("rows",))
        self._decode = jax.jit(
            self._decode_program,
            out_shardings=(self._state, whole),
            donate_argnames=("state",),
            static_argnames=("greedy", "filtered"),
        )

    def start(
        self,
        prompt: Sequence[int],
        tokens: int,
        sampling: Sampling = Sampling(),
        samples: int = 1,
        stop: int | None = None,
        vocabulary: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Reads the prompt and compiles; the iterator then makes the tokens as it is asked for them.

        Args:
          prompt: at least one id of the model's vocabulary.
          tokens: how many to make for each sample, at least 1.
          samples: continuations of the one prompt; sample i does not depend on how many there are.
          stop: the id that ends a sample.
          vocabulary: ids from here on are never chosen, as those that only pad the vocabulary.

        Yields:
          int32 [samples, n], n up to CHUNK: the next ids, −1 from `stop` on. It ends early when all samples have.

        Raises:
          ValueError: no prompt, ids that the model does not know, or more tokens than learned positions.
        """
        cfg, ids = self.parts.cfg, np.asarray(prompt, np.int64)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= cfg.vocab_size:
            raise ValueError(f"a prompt is one or more ids from 0 to {cfg.vocab_size - 1}")
        if tokens < 1 or tokens > room(cfg, len(ids)):
            raise ValueError(f"{tokens} tokens after a prompt of {len(ids)} must be from 1 to {room(cfg, len(ids))}")
        pieces = list(_pieces(ids[:-1].astype(np.int32), self._width))
        slots = max(sum(piece.size for piece, _ in pieces), len(ids) + tokens + self._width)
        rows = -(-samples // self._rows_unit) * self._rows_unit
        with jax.set_mesh(self.mesh):
            state = self._begin(slots=-(-slots // SLOTS) * SLOTS)
            for piece, count in pieces:
                state = self._prefill(self.params, state, piece[None], np.int32(count))
            state = self._spread(state, np.int32(ids[-1]), np.int32(samples), rows=rows)
        decode = functools.partial(
            self._decode,
            self.params,
            **{"seed": np.uint32(sampling.seed), "temperature": np.float32(sampling.temperature), "top_k": np.int32(sampling.top_k)},
            **{"top_p": np.float32(sampling.top_p), "stop": np.int32(-1 if stop is None else stop)},
            **{"vocabulary": np.int32(cfg.vocab_size if vocabulary is None else vocabulary)},
            **{"greedy": sampling.greedy, "filtered": sampling.filtered},
        )
        with jax.set_mesh(self.mesh):
            state, made = decode(state=state, limit=np.int32(0))  # compiled, and the prompt read, when this is done
        jax.block_until_ready(made)
        return self._tokens(decode, state, tokens, samples)

    def _tokens(self, decode, state: dict, tokens: int, samples: int) -> Iterator[np.ndarray]:
        left, size = tokens, 1
        while left:
            count, began = min(left, size), time.perf_counter()
            with jax.set_mesh(self.mesh):
                state, made = decode(state=state, limit=np.int32(count))
            ids = np.asarray(made)[:samples, :count]
            if time.perf_counter() - began < PATIENCE / 2:
                size = min(2 * size, CHUNK)
            ids = ids[:, (ids >= 0).any(0)]
            if ids.size:
                yield ids
            if ids.shape[1] < count:
                return
            left -= count

    # --- the programs ----------------------------------------------------------------------------------------------------------------

    def _begin_program(self, slots: int) -> dict:
        """The state before the prompt: as few rows as the mesh allows."""
        b = self._rows_unit
        cache = empty_cache(self.parts.cfg, b, slots, self.dtype)
        return {"cache": cache, "last": jnp.zeros(b, jnp.int32), "done": jnp.zeros(b, bool), "position": jnp.int32(0)}

    def _prefill_program(self, params: dict, state: dict, tokens_1T, count) -> dict:
        """`count` tokens of the prompt into the cache; the rest of T is padding."""
        tokens_BT = jnp.broadcast_to(tokens_1T, (self._rows_unit, tokens_1T.shape[1]))
        _, cache = extend(self.parts, params, tokens_BT, state["cache"], state["position"], self.dtype)
        return state | {"cache": cache, "position": state["position"] + count}

    def _spread_program(self, state: dict, last, samples, rows: int) -> dict:
        """The prompt's state for all rows, of which the first `samples` are wanted; `last` is the prompt's last token."""
        cache = tuple(jnp.repeat(c, rows // self._rows_unit, 1) for c in state["cache"])
        return state | {"cache": cache, "last": jnp.full(rows, last), "done": jnp.arange(rows) >= samples}

    def _decode_program(self, params, state, seed, limit, temperature, top_k, top_p, stop, vocabulary, greedy, filtered):
        """Up to `limit` more tokens → (state, int32 [B, CHUNK], −1 where there is none)."""
        rows, table_VD = state["last"].shape[0], tied_table(self.parts, params, self.dtype)

        def more(carry):
            count, state, _ = carry
            return (count < limit) & ~state["done"].all()

        def token(carry):
            count, state, made = carry
            tokens_BT = jnp.broadcast_to(state["last"][:, None], (rows, self._width))
            x_BTD, cache = extend(self.parts, params, tokens_BT, state["cache"], state["position"], self.dtype)
            logits_BV = next_logits(self.parts, params, x_BTD, table_VD)
            logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < vocabulary, logits_BV, -jnp.inf)
            key = jax.random.fold_in(jax.random.key(seed), state["position"])
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
            chosen = choose(logits_BV, keys_B, temperature, top_k, top_p, greedy, filtered)
            done = state["done"] | (chosen == stop)
            made = lax.dynamic_update_slice(made, jnp.where(done, -1, chosen)[:, None], (0, count))
            return count + 1, {"cache": cache, "last": chosen, "done": done, "position": state["position"] + 1}, made

        _, state, made = lax.while_loop(more, token, (jnp.int32(0), state, jnp.full((rows, CHUNK), -1, jnp.int32)))
        return state, made


def room(cfg, prompt: int) -> int:
    """How many tokens can follow a prompt of this many: a learned position table ends, rotary positions do not."""
    return max(0, cfg.max_positions - prompt) if cfg.positions == "learned" else 2**30 - prompt


def _pieces(ids: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, int]]:
    """Ids in arrays of few different lengths, all multiples of `width`: (zero-padded array, how many of it are ids)."""
    largest = -(-PIECE // width) * width
    for at in range(0, len(ids), largest):
        piece = ids[at : at + largest]
        units = -(-max(len(piece), 16) // width)
        size = largest if len(ids) > largest else min(largest, width << (units - 1).bit_length())
        yield np.pad(piece, (0, size - len(piece))), len(piece)


# --- text ------------------------------------------------------------------------------------------------------------------------


def prompt_ids(tokenizer: Tokenizer, prompt: str, vocab_size: int) -> list[int]:
    """A prompt's ids; an empty one is the end of the document before. DataError for a text or an id that cannot be."""
    try:
        ids = [int(i) for i in tokenizer.encode(prompt)]
    except UnicodeEncodeError:
        raise DataError("the prompt holds bytes that are not UTF-8: use UTF-8 text") from None
    if not ids:
        if tokenizer.end_of_document is None:
            raise DataError(
                "the prompt is empty, and this tokenizer has no end-of-document id to start from: use one id or more, such as 0"
            )
        ids = [tokenizer.end_of_document]
    if max(ids) >= vocab_size:
        raise DataError(f"the prompt has id {max(ids)}, and the model knows {vocab_size}: use the tokenizer that it was trained with")
    return ids


class TextStream:
    """Ids → text as soon as it is certain: a character whose bytes are not all there is held back.

    A tokenizer may put spaces or nothing before a token, depending on the one before: so each piece is what the text has become longer by.
    """

    CONTEXT = 8  # ids decoded again, so that long texts are not decoded from their beginning each time

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        """context: ids of the text before, which is not part of what is given out."""
        self._tokenizer = tokenizer
        self._ids = list(context)[-self.CONTEXT :]
        self._given = len(tokenizer.decode(self._ids))

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain with these ids."""
        self._ids += [int(i) for i in ids]
        text = self._tokenizer.decode(self._ids)
        # A character's first bytes are one mark, or up to three where the tokenizer has a token for each byte.
        held = min(3, len(text) - len(text.rstrip(NOT_TEXT)))
        certain = text[self._given : len(text) - held]
        self._given = max(self._given, len(text) - held)
        if not held and len(self._ids) > 4 * self.CONTEXT:
            self._ids = self._ids[-self.CONTEXT :]
            self._given = len(self._tokenizer.decode(self._ids))
        return certain

    def finish(self) -> str:
        """What is left, with marks for broken characters."""
        return self._tokenizer.decode(self._ids)[self._given :]


def sample_text(
    parts: Parts,
    params: dict,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    dtype=jnp.float32,
) -> str:
    """The text that the model continues a prompt with (without the prompt), up to `tokens` long or to the end of its document.

    parts, params and dtype as in `Sampler`. Where a learned position table is too short, the prompt's beginning is left out first and
    then fewer tokens are made. Raises DataError as `prompt_ids`.
    """
    ids = prompt_ids(tokenizer, prompt, parts.cfg.vocab_size)
    if parts.cfg.positions == "learned":
        ids = ids[-max(1, parts.cfg.max_positions - tokens) :]
    tokens = min(tokens, room(parts.cfg, len(ids)))
    if tokens < 1:
        return ""
    stream = TextStream(tokenizer, ids)
    chosen = Sampling(temperature, top_k, top_p, seed)
    made = Sampler(parts, params, dtype).start(ids, tokens, chosen, stop=tokenizer.end_of_document, vocabulary=tokenizer.vocab_size)
    return "".join([*(stream.push(new[0]) for new in made), stream.finish()])
