"""The web page at /: chat, tokens and the engine's blocks. It uses the public endpoints only.

Its files are built from web/ (`make page`) into page/. They need no key, because they hold no
secret: the page asks its user for a key.
"""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.errors import ApiError

FOLDER = Path(__file__).with_name("page")
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "math.js": "text/javascript; charset=utf-8",  # loaded with the first formula
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "licences.txt": "text/plain; charset=utf-8",  # of the libraries in the scripts
}
# Text of a model cannot run as a script, and the page loads from and sends to this server only.
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
    """Send the page."""
    return _file("index.html")


@router.get("/page/{name}")
async def show_part(name: str) -> Response:
    """Send a file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    if name not in TYPES:
        text = f"the page has no file {name[:64]!r}; it has {', '.join(TYPES)}."
        raise ApiError(404, text, param="name", code="not_found")
    return Response((FOLDER / name).read_bytes(), media_type=TYPES[name], headers=HEADERS)
