"""`python -m tests.serve.vllm_cases.table`: writes the cases into docs/results/vllm-cases.md.

The rows are the docstrings of the cases beside this file. What is between the two marks is written
anew, the rest of the page stays.
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


def main() -> int:
    """Write the page; returns the exit status."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    return 0


def page(text: str) -> str:
    """Return a page with the cases as they are now. Raises ValueError for one without the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN} and {END}, between which the cases go.")
    topics = dict(topics_of_cases())
    num = sum(map(len, topics.values()))
    num_different = sum(bool(case.difference) for cases in topics.values() for case in cases)
    head = f"{num} cases: {num - num_different} are the same, {num_different} differ."
    return f"{before}{BEGIN}\n\n{head}\n\n" + "\n".join(map(_table, topics.items())) + END + behind


def topics_of_cases() -> Iterator[tuple[str, list[Case]]]:
    """Yield each file's topic and cases, in the order of the files."""
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        tests = [
            node for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]  # fmt: skip
        if any(map(is_case, tests)):
            yield ast.get_docstring(tree) or path.name, [_case(node) for node in tests]


def is_case(node: ast.FunctionDef) -> bool:
    return bool(ast.get_docstring(node))


def _case(node: ast.FunctionDef) -> Case:
    what = " ".join((ast.get_docstring(node) or node.name).split())
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "differs":
            [why] = mark.args
            return Case(what, str(ast.literal_eval(why)))
    return Case(what, "")


def _table(topic: tuple[str, list[Case]]) -> str:
    name, cases = topic
    rows = [f"| {case.what} | {case.difference or 'the same'} |" for case in cases]
    return "\n".join([f"### {name}", "", "| case | here |", "|---|---|", *rows, ""]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
