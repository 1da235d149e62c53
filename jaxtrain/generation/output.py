"""Continuations of a prompt printed as they are made, and a line that says why they ended."""

import contextlib
import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.generation.text import TextStream

# why a sample ends
AT_LIMIT, AT_END, CTRL_C = "at --tokens", "at the end of the document", "by Ctrl-C"


@dataclasses.dataclass(frozen=True)
class Endings:
    """Each sample's number of new tokens, and why it ended."""

    tokens: list[int]
    reasons: list[str]

    @property
    def interrupted(self) -> bool:
        return CTRL_C in self.reasons

    def describe(self, prompt: int, positions: int, trained_length: int) -> str:
        """One line: why the samples ended, and how many tokens lie beyond the length that the model
        was trained on. prompt: the prompt's tokens; positions: those of the model's table, 0 if it
        has none."""
        remarks = [self._count(reason) for reason in (AT_LIMIT, AT_END, CTRL_C)]
        longest = max(self.tokens)
        if prompt + longest == positions:
            remarks.append(f"no position is left (model.max_positions={positions})")
        beyond = min(prompt + longest - trained_length, longest)
        if beyond > 0:
            remarks.append(
                f"the last {beyond} lie beyond the {trained_length} tokens that the model was "
                "trained on (data.sequence_length)"
            )
        return f"stopped: {'; '.join(filter(None, remarks))}"

    def _count(self, reason: str) -> str:
        """A text with the number of samples that ended for a reason, and after how many tokens; ""
        if none did."""
        tokens = [n for n, why in zip(self.tokens, self.reasons, strict=True) if why == reason]
        if not tokens:
            return ""
        low, high = min(tokens), max(tokens)
        number = str(low) if low == high else f"{low} to {high}"
        total = len(self.tokens)
        samples = f"{len(tokens)} of {total} samples " if total > 1 else ""
        plural = "" if number == "1" else "s"
        after = f"={number}" if reason == AT_LIMIT else f", after {number} token{plural}"
        return f"{samples}{reason}{after}"


def show(
    batches: Iterable[np.ndarray],
    tokenizer: Tokenizer,
    prompt: str,
    ids: list[int],
    samples: int,
    tokens: int,
) -> Endings:
    """Prints the prompt and its continuations: a single one as it is made, several ones when they
    are done. After Ctrl-C the text so far is printed.

    batches: arrays of new ids [samples, n], −1 after the end of a sample
    ids: the prompt's ids
    tokens: the requested number of new tokens
    """
    write = lambda text: print(text, end="", flush=True)
    streams = [TextStream(tokenizer, ids) for _ in range(samples)]
    texts, counts = [prompt] * samples, [0] * samples
    reasons = [CTRL_C] * samples  # unless another reason turns up
    live = samples == 1
    if live:
        write(prompt)
    with contextlib.suppress(KeyboardInterrupt):
        for batch in batches:
            for i, stream in enumerate(streams):
                new = batch[i][batch[i] >= 0]
                counts[i] += len(new)
                if len(new) < len(batch[i]):
                    reasons[i] = AT_END
                piece = stream.push(new)
                texts[i] += piece
                if live:
                    write(piece)
        reasons = [AT_LIMIT if count == tokens else AT_END for count in counts]
    if live:
        write(streams[0].finish() + "\n")
    else:
        for i, stream in enumerate(streams):
            write(f"--- sample {i + 1} of {samples}\n{texts[i]}{stream.finish()}\n")
    return Endings(counts, reasons)
