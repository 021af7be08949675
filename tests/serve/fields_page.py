"""`python -m tests.serve.fields_page [FOLDER]`: writes two pages from the table of fields.

docs/use/fields.md has the endpoints of OpenAI, Anthropic and quire, then fields of other engines
in their bodies. docs/use/fields-native.md has other engines' own endpoints. On each page, shared
fields come first, then the other fields of each body.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.serve.bodies.foreign_fields import FOREIGN, HARMLESS
from quire.serve.fields import IGNORED, REFUSED, Row, bodies, is_of_other_engine, rows

FOLDER, PAGE, NATIVE_PAGE = Path("docs/use"), "fields.md", "fields-native.md"
MAX_SMALL_LINES = 8  # of a table that is a part of the last one
HEAD = """\
# Fields of request bodies

<!-- written by `make fields` from the declarations of the bodies; do not edit -->

- A field that is taken sets a parameter of the engine, such as `Request.priority`, or the prompt,
  the grammar or the response. `=` is the field of [`SamplingParams`](sampling.md) with this name.
- An ignored field cannot change the response. A refused one gives status 400, unless it is neutral.
- Unknown fields are ignored, and the header `X-Quire-Ignored-Fields` names them.
  `--strict-fields` refuses them. Sessions' own calls, prefixes and streams always refuse them.
"""
NATIVE_HEAD = """\
# Fields of other engines' endpoints

<!-- written by `make fields` from the declarations of the bodies; do not edit -->

This page lists the fields of vLLM's [orders of a trainer](training.md), of the
[endpoints of trainers](trl.md), and of the own endpoints of [Ollama](ollama.md) (`api/...`),
[llama.cpp](llamacpp.md), [SGLang](../start/from-sglang.md) (`generate`) and
[LM Studio](../start/from-lmstudio.md) (`api/v0/...`). [Fields](fields.md) explains the words, and
lists the fields of the other endpoints.
"""
FOREIGN_HEAD = """\
## Fields of other engines

Bodies are also checked for fields of llama.cpp, SGLang, text-generation-inference and Ollama, and
so are the lines of a batch. A field in the first table is refused where the API does not have it.
"""


def cells_of(row: Row) -> tuple[str, str, str]:
    """Return the cells of a field, without the API."""
    return row.field, row.type, _meaning_of(row)


def _meaning_of(row: Row) -> str:
    if row.fate == REFUSED:
        neutral = [f"`{json.dumps(each)}`" for each in row.values]
        accepted = f" ({', '.join(neutral)} accepted)" if neutral else ""
        return f"refused: {row.advice}{accepted}"
    if row.fate == IGNORED:
        return IGNORED
    own = f"SamplingParams.{row.field}"
    parts = ["=" if part == own else f"`{part}`" if "." in part else part
             for part in row.becomes]  # fmt: skip
    return ", ".join(parts)


def page() -> str:
    """Return the page of the endpoints of OpenAI, Anthropic and quire, with foreign fields."""
    foreign = [(name, each.advice) for name, each in FOREIGN.items()]
    harmless = [(name, why) for names, why in HARMLESS.items() for name in names.split()]
    parts = [
        "", FOREIGN_HEAD, *_table("refused | instead", foreign),
        "", *_table("ignored | because", harmless), "",
    ]  # fmt: skip
    return "\n".join([HEAD, *_tables(is_native=False), *parts])


def native_page() -> str:
    """Return the page of other engines' own endpoints."""
    return "\n".join([NATIVE_HEAD, *_tables(is_native=True), ""])


def _tables(is_native: bool) -> list[str]:
    """Return the lines of the shared fields, then of the other fields of each API."""
    kinds = {name: kind for name, kind in bodies().items() if is_of_other_engine(name) == is_native}
    every = list(rows())
    found = [row for row in every if row.api in kinds]
    bases = {
        name: base
        for name, kind in kinds.items()
        for base, other in bodies().items()
        if kind is not other and issubclass(kind, other)
    }
    apis: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        if row.api not in bases:
            apis.setdefault(cells_of(row), []).append(row.api)
    shared = [(*cells, ", ".join(names)) for cells, names in apis.items() if len(names) > 1]
    parts = ["## Shared fields", "", *_table("field | type | becomes | bodies", shared)]
    others: list[tuple[str, ...]] = []
    for name in kinds:
        cells = [cells_of(row) for row in found if row.api == name]
        base = bases.get(name)
        of_base = {cells_of(row) for row in every if row.api == base}
        own = [each for each in cells if len(apis.get(each, ())) < 2 and each not in of_base]
        lines = _table("field | type | becomes", own)
        if base is None and len(lines) <= MAX_SMALL_LINES:
            others += [(*each, name) for each in own]
            continue
        intro = [] if base is None else [f"The fields of {base}, with these differences:", ""]
        parts += ["", f"## {name}", "", *intro, *lines]
    return [*parts, "", "## Other bodies", "", *_table("field | type | becomes | body", others)]


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table. Fields with equal other cells share a line."""
    fields: dict[tuple[str, ...], list[str]] = {}
    for field, *others in rows:
        fields.setdefault(tuple(others), []).append(f"`{field}`")
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return lines + [
        f"| {' | '.join((', '.join(names), *others))} |" for others, names in fields.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.fields_page", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args(argv).folder
    (folder / PAGE).write_text(page(), "utf-8")
    (folder / NATIVE_PAGE).write_text(native_page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
