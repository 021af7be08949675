"""Values that are set in other programs' settings, and reverted."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.cli.launch.settings_files import (
    JsonFile,
    OwnFile,
    SettingsFile,
    YamlFile,
    change,
    revert,
)

VALUES = {"env": {"URL": "http://a", "API_KEY": "s3cret"}, "model": "m"}
YAML = "# mine\nmodel: old  # a comment\ndark-mode: true\n"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def files(folder: Path) -> list[SettingsFile]:
    yaml = YamlFile(folder / "a.yml", {"model": "m", "api-key": "s3cret"})
    return [JsonFile(folder / "a.json", VALUES), yaml, OwnFile(folder / "a.toml", "model = 1\n")]


@pytest.mark.parametrize("which", range(3))
def test_revert_removes_a_created_file(tmp_path: Path, which: int) -> None:
    settings = files(tmp_path / "new")[which]
    change(settings, "x").write("x")
    assert settings.path.stat().st_mode & 0o777 == 0o600, "it may hold a key"
    assert change(settings, "x").is_done
    assert revert("x") == str(settings.path)
    assert not settings.path.exists()
    assert revert("x") is None


@pytest.mark.parametrize(
    ("which", "text"),
    [(0, '{"env": {"URL": "old", "A": 1},\n   "b": [1]}'), (1, YAML), (2, "model = 0\n")],
)
def test_revert_restores_the_bytes_of_a_file(tmp_path: Path, which: int, text: str) -> None:
    """This holds after two changes with different values."""
    settings = files(tmp_path)[which]
    settings.path.write_text(text)
    settings.path.chmod(0o644)
    change(settings, "x").write("x")
    again = [
        JsonFile(settings.path, {"model": "n"}), YamlFile(settings.path, {"model": "n"}),
        OwnFile(settings.path, "n"),
    ][which]  # fmt: skip
    change(again, "x").write("x")
    assert settings.path.read_text() != text
    assert settings.path.stat().st_mode & 0o777 == 0o644
    revert("x")
    assert settings.path.read_text() == text


def test_json_revert_keeps_later_edits(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"env": {"URL": "old"}, "b": 1}))
    change(JsonFile(path, VALUES | {"deep": {"er": {"x": 1}}}), "x").write("x")
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["env"] == {"URL": "http://a", "API_KEY": "s3cret"} and found["b"] == 1
    found["model"], found["c"] = "theirs", 2
    path.write_text(json.dumps(found))
    revert("x")
    expected = {"env": {"URL": "old"}, "b": 1, "model": "theirs", "c": 2}
    assert json.loads(path.read_text()) == expected


def test_second_change_of_an_edited_file_can_be_reverted(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"env": {"URL": "old"}}))
    change(JsonFile(path, VALUES), "x").write("x")
    found: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"c": 2}, indent=2) + "\n")
    assert change(JsonFile(path, VALUES), "x").is_done
    change(JsonFile(path, {"env": {"URL": "http://b"}}), "x").write("x")
    assert json.loads(path.read_text()) == {"env": {"URL": "http://b"}, "c": 2}
    revert("x")
    assert json.loads(path.read_text()) == {"env": {"URL": "old"}, "c": 2}


def test_yaml_revert_keeps_comments_and_later_edits(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(YAML)
    change(YamlFile(path, {"model": "m", "api-key": "k"}), "x").write("x")
    assert path.read_text() == '# mine\nmodel: "m"\ndark-mode: true\napi-key: "k"\n'
    path.write_text(path.read_text().replace("true", "false") + "more: 1\n")
    revert("x")
    assert path.read_text() == YAML.replace("true", "false") + "more: 1\n"


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        (JsonFile, '{"a": 1, // why\n}', "Set these values by hand"),
        (JsonFile, "[1]", "no JSON object"),
        (YamlFile, "a: [", "not valid YAML"),
        (YamlFile, "{env: 1, x: 2}", "set env there by hand"),
        (YamlFile, "env:\n  - a\n  - b\n", "set env there by hand"),
        (YamlFile, "a: 1\n---\nb: 2\n", "not valid YAML|by hand"),
    ],
)
def test_unsupported_files_are_refused_and_unchanged(
    tmp_path: Path, settings: Any, text: str, message: str
) -> None:
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        change(settings(path, {"env": "m"}), "x")
    assert path.read_text() == text


def test_edited_own_file_is_not_removed(tmp_path: Path) -> None:
    settings = OwnFile(tmp_path / "a.toml", "a = 1\n")
    change(settings, "x").write("x")
    settings.path.write_text("a = 2\n")
    with pytest.raises(ConfigError, match="was changed since"):
        revert("x")
    assert "-a = 2\n+a = 1" in change(settings, "x").shown()


def test_shown_changes_contain_no_secrets(tmp_path: Path) -> None:
    for settings in files(tmp_path):
        shown = change(settings, "x").shown()
        assert "s3cret" not in shown and "model" in shown


@pytest.mark.parametrize(
    "line",
    [
        '{"env": {"GITHUB_TOKEN": "s3cret", "ANTHROPIC_AUTH_TOKEN": "s3\\"cret"}, "b": 1}',
        '"CLIENT_SECRET": "s3cret",', "openai-api-key: s3 cret", "password = 's3cret'",
        "api_key: s3cret # mine",
    ],
)  # fmt: skip
def test_credentials_are_masked_in_every_syntax(tmp_path: Path, line: str) -> None:
    """The name of the test, which is in the path that is shown, must not contain the value."""
    settings = OwnFile(tmp_path / "a", "model: x\n")
    settings.path.write_text(line + "\n")
    shown = change(settings, "x").shown()
    assert "cret" not in shown.replace("CLIENT_SECRET", "") and "***" in shown
    assert "max_tokens: 5" in change(OwnFile(tmp_path / "b", "max_tokens: 5\n"), "y").shown()
