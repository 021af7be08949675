"""The golden cases: how they are stored, and their results in transformers.

<format>/cases.json is a list of objects:

    name            what the case pins
    messages        the messages as a client sends them
    options         add_generation_prompt (default true), continue_final_message, tools,
                    template_kwargs, template (by name), now (the current day)
    text            the prompt, written by hand from the format's description, in pieces
    decoded         what the ids decode to, where the tokenizer changes the text
    token_ids       filled in by `make`
    special_tokens  how many of the ids are special
    error           instead of text and ids: the error message of the template
"""

import difflib
import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import PreTrainedTokenizerFast

from quire.render.templates.chat_template import ChatOptions

ROOT = Path(__file__).parents[2] / "render" / "golden"
FORMATS = ("llama3", "qwen3", "mistral", "gemma")
TAKES_PARTS = ("gemma",)
OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "template_kwargs")


@dataclass(frozen=True)
class Case:
    """One conversation and its expected prompt; the module describes the fields."""

    folder: Path
    name: str
    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    decoded: str | None = None
    token_ids: list[int] | None = None
    special_tokens: int | None = None
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.name}"

    @property
    def chat_options(self) -> ChatOptions:
        return ChatOptions(**{key: self.options[key] for key in OPTIONS if key in self.options})

    @property
    def template(self) -> str | None:
        return self.options.get("template")

    @property
    def now(self) -> datetime:
        return datetime.fromisoformat(self.options.get("now", "2001-01-01"))


def read_cases(folder: Path) -> list[Case]:
    """Return the cases of one format."""
    values = json.loads((folder / "cases.json").read_text("utf-8"))
    for value in values:
        for key in value.keys() & {"text", "decoded"}:
            value[key] = "".join(value[key])
    return [Case(folder, **value) for value in values]


@cache
def transformers_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def reference(case: Case) -> tuple[str, list[int]]:
    """Return the text and ids of transformers; raise jinja2's TemplateError for a refusal.

    This parses arguments and joins parts for templates that accept only text, as a server does
    before it renders.
    """
    options = case.chat_options
    given = {
        "conversation": [_as_template_wants(message, case) for message in case.messages],
        "tools": options.tools,
        "chat_template": _template_text(case),
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
        **options.template_kwargs,
    }
    tokenizer = transformers_tokenizer(case.folder)
    with mock.patch("transformers.utils.chat_template_utils.datetime") as clock:
        clock.now.return_value = case.now
        text = tokenizer.apply_chat_template(**given, tokenize=False)
        ids = tokenizer.apply_chat_template(**given, tokenize=True, return_dict=False)
    return text, ids


def _template_text(case: Case) -> str:
    """Read the template; older releases of transformers cannot load named template files."""
    named = f"additional_chat_templates/{case.template}.jinja"
    return (case.folder / (named if case.template else "chat_template.jinja")).read_text("utf-8")


def _as_template_wants(message: dict[str, Any], case: Case) -> dict[str, Any]:
    copy = json.loads(json.dumps(message))
    if isinstance(copy["content"], list) and case.folder.name not in TAKES_PARTS:
        copy["content"] = "\n".join(part["text"] for part in copy["content"])
    for call in copy.get("tool_calls", []):
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copy


def text_difference(case: Case, made: str, by: str) -> str:
    """Return an empty text if the texts are equal; otherwise, the case's name and a diff."""
    return _difference(case, by, _lines(case.text or ""), _lines(made))


def ids_difference(case: Case, made: list[int], by: str) -> str:
    """Return an empty text if the ids are equal; otherwise, the case's name and a diff."""
    known = transformers_tokenizer(case.folder)
    wanted, got = (
        [f"{token_id:5} {known.convert_ids_to_tokens(token_id)}" for token_id in ids]
        for ids in (case.token_ids or [], made)
    )
    return _difference(case, by, wanted, got)


def _lines(text: str) -> list[str]:
    return [repr(line) for line in text.splitlines(keepends=True)]


def _difference(case: Case, by: str, wanted: list[str], got: list[str]) -> str:
    if wanted == got:
        return ""
    diff = difflib.unified_diff(wanted, got, f"pinned in {case.folder.name}/cases.json", by,
                                lineterm="")  # fmt: skip
    return "\n".join([f"{case}", *diff])
