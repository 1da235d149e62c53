"""The files of a prepared corpus, as they are written: arrays, their checksums, corpus.json, and
the line that shows how far a source is read."""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np

from jaxtrain.data.preparing import cache
from jaxtrain.data.tokenizer import FileTokenizer, Tokenizer
from jaxtrain.run import streams
from jaxtrain.run.progress import duration

INFO = "corpus.json"
EVERY = 60.0  # seconds between two lines of progress without a terminal
SHORT = 5.0  # seconds that are left and not worth showing


def corpus_checksum(parts: dict[str, str], dtype: str, tokenizer: Tokenizer) -> str:
    """The checksum of a corpus whose arrays have these sha256s."""
    content = json.dumps([parts, dtype, tokenizer.end_of_document], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def sha256(path: str | pathlib.Path) -> str:
    """The sha256 of a file's content, as hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class CorpusWriter:
    """Appends arrays to the files of a prepared folder, and computes their checksums. The first
    array makes a file."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._files = folder, contextlib.ExitStack()
        self._open: dict[str, Any] = {}
        self._digests: dict[str, Any] = {}

    def append(self, name: str, array: np.ndarray, store: bool = True) -> None:
        """Appends an array to `name`.bin and its checksum, or (store=False) to the latter alone."""
        content = np.ascontiguousarray(array).data.cast("B") if len(array) else memoryview(b"")
        self._digests.setdefault(name, hashlib.sha256()).update(content)
        if store:
            # without a buffer, which would fail once more when a file on a full disk is closed
            if name not in self._open:
                self._open[name] = self._files.enter_context(
                    (self._folder / f"{name}.bin").open("wb", buffering=0)
                )
            while content:
                content = content[self._open[name].write(content) :]

    def finish(self, tokenizer: Tokenizer, **info: Any) -> None:
        """Syncs the files, and writes corpus.json with `info` and the checksum."""
        for file in self._open.values():
            os.fsync(file.fileno())
        parts = {name: digest.hexdigest() for name, digest in self._digests.items()}
        info |= {
            "of": self._folder.name.partition(cache.UNFINISHED)[0],
            "parts": parts,
            "checksum": corpus_checksum(parts, info["dtype"], tokenizer),
            "tokenizer": tokenizer.describe(),
            "prepared": time.time(),
        }
        if isinstance(tokenizer, FileTokenizer):
            (self._folder / "tokenizer.json").write_bytes(tokenizer.content)
        (self._folder / INFO).write_text(json.dumps(info, indent=1) + "\n")

    def close(self) -> None:
        self._files.close()


def _amount(size: float) -> str:
    """A number of bytes in kB or MB."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


class ReadingProgress:
    """The part of some bytes that is read so far, the speed in MB of text (or of token files) a
    second, and the time that is left: a line that a terminal shows in place, or one a minute, and a
    last line for the log.

    doing: in words. name: of the source. total: bytes of files.
    """

    def __init__(self, name: str, total: int, shown: bool, doing: str = "preparing"):
        self._name, self._total, self._shown, self._doing = name, total, shown, doing
        self._done = self._read = 0
        self._began = self._logged = time.perf_counter()
        self._line = streams.TerminalLine(sys.stderr, shown)

    def update(self, size: int, read: int) -> None:
        """Adds `size` bytes of files, which held `read` bytes of text, and shows the line."""
        self._read, self._done, now = self._read + read, self._done + size, time.perf_counter()
        seconds = (now - self._began) * (self._total / max(self._done, 1) - 1)
        left = f", {duration(seconds)} left" if seconds > SHORT else ""
        text = (
            f"{self._doing} {self._name}: {self._done / max(self._total, 1):.0%} of "
            f"{_amount(self._total)}, {self._speed()}{left}"
        )
        self._line.draw(text)
        if self._shown and not self._line.is_live and now - self._logged > EVERY:
            self._logged = now
            streams.log(text)

    def _speed(self) -> str:
        return f"{_amount(self._read / (time.perf_counter() - self._began))}/s"

    def finish(self, tokens: int, documents: int) -> None:
        """Logs the size of the corpus and the speed."""
        self._line.clear()
        if self._shown:
            streams.log(
                f"prepared {self._name}: {_amount(self._read)}, {documents:,} documents, "
                f"{tokens:,} tokens in {time.perf_counter() - self._began:.1f} s, {self._speed()}"
            )

    def close(self) -> None:
        self._line.clear()
