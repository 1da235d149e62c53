"""A small server on the loopback that serves folders as the Hugging Face hub does: what
huggingface_hub asks of it to read models and datasets, with HF_ENDPOINT set to its address.

    GET   /api/models/ORG/NAME[/revision/REV]         the commit of a revision
    GET   /api/models/ORG/NAME/tree/REV[/PATH]        files and folders with their digests
    POST  /api/models/ORG/NAME/paths-info/REV         the same of some paths
    HEAD, GET  /ORG/NAME/resolve/REV/FILE             a file, or a part; large ones at
                                                      /blobs/DIGEST of another host

and the same for datasets, whose files are below /datasets/ORG/NAME. Nothing is written to it.

python tests/support/hub_server.py FOLDER=models/ORG/NAME … serves folders until Ctrl-C.
"""

import collections
import contextlib
import dataclasses
import hashlib
import http.server
import json
import pathlib
import re
import signal
import sys
import threading
import time
import urllib.parse
from typing import Any

LFS_BYTES = (
    1000  # files from this size on are "large": their digest is a sha256, and a CDN has them
)
TOKEN = "hf_tests"  # the token of the one account


@dataclasses.dataclass
class Repo:
    """A repository. revisions: branch or tag → commit; commits: commit → path → content.

    is_gated, is_private: only TOKEN reads its files, or sees it
    """

    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False


class HubServer:
    """The server, on a free port; a context.

    Switches, which may change while it runs:
      delay: seconds before each answer
      hangs: answers nothing
      failures: how many further requests get `failure`, a status; headers: with these
      fail_every: each request of this number gets `failure`, too; 0: none
      cut: a body of more bytes than this ends there, without a word, `cuts` times for each file

    requests: what was asked for, as ("GET", path without its query, status)
    sent: bytes of the contents of answers
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = collections.defaultdict(Repo)
        self.requests: list[tuple[str, str, int]] = []
        self.sent = 0
        self.delay, self.hangs = 0.0, False
        self.failures, self.fail_every, self.failure = 0, 0, 500
        self.headers: dict[str, str] = {}
        self.cut, self.cuts = 0, 1
        self.cut_of = collections.Counter[str]()
        self.count, self.lock = 0, threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def publish(self, name: str, folder: pathlib.Path, *revisions: str) -> str:
        """The new commit with all files of a folder; these branches or tags then are it, "main"
        without any.

        name: models/ORG/NAME or datasets/ORG/NAME
        """
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repo = self.repos[name]
        listing = json.dumps({path: _digest(content) for path, content in files.items()})
        commit = hashlib.sha1(f"{len(repo.commits)} {name} {listing}".encode()).hexdigest()
        repo.commits[commit] = files
        repo.revisions |= dict.fromkeys(revisions or ["main"], commit)
        return commit

    def environment(self, home: pathlib.Path) -> dict[str, str]:
        """What a program needs to use it, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def files(self) -> set[str]:
        """The files that were asked for."""
        paths = (path.partition("/resolve/")[2] for _, path, _ in self.requests)
        return {path.partition("/")[2] for path in paths if path}

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _digest(content: bytes) -> str:
    """The ETag of a file: git's digest of a blob, or the sha256 of a large one."""
    if len(content) >= LFS_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class _Refused(Exception):
    """An answer without the thing that was asked for. code: the hub's word for it"""

    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    api = re.compile(
        r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?"
    )
    file = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, length = self.hub, int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        path = urllib.parse.urlsplit(self.path).path
        with hub.lock:
            hub.count += 1
            failed = hub.failures > 0 or (hub.fail_every and hub.count % hub.fail_every == 0)
            hub.failures = max(hub.failures - 1, 0)
        while hub.hangs:
            time.sleep(0.05)
        time.sleep(hub.delay)
        try:
            if failed:
                raise _Refused(hub.failure)
            status, headers, content = self._found(path, body)
        except _Refused as refused:
            status, content = refused.status, json.dumps({"error": refused.message}).encode()
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            headers = {name: text for name, text in headers.items() if text}
            headers |= hub.headers if failed else {}
        hub.requests.append((self.command, urllib.parse.unquote(path), status))
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        with hub.lock:
            hub.cut_of[path] += 1
            hub.sent += len(content)
            cut = 0 < hub.cut < len(content) and hub.cut_of[path] <= hub.cuts
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[: hub.cut] if cut else content)
        self.close_connection = self.close_connection or cut

    def _found(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of an answer. Raises _Refused."""
        if match := self.api.fullmatch(path):
            answer = self._listed(*match.groups(), body)
            return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
        if match := self.file.fullmatch(path):
            kind, name, revision, file = match.groups()
            repo, commit = self._commit(f"{kind or 'models/'}{name}", revision)
            if repo.is_gated and not self._has_token():
                raise _Refused(401, "GatedRepo", f"Access to {name} is restricted.")
            content = repo.commits[commit].get(urllib.parse.unquote(file))
            headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if content is None:
                raise _Refused(404, "EntryNotFound", "Entry not found")
            headers["ETag"] = f'"{_digest(content)}"'
            if len(content) >= LFS_BYTES:
                headers["X-Linked-Etag"] = headers["ETag"]
                headers["X-Linked-Size"] = str(len(content))
                cdn = self.hub.endpoint.replace("127.0.0.1", "localhost")
                headers["Location"] = f"{cdn}/blobs/{_digest(content)}"
                return 302, headers, b""
            return self._part(content, headers)
        for repo in [*self.hub.repos.values()] if path.startswith("/blobs/") else []:
            for files in repo.commits.values():
                for content in files.values():
                    if path == f"/blobs/{_digest(content)}":
                        return self._part(content, {"ETag": f'"{_digest(content)}"'})
        raise _Refused(404)

    def _part(self, content: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """The part of a content that the Range of the request asks for."""
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not span:
            return 200, headers, content
        first, last = int(span[1]), int(span[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        return 206, headers, content[first : last + 1]

    def _listed(
        self, name: str, what: str | None, revision: str | None, below: str | None, body: bytes
    ) -> Any:
        """The JSON value of the API."""
        repo, commit = self._commit(name, revision or "main")
        files = repo.commits[commit]
        if what in (None, "revision"):
            id = name.partition("/")[2]
            siblings = [{"rfilename": path} for path in files]
            return {"id": id, "sha": commit, "private": repo.is_private, "siblings": siblings}
        entries: dict[str, dict[str, Any]] = {}
        for path, content in files.items():
            for folder in [*pathlib.PurePosixPath(path).parents][:-1]:
                entries[str(folder)] = {"type": "directory", "path": str(folder), "oid": "0" * 40}
            entry = {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
            if len(content) >= LFS_BYTES:
                entry["lfs"] = {"oid": _digest(content), "size": len(content), "pointerSize": 130}
            entries[path] = entry
        if what == "paths-info":
            text = body.decode()
            asked = json.loads(text) if text.startswith("{") else urllib.parse.parse_qs(text)
            paths = asked["paths"] if isinstance(asked["paths"], list) else [asked["paths"]]
            return [entries[path] for path in paths if path in entries]
        top = urllib.parse.unquote(below or "")
        if top and entries.get(top, {}).get("type") != "directory":
            raise _Refused(404, "EntryNotFound", f"{top} does not exist")
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        is_recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        return [
            entry
            for path, entry in sorted(entries.items())
            if path.startswith(f"{top}/" if top else "")
            and path != top
            and (is_recursive or "/" not in path.removeprefix(f"{top}/" if top else ""))
        ]

    def _commit(self, name: str, revision: str) -> tuple[Repo, str]:
        """The repository, and the commit of a revision of it."""
        repo = self.hub.repos.get(name)
        if self.headers.get("Authorization") and not self._has_token():
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.is_private and not self._has_token()):
            # the hub does not tell strangers which names there are
            raise _Refused(
                404 if self._has_token() else 401, "RepoNotFound", "Repository not found"
            )
        revision = urllib.parse.unquote(revision)
        commits = [
            each for each in repo.commits if len(revision) >= 7 and each.startswith(revision)
        ]
        commit = repo.revisions.get(revision) or next(iter(commits), None)
        if not commit:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"


def main(*words: str) -> None:
    with HubServer() as hub:
        for word in words:
            folder, _, name = word.partition("=")
            print(f"{name}@{hub.publish(name, pathlib.Path(folder))}")
        print(f"export HF_ENDPOINT={hub.endpoint}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main(*sys.argv[1:])
