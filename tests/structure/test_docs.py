"""The documents: their files, names and links exist, and short pages stay short.

The pages are README.md, CONTRIBUTING.md, SECURITY.md, docs/**/*.md, tests/README.md and each
README.md in src. Checked are paths of files and folders, dotted names of the package,
`Class.attribute`, and links with their anchors.
"""

import ast
import functools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import quire
from quire.base.plugins import KINDS
from tests.structure.test_house import PACKAGE, ROOT, sources, tree_of

Node = TypeVar("Node", bound=ast.AST)
CONTRACTS = sorted(PACKAGE.rglob("README.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *CONTRACTS,
]
MAX_LINES = {"docs/inside/overview.md": 120, "docs/inside/contracts.md": 60, "tests/README.md": 100}
HABITS = ("vllm", "llamacpp", "ollama", "lmstudio", "openai")
MAX_LINES |= {f"docs/start/from-{engine}.md": 60 for engine in HABITS}
OF_OTHERS = {
    "from-vllm.md",
    "from-llamacpp.md",
    "from-ollama.md",
    "vllm-cases.md",
    "vllm-scripts.md",
    "vllm.md",
    "llamacpp.md",
}
OF_OTHERS |= {"model-table.md", "vllm-flags.md", "vllm-flags-engine.md", "vllm-flags-other.md"}
OF_OTHERS |= {"endpoint-table.md"}
MAX_CONTRACT_LINES, MAX_COLUMNS, MAX_PAGE_LINES = 150, 120, 250
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# A file or a folder in a document. A name with capitals or stars stands for several.
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|cpp|h|md|toml)")
FOLDER = re.compile(r"[a-z_][\w.-]*(?:/[\w.-]+)*/")
PLACEHOLDER = re.compile(r"[A-Z]{3,}")
DOTTED = re.compile(r"\bquire(?:\.\w+)+")
ATTRIBUTE = re.compile(r"([A-Z]\w+)\.(\w+)(?:\(.*)?")
IDENTIFIER = re.compile(r"([A-Za-z_]\w*)(?:\(.*\))?")
SOURCE = r"`[\w/]+\.(?:py|cpp|h)`"
IN_FILES = re.compile(rf"`([A-Za-z_]\w*(?:\.\w+)?)(?:\(\))?`\s\(({SOURCE}(?:,\s{SOURCE})*)\)")
FILE_OF = re.compile(rf"({SOURCE})\s\(((?:`\w+`(?:,\s)?)+)\)")
IN_COMMENT = re.compile(r"(?<![\w/.*{}])((?:[\w-]+/)*[\w-]+\.py)\b(?!\()")
CAMEL = re.compile(r"[A-Z][a-z]+[A-Z]")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# Paths of examples or builds, and endings of files that are named after quire.
OTHERS = {"build/", "quire-held-1/"}
ENDINGS = {"yaml", "json", "key", "service", "toml"}
# Foreign identifiers: environment variables, name patterns, and composed metrics.
OTHERS_NAMES = {
    "ATEN_CPU_CAPABILITY", "KvEventPublisher", "num_x", "x_bytes", "x_id", "x_idx", "x_ms", "x_s",
}  # fmt: skip
PREFIXES = ("OTEL_",)
SHAPE = re.compile(r"_total$")
GENERATED = {"build", "node_modules", "__pycache__"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def of_each_page(test: Callable[[Path], None]) -> Callable[[Path], None]:
    return pytest.mark.parametrize("page", PAGES, ids=name_of)(test)


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def codes(page: Path) -> Iterator[str]:
    """Yield the code spans of a page, outside of code blocks."""
    yield from CODE.findall(FENCE.sub("", text_of(page)))


@functools.cache
def files() -> frozenset[str]:
    """Return the names of all files."""
    found: set[str] = set()
    for _, folders, names in os.walk(ROOT):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in GENERATED]
        found.update(names)
    return frozenset(found)


def is_there(path: str, page: Path) -> bool:
    """Return whether a path exists below the root, the package, its tests, or the page. A file name
    without a folder may be anywhere."""
    if "/" not in path and path in files():
        return True
    return find(path, page) is not None


def find(path: str, page: Path) -> Path | None:
    """Return the target of a path, or None."""
    bases = ROOT, PACKAGE, ROOT / "tests", page.parent
    return next((base / path for base in bases if (base / path).exists()), None)


@functools.cache
def words() -> frozenset[str]:
    """Return all words of the code, including tests but not this file."""
    paths = [*sources(PACKAGE, ROOT / "tests", ROOT / "benchmarks"), *(ROOT / "csrc").iterdir()]
    texts = (path.read_text("utf-8") for path in paths if path != Path(__file__))
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@functools.cache
def attributes() -> dict[str, set[str]]:
    """Return the attributes of classes in the package and the tests, by class name."""
    own, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in sources(PACKAGE, ROOT / "tests"):
        for node in _all(ast.ClassDef, tree_of(path)):
            own[node.name] |= set(_attributes_of(node))
            bases[node.name] |= {ast.unparse(base).split(".")[-1] for base in node.bases}

    def all_of(name: str) -> set[str]:
        return own[name].union(*(all_of(base) for base in bases[name] if base != name))

    return {name: all_of(name) for name in list(own)}


def _attributes_of(class_def: ast.ClassDef) -> Iterator[str]:
    """Yield methods, fields, and attributes that methods assign to."""
    for node in class_def.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        yield from (name.id for target in _targets(node) for name in _all(ast.Name, target))
    for node in _all(ast.AST, class_def):
        yield from (each.attr for target in _targets(node) for each in _all(ast.Attribute, target))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _all(kind: type[Node], node: ast.AST) -> list[Node]:
    return [each for each in ast.walk(node) if isinstance(each, kind)]


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module of the package, a top-level name of a module, or an
    attribute of such a class."""
    parts = dotted.split(".")[1:]
    for num in range(len(parts), -1, -1):
        base, rest = PACKAGE.joinpath(*parts[:num]), parts[num:]
        is_package = base.is_dir()
        path = base / "__init__.py" if is_package else base.with_suffix(".py")
        if not path.exists():
            continue
        if not rest:
            return True
        if rest[0] not in top_level_names(path):
            return False
        return len(rest) == 1 or rest[1] in attributes().get(rest[0], ())
    return False


def top_level_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports; for the package, its public names."""
    found = set(quire.__all__) if path == PACKAGE / "__init__.py" else set[str]()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@of_each_page
def test_files_named_by_a_page_exist(page: Path) -> None:
    named = {code for code in codes(page) if FILE.fullmatch(code)}
    ours = {code for code in named if not PLACEHOLDER.search(Path(code).stem)}
    assert not {path for path in ours - OTHERS if not is_there(path, page)}


@of_each_page
def test_folders_named_by_a_page_exist(page: Path) -> None:
    named = {code for code in codes(page) if FOLDER.fullmatch(code)}
    assert not {path for path in named - OTHERS if not is_there(path, page)}


@of_each_page
def test_dotted_names_of_a_page_resolve(page: Path) -> None:
    named = set(DOTTED.findall(text_of(page))) - {kind.group for kind in KINDS}
    ours = {name for name in named if name.split(".")[-1] not in ENDINGS}
    assert not {name for name in ours if not resolves(name)}


@of_each_page
def test_attributes_named_by_a_page_exist(page: Path) -> None:
    pairs = {match.groups() for code in codes(page) if (match := ATTRIBUTE.fullmatch(code))}
    known = attributes()
    assert not {(name, each) for name, each in pairs if name in known and each not in known[name]}


@of_each_page
def test_identifiers_of_a_page_occur_in_the_code(page: Path) -> None:
    if page.name in OF_OTHERS:  # names settings and fields of other engines
        return
    named = {match[1] for code in codes(page) if (match := IDENTIFIER.fullmatch(code))}
    ours = {name for name in named if "_" in name or CAMEL.match(name)}
    others = {name for name in ours if name.startswith(PREFIXES) or SHAPE.search(name)}
    assert not ours - others - OTHERS_NAMES - words()


@of_each_page
def test_names_next_to_a_file_occur_in_it(page: Path) -> None:
    """Pages write `Name.attribute` (`path.py`), or `path.py` (`name`, `name`)."""
    text = FENCE.sub("", text_of(page))
    pairs = {(name, paths) for name, paths in IN_FILES.findall(text)}
    pairs |= {(name, path) for path, names in FILE_OF.findall(text) for name in CODE.findall(names)}
    missing = set()
    for name, paths in pairs:
        found = [find(path, page) for path in CODE.findall(paths) or [paths]]
        texts = " ".join(path.read_text("utf-8") for path in found if path is not None)
        if not all(re.search(rf"\b{part}\b", texts) for part in name.split(".")):
            missing.add((name, paths))
    assert not missing


@of_each_page
def test_links_of_a_page_have_a_target(page: Path) -> None:
    broken = set()
    for link in {one or other for one, other in LINK.findall(FENCE.sub("", text_of(page)))}:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.add(link)
        elif anchor and target.suffix == ".md":
            headings = HEADING.findall(FENCE.sub("", text_of(target)))
            if anchor not in {anchor_of(heading) for heading in headings}:
                broken.add(link)
    assert not broken


def test_files_named_in_comments_exist() -> None:
    missing = {
        (path.name, named)
        for path in sources(PACKAGE)
        for named in IN_COMMENT.findall(path.read_text("utf-8"))
        if not PLACEHOLDER.search(named) and not is_there(named, path)
        if not (path.parents[1] / named).exists()
        if not (PACKAGE.parent / named).exists()
    }
    assert not missing


def test_unknown_names_are_found() -> None:
    """The checks above must be able to fail."""
    page = ROOT / "docs" / "inside" / "overview.md"
    assert not is_there("scheduler/nowhere.py", page) and is_there("scheduler/core/rows.py", page)
    assert resolves("quire.scheduler.core.queue.Fifo.peek") and resolves("quire.LLM")
    assert not resolves("quire.scheduler.core.queue.Lifo") and not resolves("quire.nowhere")
    assert not resolves("quire.scheduler.core.queue.Fifo.push_back")
    assert "schedule" in attributes()["Scheduler"] and "plan" not in attributes()["Scheduler"]
    assert anchor_of("A hit source, or `x`") == "a-hit-source-or-x"


def test_short_pages_are_short() -> None:
    limits = MAX_LINES | {name_of(page): MAX_CONTRACT_LINES for page in CONTRACTS}
    assert len(CONTRACTS) >= 7
    for name, max_lines in limits.items():
        lines = text_of(ROOT / name).splitlines()
        assert len(lines) <= max_lines, f"{name} has {len(lines)} lines"
        assert not [line for line in lines if len(line) > MAX_COLUMNS], f"{name} is too wide"


@of_each_page
def test_pages_are_not_too_long(page: Path) -> None:
    num = len(text_of(page).splitlines())
    assert num <= MAX_PAGE_LINES, f"split the page: {num} lines"


def test_each_folder_has_a_line_in_the_overview() -> None:
    named = set(codes(ROOT / "docs" / "inside" / "overview.md"))
    missing = [
        each.name
        for each in PACKAGE.iterdir()
        if each.is_dir() and each.name != "__pycache__" and f"{each.name}/" not in named
    ]
    assert not missing


def test_index_lists_each_page_for_users() -> None:
    docs = ROOT / "docs"
    listed = {one or other for one, other in LINK.findall(text_of(docs / "README.md"))}
    pages = [*docs.glob("start/*.md"), *docs.glob("use/*.md")]
    assert len(pages) > 20
    assert not {page.relative_to(docs).as_posix() for page in pages} - listed
