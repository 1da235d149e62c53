"""Continuations as they are printed, and why they ended."""

import numpy as np

from jaxtrain.data.tokenizer import NoTokenizer
from jaxtrain.generation.output import Endings, show

VOCABULARY = 61


def samples(tokens: int, *chunks, interrupt: bool = False) -> tuple[Endings, str]:
    """The endings of chunks of new ids that `show` prints, and their line; with Ctrl-C after
    them."""

    def made():
        yield from (np.array(chunk) for chunk in chunks)
        if interrupt:
            raise KeyboardInterrupt

    endings = show(made(), NoTokenizer(VOCABULARY), "", [1], len(chunks[0]), tokens)
    return endings, endings.describe(1, positions=0, trained_length=16)


def test_why_samples_ended(capsys):
    """An id of -1 is where a document has ended; no chunk has them for all samples at once."""
    assert samples(3, [[5, 6]], [[7]])[1] == "stopped: at --tokens=3"
    assert samples(3, [[5, 6]])[1] == "stopped: at the end of the document, after 2 tokens"
    assert samples(3, [[5], [6]], [[5, 7], [8, -1]])[1] == (
        "stopped: 1 of 2 samples at --tokens=3; 1 of 2 samples at the end of the document, "
        "after 2 tokens"
    )
    assert (
        samples(4, [[5, 6, 7], [6, -1, -1], [8, 9, -1]])[1]
        == "stopped: 3 of 3 samples at the end of the document, after 1 to 3 tokens"
    )
    assert capsys.readouterr().out.startswith(" 5 6 7\n 5 6\n---")


def test_ctrl_c_leaves_the_text_until_then(capsys):
    endings, line = samples(9, [[5, 6, 7], [6, -1, -1]], interrupt=True)
    assert endings.interrupted
    assert (
        line
        == "stopped: 1 of 2 samples at the end of the document, after 1 token; 1 of 2 samples by "
        "Ctrl-C, after 3 tokens"
    )
    assert capsys.readouterr().out == "--- sample 1 of 2\n 5 6 7\n--- sample 2 of 2\n 6\n"
