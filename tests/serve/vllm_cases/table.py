"""`python -m tests.serve.vllm_cases.table`: writes the cases into docs/results/vllm-cases.md.

The page counts the cases of each file and lists the different ones. A case's text is its docstring.
The text between the two marks is made again; the rest of the page stays.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "results" / "vllm-cases.md"
BEGIN = "<!-- cases: written by `make migrating` -->"
END = "<!-- cases: end -->"


@dataclass(frozen=True)
class Case:
    """difference: from vLLM's answer; empty if it is the same."""

    what: str
    difference: str


@dataclass(frozen=True)
class Topic:
    """The cases of one file."""

    title: str
    file: str
    cases: tuple[Case, ...]


def main() -> int:
    """Write the page; returns the exit status."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    return 0


def page(text: str) -> str:
    """Return a page with the cases as they are now. Raises ValueError for one without the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN} and {END}, between which the cases go.")
    topics = list(topics_of_cases())
    num = sum(len(topic.cases) for topic in topics)
    differing = [case for topic in topics for case in topic.cases if case.difference]
    lines = [f"{num} cases: {num - len(differing)} are the same, {len(differing)} differ.", ""]
    lines += ["| topic | cases | file |", "|---|---|---|"]
    lines += [f"| {topic.title} | {len(topic.cases)} | `{topic.file}` |" for topic in topics]
    lines += ["", "## Differences", "", "| case | here |", "|---|---|"]
    lines += [f"| {case.what} | {case.difference} |" for case in differing]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def topics_of_cases() -> Iterator[Topic]:
    """Yield each file's topic and cases, in the order of the files."""
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        tests = [
            node for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]  # fmt: skip
        if any(map(is_case, tests)):
            name = path.relative_to(HERE.parents[2]).as_posix()
            yield Topic(ast.get_docstring(tree) or path.name, name, tuple(map(_case, tests)))


def is_case(node: ast.FunctionDef) -> bool:
    return bool(ast.get_docstring(node))


def _case(node: ast.FunctionDef) -> Case:
    what = " ".join((ast.get_docstring(node) or node.name).split())
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "differs":
            [why] = mark.args
            return Case(what, str(ast.literal_eval(why)))
    return Case(what, "")


if __name__ == "__main__":
    sys.exit(main())
