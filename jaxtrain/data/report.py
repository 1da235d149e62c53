"""The report on a prepared corpus: the lengths of documents, tokens by file, bytes per token, and
what was left out. It lies in the corpus's folder, as report.json and report.png."""

import json
import pathlib
from typing import Any

import numpy as np

from jaxtrain.data.corpus import CHUNK, Corpus
from jaxtrain.data.preparing.corpus_writer import INFO
from jaxtrain.run import files, streams

NAMED = 15  # files that the picture names


def write_report(corpus: Corpus, sequence_length: int) -> list[str]:
    """Writes the report on a corpus, if its folder may be written. Returns it as lines of text.
    Reads the places of documents, not tokens. sequence_length: is marked in the picture"""
    report = figures(corpus)
    path = corpus.folder / "report.json"
    with files.warned(path, streams.log):
        files.replace_text(path, json.dumps(report, indent=1) + "\n")
        _draw(report, sequence_length, path.with_suffix(".png"))
    return _lines(report)


def figures(corpus: Corpus) -> dict[str, Any]:
    """A JSON object: documents and tokens by length, of documents with [2^i, 2^(i + 1)) tokens;
    tokens by file, {} for a token file; what was left out, reason → documents or bad records; and
    bytes of UTF-8 per token, None for a token file."""
    info, count = files.read_json(corpus.folder / INFO), len(corpus.documents) - 1
    documents, tokens = np.zeros(64, int), np.zeros(64, int)
    for first in range(0, count, CHUNK):
        lengths = np.diff(corpus.documents[first : min(first + CHUNK, count) + 1])
        bins = np.frexp(lengths)[1] - 1  # the logarithm, rounded down
        documents += np.bincount(bins, minlength=64)
        tokens += np.bincount(bins, lengths, 64).astype(int)
    by_file = info.get("documents_by_file", {})
    ends = np.cumsum([0, *by_file.values()]).tolist()  # of the files' documents
    places = [int(corpus.documents[end : end + 1][0]) for end in ends]
    left_out = {"bad records": corpus.skipped.count, "filter": 0, "exact": 0, "near": 0}
    longest = int(np.flatnonzero(documents)[-1])
    return {
        "source": corpus.source,
        "folder": str(corpus.folder),
        "checksum": corpus.checksum,
        "tokens": len(corpus.tokens),
        "documents": count,
        "held_out": len(corpus.validation),
        "bytes_per_token": info["text"] / info["encoded"] if "text" in info else None,
        "documents_by_length": documents[: longest + 1].tolist(),
        "tokens_by_length": tokens[: longest + 1].tolist(),
        "tokens_by_file": dict(zip(by_file, np.diff(places).tolist(), strict=True)),
        "left_out": left_out | info.get("left_out", {}),
    }


def _lines(report: dict[str, Any]) -> list[str]:
    tokens, documents = report["tokens"], report["documents"]
    half = int(np.searchsorted(np.cumsum(report["documents_by_length"]), documents / 2))
    left_out = [f"{count:,} ({why})" for why, count in report["left_out"].items() if count]
    size = report["bytes_per_token"]
    return [
        f"{report['source']}: {tokens:,} tokens{f', {size:.2f} bytes each' if size else ''}, "
        f"{report['held_out']:,} of them held out",
        f"  documents: {documents:,}, of {tokens / documents:,.0f} tokens in the mean, half of "
        f"them below {2 ** (half + 1):,}",
        f"  left out: {', '.join(left_out) or 'nothing'}",
        f"  {report['folder']}",
    ]


def _draw(report: dict[str, Any], sequence_length: int, path: pathlib.Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: no display, no state
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    figure.suptitle(_lines(report)[0], parse_math=False)
    by_length, bars = figure.subplots(2, 2)
    shortest = int(np.flatnonzero(report["documents_by_length"])[0])
    edges = 2.0 ** np.arange(shortest, len(report["documents_by_length"]) + 1)
    for axes, what in zip(by_length, ("documents", "tokens"), strict=True):
        axes.stairs(report[f"{what}_by_length"][shortest:], edges, fill=True, alpha=0.7)
        axes.axvline(sequence_length, color="C1")
        axes.set_xscale("log", base=2)
        axes.set(
            xticks=edges[:: len(edges) // 5 + 1],
            title=f"{what} by the length of the document",
            xlabel=f"tokens in a document; orange: sequence_length={sequence_length}",
        )
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter(EngFormatter())
    largest = sorted(report["tokens_by_file"].items(), key=lambda item: -item[1])
    rest = (f"{len(largest) - NAMED:,} more", sum(size for _, size in largest[NAMED:]))
    named = {
        "tokens by file": [*largest[:NAMED], *[rest][: len(largest) > NAMED]],
        "documents that were kept and left out": [
            ("kept", report["documents"]),
            *report["left_out"].items(),
        ],
    }
    for axes, (title, values) in zip(bars, named.items(), strict=True):
        drawn = axes.barh(range(len(values)), [count for _, count in values], alpha=0.7)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
        axes.set_yticks(range(len(values)), [name[-40:] for name, _ in values], parse_math=False)
        axes.set(ylim=(max(len(values), 5) - 0.5, -0.5), title=title)
        axes.margins(x=0.3)  # for the numbers beside the bars
        axes.xaxis.set_major_formatter(EngFormatter())
    figure.savefig(files.fresh(path))
