"""Repositories of the Hugging Face hub: their names in settings, the commit that a run is pinned
to, and copies of their files in the hub's own cache.

    train.init_from, data.tokenizer    org/name[@revision]: a model, unless a file or folder has
                                       that name
    data.source and others of sources  hf://datasets/org/name[@revision]/path-or-pattern

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, downloads a file once for
all processes of a host, resumes a download that breaks off, and gives a file its name when it is
complete. A run's config.json has commits, which never change, in place of branches and tags.
"""

import contextlib
import dataclasses
import functools
import glob
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jaxtrain import config as cfg
from jaxtrain.config.errors import cut, one_line, shown
from jaxtrain.run import files, streams
from jaxtrain.run.exit_status import ExitStatus, RunError

if TYPE_CHECKING:
    from huggingface_hub.utils import HfUri

T = TypeVar("T")
SCHEME, MODELS = "hf://", "hf://models/"
COMMIT = re.compile("[0-9a-f]{40}")
# what may be a model's name; a JSON file's path is none
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)(@\S+)?")
OF_MODELS = ("train.init_from", "tokenizer", "from_hf")  # how what names a model ends
OF_DATA = ("data.tokenizer", "data.source", "data.sources", "data.validation")
# Seconds until an answer begins, for which the library would wait for ever; and seconds of
# failures, or of a wait that the hub asks for, after which a command ends.
ANSWER_S, PATIENCE_S = 30.0, 60.0


class HubError(RunError):
    """A repository of the hub, or a file of one, that cannot be read; the text is one line, which
    names the setting."""

    status = ExitStatus.BAD_CONFIG


class HubUnavailableError(HubError):
    """A hub that does not answer, or a disk that is full: what may pass."""

    status = ExitStatus.STORAGE


class Repository(NamedTuple):
    """A repository that a setting names.

    setting: its path; text: its value; uri: kind, name, revision and a path in the repository
    note: a line about the commit, for people; "" if the setting has the commit
    """

    setting: str
    text: str
    uri: "HfUri"
    note: str = ""

    @property
    def is_pinned(self) -> bool:
        return bool(COMMIT.fullmatch(self.uri.revision or ""))


def repository(setting: str, text: str) -> Repository | None:
    """The repository that a setting names; None for a local file or folder, which has precedence,
    and for a text that can be no name. Raises HubError for a wrong address hf://…"""
    is_model = setting.endswith(OF_MODELS)
    if is_model and (not NAME.fullmatch(text) or os.path.lexists(text)):
        return None
    if not is_model and not text.startswith(SCHEME):
        return None
    # imported where a name needs it: this takes a third of a second
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri

    try:
        return Repository(setting, text, parse_hf_uri(SCHEME * is_model + text))
    except HfUriError as error:
        if is_model:
            return None
        raise HubError(f"{setting}={shown(text)} is no address of the hub: {error}") from None


# --- commits --------------------------------------------------------------------------------------


def pinned(named: Repository, workdir: str) -> Repository:
    """A repository at a commit: the one with which the run in this folder began, else that of its
    revision at present, or when the hub could be reached last. Raises HubError."""
    if named.is_pinned:
        return named
    before, commit, since = _of_run(workdir).get(named.setting), "", ""
    # a branch may have moved since, and a run goes on with the files that it began with
    if before and (before.uri.type, before.uri.id) == (named.uri.type, named.uri.id):
        commit, since = str(before.uri.revision), f", as in {workdir}/{files.CONFIG_FILE}"
    uri = dataclasses.replace(named.uri, revision=commit or _commit(named))
    text = uri.to_uri().removeprefix(MODELS)
    return Repository(named.setting, text, uri, f"{named.setting}={named.text} is {text}{since}")


def with_commits(
    config: cfg.Config, workdir: str, settings: Sequence[str]
) -> tuple[cfg.Config, tuple[str, ...]]:
    """(a config with a commit in each repository that some of its settings name, notes about
    them). Raises HubError."""
    notes: list[str] = []

    def pin(setting: str, text: str) -> str:
        if named := repository(setting, text):
            named = pinned(named, workdir)
            notes.extend(filter(None, [named.note]))
        return named.text if named else text

    return _changed(config, settings, pin), tuple(notes)


def _changed(
    config: cfg.Config, settings: Sequence[str], change: Callable[[str, str], str]
) -> cfg.Config:
    """A config with change(setting, text) in place of each text of some settings; an item NAME=TEXT
    of `data.sources` is the setting `data.sources.NAME`."""
    changes: dict[str, Any] = {}
    for setting in settings:
        value: Any = cfg.get(config, setting)
        if isinstance(value, str):
            changes[setting] = change(setting, value)
        elif isinstance(value, tuple):
            items = (item.partition("=") for item in value)
            changes[setting] = tuple(
                name + sign + change(f"{setting}.{name}", text) for name, sign, text in items
            )
    return cfg.replace(config, changes)


def _of_run(workdir: str) -> dict[str, Repository]:
    """Setting → the repository that it names in a run's config.json, if there is one."""
    found: dict[str, Repository] = {}

    def find(setting: str, text: str) -> str:
        if named := repository(setting, text):
            found[setting] = named
        return text

    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, HubError):
        config = cfg.from_dict(files.read_json(os.path.join(workdir, files.CONFIG_FILE)))
        _changed(config, ("train.init_from", *OF_DATA), find)
    return found


@functools.cache
def _commit(named: Repository) -> str:
    """The commit of a repository's revision, which the hub's cache remembers."""
    resolve = _library().HfApi().resolve_revision
    kind, name, revision = named.uri.type, named.uri.id, named.uri.revision
    return _patiently(named, lambda: resolve(name, repo_type=kind, revision=revision)).resolved


# --- files ----------------------------------------------------------------------------------------


@functools.cache
def folder(named: Repository, names: tuple[str, ...]) -> pathlib.Path:
    """The folder of the hub's cache with those of some files that a repository has; what lacks
    there is downloaded. It may have others, too. Raises HubError.

    named: at a commit
    """
    download = functools.partial(
        _library().snapshot_download,
        named.uri.id,
        repo_type=named.uri.type,
        revision=named.uri.revision,
        allow_patterns=[*map(glob.escape, names)],
    )
    return pathlib.Path(_patiently(named, download))


@functools.cache
def _library() -> ModuleType:
    """huggingface_hub, which asks for listings without any limit of time, and waits as long as a
    hub says: both have a bound here."""
    import huggingface_hub
    from huggingface_hub.utils._http import default_client_factory

    def limit(request: Any) -> None:
        limits = request.extensions["timeout"]
        request.extensions["timeout"] = {name: limits[name] or ANSWER_S for name in limits}

    def refuse_long_waits(response: Any) -> None:
        if (seconds := _wait_of(response)) > PATIENCE_S:
            raise HubUnavailableError(f"the hub asks to wait for {seconds:.0f} s: {response.url}")

    def client() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(limit)
        client.event_hooks["response"].append(refuse_long_waits)
        return client

    huggingface_hub.set_client_factory(client)
    if not sys.stderr.isatty():  # not all of its bars look for that themselves
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def _wait_of(response: Any) -> float:
    """The seconds that an answer asks to wait for; 0 without any."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def _patiently(named: Repository, do: Callable[[], T]) -> T:
    """The result of calls of the library, which are repeated while the hub has failures that may
    pass. Raises HubError."""
    end, wait = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            return do()
        except Exception as error:
            refusal, asked = _refusal(named, error)
            wait = max(wait, asked)
            if not asked or time.monotonic() + wait > end:
                raise refusal from error
        streams.remark(f"{refusal}: trying again in {wait:.0f} s")
        time.sleep(wait)
        wait *= 2


def _refusal(named: Repository, error: Exception) -> tuple[HubError, float]:
    """(the error for one of the library, the seconds to wait at least before another try; 0 if that
    would not help)."""
    import httpx2
    from huggingface_hub import constants, errors

    cause: BaseException = error
    while cause.__cause__ and not isinstance(cause, httpx2.HTTPError | HubError):
        cause = cause.__cause__
    value, hub = f"{named.setting}={shown(named.text)}", constants.ENDPOINT
    page = named.uri.to_url(hub)
    words = cut(one_line(str(cause)))
    rules = {
        errors.GatedRepoError: f"is gated: accept its conditions at {page}, and set HF_TOKEN",
        errors.DisabledRepoError: f"is disabled by {hub}",
        errors.RevisionNotFoundError: f"names a revision that {hub} lacks: name a branch, a tag or "
        "a commit",
        errors.RepositoryNotFoundError: f"is nothing here, and no repository of {hub}, or a "
        "private one, for which HF_TOKEN has to be set",
        errors.OfflineModeIsEnabled: f"is not, or not completely, in {constants.HF_HUB_CACHE}, and "
        "HF_HUB_OFFLINE is set",
    }
    for kind, rule in rules.items():
        if isinstance(cause, kind):
            return HubError(f"{value} {rule}"), 0.0
    if isinstance(cause, HubError):
        return type(cause)(f"{value}: {cause}"), 0.0
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        refused = f"{value} is refused by {hub} with status {status} ({words})"
        if status in (408, 429) or status >= 500:
            return HubUnavailableError(refused), max(1.0, _wait_of(cause.response))
        return HubError(refused + ": set HF_TOKEN to one that may read it"), 0.0
    if isinstance(cause, httpx2.HTTPError):
        # a timeout or a broken connection, unless there was no connection at all
        is_new = isinstance(cause, httpx2.ConnectError)
        return HubUnavailableError(f"{value}: {hub} cannot be reached ({words})"), 1.0 - is_new
    if isinstance(cause, OSError) and cause.errno:
        text = f"{value} cannot be stored in {constants.HF_HUB_CACHE} ({cause.strerror})"
        passes = cause.errno in files.TRANSIENT
        return (HubUnavailableError if passes else HubError)(text), 0.0
    # a file that is shorter than it should be is a plain OSError
    garbled = f"{value}: {hub} does not answer as a hub does ({words})"
    return HubError(garbled), float(type(cause) is OSError)
