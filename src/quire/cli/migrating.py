"""`python -m quire.cli.migrating [FILE]`: writes vLLM's flags into docs/use/vllm-flags.md.

The page stays as it is but for what stands between the two marks.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli.settings import ALIASES, SHORT_FLAGS, Option, all_options
from quire.serve.vllm_flags import GROUPS, VllmSetting

PAGE = Path("docs/use/vllm-flags.md")
BEGIN = "<!-- flags: written by `make migrating` -->"
END = "<!-- flags: end -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quire.cli.migrating", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PAGE)
    path: Path = parser.parse_args(argv).file
    path.write_text(page(path.read_text("utf-8")), "utf-8")
    return 0


def page(text: str) -> str:
    """Return a page with the flags as they are now. Raises ConfigError for one without the
    marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page has no lines {BEGIN} and {END}, between which the flags go.")
    return f"{before}{BEGIN}\n\n{_tables()}\n{END}{behind}"


def _tables() -> str:
    options = all_options()
    parts = []
    for title, settings in GROUPS.items():
        rows = [f"| {_flags(name, each)} | {_fate(name, each, options)} |"
                for name, each in settings.items()]  # fmt: skip
        parts.append("\n".join([f"### {title}", "", "| flag | here |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _flags(name: str, theirs: VllmSetting) -> str:
    """Return all spellings of a flag."""
    same = [alias for alias, ours in ALIASES.items() if ours == name]
    short = [SHORT_FLAGS[name]] if name in SHORT_FLAGS else list(theirs.short)
    return ", ".join(f"`{flag}`" for flag in (*map(_flag, (name, *same)), *short))


def _fate(name: str, theirs: VllmSetting, options: dict[str, Option]) -> str:
    """Say what becomes of a flag."""
    reason = theirs.reason.replace("|", "\\|")
    if theirs.is_same:
        default = options[name].default
        shown = "" if default in (None, (), "", False) else f"default `{_shown(default)}`"
        return "the same" + "".join(f"; {each}" for each in (shown, reason) if each)
    if theirs.becomes:
        return f"{reason}: `{_flag(theirs.becomes)}`"
    if theirs.harmless is None:
        return f"ignored: {reason}"
    if theirs.is_switch:
        off = _flag(f"no_{name}")
        if theirs.harmless == (True,):
            return f"ignored: {reason}; `{off}` is **refused**"
        return f"**refused**: {reason}; `{off}` is ignored"
    values = " and ".join(f"`{_shown(value)}`" for value in theirs.harmless)
    return f"**refused**: {reason}" + (f"; {values} is ignored" if values else "")


def _shown(value: object) -> str:
    return str(value) if value != "" else '""'


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
