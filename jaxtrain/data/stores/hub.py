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
import logging
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from jaxtrain import config as cfg
from jaxtrain.config import addresses
from jaxtrain.config.errors import cut, one_line, shown
from jaxtrain.data.errors import StoreAwayError, StoreError
from jaxtrain.run import files, streams

T = TypeVar("T")
SCHEME, MODELS, COMMIT = addresses.HUB, f"{addresses.HUB}models/", "[0-9a-f]{40}"
# what may be a model's name; a JSON file's path is none
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)(@\S+)?")
OF_MODELS = ("train.init_from", "tokenizer", "from_hf")  # endings of what names a model
OF_DATA, OF_MIXTURES = ("data.tokenizer", "data.source"), ("data.sources", "data.validation")
# seconds between tries; until an answer begins, for which the library would wait for ever; and the
# most that the hub may ask to wait for
WAITS_S, ANSWER_S, LONGEST_S = (1.0, 2.0, 4.0, 8.0, 16.0), 30.0, 60.0


class Repository(NamedTuple):
    """A repository that a setting names.

    setting: its path, data.sources.NAME for an item of a mixture; text: its value
    uri: huggingface_hub's record of kind, name, revision, and a path in the repository
    note: a line about its commit, for people; "" where the setting has the commit
    """

    setting: str
    text: str
    uri: Any
    note: str = ""


def repository(setting: str, text: str) -> Repository | None:
    """The repository that a setting names; None for a local file or folder, which has precedence,
    and for a text that can be no name. Raises StoreError for a wrong address hf://…"""
    is_model = setting.endswith(OF_MODELS)
    is_named = NAME.fullmatch(text) and not os.path.lexists(text) if is_model else None
    if not is_named and (is_model or not text.startswith(SCHEME)):
        return None
    # imported where a name needs it: this takes a third of a second
    from huggingface_hub.utils import parse_hf_uri

    try:
        return Repository(setting, text, parse_hf_uri(SCHEME * is_model + text))
    except ValueError as error:
        if is_model:
            return None
        raise StoreError(f"{setting}={shown(text)} is no address of the hub: {error}") from None


# --- commits --------------------------------------------------------------------------------------


def pinned(named: Repository, workdir: str) -> Repository:
    """A repository at a commit: the one with which the run in this folder began, else that of its
    revision at present, or when the hub could be reached last. Raises StoreError."""
    uri, config = named.uri, ""
    if re.fullmatch(COMMIT, uri.revision or ""):
        return named
    with contextlib.suppress(OSError, ValueError):
        config = files.read_regular(os.path.join(workdir, files.CONFIG_FILE)).decode()
    # A branch may have moved since, and a run goes on with the files that it began with: those that
    # the same setting, or item of a mixture, has in config.json.
    item = named.setting.partition(".")[2].partition(".")[2]
    prefix = "" if named.text.startswith(SCHEME) else MODELS
    place = dataclasses.replace(uri, revision=None, path_in_repo="").to_uri().removeprefix(prefix)
    pattern = re.escape(f'"{item}{"=" * bool(item)}{place}@') + f"({COMMIT})"
    if match := re.search(pattern, config):
        commit, since = match[1], f", as in {workdir}/{files.CONFIG_FILE}"
    else:
        ask = functools.partial(_library().HfApi().resolve_revision, uri.id, repo_type=uri.type)
        commit, since = _patiently(named, lambda: ask(revision=uri.revision)).resolved, ""
    uri = dataclasses.replace(uri, revision=commit)
    text = uri.to_uri().removeprefix(prefix)
    return Repository(named.setting, text, uri, f"{named.setting}={named.text} is {text}{since}")


def with_commits(config: cfg.Config, workdir: str) -> cfg.Config:
    """A config with a commit in each repository that its data name. Raises StoreError."""

    def pin(setting: str, text: str) -> str:
        named = repository(setting, text)
        return pinned(named, workdir).text if named else text

    changes: dict[str, Any] = {path: pin(path, cfg.get(config, path)) for path in OF_DATA}
    for path in OF_MIXTURES:
        items = (item.partition("=") for item in cfg.get(config, path))
        changes[path] = tuple(f"{name}{sign}{pin(f'{path}.{name}', x)}" for name, sign, x in items)
    return cfg.replace(config, changes)


# --- files ----------------------------------------------------------------------------------------


@functools.cache
def folder(named: Repository, names: tuple[str, ...]) -> pathlib.Path:
    """The folder of the hub's cache with those of some files that a repository has; what lacks
    there is downloaded. It may have others, too. Raises StoreError.

    named: at a commit
    """
    uri, patterns = named.uri, [*map(glob.escape, names)]
    get = functools.partial(
        _library().snapshot_download,
        uri.id,
        repo_type=uri.type,
        revision=uri.revision,
        allow_patterns=patterns,
    )
    return pathlib.Path(_patiently(named, get))


@functools.cache
def tree(named: Repository) -> dict[str, dict[str, Any]]:
    """Address → size and digest of each file of a repository, as an fsspec file system describes
    them; the hub's cache has this of commits that were listed before. Raises StoreError.

    named: at a commit
    """
    uri, get = named.uri, _library().get_cached_repo_tree
    folder(named, ())  # lists the repository, and downloads nothing
    address = dataclasses.replace(uri, path_in_repo="").to_uri()
    return {
        f"{address}/{entry.path}": {"size": entry.size, "blob_id": entry.blob_id}
        for entry in _patiently(
            named, lambda: get(uri.id, repo_type=uri.type, revision=uri.revision)
        )
    }


def filesystem() -> Any:
    """fsspec's file system of the hub's addresses."""

    class HubFiles(_library().HfFileSystem):  # type: ignore[misc]
        def cat_file(self, path: str, start: int, end: int) -> bytes:
            # one request: it would ask for a file's size first, and read far ahead
            return super().cat_file(path, start, end, block_size=1, size=end)

    return HubFiles()


@functools.cache
def _library() -> Any:
    """huggingface_hub, with bounds: it asks for listings without any limit of time, and waits as
    long as a hub says."""
    import huggingface_hub
    from huggingface_hub.utils._http import default_client_factory

    def limit(request: Any) -> None:
        limits = request.extensions["timeout"]
        request.extensions["timeout"] = {name: limits[name] or ANSWER_S for name in limits}

    def refuse_long_waits(response: Any) -> None:
        if (seconds := _wait_of(response)) > LONGEST_S:
            raise StoreAwayError(f"it asks to wait for {seconds:.0f} s")

    def client() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(limit)
        client.event_hooks["response"].append(refuse_long_waits)
        return client

    huggingface_hub.set_client_factory(client)
    # it warns where none of the files that may be there is
    logging.getLogger("huggingface_hub._snapshot_download").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # not all of its bars look for that themselves
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def _wait_of(response: Any) -> float:
    """The seconds that an answer, if there is one, asks to wait for."""
    text = response.headers.get("Retry-After", "") if response else ""
    return float(text) if text.isdigit() else 0.0


def _patiently(named: Repository, do: Callable[[], T]) -> T:
    """The result of calls of the library, which are repeated while the hub has failures that may
    pass. Raises StoreError."""
    import httpx2

    for wait in (*WAITS_S, 0.0):
        try:
            return do()
        except Exception as error:
            cause, wrong = _cause(error), refusal(named, error)
            # where there is no connection at all, no other try will find one
            is_final = not wait or isinstance(cause, httpx2.ConnectError | StoreError)
            if is_final or not isinstance(wrong, StoreAwayError):
                raise wrong from error
            wait = max(wait, _wait_of(getattr(cause, "response", None)))
        streams.remark(f"{wrong}: trying again in {wait:.0f} s")
        time.sleep(wait)
    raise AssertionError


def _cause(error: BaseException) -> BaseException:
    """The error of HTTP or of this module behind one of the library, or that behind all others."""
    import httpx2

    while error.__cause__ and not isinstance(error, httpx2.HTTPError | StoreError):
        error = error.__cause__
    return error


def refusal(named: Repository, error: Exception) -> StoreError:
    """The error for one of the library."""
    import httpx2
    from huggingface_hub import constants, errors

    cause = _cause(error)
    page = dataclasses.replace(named.uri, revision=None, path_in_repo="").to_url(constants.ENDPOINT)
    hub, text = constants.ENDPOINT, f"{named.setting}={shown(named.text)}"
    rules: dict[type, str] = {
        errors.GatedRepoError: f"is gated: accept its conditions at {page}, and set HF_TOKEN",
        errors.RevisionNotFoundError: f"names a revision that {hub} lacks: name a branch, a tag or "
        "a commit",
        errors.RepositoryNotFoundError: f"is nothing here, and no repository of {hub}, or a "
        "private one, for which HF_TOKEN has to be set",
        errors.OfflineModeIsEnabled: f"is not, or not completely, in {constants.HF_HUB_CACHE}, and "
        "HF_HUB_OFFLINE is set",
    }
    for kind, rule in rules.items():
        if isinstance(cause, kind):
            return StoreError(f"{text} {rule}")
    text += f" cannot be read from {hub} ({cut(one_line(str(cause)))})"
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    if status in (401, 403):
        text += ": set HF_TOKEN to one that may read it"
    passing = (httpx2.TransportError, StoreAwayError, ConnectionError, TimeoutError, RuntimeError)
    passes = (
        isinstance(cause, passing)
        or status in (408, 429)
        or status >= 500
        or getattr(cause, "errno", None) in files.TRANSIENT
        or type(cause) is OSError  # a file that is shorter than it should be
    )
    return (StoreAwayError if passes else StoreError)(text)
