"""The report on a prepared corpus: the lengths of documents, tokens by file, bytes per token, and
what was left out. It lies in the corpus's folder as report.json and report.png."""

import dataclasses
import json
import os
import pathlib

import numpy as np

from jaxtrain.data.corpus import CHUNK, Corpus
from jaxtrain.data.preparing.corpus_writer import INFO
from jaxtrain.data.stores import listing
from jaxtrain.run import files, streams

JSON, PICTURE = "report.json", "report.png"
NAMED = 15  # files that the picture names
LONGEST_NAME = 40  # characters of a file's name in the picture
BINS = 64


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures of a prepared corpus.

    source, folder: paths
    tokens, documents: their numbers; held_out: tokens
    bytes_per_token: of UTF-8; None for a token file
    documents_by_length, tokens_by_length: those of documents with [2^i, 2^(i + 1)) tokens
    tokens_by_file: of the files that have any
    left_out: reason → documents, or bad records
    """

    source: str
    folder: str
    checksum: str
    tokens: int
    documents: int
    held_out: int
    bytes_per_token: float | None
    documents_by_length: list[int]
    tokens_by_length: list[int]
    tokens_by_file: dict[str, int]
    left_out: dict[str, int]

    def lines(self) -> list[str]:
        """Lines of text for a terminal."""
        half = np.searchsorted(np.cumsum(self.documents_by_length), self.documents / 2)
        left_out = [f"{count:,} ({why})" for why, count in self.left_out.items() if count]
        text = f", {self.bytes_per_token:.2f} bytes each" if self.bytes_per_token else ""
        return [
            f"{self.source}: {self.tokens:,} tokens{text}, {self.held_out:,} of them held out",
            f"  documents: {self.documents:,}, of {self.tokens / self.documents:,.0f} tokens in "
            f"the mean, half of them below {2 ** (half + 1):,}",
            f"  left out: {', '.join(left_out) or 'nothing'}",
            f"  {self.folder}",
        ]


def write_report(corpus: Corpus, sequence_length: int) -> Report:
    """The report on a corpus, which is written into the corpus's folder if that is allowed. Reads
    the places of documents, not tokens.

    sequence_length: is marked in the picture
    """
    report = _report(corpus)
    text = json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False)
    with files.warned(corpus.folder / JSON, streams.log):
        files.replace_text(corpus.folder / JSON, text + "\n")
        _draw(report, sequence_length, corpus.folder / PICTURE)
    return report


def _report(corpus: Corpus) -> Report:
    info, count = files.read_json(corpus.folder / INFO), len(corpus.documents) - 1
    documents, tokens = np.zeros(BINS, int), np.zeros(BINS, int)
    for first in range(0, count, CHUNK):
        lengths = np.diff(corpus.documents[first : min(first + CHUNK, count) + 1])
        bins = np.frexp(lengths)[1] - 1  # the rounded logarithm
        documents += np.bincount(bins, minlength=BINS)
        tokens += np.bincount(bins, lengths, BINS).astype(int)
    longest = int(np.flatnonzero(documents)[-1])
    source = listing.find(corpus.source)
    ends = np.cumsum([0, *info.get("files", [count])]).tolist()  # of a file's documents
    places = [int(corpus.documents[end : end + 1][0]) for end in ends]
    names = [os.path.relpath(file.path, source.root.parent) for file in source.files]
    by_file = {name: size for name, size in zip(names, np.diff(places).tolist()) if size}
    return Report(
        corpus.source,
        str(corpus.folder),
        corpus.checksum,
        len(corpus.tokens),
        count,
        len(corpus.validation),
        info["text"] / info["encoded"] if "text" in info else None,
        documents[: longest + 1].tolist(),
        tokens[: longest + 1].tolist(),
        by_file,
        {"bad records": corpus.skipped.count, "filter": 0, "exact": 0, "near": 0}
        | info.get("left_out", {}),
    )


def _draw(report: Report, sequence_length: int, path: pathlib.Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: no display, no state
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    figure.suptitle(report.lines()[0], parse_math=False)
    axes = figure.subplots(2, 2)
    shortest = int(np.flatnonzero(report.documents_by_length)[0])
    edges = 2.0 ** np.arange(shortest, len(report.documents_by_length) + 1)
    for one, counts, what in (
        (axes[0, 0], report.documents_by_length, "documents"),
        (axes[0, 1], report.tokens_by_length, "tokens"),
    ):
        one.stairs(counts[shortest:], edges, fill=True, alpha=0.7)
        one.axvline(sequence_length, color="C1")
        one.set_xscale("log", base=2)
        one.set_xticks(edges[:: len(edges) // 5 + 1])
        one.xaxis.set_major_formatter("{x:,.0f}")
        one.yaxis.set_major_formatter(EngFormatter())
        one.set(title=f"{what} by the length of the document")
        one.set_xlabel(f"tokens in a document; orange: sequence_length={sequence_length}")
    largest = sorted(report.tokens_by_file.items(), key=lambda item: -item[1])
    rest = (f"{len(largest) - NAMED:,} more", sum(size for _, size in largest[NAMED:]))
    by_file = largest[:NAMED] + [rest] * (len(largest) > NAMED)
    kept = [("kept", report.documents), *report.left_out.items()]
    for one, bars, title in (
        (axes[1, 0], by_file, "tokens by file"),
        (axes[1, 1], kept, "documents that were kept and left out"),
    ):
        names = [f"{'…' * (len(name) > LONGEST_NAME)}{name[-LONGEST_NAME:]}" for name, _ in bars]
        drawn = one.barh(range(len(bars)), [size for _, size in bars], alpha=0.7)
        one.bar_label(drawn, fmt="{:,.0f}", padding=3)
        one.set_yticks(range(len(bars)), names, parse_math=False)
        one.set_ylim(max(len(bars), 5) - 0.5, -0.5)
        one.margins(x=0.3)  # for the numbers beside the bars
        one.xaxis.set_major_formatter(EngFormatter())
        one.set_title(title)
    figure.savefig(files.fresh(path))
