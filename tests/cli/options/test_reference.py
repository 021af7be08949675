"""docs/use/settings.md and other-flags.md agree with the configuration and the tables."""

from pathlib import Path

from quire.cli.options.reference import main, pages
from quire.cli.options.synonyms import SYNONYMS
from quire.cli.settings import all_options
from tests.structure.test_house import ROOT

MAX_LINES, MAX_COLUMNS = 250, 120


def test_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    for name, text in pages().items():
        assert (tmp_path / name).read_text("utf-8") == text
        assert (ROOT / "docs" / "use" / name).read_text("utf-8") == text, "run `make settings`"
        assert "written by `make settings`" in text
        lines = text.splitlines()
        assert len(lines) <= MAX_LINES
        assert all(len(line) <= MAX_COLUMNS for line in lines if not line.startswith("|"))


def test_each_setting_has_a_row() -> None:
    text = pages()["settings.md"]
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(all_options())
    assert "| `--block-size` | tokens | `16` | Size of a KV block. |" in rows
    assert any("| `--port` | whole number | `8000` | TCP port to listen on" in row for row in rows)
    [key] = [row for row in rows if "`--api-key`" in row]
    assert "Environment variable: `QUIRE_API_KEY`, `VLLM_API_KEY`." in key
    [role] = [row for row in rows if "`--response-role`" in row]
    assert role.endswith("Not in `LLM(...)`. |")


def test_each_flag_of_other_engines_is_listed() -> None:
    text = pages()["other-flags.md"]
    assert all(f"`{flag}`" in text for flag in SYNONYMS)
    assert "`0`: `--device cpu`; other values are ignored:" in text
