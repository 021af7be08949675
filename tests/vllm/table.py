"""`python -m tests.vllm.table`: writes docs/results/vllm-scripts.md from examples/vllm.

The text between the two marks is made from the scripts' docstrings. The rest of the page stays.

The first line of a script's docstring says what the script does. Further lines are fields: `vLLM:`
is the path of the example, and `Needs:` the model or server for a run. `Change:` names what differs
from the example. `Refused:` is a part of the error with which the script ends.
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "vllm"
NEEDS = ("", "adapter", "embed", "classify", "seeing", "server", "embed server")
FIELD = re.compile(r"^(vLLM|Needs|Change|Refused): (.+)$", re.MULTILINE)
PAGE = ROOT / "docs" / "results" / "vllm-scripts.md"
BEGIN = "<!-- scripts: written by `make migrating` -->"
END = "<!-- scripts: end -->"


@dataclass(frozen=True)
class Script:
    """One script. needs: one of NEEDS. change, refused: empty if the example runs unchanged."""

    path: Path
    what: str
    theirs: str
    needs: str
    change: str
    refused: str

    @property
    def name(self) -> str:
        return self.path.stem


def read_script(path: Path) -> Script:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    found = dict(FIELD.findall(text))
    names = ("vLLM", "Needs", "Change", "Refused")
    return Script(path, text.splitlines()[0], *(found.get(name, "") for name in names))


SCRIPTS = [read_script(path) for path in sorted(FOLDER.glob("*.py"))]


def main() -> int:
    """Write the page; return the exit status."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    return 0


def page(text: str) -> str:
    """Return a page with the present scripts. Raises ValueError for one without the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN} and {END}, between which the scripts go.")
    changed = [script for script in SCRIPTS if script.change]
    refused = [script for script in SCRIPTS if script.refused]
    same = [script for script in SCRIPTS if not script.change and not script.refused]
    counts = f"{len(same)} run unchanged, {len(changed)} need a change, {len(refused)} are refused"
    parts = [
        f"{len(SCRIPTS)} examples: {counts}.",
        _table("Unchanged", "what it does", [(s, s.what) for s in same]),
        _table("With a change", "the change", [(s, s.change) for s in changed]),
        _table("Refused", "the error", [(s, s.refused) for s in refused]),
    ]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _table(title: str, column: str, rows: list[tuple[Script, str]]) -> str:
    head = f"## {title}\n\n| vLLM's example | script | {column} |\n|---|---|---|\n"
    folder = "../../examples/vllm"
    lines = [
        f"| {s.theirs.removeprefix('examples/')} | [{s.name}]({folder}/{s.name}.py) | {text} |"
        for s, text in sorted(rows, key=lambda row: row[0].theirs)
    ]
    return head + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
