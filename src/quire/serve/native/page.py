"""The page at /: chat, tokens and the engine's blocks, a client of the public endpoints alone.

Its files are built ahead from web/ (`make page`) and lie in page/. They hold no secret, so they
need no key: the page asks for one.
"""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.errors import ApiError

FOLDER = Path(__file__).with_name("page")
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# What a model writes is no script, and nothing is loaded from or sent to elsewhere.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def show_page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}")
async def show_part(name: str) -> Response:
    """A file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    if name not in TYPES:
        text = f"the page has no file {name[:64]!r}; it has {', '.join(TYPES)}."
        raise ApiError(404, text, param="name", code="not_found")
    return Response((FOLDER / name).read_bytes(), media_type=TYPES[name], headers=HEADERS)
