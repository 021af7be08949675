"""`python -m quire.cli.migrating [FOLDER]`: writes vLLM's flags into docs/use/vllm-flags*.md.

A page names the groups of flags that it shows, in the line `<!-- flags of GROUP; GROUP: written by
`make migrating` -->`. The tables stand between this line and `<!-- flags: end -->`. Other lines of
the page stay as they are.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli.settings import ALIASES, SHORT_FLAGS, Option, all_options
from quire.serve.vllm_flags import GROUPS, VllmSetting

FOLDER = Path("docs/use")
PAGES = "vllm-flags*.md"
BEGIN = re.compile(r"<!-- flags of ([^:]+): written by `make migrating` -->")
END = "<!-- flags: end -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages of a folder; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quire.cli.migrating", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args(argv).folder
    for path in sorted(folder.glob(PAGES)):
        path.write_text(page(path.read_text("utf-8")), "utf-8")
    return 0


def groups_of(text: str) -> list[str]:
    """Return the groups of flags that a page names.

    Raises ConfigError for a page without marks and for an unknown group."""
    begin = BEGIN.search(text)
    if begin is None or END not in text[begin.end() :]:
        raise ConfigError(
            "the page lacks the lines `<!-- flags of GROUP; GROUP: written by `make migrating` -->`"
            f" and `{END}`; add them, and the tables go between them."
        )
    names = begin[1].split("; ")
    if unknown := [name for name in names if name not in GROUPS]:
        raise ConfigError(
            f"there is no group of flags {unknown[0]!r}; name one of: {'; '.join(GROUPS)}."
        )
    return names


def page(text: str) -> str:
    """Return a page with the current flags of its groups. Raises ConfigError as `groups_of`."""
    names = groups_of(text)
    begin = BEGIN.search(text)
    assert begin is not None
    after = text[begin.end() :].partition(END)[2]
    return f"{text[: begin.end()]}\n\n{_tables(names)}\n{END}{after}"


def _tables(names: Sequence[str]) -> str:
    options = all_options()
    parts = []
    for title in names:
        rows = [f"| {_flags(name, each)} | {_fate(name, each, options)} |"
                for name, each in GROUPS[title].items()]  # fmt: skip
        parts.append("\n".join([f"## {title}", "", "| flag | here |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _flags(name: str, theirs: VllmSetting) -> str:
    """Return all spellings of a flag."""
    same = [alias for alias, ours in ALIASES.items() if ours == name]
    short = [SHORT_FLAGS[name]] if name in SHORT_FLAGS else list(theirs.short)
    return ", ".join(f"`{flag}`" for flag in (*map(_flag, (name, *same)), *short))


def _fate(name: str, theirs: VllmSetting, options: dict[str, Option]) -> str:
    """Describe how quire treats a flag."""
    reason = theirs.reason.replace("|", "\\|")
    if theirs.is_same:
        default = options[name].default
        shown = "" if default in (None, (), "", False) else f"default `{_shown(default)}`"
        return "the same" + "".join(f"; {each}" for each in (shown, reason) if each)
    if theirs.becomes:
        return f"becomes {reason}: `{_flag(theirs.becomes)}`"
    if theirs.harmless is None:
        return f"ignored: {reason}"
    if theirs.is_switch:
        off = _flag(f"no_{name}")
        if theirs.harmless == (True,):
            return f"ignored: {reason}; `{off}` is **refused**"
        return f"**refused**: {reason}; `{off}` is ignored"
    values = " and ".join(f"`{_shown(value)}`" for value in theirs.harmless)
    verb = "are" if len(theirs.harmless) > 1 else "is"
    return f"**refused**: {reason}" + (f"; {values} {verb} ignored" if values else "")


def _shown(value: object) -> str:
    return str(value) if value != "" else '""'


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
