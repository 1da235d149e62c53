"""Notes about a prepared corpus: a setting without effect on it, and numbers that seem to be halves
of ids."""

from typing import Any

import numpy as np

from jaxtrain.data.reading.joined import Sliced
from jaxtrain.data.tokenizer import Tokenizer

SAMPLE = 1 << 20  # numbers examined
LEAST = 64  # so many do not alternate with zeros by chance
FEW = 16  # ids of which a small corpus may be made that alternates with zeros


def notes(ids: Sliced, documents: int, data: Any, tokenizer: Tokenizer) -> list[str]:
    """Notes about ids [n] of so many documents, which a config's `data` group has prepared."""
    lines, end, name = [], tokenizer.end_of_document, f"data.source={data.source}"
    if wider := _wider_type(ids):
        lines.append(
            f"every second number of {name} is 0, as if {wider} were read as {ids.dtype.name}: if "
            f"so, read it with --config.data.token_dtype={wider} (an .npy file: write it as such)"
        )
    if not data.attend_across_documents and documents == 1:
        last = ids[len(ids) - 1 :][0]
        why = "" if last == end else f", in which id {end} would end documents and is not"
        if end is None:
            why = f", for data.tokenizer={data.tokenizer} has no id that ends documents"
        lines.append(
            f"data.attend_across_documents=false has no effect: {name} is one document{why}"
        )
    return [f"note: {line}" for line in lines]


def _wider_type(ids: Sliced) -> str:
    """The integer type of which the numbers [n] seem to be halves or quarters; "" if none."""
    sample = np.array(ids[: min(SAMPLE, len(ids) // 8 * 8)], ids.dtype.newbyteorder("<"))
    size = ids.dtype.itemsize
    while size < 8 and len(sample) >= LEAST and ids.nbytes % (2 * size) == 0:
        low, high = sample.view(f"<u{size}").reshape(-1, 2).T
        if high.any() or low.max() < FEW:
            break
        size *= 2
    return f"uint{8 * size}" if size > ids.dtype.itemsize else ""
