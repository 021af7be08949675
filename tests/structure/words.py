"""The word test: banned words, long sentences and wide lines in texts, docstrings and comments.

    python -m tests.structure.words [--only KIND] [PATH...]

prints `file:line: what is wrong: the sentence`, for the whole repository or the paths given, and
exits with 1 if there is anything. The kinds of texts:

pages       Markdown of ours, without code blocks and without blocks that a program writes
help        help of the command line and of settings, in src
messages    errors, logs and all other prose in strings of src; a placeholder counts as one word
web         strings of the web page
docstrings  in src, benchmarks and demo_model, and at the head of the files of tests
comments    in src, benchmarks, demo_model, csrc and web
names       names that the same folders define

How words are counted: a sentence ends with `.`, `!` or `?`, or with its paragraph, list item,
table cell or heading. A code span is one word, and a link counts its text.
"""

import argparse
import ast
import functools
import html
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.structure.banned import (
    BANNED_MODULES,
    SIDE_BY_SIDE,
    banned_words,
    begins_with_verb,
    name_faults,
)
from tests.structure.test_house import ROOT, tree_of

MAX_WORDS, MAX_COLUMNS = 25, 120
FOREIGN = {"node_modules", "build", "dist", "__pycache__"}  # folders with texts of others

HOLE = "{}"  # stands for a placeholder
# Letters of code spans are moved to code points that no rule matches, and back when shown.
PRIVATE = 0xE000
SHOW = {PRIVATE + code: code for code in range(0x1000)}
SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
QUOTED = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\([^)\s]*(?:\s\"[^\"]*\")?\)|\[[^\]]*\])")
DEFINITION = re.compile(r"\s*\[[^\]]+\]:\s")
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
COMMENT = re.compile(r"<!--.*?-->")
FENCE = re.compile(r"\s*(?:>\s*)?(`{3,}|~{3,})")
GENERATED = re.compile(r"<!--.*\b(?:written by|made by)\b(?!.*\bend\b).*-->")
END = re.compile(r"<!--.*\bend\b.*-->")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+(?:\[[ x]\]\s+)?")
HEADING = re.compile(r"#+\s")
RULE = re.compile(r"\s*[-|:= ]+$")
EMPHASIS = re.compile(r"\*+|(?<!\w)_+|_+(?!\w)")
SHORT = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|approx|resp|No|Fig|Sec|Eq|al)\.$")
STOP = re.compile(r"[.!?]+[\"')\]*_]*(?:\s+|$)")
WORD = re.compile(r"[\w{`]")
PROGRAM = re.compile(
    r"^\s*(?:from [\w.{}]+ import|import \w|def \w+\(|class [\w{}]+)", re.MULTILINE
)
PROSE = re.compile(r"(?:\b[A-Za-z][a-z]*\b[,;:]? ){2}")

HELP_CALLS = {"add_argument", "add_parser", "ArgumentParser", "add_argument_group", "setting"}
HELP_CALLS |= {"add_subparsers", "add_mutually_exclusive_group"}


@dataclass(frozen=True)
class Text:
    """A paragraph, list item, cell or string, and where it begins."""

    line: int
    text: str


@dataclass(frozen=True)
class Problem:
    path: Path
    line: int
    fault: str
    sentence: str

    def __str__(self) -> str:
        name = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{name}:{self.line}: {self.fault}: {self.sentence.translate(SHOW)}"


# Sentences


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without markup, in one line each."""
    flat, begin = " ".join(text.split()), 0
    for stop in STOP.finditer(flat):
        if SHORT.search(flat[begin : stop.start() + 1]):
            continue
        if (sentence := flat[begin : stop.end()].strip()) and WORD.search(sentence):
            yield sentence
        begin = stop.end()
    if WORD.search(flat[begin:]):
        yield flat[begin:].strip()


def num_words(sentence: str) -> int:
    """Count the words of a sentence; signs between words are none."""
    return sum(bool(WORD.search(word)) for word in sentence.split())


def faults(sentence: str) -> list[str]:
    """Return all that is wrong with a sentence."""
    bare = SIDE_BY_SIDE.sub("adjacent", QUOTED.sub("code", sentence))
    found = banned_words(bare)
    if (num := num_words(bare)) > MAX_WORDS:
        found.append(f"{num} words, at most {MAX_WORDS}")
    return found


# Markdown


def plain(text: str) -> str:
    """Return Markdown without its marks: a code span as one word, a link as its text."""
    text = COMMENT.sub(" ", SPAN.sub(lambda span: f"`{_hidden(span[2])}`", text))
    for _ in range(2):  # an image inside of a link
        text = LINK.sub(r"\1", text)
    return html.unescape(EMPHASIS.sub("", TAG.sub(" ", text)))


def _hidden(code: str) -> str:
    flat = " ".join(code.split())
    return "".join(chr(PRIVATE + ord(c)) if ord(c) < 0x1000 else c for c in flat)


def own_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that we write, with their numbers: no front matter, and no block
    that a program writes."""
    lines = text.splitlines()
    is_front = bool(lines) and lines[0] == "---"
    is_generated = False
    for number, line in enumerate(lines, start=1):
        if is_front:
            is_front = number == 1 or line != "---"
        elif is_generated:
            is_generated = not END.search(line)
        elif GENERATED.search(line):
            is_generated = True
        else:
            yield number, line


def markdown_texts(text: str) -> Iterator[Text]:
    """Yield the paragraphs, list items, table cells and headings of a page."""
    open_fence, begin, kept = "", 0, list[str]()
    for number, line in (*own_lines(text), (0, "")):
        fence = FENCE.match(line)
        if open_fence:
            open_fence = "" if fence and fence[1].startswith(open_fence) else open_fence
            continue
        is_cell, is_item = line.lstrip().startswith("|"), ITEM.match(line)
        ends = fence or is_cell or is_item or not line.strip() or HEADING.match(line)
        if kept and (ends or RULE.match(line)):
            yield Text(begin, plain("\n".join(kept)))
            kept = []
        if fence:
            open_fence = fence[1]
        elif is_cell:
            cells = SPAN.sub(lambda span: span[0].replace("|", " "), line).replace(r"\|", " ")
            yield from (Text(number, plain(cell)) for cell in cells.split("|"))
        elif HEADING.match(line):
            yield Text(number, plain(HEADING.sub("", line, count=1)))
        elif line.strip() and not RULE.match(line) and not DEFINITION.match(line):
            begin = begin if kept else number
            kept.append(line[is_item.end() :] if is_item else line.lstrip("> "))


def wide_lines(path: Path) -> Iterator[Problem]:
    """Yield the lines of a page that are too wide; tables may be."""
    for number, line in own_lines(path.read_text("utf-8")):
        may_be_wide = line.lstrip().startswith("|") or DEFINITION.match(line)
        if len(line) > MAX_COLUMNS and not may_be_wide:
            yield Problem(path, number, f"{len(line)} columns, at most {MAX_COLUMNS}", line)


# Strings of Python


def python_texts(tree: ast.Module, *, of_help: bool) -> Iterator[Text]:
    """Yield the strings of a module that are prose: in help texts, or anywhere else. Docstrings
    are not among them."""
    return (text for is_help, text in _strings_of(tree) if is_help == of_help)


@functools.cache
def _strings_of(tree: ast.Module) -> list[tuple[bool, Text]]:
    """List the strings of a module that are prose, and whether each is a help text."""
    found = list[tuple[bool, Text]]()

    def visit(node: ast.AST, is_help: bool, is_part: bool) -> None:
        is_help = is_help or (isinstance(node, ast.Call) and _called(node) in HELP_CALLS)
        text = _string(node)
        is_prose = text is not None and PROSE.search(text) and not PROGRAM.search(text)
        if text is not None and is_prose and not is_part:
            found.append((is_help, Text(node.lineno, text)))  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            is_docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
            visit(child, is_help, text is not None or is_docstring)

    visit(tree, False, False)
    return found


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _string(node: ast.AST) -> str | None:
    """Return the text that a string, f-string or sum of such gives; None of other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (_string(value) for value in node.values)
        return "".join(HOLE if part is None else part for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _string(node.left), _string(node.right)
        if left is None and right is None:
            return None
        return (HOLE if left is None else left) + (HOLE if right is None else right)
    return None


# Strings of the web page

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r"|(?<=[(,=:\[!&|?{};])\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\n])*\]|[^/\\\n\[])+/[a-z]*"
    r"|(?P<plain>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<template>`(?:\\.|\$\{(?:[^{}]|\{[^{}]*\})*\}|[^`\\])*`)",
    re.DOTALL,
)
FILLED = re.compile(r"\$\{((?:[^{}]|\{[^{}]*\})*)\}")
SHOWN = re.compile(r"\b(?:alt|title|placeholder|aria-label)=\"([^\"]*)\"")
HIDDEN = re.compile(r"<(script|style)\b.*?</\1>|<!.*?>", re.DOTALL)


def script_texts(text: str, first: int = 1) -> Iterator[Text]:
    """Yield the strings of a TypeScript file that hold more than one word."""
    for token in TOKEN.finditer(text):
        line = first + text.count("\n", 0, token.start())
        inner = (token["template"] or token["plain"] or "")[1:-1]
        holes = list(FILLED.finditer(inner)) if token["template"] else []
        found = FILLED.sub(HOLE, inner) if holes else inner
        if " " in found:
            yield Text(line, found)
        for hole in holes:
            yield from script_texts(hole[1], line)


def html_texts(text: str) -> Iterator[Text]:
    """Yield the texts of a page of HTML, and the attributes that readers see or hear."""
    text = HIDDEN.sub(lambda hidden: "\n" * hidden[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), start=1):
        for shown in (*SHOWN.findall(line), *re.split(r"<[^>]*>", line)):
            yield Text(number, html.unescape(shown))


# Docstrings, comments and names

LEGEND = "Shape legend:"
FIELD = re.compile(rf"(?:\w+(?:, \w+)*|\*{{0,2}}\w+ \([^)]*\)): |{LEGEND}")
SECTION = re.compile(r"(?:Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
DIRECTIVE = re.compile(r"#|!|(?:noqa|type|fmt|mypy|pragma|ruff|clang-format|NOLINT|IWYU)\b")
ARRAY = re.compile(r"(?:torch\.)?Tensor$|(?:np|npt|numpy)\.(?:nd|ND)[aA]rray\b")
DIMENSION = r"(?:\d+ )?[\w.*+/-]+(?: ?[*+/-] ?[\w.]+)*(?: [A-Z])*"
SHAPE = re.compile(
    rf"\[{DIMENSION}(?:, ?{DIMENSION})*\]|\({DIMENSION},(?: ?{DIMENSION},?)*\)|\bscalar"
)
PYTHON_TOKEN = re.compile(
    r"(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')|#(?P<line>[^\n]*)",
    re.DOTALL,
)
CPP_TOKEN = re.compile(
    r"R\"\((?:.*?)\)\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    r"|//+(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/",
    re.DOTALL,
)
WEB_TOKEN = re.compile(
    TOKEN.pattern.replace(r"//[^\n]*|/\*.*?\*/", r"//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/", 1),
    re.DOTALL,
)
CSS_TOKEN = re.compile(r"/\*(?P<block>.*?)\*/", re.DOTALL)
LANGUAGES = {".py": PYTHON_TOKEN, ".ts": WEB_TOKEN, ".mjs": WEB_TOKEN, ".css": CSS_TOKEN}
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose_texts(text: str, first: int) -> Iterator[Text]:
    """Yield the paragraphs, items, fields and table cells of a docstring or comment.

    Indented lines after an empty line are code or a drawing, unless they are fields.
    """
    begin, kept = first, list[str]()
    for number, line in enumerate((*text.splitlines(), ""), start=first):
        bare = line.strip()
        starts = ITEM.match(line) or FIELD.match(bare) or SECTION.match(bare)
        is_drawn = not kept and not starts and line.startswith("  ")
        *cells, rest = re.split(r"\s{2,}", bare)
        if kept and (starts or cells or not bare):
            if not kept[0].startswith(LEGEND):
                yield Text(begin, SPAN.sub(lambda span: f"`{_hidden(span[2])}`", " ".join(kept)))
            kept = []
        if bare and not is_drawn and not bare.startswith((">>>", "$ ")):
            yield from (Text(number, cell) for cell in cells)
            begin = begin if kept else number
            kept.append(rest)


def docstring_nodes(tree: ast.Module, *, of_head: bool) -> Iterator[tuple[DOCUMENTED, str, int]]:
    """Yield what has a docstring, the docstring, and its line; or only the module itself."""
    for node in [tree] if of_head else ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node, text, node.body[0].lineno


def check_docstrings(path: Path) -> Iterator[Problem]:
    """Check the docstrings of a Python file: words, sentences, first verbs and shapes of arrays."""
    tree, is_test = tree_of(path), path.is_relative_to(ROOT / "tests")
    public = set(_public_functions(tree))
    for node, text, line in docstring_nodes(tree, of_head=is_test):
        yield from _check(path, prose_texts(text, line))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        begin = text.splitlines()[0]
        decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
        if "property" not in decorators and not begins_with_verb(text):
            yield Problem(path, line, "begin with an imperative verb", begin)
        has_shape = SHAPE.search(" ".join(text.split())) or text.startswith("See ")
        if node in public and _takes_arrays(node) and not has_shape:
            yield Problem(path, line, "name the shapes of arrays, such as [num_tokens, 3]", begin)


def _public_functions(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else []
        for each in (node, *members):
            names = [node.name, each.name] if isinstance(each, DOCUMENTED) else ["_"]  # type: ignore[union-attr]
            if not any(name.startswith("_") for name in names):
                yield each


def _takes_arrays(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    annotations = (ast.unparse(each.annotation).strip("'") for each in every if each.annotation)
    return any(ARRAY.match(part) for each in annotations for part in each.split(" | "))


def comment_texts(text: str, token: re.Pattern[str]) -> Iterator[Text]:
    """Yield the comments of a source. Comments on lines of their own that follow each other are one
    text; so are comments that continue one at the end of a line, in the same column."""
    begin, column, kept, last = 0, -1, list[str](), -1
    for found in token.finditer(text):
        groups = found.groupdict()
        line, block = groups.get("line"), groups.get("block")
        if line is None and block is None:
            continue
        number = text.count("\n", 0, found.start()) + 1
        line_begin = text.rfind("\n", 0, found.start()) + 1
        start = found.start() - line_begin
        is_alone = not text[line_begin : found.start()].strip()
        if kept and (line is None or not is_alone or number != last + 1 or start != column):
            yield from prose_texts("\n".join(kept), begin)
            kept = []
        if block is not None:
            yield from prose_texts(re.sub(r"(?m)^\s*\*+ ?", "", block).strip(), number)
        elif line is not None and not DIRECTIVE.match(line.strip(" !/")):
            begin = begin if kept else number
            column, last = start, number
            kept.append(line.removeprefix(" "))
    yield from prose_texts("\n".join(kept), begin)


def check_comments(path: Path) -> Iterator[Problem]:
    """Check the words and sentences of the comments of a source."""
    token = LANGUAGES.get(path.suffix, CPP_TOKEN)
    return _check(path, comment_texts(path.read_text("utf-8"), token))


def check_names(path: Path) -> Iterator[Problem]:
    """Check the names that a Python file defines, or all names of another source."""
    if path.stem in BANNED_MODULES:
        yield Problem(path, 1, "name the module with a noun of the field", path.stem)
    names = dict[str, int]()
    for name, line in _names_of(path):
        names.setdefault(name, line)
    for name, line in names.items():
        yield from (Problem(path, line, fault, name) for fault in name_faults(name))


def _names_of(path: Path) -> Iterator[tuple[str, int]]:
    yield path.stem, 1
    if path.suffix != ".py":
        token = LANGUAGES.get(path.suffix, CPP_TOKEN)
        text = token.sub(lambda found: "\n" * found[0].count("\n"), path.read_text("utf-8"))
        for number, line in enumerate(text.splitlines(), start=1):
            yield from ((found[0], number) for found in IDENTIFIER.finditer(line))
        return
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


# Files


def check_page(path: Path) -> Iterator[Problem]:
    """Check a page of Markdown: its words, its sentences and its columns."""
    yield from _check(path, markdown_texts(path.read_text("utf-8")))
    yield from wide_lines(path)


def check_help(path: Path) -> Iterator[Problem]:
    """Check the help texts of a Python file."""
    return _check(path, python_texts(tree_of(path), of_help=True))


def check_messages(path: Path) -> Iterator[Problem]:
    """Check the messages of a Python file."""
    return _check(path, python_texts(tree_of(path), of_help=False))


def check_web(path: Path) -> Iterator[Problem]:
    """Check the strings of a source of the web page."""
    texts = html_texts if path.suffix == ".html" else script_texts
    return _check(path, texts(path.read_text("utf-8")))


def _check(path: Path, texts: Iterable[Text]) -> Iterator[Problem]:
    for item in texts:
        for sentence in sentences(item.text):
            yield from (Problem(path, item.line, fault, sentence) for fault in faults(sentence))


@dataclass(frozen=True)
class Kind:
    check: Callable[[Path], Iterable[Problem]]
    suffixes: tuple[str, ...]
    folders: tuple[str, ...]  # from the root


CODE = ("src", "benchmarks", "demo_model")
SOURCES = (*CODE, "csrc", "web")
SUFFIXES = (".py", ".h", ".cpp", ".ts", ".mjs", ".css")
KINDS = {
    "pages": Kind(check_page, (".md",), ("",)),
    "help": Kind(check_help, (".py",), ("src",)),
    "messages": Kind(check_messages, (".py",), ("src",)),
    "web": Kind(check_web, (".ts", ".html"), ("web/src",)),
    "docstrings": Kind(check_docstrings, (".py",), (*CODE, "tests")),
    "comments": Kind(check_comments, SUFFIXES, SOURCES),
    "names": Kind(check_names, SUFFIXES[:-1], SOURCES),
}


def files_of(kind: Kind, paths: Iterable[Path]) -> list[Path]:
    """List the files of a kind among paths: files, or folders with all below. Files outside of the
    repository may be anywhere."""
    homes = [ROOT / folder for folder in kind.folders]
    found = set[Path]()
    for path in paths:
        for each in [path] if path.is_file() else _files_below(path):
            is_home = any(each.is_relative_to(home) for home in homes)
            if each.suffix in kind.suffixes and (is_home or not each.is_relative_to(ROOT)):
                found.add(each)
    return sorted(found)


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in FOREIGN]
        yield from (Path(parent, name) for name in names)


def problems(kind: str, paths: Iterable[Path]) -> list[Problem]:
    """Return all that is wrong with the texts of a kind in these files and folders."""
    files = files_of(KINDS[kind], paths)
    return [problem for path in files for problem in KINDS[kind].check(path)]


def main(arguments: list[str] | None = None) -> int:
    """Print the problems of the paths given; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure.words")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders; all if absent")
    parser.add_argument("--only", choices=KINDS, metavar="KIND", help="|".join(KINDS))
    given = parser.parse_args(arguments)
    paths = [Path(path).resolve() for path in given.paths] or [ROOT]
    if missing := [path for path in paths if not path.exists()]:
        print(f"no such file or folder: {missing[0]}", file=sys.stderr)
        return 2
    kinds = [given.only] if given.only else list(KINDS)
    found = [problem for kind in kinds for problem in problems(kind, paths)]
    print("\n".join(map(str, found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
