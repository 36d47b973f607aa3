"""A hub of models on a local port, with the HTTP that huggingface_hub speaks; it can cut and refuse."""

import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
TOKEN = "hf_test"  # noqa: S105 - of this hub


@dataclass(slots=True)
class Hub:
    """`repositories` are folders by id; those in `gated` want TOKEN. Connections that send a
    file break at each of the bytes in `cuts`, once. `asked` has each request."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set[str])
    cuts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    asked: list[str] = field(default_factory=list[str])
    url: str = ""


@contextmanager
def model_hub(hub: Hub) -> Generator[Hub]:
    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as the base class has it
        del format, args

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.served.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._answer_api(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository, revision, name = match.groups()
            if self._is_allowed(repository, revision):
                self._send_file(self.served.repositories[repository] / name, with_body=with_body)
        else:
            self._send(404, b"{}")

    def _answer_api(self, repository: str, kind: str | None, revision: str | None) -> None:
        if not self._is_allowed(repository, revision or "main"):
            return
        folder = self.served.repositories[repository]
        files = (path for path in folder.rglob("*") if path.is_file())
        names = sorted(path.relative_to(folder).as_posix() for path in files)
        if kind == "tree":
            sizes = {name: (folder / name).stat().st_size for name in names}
            entries = [
                {"type": "file", "path": name, "size": sizes[name], "oid": _etag(folder / name)}
                for name in names
            ]
            self._send(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": name} for name in names]
            body = {"id": repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._send(200, json.dumps(body).encode())

    def _is_allowed(self, repository: str, revision: str) -> bool:
        """Return whether the request may have it; answer it otherwise."""
        if repository not in self.served.repositories:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repository in self.served.gated and self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif revision not in {"main", "v1", COMMIT}:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _send_file(self, file: Path, *, with_body: bool) -> None:
        if not file.exists():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data = file.read_bytes()
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, start, end = 200, 0, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(data) - 1) + 1
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(data)}"
        if not with_body:
            self._send(status, b"", {**headers, "Content-Length": str(end - start)})
            return
        cuts = self.served.cuts.get(file.name)
        is_cut = bool(cuts) and cuts[0] < end
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(end - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[start : cuts.pop(0) if cuts and is_cut else end])
        self.close_connection = is_cut

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
