"""`python -m quire.cli.options.reference [FOLDER]`: writes the pages on settings and on other
engines' flags, which are generated as a whole.

    settings.md      every setting, from the configuration's dataclasses and options/groups.py
    other-flags.md   flags of llama.cpp, Ollama, SGLang and TGI, from options/synonyms.py
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.base.settings.config import JSON_SETTINGS
from quire.cli.options.groups import GROUPS, OTHER_VARIABLES, VARIABLES, Group
from quire.cli.options.synonyms import COMMANDS, FLAGS, Synonym
from quire.cli.settings import ENGINE, SHORT_FLAGS, Option, all_options, options_of

FOLDER = Path("docs/use")
MARK = "<!-- written by `make settings` from the configuration; do not edit -->"
KINDS = {int: "whole number", float: "number", str: "text", bool: "on or off"}
SETTINGS_HEAD = f"""\
# Settings

{MARK}

Settings are flags of `quire serve` (see `--help`) and keys of the YAML file of `--config`. All but
groups Server and Security and rows marked "Not in `LLM(...)`" are arguments of `LLM(...)`, too.

- `--max-model-len 4k` is `max-model-len: 4k` in a file, and `max_model_len=4096` in Python.
- A flag overrides the file, and the file overrides the default.
- Numbers may end in `k`, `m`, `g` (powers of 1,000) or `K`, `M`, `G` (powers of 1,024).
- The `--no-` form turns a switch off: `--no-enable-prefix-caching`. In a file: `true` or `false`.
- A flag takes several values one after the other: `--api-key a b`. In a file they are a list.
- A part of a JSON setting may be a flag: `--speculative-config.method ngram`.
"""
OTHERS_HEAD = f"""\
# Flags of other engines

{MARK}

The command line accepts the usual flags of llama.cpp, Ollama, SGLang and TGI. Each becomes a flag
of quire, is ignored with a line in the log, or is answered with what to do instead. A flag that
quire has itself keeps its meaning: `-n` is `--nnodes`. [Flags of vLLM](vllm-flags.md) is the page
for vLLM, and [Settings](settings.md) lists quire's own flags.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages and return the exit status."""
    name = "python -m quire.cli.options.reference"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args(argv).folder
    for file, text in pages().items():
        (folder / file).write_text(text, "utf-8")
    return 0


def pages() -> dict[str, str]:
    """Return the text of each page, by its file's name."""
    return {"settings.md": settings_page(), "other-flags.md": other_flags_page()}


def settings_page() -> str:
    """Return the page with every setting, by group."""
    options = all_options()
    parts = [SETTINGS_HEAD]
    for group in GROUPS:
        rows = [_row(options[name], group) for name in group.settings]
        head = ["| flag | value | default | meaning |", "|---|---|---|---|"]
        title = f"## {group.name.capitalize()}"
        parts.append("\n".join([title, "", _sentence(group.text), "", *head, *rows, ""]))
    rows = [f"| `{name}` | {_sentence(text)} |" for name, text in OTHER_VARIABLES.items()]
    head = ["## Environment variables", "", "| variable | meaning |", "|---|---|"]
    return "\n".join([*parts, *head, *rows, ""])


def other_flags_page() -> str:
    """Return the page with the flags and commands of other engines."""
    flags = [f"| {_codes(each.flags)} | {', '.join(each.engines)} | {_fate(each.meaning)} |"
             for each in FLAGS]  # fmt: skip
    commands = [f"| `{name}` | {_sentence(advice)} |" for name, advice in COMMANDS.items()]
    parts = [
        OTHERS_HEAD, "## Flags", "", "| flag | of | here |", "|---|---|---|", *flags, "",
        "## Commands", "", "| command | instead |", "|---|---|", *commands, "",
    ]  # fmt: skip
    return "\n".join(parts)


def _row(option: Option, group: Group) -> str:
    short = [SHORT_FLAGS[option.name]] if option.name in SHORT_FLAGS else []
    default = option.shown_default
    shown = "" if default is None else f"`{default}`"
    text = _sentence(option.help)
    if option.name in VARIABLES:
        text += f" Environment variable: {_codes(VARIABLES[option.name])}."
    of_engine = options_of(ENGINE)
    is_mixed = any(name in of_engine for name in group.settings)
    if is_mixed and option.name not in of_engine:
        text += " Not in `LLM(...)`."
    return f"| {_codes([option.flag, *short])} | {_value(option)} | {shown} | {text} |"


def _value(option: Option) -> str:
    """Return the kind of an option's value, with its unit."""
    if option.choices:
        more = [" or a plug-in's"] if option.is_open else []
        return ", ".join(f"`{choice}`" for choice in option.shown_choices) + "".join(more)
    words = "".join(f" or `{word}`" for word in option.words)
    kind = "JSON" if option.name in JSON_SETTINGS else option.unit or KINDS[option.kind]
    return f"{kind}, several" if option.several else kind + words


def _fate(meaning: Synonym) -> str:
    """Return how quire treats a flag."""
    parts = []
    if meaning.becomes:
        parts.append(f"`{' '.join(meaning.becomes)}`")
    for value, words in meaning.values.items():
        parts.append(f"`{value}`: " + (f"`{' '.join(words)}`" if words else "the default"))
    others = "other values are " if meaning.values else ""
    if meaning.ignored:
        parts.append(f"{others}ignored: {meaning.ignored}")
    elif meaning.advice:
        parts.append(f"{others}refused: {meaning.advice}" if others else meaning.advice)
    return _sentence("; ".join(parts))


def _codes(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _sentence(text: str) -> str:
    """Return a text as a sentence for a table's cell."""
    first = text[0].upper() + text[1:]
    return first.replace("|", "\\|") + "."


if __name__ == "__main__":
    sys.exit(main())
