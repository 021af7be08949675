"""The table of fields: what becomes of each field of each API's body.

    python -m quire.serve.api.fields [FOLDER]

writes docs/use/fields.md. Rows follow from the bodies of the routes and from the declarations at
their fields (`bodies/open_body.py`), which validation reads as well.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

from quire.base.requests.sampling_params import SamplingParams
from quire.serve.api import utility
from quire.serve.api.batches import batches_routes
from quire.serve.api.bodies.foreign_fields import FOREIGN, HARMLESS, Refused
from quire.serve.api.bodies.open_body import NO_EFFECT, Becomes, body_class
from quire.serve.api.messages import routes as messages
from quire.serve.api.native import admin, prefixes, sessions
from quire.serve.api.native.open_request import OpenPromptRequest
from quire.serve.api.openai import chat_completions, completions
from quire.serve.api.pooling import embeddings, scores
from quire.serve.api.responses import routes as responses

FOLDER, PAGE = Path("docs/use"), "fields.md"
MAX_SMALL_LINES = 8  # of a table that is a part of the last one
STREAM = "/v1/stream"  # a WebSocket, whose route has no body
ROUTERS = (
    chat_completions.router, completions.router, responses.router, messages.generating_router,
    messages.counting_router, embeddings.router, scores.router, utility.router, prefixes.router,
    sessions.router, admin.router, batches_routes.router,
)  # fmt: skip
TAKEN, IGNORED, REFUSED = "taken", "ignored", "refused"
KINDS = {
    "integer": "whole number", "number": "number", "string": "text", "boolean": "true or false",
    "array": "list", "object": "object",
}  # fmt: skip
HEAD = """\
# Fields of request bodies

<!-- written by `make fields` from the declarations of the bodies; do not edit -->

Each field of a body is taken, ignored or refused.

- A field that is taken sets a parameter of the engine, such as `Request.priority`, or a part of the
  plan: the prompt, the grammar or the response. `=` is the field of
  [`SamplingParams`](sampling.md) with the same name.
- A field that is ignored is a label or a hint. It cannot change the response.
- A field that is refused gives status 400 with `param` and the advice in the table. It is accepted
  at null, and at its neutral values.
- Unknown fields are ignored, and the header `X-Quire-Ignored-Fields` names them.
  `--strict-fields` refuses them. Sessions' own calls, prefixes and streams always refuse them.
"""
FOREIGN_HEAD = """\
## Fields of other engines

Bodies are also checked for fields of llama.cpp, SGLang, text-generation-inference and Ollama, and
so are the lines of a batch. A field in the first table is refused where the API does not have it.
"""


@dataclass(frozen=True)
class Row:
    """A field of an API. becomes: what it sets, if it is taken. advice: if it is refused."""

    api: str  # the path, without /v1
    field: str
    type: str
    fate: str
    becomes: tuple[str, ...] = ()
    advice: str = ""
    values: tuple[object, ...] = ()  # neutral values of a refused field

    @property
    def cells(self) -> tuple[str, str, str]:
        """Return the cells of the page, without the API."""
        return self.field, self.type, self._meaning

    @property
    def _meaning(self) -> str:
        if self.fate == REFUSED:
            neutral = [f"`{json.dumps(each)}`" for each in self.values]
            accepted = f" ({', '.join(neutral)} accepted)" if neutral else ""
            return f"refused: {self.advice}{accepted}"
        if self.fate == IGNORED:
            return IGNORED
        own = f"SamplingParams.{self.field}"
        parts = ["=" if part == own else f"`{part}`" if "." in part else part
                 for part in self.becomes]  # fmt: skip
        return ", ".join(parts)


def bodies() -> dict[str, type[BaseModel]]:
    """Return the class of each API's body, by its name: the shortest path without /v1/."""
    paths: dict[type[BaseModel], list[str]] = {}
    for router in ROUTERS:
        for route in router.routes:
            kind = body_class(route.endpoint) if isinstance(route, APIRoute) else None
            if kind is not None and isinstance(route, APIRoute):
                paths.setdefault(kind, []).append(route.path)
    found = {_name_of(min(same, key=len)): kind for kind, same in paths.items()}
    return found | {_name_of(STREAM): OpenPromptRequest}


def _name_of(path: str) -> str:
    return path.removeprefix("/v1").removeprefix("/").replace("{request_id}", "ID")


def rows() -> list[Row]:
    """Return the fields of all APIs."""
    return [row for name, kind in bodies().items() for row in rows_of(name, kind)]


def rows_of(name: str, kind: type[BaseModel]) -> Iterator[Row]:
    """Yield the fields of an API."""
    properties = kind.model_json_schema()["properties"]
    for field, info in kind.model_fields.items():
        shown = info.alias or field
        type_ = _type_of(properties[shown])
        declared = [each for each in info.metadata if isinstance(each, Becomes | Refused)]
        if NO_EFFECT in info.metadata:
            yield Row(name, shown, type_, IGNORED)
        elif not declared:
            assert field in SamplingParams.__struct_fields__, f"{kind.__name__}.{field} has no fate"
            yield Row(name, shown, type_, TAKEN, (f"SamplingParams.{field}",))
        elif isinstance(declared[-1], Refused):
            refused = declared[-1]
            yield Row(name, shown, type_, REFUSED, (), refused.advice, refused.values)
        else:
            yield Row(name, shown, type_, TAKEN, declared[-1].parts)


def _type_of(schema: dict[str, Any]) -> str:
    """Describe the type of a field's JSON schema in words."""
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    words: list[str] = []
    for each in kinds:
        if "enum" in each or "const" in each:
            choices = [value for value in each.get("enum", [each.get("const")]) if value]
            words.append(", ".join(f"`{choice}`" for choice in choices))
        elif "type" in each or "$ref" in each:
            words.append(KINDS[each.get("type", "object")])
    return " or ".join(dict.fromkeys(words)) or "any"


def page() -> str:
    """Return the page: shared fields, then the other fields of each API, then foreign fields."""
    kinds, found = bodies(), rows()
    bases = {
        name: base
        for name, kind in kinds.items()
        for base, other in kinds.items()
        if kind is not other and issubclass(kind, other)
    }
    apis: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        if row.api not in bases:
            apis.setdefault(row.cells, []).append(row.api)
    shared = [(*cells, ", ".join(names)) for cells, names in apis.items() if len(names) > 1]
    parts = [HEAD, "## Shared fields", "", *_table("field | type | becomes | bodies", shared)]
    others: list[tuple[str, ...]] = []
    for name in kinds:
        cells = [row.cells for row in found if row.api == name]
        base = bases.get(name)
        of_base = {row.cells for row in found if row.api == base}
        own = [each for each in cells if len(apis.get(each, ())) < 2 and each not in of_base]
        lines = _table("field | type | becomes", own)
        if base is None and len(lines) <= MAX_SMALL_LINES:
            others += [(*each, name) for each in own]
            continue
        intro = [] if base is None else [f"The fields of {base}, with these differences:", ""]
        parts += ["", f"## {name}", "", *intro, *lines]
    parts += ["", "## Other bodies", "", *_table("field | type | becomes | body", others)]
    foreign = [(name, each.advice) for name, each in FOREIGN.items()]
    harmless = [(name, why) for names, why in HARMLESS.items() for name in names.split()]
    parts += [
        "", FOREIGN_HEAD, *_table("refused | instead", foreign),
        "", *_table("ignored | because", harmless), "",
    ]  # fmt: skip
    return "\n".join(parts)


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
    """Write the page; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quire.serve.api.fields", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args(argv).folder
    (folder / PAGE).write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
