"""The corpora of a run: those of its mixture's sources, and the sets that it is evaluated on."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxtrain.config import ConfigError
from jaxtrain.config.groups.mixture_settings import (
    PARTS,
    MixtureSource,
    mixture_of,
    validation_sets,
)
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.mixture import in_parts
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.data.split import Stream
from jaxtrain.data.tokenizer import DataError, Tokenizer


class ValidationSet(NamedTuple):
    """Documents that a run is evaluated on: those that a source holds out, or a set of
    `data.validation`."""

    source: MixtureSource
    corpus: Corpus
    stream: Stream


@dataclasses.dataclass(frozen=True, eq=False)
class Corpora:
    """The sources of a run's mixture, one of name "" without `data.sources`, and their corpora; and
    the sets of `data.validation`."""

    sources: tuple[MixtureSource, ...]
    corpora: tuple[Corpus, ...]
    named_sets: tuple[ValidationSet, ...] = ()

    def pairs(self) -> list[tuple[MixtureSource, Corpus]]:
        """Each source with its corpus."""
        return list(zip(self.sources, self.corpora, strict=True))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all of them."""
        return self.corpora[0].tokenizer

    @property
    def checksums(self) -> dict[str, str]:
        """Source → its corpus's checksum."""
        return {source.name: corpus.checksum for source, corpus in self.pairs()}

    @property
    def checksum(self) -> str:
        """The corpus's; a digest of the names and checksums of several ones."""
        return self.checksums.get("") or hashlib.sha256(repr(self.checksums).encode()).hexdigest()

    @functools.cached_property
    def validation_sets(self) -> Mapping[str, ValidationSet]:
        """Name → set: the parts that sources hold out, under their names, then the others."""
        held_out = [
            ValidationSet(source, corpus, corpus.validation)
            for source, corpus in self.pairs()
            if source.data.validation_fraction > 0
        ]
        return {each.source.name: each for each in (*held_out, *self.named_sets)}

    def describe(self) -> list[str]:
        """Lines of text: the sources, and their weights in the mixture."""
        weights = in_parts([source.weight for source in self.sources])
        lines = [
            (one.name and f"{one.name}, weight {weight / PARTS:.6g} ({weight:,}/{PARTS:,}): ")
            + corpus.describe()
            for (one, corpus), weight in zip(self.pairs(), weights, strict=True)
        ]
        return lines + [
            f"validation set {each.source.name}: {len(each.stream):,} tokens from "
            f"{each.corpus.source}"
            for each in self.named_sets
        ]


def prepare_all(data: Any, vocab_size: int, progress: bool = True) -> Corpora:
    """The corpora of a `data` config, prepared now where the cache does not have them. Arguments
    and errors as of `prepare`; ConfigError too for two tokenizers in one mixture."""
    sources = mixture_of(data)
    of_sources = tuple(_prepare(one, vocab_size, progress) for one in sources)
    sets = []
    for one in validation_sets(data):
        corpus = _prepare(one, vocab_size, progress)
        # without a fraction of its own the set is its entire corpus, of which all is to be trained
        stream = corpus.validation if one.data.validation_fraction > 0 else corpus.train
        sets.append(ValidationSet(one, corpus, stream))
    corpora = Corpora(sources, of_sources, tuple(sets))
    identity = lambda tokenizer: tokenizer.describe() | {"path": ""}
    for source, corpus in (*corpora.pairs(), *(one[:2] for one in sets)):
        if identity(corpus.tokenizer) != identity(corpora.tokenizer):
            raise ConfigError(
                f"{source.setting}.tokenizer",
                source.data.tokenizer,
                f"is another tokenizer than that of {sources[0].setting}, "
                f"{sources[0].data.tokenizer!r}: a run has one",
            )
    return corpora


def _prepare(source: MixtureSource, vocab_size: int, progress: bool) -> Corpus:
    with errors_of(source):
        return prepare(source.data, vocab_size, progress)


@contextlib.contextmanager
def errors_of(source: MixtureSource) -> Iterator[None]:
    """A context in which errors of a source's preparation name the settings of that source."""
    try:
        yield
    except ConfigError as error:
        field, name = error.field, error.field.removeprefix("data.")
        if name == "source" or source.name:
            field = source.setting if name == "source" else f"{source.setting}.{name}"
        raise ConfigError(
            field,
            error.value,
            error.rule,
            error.nearest.replace("config.data.source=", f"config.{source.setting}="),
        ) from error
    except DataError as error:
        if source.name and not f"{error}".startswith(source.setting):
            text = f"{error}".removeprefix("data.source=")
            error.args = (f"{source.setting}{': ' if text == str(error) else '='}{text}",)
        raise
