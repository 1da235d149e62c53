"""Repositories of the hub, read by huggingface_hub from a small server (support/hub_server.py).
tests/test_init_from.py has runs that start from one."""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import ROOT
from support.hub_server import TOKEN, HubServer

from jaxtrain.data.errors import StoreError
from jaxtrain.data.stores import hub as hub_room
from jaxtrain.run.exit_status import ExitStatus

# For each line of standard input, [setting, name, files, workdir]: a line with the folder, its
# files, and the name at its commit; or with status and text of the error.
PROGRAM = """
import json, os, sys
from jaxtrain.data.stores import hub
from jaxtrain.run.exit_status import RunError
if "HURRY" in os.environ:
    hub.WAITS_S, hub.ANSWER_S = (0.5,), 1.0
for setting, name, files, workdir in map(json.loads, sys.stdin):
    try:
        named = hub.pinned(hub.repository(setting, name), workdir)
        folder = hub.folder(named, tuple(files))
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        answer = [named.text, names, named.note]
    except RunError as error:
        answer = [int(error.status), str(error)]
    print(json.dumps(answer), flush=True)
"""
FILES = ("config.json", "model.safetensors")


class Programs:
    """Programs that read from a hub, with one cache."""

    def __init__(self, hub: HubServer, home: pathlib.Path):
        self.hub, self.environment = hub, hub.environment(home) | {"PYTHONPATH": str(ROOT)}
        self.folder = home.parent

    def start(self, code: str = PROGRAM, **environment: str) -> subprocess.Popen:
        clean = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=clean | self.environment | environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self, *names: str, files=FILES, workdir: str = "run", **environment: str) -> list:
        """What one program says about some names, and what it has written on standard error."""
        words = [json.dumps(["train.init_from", name, files, workdir]) for name in names]
        program = self.start(**environment)
        out, self.err = program.communicate("\n".join(words), timeout=120)
        assert program.returncode == 0, self.err
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def programs(tmp_path) -> Iterator[Programs]:
    model = tmp_path / "model"
    (model / "onnx").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("model.safetensors", "pytorch_model.bin", "onnx/config.json"):
        (model / name).write_bytes(os.urandom(30_000))
    with HubServer() as hub:
        hub.first = hub.publish("models/org/name", model)
        yield Programs(hub, tmp_path / "home")


def test_what_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    for text in (
        *("model", "/models/a", "./a/b", "../a", "a/b/c", "", "here/model", "~/a", "a/b@"),
        *("models/a", "datasets/a", "texts/tokenizer.json", "s3://bucket/a", "hf://org/name"),
    ):
        assert hub_room.repository("train.init_from", text) is None, text
    named = hub_room.repository("train.init_from", "here/other@refs/pr/1")
    assert named and (named.uri.id, named.uri.revision) == ("here/other", "refs/pr/1")
    assert hub_room.repository("data.source", "org/name") is None
    named = hub_room.repository("data.sources.web", "hf://datasets/org/name@v1/a/*.parquet")
    assert named and named.uri.path_in_repo == "a/*.parquet"
    with pytest.raises(StoreError, match="data.source='hf://datasets/a' is no address"):
        hub_room.repository("data.source", "hf://datasets/a")


def test_files_of_a_commit(programs, tmp_path):
    """Only those that are named; later without any request, and without the hub at all."""
    hub = programs.hub
    at = f"org/name@{hub.first}"
    [answer] = programs.read("org/name")
    assert answer == [at, [*FILES], f"train.init_from=org/name is {at}"]
    assert hub.files() == {*FILES} and programs.err == ""
    # the branch moves; the run that began with the first commit stays there
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    second = hub.publish("models/org/name", tmp_path / "model")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"train": {"init_from": at}}))
    hub.requests.clear()
    stays = f"train.init_from=org/name is {at}, as in run/config.json"
    cached = [[at, [*FILES], ""], [at, [*FILES], stays]]
    assert programs.read(at, "org/name") == cached and not hub.requests
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    *answers, (status, text) = programs.read(at, "org/name", f"org/name@{second}", **offline)
    assert answers == cached and status == ExitStatus.BAD_CONFIG and programs.err == ""
    rule = f"is not, or not completely, in {tmp_path / 'home' / 'hub'}, and HF_HUB_OFFLINE is set"
    assert text == f"train.init_from='org/name@{second}' {rule}"
    assert programs.read("org/name", workdir="")[0][0] == f"org/name@{second}"


@pytest.mark.full
def test_refusals(programs, tmp_path):
    """A line for each that says what to do; nothing is waited for."""
    hub = programs.hub
    hub.publish("models/org/gated", tmp_path / "model")
    hub.publish("models/org/private", tmp_path / "model")
    hub.repos["models/org/gated"].is_gated = hub.repos["models/org/private"].is_private = True
    names = ("org/nmae", "org/name@v2", f"org/name@{'0' * 40}", "org/gated", "org/private")
    page = f"{hub.endpoint}/org/gated"
    rules = [
        f"is nothing here, and no repository of {hub.endpoint}, or a private one, for which "
        "HF_TOKEN has to be set",
        f"names a revision that {hub.endpoint} lacks: name a branch, a tag or a commit",
        f"names a revision that {hub.endpoint} lacks: name a branch, a tag or a commit",
        "is gated: accept its conditions at",
        "is nothing here, and no repository of",
    ]
    answers = programs.read(*names)
    for name, rule, (status, text) in zip(names, rules, answers, strict=True):
        assert status == ExitStatus.BAD_CONFIG and f"train.init_from='{name}" in text
        assert rule in text and "\n" not in text
    assert page in answers[3][1] and programs.err == ""
    answers = programs.read("org/gated", "org/private", HF_TOKEN=TOKEN)
    assert [files for _, files, _ in answers] == [[*FILES], [*FILES]]
    (tmp_path / "home" / "token").write_text(TOKEN)  # as `hf auth login` stores it
    (tmp_path / "home" / "hub").rename(tmp_path / "before")
    assert programs.read("org/private")[0][1] == [*FILES]
    [(status, text)] = programs.read("org/name@v2", HF_TOKEN="hf_wrong")
    assert (status, "401 Unauthorized" in text) == (ExitStatus.BAD_CONFIG, True)
    hub.publish("models/org/name", tmp_path / "model", "v1", "v2")
    hub.failures, hub.failure = 9, 403
    assert programs.read("org/name@v1")[0][0] == ExitStatus.BAD_CONFIG
    [(status, text)] = programs.read("org/name@v2", HF_ENDPOINT="http://127.0.0.1:9")
    assert (status, "cannot be read from http://127.0.0.1:9" in text) == (ExitStatus.STORAGE, True)
    assert programs.err == ""


# --- a hub in trouble -----------------------------------------------------------------------------

TROUBLE = {
    "each fourth request fails": ({"fail_every": 4, "failure": 503}, ""),
    "the first three requests fail": ({"failures": 3, "failure": 502}, "trying again in 1 s"),
    "it asks to wait": (
        {"failures": 1, "failure": 429, "headers": {"Retry-After": "2"}},
        "trying again in 2 s",
    ),
    "each body is cut twice": ({"cut": 7_000, "cuts": 2}, "Trying to resume download"),
    "it is slow": ({"delay": 0.4}, ""),
}


@pytest.mark.full
@pytest.mark.parametrize("trouble", TROUBLE)
def test_what_passes_is_waited_for(programs, trouble, tmp_path):
    switches, said = TROUBLE[trouble]
    vars(programs.hub).update(switches)
    [answer] = programs.read("org/name")
    assert answer[1] == [*FILES] and said in programs.err
    [blob] = tmp_path.glob("home/hub/models--org--name/snapshots/*/model.safetensors")
    assert blob.read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    parts = [path for method, path, _ in programs.hub.requests if "/blobs/" in path]
    assert len(parts) == (3 if "cut" in trouble else 1)


LASTING = {
    "status 500": ({"failures": 99}, "cannot be read from HUB (Server error '500 "),
    "no answer": ({"hangs": True}, "cannot be read from HUB (timed out)"),
    "a long wait": (
        {"failures": 99, "failure": 429, "headers": {"Retry-After": "3600"}},
        "cannot be read from HUB (it asks to wait for 3600 s)",
    ),
    "cut for ever": ({"cut": 7_000, "cuts": 99}, "cannot be read from HUB (peer closed connection"),
}


@pytest.mark.full
@pytest.mark.parametrize("trouble", LASTING)
def test_waits_are_bounded(programs, trouble, tmp_path):
    """Nothing that is half there is used, with the hub or without it."""
    switches, rule = LASTING[trouble]
    vars(programs.hub).update(switches)
    [(status, text)] = programs.read("org/name", HURRY="1")
    assert status == ExitStatus.STORAGE and rule.replace("HUB", programs.hub.endpoint) in text
    assert not [*tmp_path.rglob("snapshots/*/model.safetensors")]
    programs.hub.hangs = False
    [(status, text)] = programs.read("org/name", HF_HUB_OFFLINE="1")
    assert status == ExitStatus.BAD_CONFIG and "not completely" in text
    vars(programs.hub).update({"failures": 0, "cut": 0})
    assert programs.read("org/name")[0][1] == [*FILES]


@pytest.mark.full
def test_two_programs_download_a_file_once(programs, tmp_path):
    programs.hub.delay = 0.2
    both = [programs.start(), programs.start()]
    line = json.dumps(["train.init_from", "org/name", FILES, "run"])
    for program in both:  # so that they begin together
        assert program.stdin
        program.stdin.write(line + "\n")
        program.stdin.flush()
    answers = [json.loads(program.communicate(timeout=60)[0]) for program in both]
    assert answers[0] == answers[1] and answers[0][1] == [*FILES]
    assert sum("/blobs/" in path for _, path, _ in programs.hub.requests) == 1


@pytest.mark.full
def test_a_killed_download_is_not_used(programs, tmp_path):
    programs.hub.cut, programs.hub.cuts = 7_000, 999
    program = programs.start()
    assert program.stdin
    program.stdin.write(json.dumps(["train.init_from", "org/name", FILES, "run"]) + "\n")
    program.stdin.flush()
    blobs = tmp_path / "home" / "hub" / "models--org--name" / "blobs"
    end = time.monotonic() + 60
    while not [*blobs.glob("*.incomplete")] and time.monotonic() < end:
        time.sleep(0.02)
    program.kill()
    program.communicate()
    assert [*blobs.glob("*.incomplete")]
    [(status, text)] = programs.read("org/name", HF_HUB_OFFLINE="1")
    assert status == ExitStatus.BAD_CONFIG and "not completely" in text
    programs.hub.cut = 0
    assert programs.read("org/name")[0][1] == [*FILES]


# --- sources --------------------------------------------------------------------------------------

# For each line of standard input, [source, cache]: a line with the source at its commit, the
# corpus's checksum and its documents; or with status and text of the error.
PREPARE = """
import json, sys
from jaxtrain.config import Config, DataConfig
from jaxtrain.data.stores import hub
from jaxtrain.data.preparing.prepare import prepare
from jaxtrain.run.exit_status import RunError
for source, cache in map(json.loads, sys.stdin):
    data = DataConfig(source=source, tokenizer="bytes", cache=cache)
    try:
        data = hub.with_commits(Config(data=data), "").data
        corpus = prepare(data, 257, progress=False)
        answer = [data.source, corpus.checksum, len(corpus.documents) - 1]
    except (RunError, ValueError) as error:
        answer = [int(getattr(error, "status", 2)), str(error)]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def dataset(programs, tmp_path) -> pathlib.Path:
    """A folder with Parquet files, of which a tenth is text, and others; published."""
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name in ("a", "b"):
        texts = [f"{name} {number} " + "text " * 20 for number in range(2000)]
        table = {"text": texts, "image": [os.urandom(1000) for _ in texts]}
        pq.write_table(pa.table(table), folder / "data" / f"{name}.parquet", row_group_size=500)
    (folder / "data" / "c.jsonl").write_text('{"text": "no"}\n')
    (folder / "README.md").write_text("a set")
    programs.hub.publish("datasets/org/set", folder)
    return folder


def prepared(programs: Programs, *lines: tuple[object, object], **environment: str) -> list:
    """What one program says about some pairs of source and cache."""
    program = programs.start(PREPARE, **environment)
    words = [json.dumps([str(source), str(cache)]) for source, cache in lines]
    out, programs.err = program.communicate("\n".join(words), timeout=120)
    assert program.returncode == 0, programs.err
    return [json.loads(line) for line in out.splitlines()]


def test_a_source_of_the_hub(programs, dataset, tmp_path):
    """The corpus of the same files on the disk; columns that no field is in are not read. Files
    that another commit has, too, are not read again; without the hub the listing is the cache's."""
    hub, source = programs.hub, "hf://datasets/org/set/data/*.parquet"
    hub.requests.clear()
    hub.sent = 0
    local, of_hub = prepared(
        programs, (dataset / "data" / "*.parquet", tmp_path / "1"), (source, tmp_path / "2")
    )
    commit = hub.repos["datasets/org/set"].revisions["main"]
    assert of_hub == [source.replace("/set/", f"/set@{commit}/"), *local[1:]]
    assert of_hub[2] == 4000 and hub.files() == {"data/a.parquet", "data/b.parquet"}
    assert hub.sent < 0.3 * sum(path.stat().st_size for path in dataset.rglob("*.parquet"))
    (dataset / "README.md").write_text("the same set")
    hub.publish("datasets/org/set", dataset)
    hub.requests.clear()
    again, before, missing = prepared(
        programs,
        *((source, tmp_path / "2"), (of_hub[0], tmp_path / "2")),
        ("hf://datasets/org/set/*.txt", tmp_path / "2"),
    )
    assert again[1:] == of_hub[1:] and before == of_hub and not hub.files()
    assert missing[0] == ExitStatus.BAD_CONFIG and "matches no files" in missing[1]
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert prepared(programs, (source, tmp_path / "2"), **offline) == [again]


SOURCE_TROUBLE = {
    "each third request fails": {"fail_every": 3, "failure": 503},
    "each body is cut": {"cut": 60_000, "cuts": 1},
    "it asks to wait": {"failures": 2, "failure": 429, "headers": {"Retry-After": "1"}},
}


@pytest.mark.full
@pytest.mark.parametrize("trouble", SOURCE_TROUBLE)
def test_a_source_waits_for_the_hub(programs, dataset, trouble, tmp_path):
    pattern = "data/*.parquet"
    [local] = prepared(programs, (dataset / pattern, tmp_path / "1"))
    vars(programs.hub).update(SOURCE_TROUBLE[trouble])
    [of_hub] = prepared(programs, (f"hf://datasets/org/set/{pattern}", tmp_path / "2"))
    assert of_hub[1:] == local[1:]


@pytest.mark.full
def test_sources_that_are_refused(programs, dataset, tmp_path):
    hub = programs.hub
    hub.publish("datasets/org/gated", dataset)
    hub.repos["datasets/org/gated"].is_gated = True
    pattern, cache = "data/*.parquet", tmp_path / "cache"
    rules = {
        f"hf://datasets/org/gated/{pattern}": "is gated: accept its conditions at",
        f"hf://datasets/org/sets/{pattern}": "is nothing here, and no repository of",
        f"hf://datasets/org/set@v3/{pattern}": "names a revision that",
        "hf://datasets/org/set/date": "holds no files",
        "hf://datasets/set": "is no address of the hub",
    }
    answers = prepared(programs, *((source, cache) for source in rules))
    for source, (status, text) in zip(rules, answers, strict=True):
        assert status == ExitStatus.BAD_CONFIG and rules[source] in text, text
        assert "data.source='hf://datasets/" in text and "\n" not in text
    assert f"at {hub.endpoint}/datasets/org/gated, and set HF_TOKEN" in answers[0][1]
    assert not [*cache.glob("*-*")]
    [(_, _, documents)] = prepared(programs, ([*rules][0], cache), HF_TOKEN=TOKEN)
    assert documents == 4000
    # a file of its own, and one of a model's repository
    hub.publish("models/org/texts", dataset)
    [one, other] = prepared(
        programs,
        *(("hf://datasets/org/set/data/a.parquet", cache), ("hf://org/texts/data", cache)),
    )
    assert one[2] == 2000 and other[2] == 4001
    commit = hub.repos["models/org/texts"].revisions["main"]
    assert other[0] == f"hf://models/org/texts@{commit}/data"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
    [(status, text)] = prepared(programs, ([*rules][0], cache), **offline)
    assert status == ExitStatus.BAD_CONFIG and "HF_HUB_OFFLINE is set" in text
