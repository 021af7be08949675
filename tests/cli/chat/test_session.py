"""Commands of a chat: /system, /set, /model, /regen, /save, /load, each with wrong input.

Covers `cli/chat/session.py` and `cli/chat/conversation.py`.
"""

import json
from pathlib import Path

import pytest

from quire.base.errors import EngineError
from tests.cli.test_chat import Parrot, chat, contents

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_system_command_sets_the_system_message(capsys: Capture, monkeypatch: Patch) -> None:
    target = Parrot()
    assert chat(monkeypatch, target, "/system\none\n/system Be kind.\ntwo\n") == 0
    assert [contents(received) for received in target.received] == [
        ["one"], ["Be kind.", "one", "one", "two"],
    ]  # fmt: skip
    err = capsys.readouterr().err
    assert err == "[system message: none]\n[system message: Be kind.]\n"


def test_set_command_changes_sampling_options(capsys: Capture, monkeypatch: Patch) -> None:
    target = Parrot()
    text = (
        "/set\n/set temperature 0.2\n/set max_tokens 30\n/set stop end\n/set temperature default\n"
    )
    assert chat(monkeypatch, target, text) == 0
    assert target.used[-2:] == [
        {"temperature": 0.2, "max_tokens": 30, "stop": ["end"]},
        {"max_tokens": 30, "stop": ["end"]},
    ]
    assert "[temperature 0.2, max_tokens 30]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/set heat 3", "there is no sampling option 'heat'; there are temperature,"),
        ("/set temperature warm", "temperature must be a number, or `default`, got 'warm'"),
        ("/set top_k 0.5", "top_k must be a whole number"),
        ("/set stop", "stop must be a text"),
        ("/set temperature 9", "too hot"),
        ("/model other", "no model other"),
        ("/regen", "there is no answer yet"),
        ("/save", "give the path"),
        ("/save /no/where/x", "'/no/where/x' cannot be written: No such file"),
        ("/load", "give the path"),
        ("/load /no/where/x", "'/no/where/x' cannot be read: No such file"),
        ("/sing", "unknown command /sing"),
    ],
)
def test_wrong_commands_report_an_error_and_change_nothing(
    capsys: Capture, monkeypatch: Patch, command: str, message: str
) -> None:
    target = Parrot()
    assert chat(monkeypatch, target, f"{command}\nhello\n") == 0
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "hello\n"
    assert target.used == []


def test_model_command_lists_and_selects_models(capsys: Capture, monkeypatch: Patch) -> None:
    target = Parrot()
    assert chat(monkeypatch, target, "/model\n/model macaw\n") == 0
    assert target.used == ["macaw"]
    assert capsys.readouterr().err == "[models: parrot, macaw]\n[model macaw]\n"


def test_regen_command_replaces_the_last_answer(capsys: Capture, monkeypatch: Patch) -> None:
    target = Parrot()
    assert chat(monkeypatch, target, "one\ntwo\n/regen\nthree\n") == 0
    assert capsys.readouterr().out == "one\ntwo\ntwo\nthree\n"
    assert contents(target.received[2]) == ["one", "one", "two"]
    assert contents(target.received[3]) == ["one", "one", "two", "two", "three"]


@pytest.mark.parametrize("question", ["long", "a"])  # with and without a chunk before the error
def test_failed_regeneration_keeps_the_old_answer(
    monkeypatch: Patch, tmp_path: Path, question: str
) -> None:
    target, path = Parrot(error=EngineError("no.")), tmp_path / "c.json"
    turn = [{"role": "user", "content": question}, {"role": "assistant", "content": "old"}]
    path.write_text(json.dumps({"messages": turn}))
    target.fails_at = min(2, len(question) - 1)
    assert chat(monkeypatch, target, f"/load {path}\n/regen\n/save {path}\n") == 1
    assert json.loads(path.read_text())["messages"] == turn


def test_saved_conversation_can_be_loaded(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    path, target = tmp_path / "c.json", Parrot()
    text = f"/system Be kind.\none\n/save {path}\n/reset\ntwo\n/load {path}\nthree\n"
    assert chat(monkeypatch, target, text) == 0
    assert contents(target.received[-1]) == ["Be kind.", "one", "one", "three"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each["role"] for each in json.loads(path.read_text())["messages"]] == [
        "system", "user", "assistant",
    ]  # fmt: skip
    assert "[loaded 1 turn(s) from" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"messages": 3}', '{"messages": [3]}', "[" * 9000,
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
    ],
)  # fmt: skip
def test_invalid_conversation_files_are_refused(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path, text: str
) -> None:
    path, target = tmp_path / "c.json", Parrot()
    path.write_text(text)
    assert chat(monkeypatch, target, f"one\n/load {path}\ntwo\n") == 0
    assert "is not a conversation" in capsys.readouterr().err
    assert contents(target.received[-1]) == ["one", "one", "two"]
