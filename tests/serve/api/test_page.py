"""The page at /: its files, its size, and its build from the sources in web/."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.native.page import FOLDER, TYPES
from tests.serve.api.conftest import MakeContext

WEB = Path(__file__).parents[3] / "web"
MAX_FIRST_BYTES = 60_000  # of the files that a browser loads first, gzipped
MAX_BYTES = 110_000  # including the formula renderer and the licences
LATER = ("math.js", "licences.txt")
# Namespaces, the scheme that the parser puts before "www.", its own address in an error, and one of
# its methods.
NO_ADDRESSES = (
    "http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML", '"http://"+',
    "https://github.com/markedjs/marked.", "}url(n){", "tokenizer.url(",
)  # fmt: skip
NODE, ESBUILD = shutil.which("node"), WEB / "node_modules" / "esbuild" / "package.json"


def test_page_is_served_without_a_key(make_context: MakeContext) -> None:
    api = TestClient(create_app(make_context(api_key=("k",))))
    page = api.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, TYPES["index.html"])
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    parts = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
    assert parts == {"page/page.js", "page/page.css", "page/icon.svg"}
    for part in parts:
        found = api.get("/" + part)
        assert (found.status_code, found.headers["x-content-type-options"]) == (200, "nosniff")
    assert api.get("/v1/models").status_code == 401
    for name in ("other.js", "..%2fpage.py", "%2e%2e"):
        assert api.get(f"/page/{name}").status_code == 404


def test_page_can_be_disabled(make_context: MakeContext) -> None:
    api = TestClient(create_app(make_context(page=False)))
    assert api.get("/").status_code == api.get("/page/page.js").status_code == 404
    assert api.get("/v1/models").status_code == 200


def test_page_is_small_and_self_contained() -> None:
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert files.keys() == TYPES.keys()
    packed = {name: len(gzip.compress(data)) for name, data in files.items()}
    assert sum(packed.values()) < MAX_BYTES
    assert sum(packed[name] for name in packed if name not in LATER) < MAX_FIRST_BYTES
    text = b"".join(data for name, data in files.items() if name != "licences.txt").decode()
    for known in NO_ADDRESSES:
        text = text.replace(known, "")
    for word in ("http:", "https:", "url(", "@import", "innerHTML", "insertAdjacentHTML", "eval("):
        assert word not in text, word


@pytest.mark.skipif(NODE is None or not ESBUILD.exists(), reason="needs node, and `npm ci` in web/")
def test_page_is_built_from_its_source(tmp_path: Path) -> None:
    assert NODE is not None
    subprocess.run([NODE, "build.mjs", str(tmp_path)], cwd=WEB, check=True, timeout=60)
    for name in TYPES:
        built, committed = (tmp_path / name).read_bytes(), (FOLDER / name).read_bytes()
        assert built == committed, f"{name} is not what web/ builds; run `make page`"
