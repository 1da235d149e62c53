"""`python -m jaxtrain.data prepare | show`: prepares the corpora of a recipe, and shows sequences
as the model sees them. No device is used.
"""

import contextlib
import re
import sys
import types
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain import cli
from jaxtrain.config import Config, UsageError
from jaxtrain.config.flags import Flag
from jaxtrain.config.groups.mixture_settings import mixture_of, validation_sets
from jaxtrain.config.phases import spans
from jaxtrain.data.corpora import errors_of, prepare_all
from jaxtrain.data.document_packing import SequenceArrays
from jaxtrain.data.preparing.prepare import prepare_shard
from jaxtrain.data.report import write_report
from jaxtrain.data.tokenizer import FileTokenizer, Tokenizer
from jaxtrain.run import streams
from jaxtrain.run.exit_status import ExitStatus

DESCRIPTION = """
Prepares the corpora of a recipe, and shows its training sequences as the model sees them.

usage: jaxtrain data prepare [--config=NAME|FILE] [--config.GROUP.FIELD=VALUE …] [--shard=I/N]
                             encodes all sources and validation sets into data.cache, and writes a
                             report on each (report.json, report.png) into its folder
       jaxtrain data show … [--row=R] [--rows=COUNT]
                             prints training sequences by their numbers among all of the run: the
                             source, and of each token its id, text, document, position, target and
                             the weight of the target's loss

With --shard=I/N (I from 0 to N - 1) this machine encodes its part of each source into a data.cache
that all machines have. Once no part is missing, any of them joins the parts. The bytes are the same
for each N, and a command that was killed goes on where it was. No device is used.
"""
FLAGS = {
    "prepare": (
        Flag("shard", "0/1", "the part of each source that is encoded here: 0/7 to 6/7 of seven"),
    ),
    "show": (
        Flag("row", 0, "the number of the first sequence; the first one is 0", at_least=0),
        Flag("rows", 1, "the number of sequences", at_least=1),
    ),
}
SHARD = re.compile(r"(\d{1,6})/(\d{1,6})")


@cli.command
def main(argv: Sequence[str]) -> int:
    """The exit status, as that of train."""
    name, *rest = argv or ["--help"]
    if name in ("--help", "-h", "--version"):
        cli.parse([name], DESCRIPTION, (*FLAGS["prepare"], *FLAGS["show"]))  # ends here
    if name not in FLAGS:
        raise cli.FlagsError(
            f"{name!r} is no command of jaxtrain data: use jaxtrain data prepare or jaxtrain data "
            "show, and then the flags"
        )
    config, flags = cli.parse(rest, DESCRIPTION, FLAGS[name], check=check_flags, uses_devices=False)
    {"prepare": prepare, "show": show}[name](config, flags)
    return ExitStatus.FINISHED


def check_flags(flags: types.SimpleNamespace, config: Config) -> None:
    """Raises UsageError for a --shard that is none."""
    shard = SHARD.fullmatch(getattr(flags, "shard", "0/1"))
    if not shard or int(shard[1]) >= int(shard[2]):
        last = f"{int(shard[2]) - 1}/{shard[2]}" if shard and int(shard[2]) else "0/1"
        raise UsageError(
            f"--shard={flags.shard} is not I/N with I from 0 to N - 1", {"shard": last}
        )


# --- prepare --------------------------------------------------------------------------------------


def prepare(config: Config, flags: types.SimpleNamespace) -> None:
    number, count = map(int, flags.shard.split("/"))
    sources = mixture_of(config.data)
    for k, one in enumerate((*sources, *validation_sets(config.data))):
        with errors_of(one):
            shard = prepare_shard(one.data, config.model.vocab_size, (number, count))
        if not shard.corpus:
            others = sorted({part % count for part in shard.missing})
            lines = [
                f"{one.data.source}: {shard.encoded} of {shard.parts} parts encoded now, "
                f"{len(shard.missing)} missing, those of --shard="
                f"{', '.join(f'{other}/{count}' for other in others)}"
            ]
        else:
            lines = write_report(shard.corpus, config.data.sequence_length)
        if shard.corpus and k < len(sources):
            tokens_read = sum(
                (span.tokens_before(span.end) - span.tokens) * span.weights[k] / sum(span.weights)
                for span in spans(config)
            )
            weight = f"{one.name}, weight {one.weight:g}: " if one.name else ""
            lines.append(
                f"  {weight}{config.train.steps:,} steps read it "
                f"{tokens_read / max(len(shard.corpus.train), 1):.3g} times"
            )
        print("\n".join(lines), flush=True)


# --- show -----------------------------------------------------------------------------------------


def show(config: Config, flags: types.SimpleNamespace) -> None:
    # Grain's permutation imports jax, which takes a second.
    from jaxtrain.data.batches import TrainingBatches

    with contextlib.redirect_stdout(sys.stderr):  # the lines about the preparation
        corpora = prepare_all(config.data, config.model.vocab_size)
    batches = TrainingBatches(corpora, spans(config))
    for row in range(flags.row, flags.row + flags.rows):
        span = next(each for each in reversed(batches.spans) if each.rows <= row)
        batch, place = divmod(row - span.rows, span.batch_size)
        draw = batches.draw(span.begin + batch, place)
        print(
            f"row {row}: batch {span.begin + batch}, place {place}"
            f"{span.phase and f', phase {span.phase}'}; source {draw.source or config.data.source},"
            f" ordinal {draw.ordinal}, epoch {draw.epoch}, sequence {draw.number} of "
            f"{len(draw.sequences)}"
        )
        print("\n".join(_table(draw.arrays(), corpora.tokenizer)), flush=True)


def _table(arrays: SequenceArrays, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines of text: the names of the columns, and each token of a sequence."""
    length = len(arrays["tokens"])
    columns = {
        "document": arrays.get("segments", np.ones(length, np.int32)),
        "position": arrays.get("positions", np.arange(length)),
        "id": arrays["tokens"],
        "target": arrays["targets"],
        "weight": arrays["weights"],
    }
    yield "".join(f"{name:>9}" for name in columns) + "  text"
    for values in zip(*columns.values(), strict=True):
        token = int(values[2])
        text = tokenizer.decode([token])
        mark = tokenizer.token(token) if isinstance(tokenizer, FileTokenizer) else "end of document"
        yield "".join(f"{value!s:>9}" for value in values) + f"  {repr(text) if text else mark}"


if __name__ == "__main__":
    sys.exit(streams.run(main, sys.argv[1:]))
