"""Generate the tokenizers and token ids of the golden files; their texts are written by hand.

    python -m tests.render.golden.make            shows what would change
    python -m tests.render.golden.make --write    changes it

Texts are never made: write a case's text from the format's description. Nothing is written while
a text differs from what transformers makes of the same conversation and template. The exit status
is 1 if anything differs from the files as they were found.
"""

import difflib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.render.golden_cases import (
    FORMATS,
    ROOT,
    Case,
    read_cases,
    reference,
    text_difference,
)
from tests.support.render.golden_vocabularies import BUILDERS, config

MAX_DIFF = 60  # lines shown per file


def make_format(folder: Path) -> dict[str, str]:
    """Return the generated files of one format: file name -> text."""
    name = folder.name
    backend = BUILDERS[name]()
    cases = json.loads((folder / "cases.json").read_text("utf-8"))
    for case in cases:
        if "text" in case:
            text = "".join(case["text"])
            case["token_ids"] = backend.encode(text, add_special_tokens=False).ids
    return {
        "tokenizer.json": backend.to_str(pretty=False) + "\n",
        "tokenizer_config.json": json.dumps(config(name), indent=1) + "\n",
        "cases.json": dump_cases(cases),
    }


def dump_cases(cases: list[dict[str, Any]]) -> str:
    """Return JSON with a line for each message and each piece of text, and one for all ids."""
    blocks = []
    for case in cases:
        parts = [f"  {_json(key)}: {_value(key, value)}" for key, value in case.items()]
        blocks.append(" {\n" + ",\n".join(parts) + "\n }")
    return "[\n" + ",\n".join(blocks) + "\n]\n"


def _value(key: str, value: Any) -> str:
    if key not in ("messages", "text", "decoded"):
        return _json(value)
    return "[\n" + ",\n".join(f"   {_json(item)}" for item in value) + "\n  ]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def wrong_texts(folder: Path, made: dict[str, str]) -> list[str]:
    """Return differences between the texts of transformers with the new files and our texts."""
    with TemporaryDirectory() as empty:
        copy = Path(empty) / folder.name
        copy.mkdir()
        for path in folder.rglob("*.jinja"):
            target = copy / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
        for name, text in made.items():
            (copy / name).write_text(text, "utf-8")
        cases = [case for case in read_cases(copy) if case.text is not None]
        return [found for case in cases if (found := _wrong_text(case))]


def _wrong_text(case: Case) -> str:
    return text_difference(case, reference(case)[0], "transformers")


def show_change(path: Path, text: str) -> str:
    """Return a diff of one file, empty if the file does not change."""
    old = path.read_text("utf-8") if path.is_file() else ""
    if old == text:
        return ""
    if path.name == "tokenizer.json":  # one line
        return f"{path.parent.name}/{path.name}: another tokenizer, {len(old)} -> {len(text)} bytes"
    label = f"{path.parent.name}/{path.name}"
    lines = list(
        difflib.unified_diff(old.splitlines(), text.splitlines(), label, "made", lineterm="")
    )
    more = [f"... {len(lines) - MAX_DIFF} more lines"] if len(lines) > MAX_DIFF else []
    return "\n".join(lines[:MAX_DIFF] + more)


def run(root: Path, write: bool) -> int:
    """Show what changes under root, write it if `write`, and return the exit status."""
    changed = False
    for folder in (root / name for name in FORMATS):
        made = make_format(folder)
        if wrong := wrong_texts(folder, made):
            print("\n\n".join(wrong))
            print(f"{folder.name}: nothing written; correct the text by hand, or the template.")
            changed = True
            continue
        for name, text in made.items():
            if shown := show_change(folder / name, text):
                print(shown)
                changed = True
                if write:
                    (folder / name).write_text(text, "utf-8")
    if changed and not write:
        print("Nothing was written; look at the changes and run again with --write.")
    return int(changed)


if __name__ == "__main__":
    sys.exit(run(ROOT, "--write" in sys.argv[1:]))
