"""Formats of the files of a corpus, by the endings of their names. A new format is a record of
FORMATS, and the reader that it names. Standard library only."""

import dataclasses
import os
import re
from typing import Literal

STDLIB = "stdlib"
COMPRESSIONS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".bz2": "bzip2",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".xz": "xz",
}
SHARD = re.compile(r"-\d+-of-\d+$")  # the end of a shard's name: a.array_record-00000-of-00008


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of files.

    title: its name in help; "" where users do not choose it.
    endings: the names of its files end with these, in any case.
    holds: "text": a file is a document; "records": a document a record, of the fields
      `data.text_fields`; "tokens": ids.
    reader: module and function of jaxtrain/data/reading/ that turn (file, runs of fields, scratch
      folder) into pieces of documents; "" for tokens, which token_files.py maps into memory, and
      for the index that lies beside them.
    """

    title: str
    endings: tuple[str, ...]
    holds: Literal["text", "records", "tokens"]
    reader: str = ""


FORMATS = {
    "text": Format("text", (), "text", "documents:read_text"),  # every other ending
    "python": Format("", (), "text", "documents:read_python"),
    "json": Format("JSON", (".json",), "records", "records:read_json"),
    "jsonl": Format("JSONL", (".jsonl", ".ndjson"), "records", "records:read_jsonl"),
    "parquet": Format("Parquet", (".parquet",), "records", "records:read_parquet"),
    "arrow": Format("Arrow", (".arrow",), "records", "records:read_arrow"),
    "array_record": Format(
        "ArrayRecord", (".array_record", ".arrayrecord"), "records", "array_records:read_records"
    ),
    "bin": Format("tokens (.bin)", (".bin",), "tokens"),
    "npy": Format("tokens (.npy)", (".npy",), "tokens"),
    "megatron": Format("Megatron (.bin with .idx)", (), "tokens"),  # the .bin
    "idx": Format("", (".idx",), "tokens"),
    "prepared": Format("", (), "tokens"),  # the tokens.bin of a prepared corpus
    "beside": Format("", (), "tokens"),  # its other files
}
PREPARED = ("tokens.bin", "corpus.json", "documents.bin")  # what a prepared corpus has at least
BESIDE = ("idx", "beside")  # formats of files that lie beside tokens
RECORDS = ", ".join(format.title for format in FORMATS.values() if format.holds == "records")
BY_ENDING = {ending: name for name, format in FORMATS.items() for ending in format.endings}
HELP = (
    "corpus: a folder (of datasets' save_to_disk, too), a pattern such as 'crawl/**/*.jsonl.gz', "
    "or a file of "
    + ", ".join(format.title for format in FORMATS.values() if format.title)
    + ", which may be compressed; one of these at s3://BUCKET/PATH, gs://BUCKET/PATH or "
    + f"hf://datasets/org/name[@revision]/PATH; {STDLIB}: Python's own sources"
)


def format_of(name: str) -> str:
    """The format of a file by the ending of its name, compressed or not: a key of FORMATS."""
    stem = without_compression(SHARD.sub("", name))
    return BY_ENDING.get(os.path.splitext(stem)[1].lower(), "text")


def without_compression(name: str) -> str:
    """A file's name without the ending of a compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in COMPRESSIONS else name


def ending(name: str) -> str:
    """The ending of a file's name, with that of its compression: ".jsonl.gz"; "" without any."""
    stem = without_compression(name)
    return os.path.splitext(stem)[1] + name[len(stem) :]
