"""The files of the status page at `/` and of the API's reference at `/docs`, which need no key."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

FOLDER = Path(__file__).resolve().parents[2] / "dashboard"
PREFIX = "/page/"
PATHS = {"index.html": "/", "docs.html": "/docs"}
"""The paths of pages; other files are below PREFIX."""

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES))
PAGE_PATHS = frozenset(PATHS.get(name, PREFIX + name) for name in FILES)
"""The files hold no data of the fleet: the page fetches it with the key that a user enters."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page_routes(app: FastAPI) -> None:
    """Serve `/`, `/docs` and the files below /page/."""
    for name in FILES:
        _add_file(app, PATHS.get(name, PREFIX + name), FOLDER / name)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    content = file.read_bytes()

    async def send() -> Response:
        return Response(content, media_type=MEDIA_TYPES[file.suffix], headers=HEADERS)

    app.add_api_route(path, send, methods=["GET", "HEAD"], include_in_schema=False)
