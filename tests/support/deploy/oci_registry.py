"""An OCI registry in memory, with what clients need to push and pull artefacts of one part."""

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

BLOBS = re.compile(r"/v2/(?P<name>.+)/blobs/(?P<digest>sha256:\w+)")
MANIFESTS = re.compile(r"/v2/(?P<name>.+)/manifests/(?P<reference>[\w.:-]+)")


class OciRegistry(ThreadingHTTPServer):
    """Content by digest, and the digests of tags by `NAME:TAG`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.contents: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def keep(self, kind: str, content: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.contents[digest] = (kind, content)
        return digest


class _Exchange(BaseHTTPRequestHandler):
    server: OciRegistry  # pyrefly: ignore[bad-override-mutable-attribute]  the only class that has it
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
        del format, args

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/v2/":
            return self._answer(200)
        if match := BLOBS.fullmatch(self.path):
            digest = match["digest"]
        elif match := MANIFESTS.fullmatch(self.path):
            digest = self.server.tags.get(f"{match['name']}:{match['reference']}", match["reference"])
        else:
            return self._answer(404)
        if digest not in self.server.contents:
            return self._answer(404)
        kind, content = self.server.contents[digest]
        return self._answer(200, content, Content_Type=kind, Docker_Content_Digest=digest)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(202, Location=f"{self.path}1")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = self.server.keep(self.headers.get("Content-Type", "application/octet-stream"), content)
        if match := MANIFESTS.fullmatch(self.path):
            self.server.tags[f"{match['name']}:{match['reference']}"] = digest
        elif parse_qs(urlsplit(self.path).query)["digest"] != [digest]:
            return self._answer(400)
        return self._answer(201, Docker_Content_Digest=digest, Location=f"/v2/content/{digest}")


@contextmanager
def oci_registry() -> Generator[OciRegistry]:
    """Serve a registry on a free port of the loopback address."""
    with OciRegistry() as registry:
        serving = Thread(target=registry.serve_forever)
        serving.start()
        try:
            yield registry
        finally:
            registry.shutdown()
            serving.join()
