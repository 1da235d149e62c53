"""Sources: the files that a file, a folder, a pattern or `stdlib` names, in their order; what is
passed over and said; and what is refused."""

import json
import os
import pathlib
import pkgutil
import socket

import pytest

from jaxtrain import config as cfg
from jaxtrain.config import ConfigError, sources
from jaxtrain.config.groups import formats
from jaxtrain.config.rules import checks
from jaxtrain.config.rules.unused import unused_settings


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write("name", …) → new files of one byte below the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")

    return make


def names_of(source):
    """The paths of a source's files, below the current folder."""
    return [os.path.relpath(file.path) for file in sources.find(source).files]


def refusal(source):
    """The message; `check` says the same of all but folders, whose files it does not list."""
    with pytest.raises(ConfigError) as caught:
        sources.find(source)
    if not os.path.isdir(source) and source != "stdlib":
        with pytest.raises(ConfigError) as checked:
            sources.check(source)
        assert str(checked.value) == str(caught.value)
    return str(caught.value)


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, format, ending",
    [
        ("a.jsonl", "jsonl", ".jsonl"),
        ("a.NDJSON.Gz", "jsonl", ".NDJSON.Gz"),
        ("a.json.zst", "json", ".json.zst"),
        ("d.gz/a.parquet", "parquet", ".parquet"),
        ("ids.bin.xz", "bin", ".bin.xz"),
        ("a.NPY", "npy", ".NPY"),
        ("a.b.txt", "text", ".txt"),
        ("notes.gz", "text", ".gz"),
        ("noise", "text", ""),
        (".jsonl", "text", ""),
    ],
)
def test_endings(name, format, ending):
    assert sources.format_of(name) == format
    assert formats.ending(name) == ending
    assert sources.holds_tokens(name) == (format in ("bin", "npy"))


def test_compressions_are_no_part_of_a_format():
    names = ("a.jsonl.gz", "a.txt.ZST", "d.gz/a.json", "a.bz2", "x")
    plain = [formats.without_compression(name) for name in names]
    assert plain == ["a.jsonl", "a.txt", "d.gz/a.json", "a", "x"]


def test_every_format_has_a_reader_unless_it_holds_tokens():
    for format in sources.FORMATS.values():
        if format.holds == "tokens":
            assert not format.reader
        else:
            assert callable(pkgutil.resolve_name(f"jaxtrain.data.reading.{format.reader}"))
        assert not format.title or format.title in formats.HELP


# --- folders and patterns -------------------------------------------------------------------------

TREE = (
    "crawl/b.jsonl.gz",
    "crawl/a/2.jsonl.gz",
    "crawl/a/10.jsonl.gz",
    "crawl/a/deep/er/1.jsonl.gz",
    "crawl/a-b/1.txt",
    "crawl/a/1.JSONL",
)


@pytest.mark.parametrize(
    "pattern, files",
    [
        ("crawl/*.jsonl.gz", ["b.jsonl.gz"]),
        (
            "crawl/**/*.jsonl.gz",
            ["a/10.jsonl.gz", "a/2.jsonl.gz", "a/deep/er/1.jsonl.gz", "b.jsonl.gz"],
        ),
        (
            "crawl/a*/*",
            ["a/1.JSONL", "a/10.jsonl.gz", "a/2.jsonl.gz", "a/deep/er/1.jsonl.gz", "a-b/1.txt"],
        ),
        ("crawl/a/?.jsonl.gz", ["a/2.jsonl.gz"]),
        ("crawl/a/[0-9]*.jsonl.gz", ["a/10.jsonl.gz", "a/2.jsonl.gz"]),
        ("crawl/*/deep", ["a/deep/er/1.jsonl.gz"]),
        ("*/a/**/er/*", ["a/deep/er/1.jsonl.gz"]),
        ("crawl/a/d**p/*/1*", ["a/deep/er/1.jsonl.gz"]),
    ],
)
def test_patterns(write, pattern, files):
    """Sorted by path; a folder that matches stands for what is below it."""
    write(*TREE)
    assert names_of(pattern) == [f"crawl/{name}" for name in files]
    assert names_of(os.path.abspath(pattern)) == [f"crawl/{name}" for name in files]
    sources.check(pattern)


@pytest.mark.parametrize("pattern", ["crawl/**", "crawl/**/*", "crawl/*", "craw?", "crawl/"])
def test_a_folder_and_a_pattern_for_all_of_it_have_the_same_files(write, pattern):
    write(*TREE)
    assert sources.find(pattern).files == sources.find("crawl").files
    assert len(sources.find(pattern).files) == len(TREE)


def test_the_order_does_not_depend_on_the_folder(write, tmp_path):
    write(*TREE)
    before = names_of("crawl")
    (tmp_path / "z/y").mkdir(parents=True)
    os.rename("crawl", "z/y/other crawl")
    assert names_of("z/y/other crawl") == [f"z/y/other {name}" for name in before]


def test_the_current_folder_is_a_source(write):
    write("d/a.txt")
    assert names_of(".") == ["d/a.txt"]
    sources.check("/")


def test_names_that_are_no_patterns(write):
    """A path that exists is itself, and so is its beginning."""
    write("a[1].txt", "a1.txt", "what?/b c.txt", "what?/d.md", "whats/b c.txt")
    assert names_of("a[1].txt") == ["a[1].txt"]
    assert names_of("a[0-9].txt") == ["a1.txt"]
    assert names_of("what?") == ["what?/b c.txt", "what?/d.md"]
    assert names_of("what?/*.txt") == ["what?/b c.txt"]


def test_what_begins_with_an_underscore_or_a_dot_is_passed_over(write):
    write("d/a.jsonl", "d/_SUCCESS", "d/.a.jsonl.crc")
    write("d/_temporary/0/b.jsonl", "d/x/.git/c.jsonl")
    assert names_of("d") == names_of("d/**/*.jsonl") == ["d/a.jsonl"]
    for name, passed_over in (
        ("d", ["d/.a.jsonl.crc", "d/_SUCCESS", "d/_temporary", "d/x/.git"]),
        ("d/**/*.jsonl", ["d/_temporary", "d/x/.git"]),  # the others do not match
    ):
        source = sources.find(name)
        assert [os.path.relpath(path) for path in source.passed_over] == passed_over
    # a source's own name does not matter
    assert names_of("d/_temporary") == names_of("d/_temporary/*/b*") == ["d/_temporary/0/b.jsonl"]
    assert names_of("d/_SUCCESS") == ["d/_SUCCESS"]


def test_links(write):
    """Those to files are followed, those to folders named; a source's own link is followed."""
    write("d/a.txt", "other/b.txt", "other/c.txt")
    os.symlink(os.path.abspath("other"), "d/link")
    os.symlink(os.path.abspath("other/c.txt"), "d/c.txt")
    for name in ("d", "d/**/*.txt", "d/*"):
        assert sources.find(name).linked_folders == (os.path.abspath("d/link"),)
    assert names_of("d") == names_of("d/**/*.txt") == names_of("d/*.txt") == ["d/a.txt", "d/c.txt"]
    assert "links to folders, which are not followed: link" in refusal("d/*/*.txt")
    assert names_of("d/link") == names_of("d/link/*") == ["other/b.txt", "other/c.txt"]


def test_what_is_taken_is_said(write):
    write("a.txt", "d/1.jsonl", "d/2.jsonl", "d/a/3.jsonl")
    write("e/1.jsonl", "e/2.json", "e/x", "e/y.md")
    assert sources.find("a.txt").lines() == sources.find("stdlib").lines() == []
    assert sources.find("d").lines() == ["data.source=d: read 3 .jsonl"]
    write("d/README.md", "d/_SUCCESS", "d/.crc", "d/a/_x", "d/a/_y")
    os.symlink(os.path.abspath("e"), "d/link")
    link = f"  {os.path.abspath('d/link')} is a link to a folder, which is not followed"
    assert sources.find("d").lines() == [
        "data.source=d: read 3 .jsonl, 1 .md; passed over, for names that begin with _ or .: .crc, "
        "_SUCCESS, a/_x, 1 more",
        "  text beside files of records, a document each: README.md "
        "(--config.data.source='d/**/*.jsonl' leaves them out)",
        link,
    ]
    assert names_of("d/**/*.jsonl") == ["d/1.jsonl", "d/2.jsonl", "d/a/3.jsonl"]
    assert sources.find("d/**/*.jsonl").lines() == ["data.source=d/**/*.jsonl: read 3 .jsonl", link]
    assert sources.find("e").lines()[0].startswith("data.source=e: read 1 ")
    assert sources.find("e").lines()[1:] == [
        "  text beside files of records, a document each: x, y.md"
    ]


def test_few_endings_are_counted(write):
    """Shards may end in their numbers."""
    write("d/a.txt", "d/b.txt", *(f"d/part.{i:03}" for i in range(100)))
    assert sources.find("d").lines() == [
        "data.source=d: read 2 .txt, 1 .000, 1 .001, 1 .002, 1 .003, 96 with other endings"
    ]


def test_files_to_come(write, tmp_path):
    write(*TREE)
    below = tmp_path / "crawl/new"
    assert sources.find("crawl").takes(below / "corpus.json")
    assert not sources.find("crawl").takes(tmp_path / "new/corpus.json")
    assert not sources.find("crawl/**/*.jsonl.gz").takes(below / "corpus.json")
    assert sources.find("crawl/**/*.jsonl.gz").takes(below / "a.jsonl.gz")
    assert not sources.find("crawl").takes(tmp_path / "crawl/_cache/corpus.json")
    assert not sources.find("crawl/b.jsonl.gz").takes(below / "b.jsonl.gz")


# --- refusals -------------------------------------------------------------------------------------


def test_what_does_not_exist(write):
    write("corpus.jsonl", "crawl/a.jsonl", "s3:/b/a.jsonl")
    neither = "is neither 'stdlib' nor an existing path"
    write("part-1.jsonl")
    for name, use in (
        ("", ""),
        ("corpsu.jsonl", "corpus.jsonl"),
        ("crwal/a.jsonl", ""),
        ("crwal/*.jsonl", "'crawl/*.jsonl'"),
        ("corpus.jsonl/*", "corpus.jsonl"),
        ("part-2.jsonl", ""),  # another part is no other spelling
    ):
        use = f": use --config.data.source={use}" if use else ""
        assert refusal(name) == f"data.source={name!r} {neither}{use}"
    with pytest.raises(ConfigError, match="^data.source='s4://b/x' is in an unknown store"):
        sources.check("s4://b/x")


def test_a_pattern_without_a_match_names_what_is_there(write, tmp_path):
    write("d/a.jsonl.gz", "d/b.jsonl.gz", "d/c.txt", "d/e/f.md", "d/noise", "d/_SUCCESS")
    assert refusal("d/*.jsonl") == (
        f"data.source='d/*.jsonl' matches no files; below {tmp_path}/d are 2 .jsonl.gz, 1 "
        "without an ending, 1 .txt; folders that do not match (1)"
    )
    assert names_of("d/*.jsonl.gz") == ["d/a.jsonl.gz", "d/b.jsonl.gz"]
    assert "are 2 .jsonl.gz, " in refusal("d/**/*.parquet")
    assert "1 .md" in refusal("d/**/*.parquet") and "1 .md" not in refusal("d/*.parquet")
    assert refusal("d/e/x*").endswith(f"{tmp_path}/d/e are 1 .md")
    write("h/_a.jsonl")
    assert refusal("h/*.jsonl").endswith(
        f"below {tmp_path}/h are passed over, for names that begin with _ or .: _a.jsonl"
    )


def test_a_folder_without_files(write, tmp_path):
    (tmp_path / "f").mkdir(exist_ok=True)
    write("other/a.txt")
    assert refusal("f") == (f"data.source='f' holds no files; below {tmp_path}/f are none")
    write("f/.a.txt", "f/_b.txt")
    os.symlink(os.path.abspath("other"), "f/link")
    assert (
        "are passed over, for names that begin with _ or .: .a.txt, _b.txt; links to folders, "
        "which are not followed: link" in refusal("f")
    )


def test_a_token_file_among_others(write):
    write("d/a.txt", "d/x.npy.gz")
    assert refusal("d") == refusal("d/*").replace("'d/*'", "'d'")
    rename = "let the names of those that are not meant begin with _ or ., or name a pattern"
    assert refusal("d") == (
        f"data.source='d' holds token files (x.npy.gz) beside others (a.txt): {rename}"
    )
    os.rename("d/x.npy.gz", "d/_x.npy.gz")
    assert names_of("d") == ["d/a.txt"]
    write("e/a.npy", "e/b.bin")
    assert refusal("e").startswith(
        "data.source='e' holds token files of several formats, tokens (.npy): "
    )
    assert names_of("e/*.bin") == ["e/b.bin"]


# --- Megatron's pairs and saved datasets ----------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["m/a.bin", "m/a.idx", "m/a", "m", "m/*", "m/*.bin", "m/*.idx", "m/[a]", "**/a.bin"]
)
def test_a_megatron_pair_has_many_names(write, name):
    write("m/a.bin", "m/a.idx")
    source = sources.find(name)
    assert [file.format for file in source.files] == ["megatron", "idx"]
    assert names_of(name) == ["m/a.bin", "m/a.idx"]
    assert [file.path for file in source.token_files] == [os.path.abspath("m/a.bin")]
    assert sources.holds_tokens(name) and sources.formats(name) == {"megatron", "idx"}


def test_pairs_that_are_not_complete(write):
    write("m/a.bin", "m/a.idx", "m/b.idx", "n/a.bin", "n/a.idx", "n/b.bin")
    assert refusal("m").endswith(
        f"has the index {os.path.abspath('m/b.idx')} without its tokens, "
        f"{os.path.abspath('m/b.bin')}"
    )
    with pytest.raises(ConfigError, match=r"without its tokens, \S+/m/b\.bin$"):
        sources.find("m/b.idx")
    assert "tokens (.bin): " in refusal("n") and "Megatron (.bin with .idx): " in refusal("n")
    assert names_of("n/b.bin") == ["n/b.bin"] and sources.formats("n/b.bin") == {"bin"}


def saved(folder, *files, state=None):
    """Writes what datasets' save_to_disk writes beside the data files."""
    os.makedirs(folder, exist_ok=True)
    for file in files:
        pathlib.Path(folder, file).write_text("x")
    content = {"_data_files": [{"filename": file} for file in files], "_split": "train"}
    pathlib.Path(folder, sources.STATE).write_text(json.dumps(content) if state is None else state)
    pathlib.Path(folder, sources.INFO).write_text("{}")


def test_saved_datasets_have_the_order_of_their_state(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("d/two", "z.arrow", "a.arrow")
    saved("d/one", "b.arrow")
    assert names_of("d/two") == ["d/two/z.arrow", "d/two/a.arrow"]
    assert names_of("d") == names_of("d/*") == ["d/one/b.arrow", *names_of("d/two")]
    assert names_of("d/**/*.arrow") == ["d/one/b.arrow", "d/two/a.arrow", "d/two/z.arrow"]
    write("d/one/stray.arrow", "d/one/notes.txt")
    assert names_of("d/one") == ["d/one/b.arrow"]
    assert sources.find("d/one").lines() == ["data.source=d/one: read 1 .arrow"]
    write("cache/imdb-train.arrow", "cache/dataset_info.json")
    assert names_of("cache") == ["cache/imdb-train.arrow"]


@pytest.mark.parametrize(
    "state, says",
    [
        ({"_data_files": [{"filename": "b.arrow"}]}, "names b.arrow, which is not there"),
        ({"_data_files": [{"filename": "../d/a.arrow"}]}, "names ../d/a.arrow, which is not there"),
        ({"_data_files": [{"filename": "a.arrow"}] * 2}, "names a file twice"),
        ({"_data_files": [{"filename": [1]}]}, "names [1], which is not there"),
        ({"_data_files": "a.arrow"}, "which is not as datasets' save_to_disk writes it"),
        ({"_data_files": None}, "which is not as datasets' save_to_disk writes it"),
        ([], "which is not as datasets' save_to_disk writes it"),
    ],
)
def test_a_state_that_does_not_match(tmp_path, monkeypatch, state, says):
    monkeypatch.chdir(tmp_path)
    saved("d", "a.arrow", state=json.dumps(state))
    assert says in refusal("d") and os.path.abspath("d/state.json") in refusal("d")
    pathlib.Path("d/state.json").write_text("[" * 100_000)
    assert "which is not as datasets' save_to_disk writes it" in refusal("d")


def test_a_dict_of_datasets_names_its_splits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        saved(f"d/{split}", "a.arrow")
    pathlib.Path("d", sources.SPLITS).write_text('{"splits": ["train", "test"]}')
    message = refusal("d")
    assert "use --config.data.source=" in message and os.path.abspath("d/train") in message
    assert names_of("d/train") == names_of("d/tr*") == ["d/train/a.arrow"]


def test_pairs_and_saved_datasets_in_stores():
    """Among the files of a store the same ones are chosen."""
    root = pathlib.Path("s3:/b/d")
    listed = [
        sources.File(f"{root}/{name}", sources.format_of(name), 1, "v")
        for name in ("m/a.bin", "m/a.idx", "d/state.json", "d/dataset_info.json", "d/1.arrow")
    ]

    def chosen(*pattern):
        files = sources.find_among("s3://b/d", root, pattern, listed).files
        return [(file.path.removeprefix(f"{root}/"), file.format) for file in files]

    pair = [("m/a.bin", "megatron"), ("m/a.idx", "idx")]
    assert chosen("m", "*.bin") == chosen("m", "a") == chosen("m") == pair
    assert chosen("d") == chosen("**", "*.arrow") == [("d/1.arrow", "arrow")]
    one = sources.find_among("s3://b/d/d/1.arrow", root / "d/1.arrow", (), listed[-1:])
    assert [file.path for file in one.files] == [f"{root}/d/1.arrow"]


@pytest.mark.parametrize(
    "name", ["a.array_record-00003-of-00008", "a.arrayrecord", "A.ARRAY_RECORD"]
)
def test_shards_end_in_their_numbers(name):
    assert sources.format_of(name) == "array_record"
    assert sources.format_of("a.jsonl-00000-of-00002") == "jsonl"


@pytest.mark.parametrize("kind", ["pipe", "socket", "/dev/zero", "/dev/null"])
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, kind):
    """Not waited for, not read without end, and not called empty."""
    monkeypatch.chdir(tmp_path)
    if kind == "pipe":
        os.mkfifo("pipe")
    elif kind == "socket":
        bound = socket.socket(socket.AF_UNIX)
        bound.bind("socket")
        bound.close()
    assert refusal(kind).startswith(
        f"data.source={kind!r} is not a regular file or a folder: use --config.data.source="
    )
    if not kind.startswith("/"):
        found = sources.find(f"{kind[0]}*")
        assert found.unreadable == (os.path.abspath(kind),) and not found.files


def test_a_folder_that_may_not_be_read_is_named(write, monkeypatch):
    write("d/a.txt", "d/e/b.txt")
    scan = os.scandir

    def refuse(path):
        if os.path.basename(path) == "e":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert sources.find("d").unreadable == sources.find("d/**/*.txt").unreadable
    assert sources.find("d").unreadable == (os.path.abspath("d/e"),)
    assert sources.find("d/*.txt").unreadable == ()


# --- the standard library -------------------------------------------------------------------------


def test_stdlib_is_python_without_tests():
    source = sources.find("stdlib")
    names = [file.path.removeprefix(str(source.root)) for file in source.files]
    assert "/json/decoder.py" in names and "/os.py" in names and "/json/__init__.py" in names
    assert not [
        name
        for name in names
        if "/test/" in name
        or "/tests/" in name
        or "site-packages" in name
        or not name.endswith(".py")
    ]
    assert names == sorted(names, key=lambda name: name.split("/"))


def test_stdlib_without_sources(tmp_path, monkeypatch):
    nowhere = pathlib.Path(tmp_path / "nowhere.zip")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(nowhere))
    assert refusal("stdlib") == (
        f"data.source='stdlib' is empty, for this Python has no sources in {nowhere}: name a "
        "folder or a file"
    )


# --- rules between settings -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ids.bin", "IDS.BIN", "ids.bin.zst", "ids/*.bin.gz"])
def test_rules_know_token_files_by_their_names(name):
    """Whatever their case and compression."""
    settings = {"data.source": name, "data.token_dtype": "uint32", "model.vocab_size": 200}
    config = cfg.replace(cfg.Config(), settings)
    checks.check(config)
    assert not [note for note in unused_settings(config) if "token_dtype" in note]
    config = cfg.replace(config, {"data.text_fields": ("body",)})
    assert f"data.text_fields=body has no use with data.source={name!r}" in unused_settings(config)
