"""The text of ids that come one after the other, and the continuation of a prompt as a text."""

from collections.abc import Iterable

from jaxtrain.data.tokenizer import Tokenizer, prompt_ids
from jaxtrain.generation.sampling import Sampler, Sampling

NOT_TEXT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes ids as they are made; a character whose bytes are not all there yet is held back.

    A tokenizer may put spaces or nothing before a token, depending on the one before. So each piece
    is the difference between two decoded texts.
    """

    # ids decoded again, so that long texts are not decoded from their beginning each time
    CONTEXT = 8

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        """context: ids of the text before, which is not returned."""
        self._tokenizer = tokenizer
        self._ids = list(context)[-self.CONTEXT :]
        # characters of these ids' text that have been returned
        self._returned = len(tokenizer.decode(self._ids))

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain with these ids."""
        self._ids += [int(i) for i in ids]
        text = self._tokenizer.decode(self._ids)
        # A character's first bytes are one mark, or up to three where the tokenizer has a token for
        # each byte.
        held = min(3, len(text) - len(text.rstrip(NOT_TEXT)))
        certain = text[self._returned : len(text) - held]
        self._returned = max(self._returned, len(text) - held)
        if not held and len(self._ids) > 4 * self.CONTEXT:
            self._ids = self._ids[-self.CONTEXT :]
            self._returned = len(self._tokenizer.decode(self._ids))
        return certain

    def finish(self) -> str:
        """The remaining text, with marks for broken characters."""
        return self._tokenizer.decode(self._ids)[self._returned :]


def sample_text(
    sampler: Sampler,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    sampling: Sampling,
) -> str:
    """The model's continuation of a prompt, without the prompt: `tokens` long, or to the end of its
    document.

    Where a learned position table is too short, the prompt loses its beginning, and then fewer
    tokens are made. Raises DataError as `prompt_ids`.
    """
    parts = sampler.parts
    ids = prompt_ids(tokenizer, prompt, parts.cfg.vocab_size)
    if parts.cfg.positions == "learned":
        ids = ids[-max(1, parts.cfg.max_positions - tokens) :]
    tokens = min(tokens, parts.capacity(len(ids)))
    if tokens < 1:
        return ""
    stream = TextStream(tokenizer, ids)
    bursts = sampler.start(
        ids, tokens, sampling, stops=tokenizer.stops, vocabulary=tokenizer.vocab_size
    )
    return "".join([*(stream.push(burst[0]) for burst in bursts), stream.finish()])
