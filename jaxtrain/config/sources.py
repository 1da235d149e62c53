"""What `data.source` may be, for the rules that refuse one and for the readers in data/: formats of
files, folders, patterns and `stdlib`, and the files that each of them names.

    file      one of the formats below; it may be compressed (`.jsonl.gz`, `.txt.zst`, …). A
              Megatron file is named by its `.bin`, its `.idx` or what both begin with
    prepared  a folder of data.cache, or a copy of one that has its tokens: a corpus by itself
    folder    every file below it, in the order of their paths. Names that begin with `_` or `.` are
              passed over: Spark and Hadoop write `_SUCCESS` and `.part-0.crc` beside the data.
              Links to folders are reported and not followed. A pipe, a socket or a dangling link
              is a file that cannot be read. Of a folder that datasets' save_to_disk has written,
              the files that its state.json names, in that order
    pattern   those of a folder's files that match, such as `crawl/**/*.jsonl.gz`; `**` stands for
              any number of folders. A folder that matches stands for all files below it. A path
              that exists is no pattern
    address   one of these in a store or in the Hugging Face hub (data/stores/listing.py)
    stdlib    the sources of the Python standard library: its *.py files without tests

Formats and their readers are in groups/formats.py. Files are listed here, not read. Standard
library only.
"""

import collections
import dataclasses
import fnmatch
import glob
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.config import addresses
from jaxtrain.config.errors import ConfigError, nearly, suggestion
from jaxtrain.config.groups.formats import (
    BESIDE,
    FORMATS,
    PREPARED,
    STDLIB,
    ending,
    format_of,
)

LEFT_OUT_OF_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HIDDEN = ("_", ".")  # the names below a source that begin with these are passed over
NAMED = 3  # the names that a line lists at most
ENDINGS = 5  # the endings that a line counts at most
# the files of a folder by datasets' save_to_disk: the data files in their order, the features
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
MOST_STATE = 1 << 26  # bytes of a state.json
DESCRIPTIONS = (STATE, INFO, "features.json")  # written beside .arrow and .array_record files


class File(NamedTuple):
    """A file of a source, or an extent of one (data/reading/extents.py).

    path: an address if it lies in a store
    format: a key of FORMATS
    size: bytes of the whole file
    modified: nanoseconds since the epoch, or in a store the version of its content
    first, last: the extent, in bytes of JSONL or row groups of Parquet; last=0: to the end
    """

    path: str
    format: str
    size: int
    modified: int | str
    first: int = 0
    last: int = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a `data.source`.

    name: the source as messages name it.
    root: the file or folder that the user named; of a pattern, the folder above it; of an address,
      its text as a path.
    files: the files in the order of the corpus; empty only if there are unreadable ones.
    pattern: the parts of the pattern below the root; () for everything.
    unreadable: paths below a folder that are no regular files: pipes, sockets, devices, dangling
      links; and folders that may not be listed.
    linked_folders: links to folders, which are not followed.
    passed_over: the files and folders that would count but for their names.
    """

    name: str
    root: pathlib.Path
    files: tuple[File, ...]
    pattern: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    linked_folders: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def place(self) -> str:
        """The root as users write it: an address has two slashes, of which a path keeps one."""
        text = str(self.root)
        return text.replace(":/", "://", 1) if addresses.is_address(self.name) else text

    @property
    def holds_tokens(self) -> bool:
        return bool(self.token_files)

    @property
    def is_prepared(self) -> bool:
        return any(file.format == "prepared" for file in self.files)

    @property
    def token_files(self) -> list[File]:
        """The files that hold tokens, without their indices."""
        tokens = [file for file in self.files if FORMATS[file.format].holds == "tokens"]
        return [file for file in tokens if file.format not in BESIDE]

    @property
    def has_fields(self) -> bool:
        return any(FORMATS[file.format].holds == "records" for file in self.files)

    def takes(self, path: pathlib.Path) -> bool:
        """True if a file at this path, made later, would be one of the source's."""
        if not self.root.is_dir() or not path.is_relative_to(self.root):
            return False
        parts = path.relative_to(self.root).parts
        return _matches(parts, self.pattern) and not any(map(_is_hidden, parts))

    def lines(self) -> list[str]:
        """Lines of text that say what a folder or a pattern has brought: files by their endings,
        the names that were passed over, texts beside records, links to folders."""
        if self.name == STDLIB or self.files[:1] and pathlib.Path(self.files[0].path) == self.root:
            return []
        if self.is_prepared:
            return [f"data.source={self.name}: a prepared corpus, whose tokens are read in place"]
        lines = [
            f"data.source={self.name}: read {_amounts(ending(file.path) for file in self.files)}"
        ]
        if self.passed_over:
            lines[0] += f"; {self.passed_over_text()}"
        texts = [file.path for file in self.files if file.format == "text"]
        if texts and self.has_fields:
            lines.append(f"  text beside files of records, a document each: {self.listed(texts)}")
            records = {ending(file.path) for file in self.files if file.format != "text"}
            if len(records) == 1 and not self.pattern:
                only = os.path.join(self.name, "**", f"*{records.pop()}")
                lines[-1] += f" ({suggestion({'data.source': only})} leaves them out)"
        links = "is a link to a folder, which is not followed"
        return [*lines, *(f"  {link} {links}" for link in self.linked_folders)]

    def passed_over_text(self) -> str:
        return f"passed over, for names that begin with _ or .: {self.listed(self.passed_over)}"

    def listed(self, paths: Sequence[str]) -> str:
        """The first NAMED of some paths, as they are called below the root, and how many more."""
        names = [os.path.relpath(path, self.root) for path in paths[:NAMED]]
        rest = [f"{len(paths) - NAMED:,} more"] if len(paths) > NAMED else []
        return ", ".join(names + rest)


def formats(name: str) -> set[str]:
    """The formats of a source's files, keys of FORMATS; what does not exist is judged by its
    name."""
    if name == STDLIB:
        return {"python"}
    if addresses.is_address(name):  # a store is not asked yet
        return {format_of(name)} if ending(name) else {*FORMATS}
    try:
        return {file.format for file in find(name).files}
    except (ConfigError, OSError):
        return {format_of(name)}


def holds_tokens(name: str) -> bool:
    """True if files of a source hold tokens."""
    return any(FORMATS[format].holds == "tokens" for format in formats(name))


def may_have_fields(name: str) -> bool:
    """True if files of a source hold records, or may."""
    return any(FORMATS[format].holds == "records" for format in formats(name))


def check(name: str) -> None:
    """Raises ConfigError if a source does not exist, or is a pattern that no file matches. Files of
    a folder are not listed, and those of an address are not looked for."""
    if addresses.is_address(name):
        check_address(name)
    elif name != STDLIB and _place(name)[1]:
        find(name)


def check_address(name: str) -> None:
    """Raises ConfigError for the address of a source in no store that can be used. The store is not
    asked."""
    # a bucket itself may be a source
    wrong = addresses.fault(f"{name.rstrip('/')}/*") or addresses.missing_package(name)
    if wrong and not name.startswith(addresses.HUB):
        fixes = [{"data.source": place.removesuffix("/*")} for place in wrong.meant]
        raise ConfigError("data.source", name, wrong.rule, fixes=fixes)


def find(name: str) -> Source:
    """The files of a `data.source`. Raises ConfigError if there are none, or token files are among
    others, OSError if one has gone meanwhile."""
    if name == STDLIB:
        return _list(name, pathlib.Path(sysconfig.get_path("stdlib")), ("**", "*.py"))
    root, pattern = _place(name)
    if not root.is_file():
        return _as_corpus(_list(name, root, pattern))
    return _as_corpus(Source(name, root, tuple(map(_stat, _pair(root) or (root,)))))


def find_among(
    name: str, root: pathlib.Path, pattern: tuple[str, ...], files: Sequence[File]
) -> Source:
    """The source of those files of a store that lie below a root, which may be one of them, and
    match a pattern. Raises ConfigError as `find`."""
    below = {file: pathlib.Path(file.path).relative_to(root).parts for file in files}
    paths = {"/".join(parts) for parts in below.values()}
    matches = [
        file
        for file in sorted(files, key=below.__getitem__)
        if any(
            _matches(called.split("/"), pattern) for called in _called("/".join(below[file]), paths)
        )
    ]
    if any(file.format in ("arrow", "array_record") for file in matches):
        matches = [f for f in matches if pathlib.Path(f.path).name not in DESCRIPTIONS]
    hidden = {file for file in matches if any(map(_is_hidden, below[file]))}
    source = Source(
        name,
        root,
        tuple(file for file in matches if file not in hidden),
        pattern,
        passed_over=tuple(file.path for file in matches if file in hidden),
    )
    if not source.files:
        raise _no_files(source, [ending(file.path) for file in {*files} - {*matches}], 0)
    return _as_corpus(source)


def _as_corpus(source: Source) -> Source:
    """The source with the formats that depend on several files: a .bin with an index beside it is
    Megatron's, and of a folder with a prepared corpus only that one's files remain.

    Raises ConfigError for token files that are no corpus: they lie among others, are of several
    formats, or an index lacks its tokens.
    """
    names = {os.path.relpath(file.path, source.root): file for file in source.files}
    if not source.pattern and names.keys() >= {*PREPARED}:
        own = [
            names[name]._replace(format="beside")
            for name in (*PREPARED, "mask.bin")
            if name in names
        ]
        return dataclasses.replace(source, files=(own[0]._replace(format="prepared"), *own[1:]))
    indices = {os.path.splitext(f.path)[0]: f.path for f in source.files if f.format == "idx"}
    files = [
        file._replace(format="megatron")
        if file.format == "bin" and os.path.splitext(file.path)[0] in indices
        else file
        for file in source.files
    ]
    source = dataclasses.replace(source, files=tuple(files))
    tokens = [file.path for file in files if FORMATS[file.format].holds == "tokens"]
    texts = [file.path for file in files if FORMATS[file.format].holds != "tokens"]
    by_format = {file.format: file.path for file in source.token_files}
    rename = "let the names of those that are not meant begin with _ or ., or name a pattern"
    problem = ""
    if tokens and texts:
        problem = (
            f"holds token files ({source.listed(tokens)}) beside others ({source.listed(texts)}): "
            f"{rename}"
        )
    elif alone := indices.keys() - {os.path.splitext(file.path)[0] for file in source.token_files}:
        problem = f"has the index {indices[min(alone)]} without its tokens, {min(alone)}.bin"
    elif len(by_format) > 1:
        kinds = " and ".join(f"{FORMATS[kind].title}: {path}" for kind, path in by_format.items())
        problem = f"holds token files of several formats, {kinds}: {rename}"
    if problem:
        raise ConfigError("data.source", source.name, problem)
    return source


def similar_files(path: pathlib.Path) -> list[str]:
    """The path of the file in a missing file's folder whose name is nearly its name, if one is."""
    if not path.parent.is_dir():
        return []
    names = {other.name: str(other) for other in path.parent.iterdir()}
    return [names[name] for name in filter(None, [nearly(path.name, names)])]


def _place(name: str) -> tuple[pathlib.Path, tuple[str, ...]]:
    """The file or folder that exists, and the parts of the pattern below it.

    Raises ConfigError for a source that does not exist, or is neither a file nor a folder.
    """
    root = pathlib.Path(os.path.expanduser(name))
    pattern: tuple[str, ...] = ()
    if name and (pair := _pair(root)):
        return pair[0].parent.resolve() / pair[0].name, pattern
    while glob.has_magic(str(root)) and not os.path.exists(root):
        root, pattern = root.parent, (root.name, *pattern)
    if name and (os.path.isdir(root) or (os.path.isfile(root) and not pattern)):
        return root.resolve(), pattern
    rule = f"is neither {STDLIB!r} nor an existing path"
    if name and not pattern and os.path.exists(root):
        rule = "is not a regular file or a folder"  # a pipe would be waited for
    similar = [
        path if os.path.isfile(path) else os.path.join(path, *pattern)
        for path in similar_files(root)
    ]
    if "," in name:
        rule += ", nor a list: files of one corpus are a folder or a pattern"
    raise ConfigError("data.source", name, rule, fixes=[{"data.source": each} for each in similar])


def _pair(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """The .bin and the .idx of a Megatron file that is named by either, or by what both begin with;
    None if they are not there."""
    stem, suffix = os.path.splitext(path)
    stem = stem if suffix in (".bin", ".idx") else str(path)
    tokens, index = pathlib.Path(f"{stem}.bin"), pathlib.Path(f"{stem}.idx")
    names_another = path.exists() and path not in (tokens, index)
    return None if names_another or not (tokens.is_file() and index.is_file()) else (tokens, index)


def _is_hidden(name: str) -> bool:
    return name.startswith(HIDDEN)


def _is_left_out_of_stdlib(name: str) -> bool:
    return name.startswith(".") or name in LEFT_OUT_OF_STDLIB


def _list(name: str, root: pathlib.Path, pattern: tuple[str, ...]) -> Source:
    """The source of what lies below a folder and matches a pattern. Folders in which nothing can
    match are not entered. Raises ConfigError if there are no files."""
    files: list[str] = []
    unreadable: list[str] = []
    linked_folders: list[str] = []
    passed_over: list[str] = []
    unmatched: list[str] = []  # endings
    closed = 0  # folders in which nothing can match
    order: dict[str, tuple[str, ...]] = {}  # path → what it is sorted by, in saved datasets
    passes = _is_hidden if name != STDLIB else _is_left_out_of_stdlib
    # nothing is below a folder that does not exist
    for folder, folders, names in os.walk(root, onerror=lambda e: unreadable.append(e.filename)):
        above = pathlib.PurePath(folder).relative_to(root).parts
        entered = [name for name in folders if _matches((*above, name), pattern, partly=True)]
        present = {*names}
        matches = [
            entry
            for entry in names
            if any(_matches((*above, called), pattern) for called in _called(entry, present))
        ]
        if SPLITS in matches:
            split = "train" if "train" in folders else min(folders, default="SPLIT")
            rule = f"has {os.path.join(folder, SPLITS)}: its splits ({', '.join(sorted(folders))}) "
            fixes = [{"data.source": os.path.join(folder, split)}]
            raise ConfigError("data.source", name, f"{rule}are one source each", fixes=fixes)
        if {STATE, INFO} <= {*matches}:
            matches = _saved_files(name, folder, matches)
            folders_above = pathlib.PurePath(folder).parts
            order |= {
                os.path.join(folder, entry): (*folders_above, f"{i:012}")
                for i, entry in enumerate(matches)
            }
        elif any(format_of(entry) in ("arrow", "array_record") for entry in matches):
            matches = [entry for entry in matches if entry not in DESCRIPTIONS]
        unmatched += [ending(name) for name in {*names} - {*matches} if not passes(name)]
        closed += len(folders) - len(entered)
        folders[:] = [name for name in entered if not passes(name)]
        for entry in (*entered, *matches):
            path = os.path.join(folder, entry)
            if passes(entry):
                passed_over.append(path)
            elif os.path.isfile(path):
                files.append(path)
            elif not os.path.isdir(path):
                unreadable.append(path)
            elif os.path.islink(path):
                linked_folders.append(path)
    for paths in (files, unreadable, linked_folders, passed_over):
        paths.sort(key=lambda path: order.get(path) or pathlib.PurePath(path).parts)
    source = Source(
        name,
        root,
        tuple(_stat(path, "python" if name == STDLIB else "") for path in files),
        pattern,
        tuple(unreadable),
        tuple(linked_folders),
        tuple(passed_over),
    )
    if not files and (not unreadable or name == STDLIB):
        raise _no_files(source, unmatched, closed)
    return source


def _called(name: str, names: set[str]) -> tuple[str, ...]:
    """The names by which a pattern may call a file of a folder that has `names`: also those of its
    pair and of both without an ending, if it is one of Megatron's."""
    stem = name.removesuffix(".bin").removesuffix(".idx")
    pair = (f"{stem}.bin", f"{stem}.idx")
    return (stem, *pair) if name in pair and names.issuperset(pair) else (name,)


def _saved_files(name: str, folder: str, present: Sequence[str]) -> list[str]:
    """The data files of a folder that datasets' save_to_disk has written, in their order. Raises
    ConfigError if its state.json does not name them, or one is not `present`."""
    path = os.path.join(folder, STATE)
    try:
        with open(path, "rb") as file:
            state = json.loads(file.read(MOST_STATE))
        files = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        rule = (
            f"has {path}, which is not as datasets' save_to_disk writes it: copy the folder again"
        )
        raise ConfigError("data.source", name, rule) from error
    missing = [file for file in files if file not in present]
    if missing or len({*files}) < len(files):
        what = f"names {missing[0]}, which is not there" if missing else "names a file twice"
        rule = f"does not match what lies there: {path} {what}: copy the folder again"
        raise ConfigError("data.source", name, rule)
    return files


def _matches(parts: Sequence[str], pattern: Sequence[str], partly: bool = False) -> bool:
    """True if a pattern matches a path or a folder above it. partly: also if it can match a path
    below."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:], partly) for i in range(len(parts) + 1))
    if not parts:
        return partly
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:], partly)


def _no_files(source: Source, unmatched: Sequence[str], closed: int) -> ConfigError:
    """The error for a folder without files, or a pattern without a match, with what is there:
    unmatched has the endings of other files, closed is the number of folders that do not match."""
    if source.name == STDLIB:
        return ConfigError(
            "data.source",
            STDLIB,
            f"is empty, for this Python has no sources in {source.root}: name a folder or a file",
        )
    links = source.listed(source.linked_folders)
    present = [
        _amounts(unmatched),
        f"folders that do not match ({closed:,})" if closed else "",
        source.passed_over_text() if source.passed_over else "",
        f"links to folders, which are not followed: {links}" if links else "",
    ]
    return ConfigError(
        "data.source",
        source.name,
        f"{'matches' if source.pattern else 'holds'} no files; below {source.place} are "
        f"{'; '.join(filter(None, present)) or 'none'}",
    )


def _amounts(endings: Iterable[str]) -> str:
    """Numbers of files by their endings, the largest first: "411 .jsonl.gz, 1 .md"."""
    amounts = collections.Counter(sorted(endings)).most_common()
    words = [f"{count:,} {ending or 'without an ending'}" for ending, count in amounts[:ENDINGS]]
    if rest := sum(count for _, count in amounts[ENDINGS:]):  # shards may end in their numbers
        words.append(f"{rest:,} with other endings")
    return ", ".join(words)


def _stat(path: str | os.PathLike, format: str = "") -> File:
    """A file of the disk, whose format is known by its name unless it is given."""
    stat = os.stat(path)
    return File(str(path), format or format_of(str(path)), stat.st_size, stat.st_mtime_ns)
