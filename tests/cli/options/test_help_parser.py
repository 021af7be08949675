"""Help: the usual options, a group, one option, or everything."""

import pytest

from quire.cli.main import COMMANDS
from quire.cli.options.groups import GROUPS
from quire.cli.settings import all_options
from tests.support.commands import run


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    return out


def test_help_shows_usual_options_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys, "serve", "--help").splitlines()
    begin = lines.index("usual settings:") + 1
    end = lines.index("more help:")
    shown = [line for line in lines[begin:end] if line.startswith("  --")]
    assert 10 <= len(shown) <= 15
    port = next(line for line in shown if "--port" in line)
    assert port.split(maxsplit=2)[1:] == ["NUMBER", "TCP port to listen on (default: 8000)"]
    assert not any("--model " in line for line in lines), "the positional MODEL is shown instead"
    assert "--help cache" in "".join(lines) and "--help all" in "".join(lines)
    assert len(lines) < 60


def test_help_of_a_group_shows_only_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for group in GROUPS:
        out = help_of(capsys, "serve", "--help", group.name)
        shown = {word.strip(",") for word in out.split() if word.startswith("--")}
        for name, option in all_options().items():
            assert (option.flag in shown) >= (name in group.settings), (group.name, name)
        assert out.startswith(f"{group.name} settings:")
    out = help_of(capsys, "serve", "--help", "speculation")
    assert "--port" not in out and "usage" not in out


def test_help_all_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys, "serve", "--help", "all")
    assert all(option.flag in out for option in all_options().values())
    assert "--grpc" not in out, "flags of vLLM alone are not listed"
    assert "bf16" not in out and "fcfs" not in out, "synonyms of values are not listed"


def test_help_of_one_option_shows_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys, "serve", "--help", "dtype")
    assert "{auto,float32,bfloat16,float16,float64}" in out and "--port" not in out


def test_each_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys, "--help")
    for name in COMMANDS:
        assert any(line.split()[:1] == [name] for line in out.splitlines()), name
        assert f"usage: quire {name}" in help_of(capsys, name, "--help")
    assert help_of(capsys, "--help", "serve") == help_of(capsys, "serve", "--help")
    assert help_of(capsys, "--help", "cache") == help_of(capsys, "serve", "--help", "cache")
    everything = help_of(capsys, "--help", "all")
    assert "usage: quire COMMAND" in everything and "--kv-host-gb" in everything


def test_help_of_a_command_shows_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys, "generate", "--help")
    assert "--temperature" in out and "--top-p" not in out and "--model " in out
    out = help_of(capsys, "generate", "--help", "sampling")
    assert "--top-p" in out and "--max-model-len" not in out


def test_benchmark_help_shows_usual_options(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys, "bench", "serve", "--help")
    assert "--request-rate" in out and "--burstiness" not in out
    assert "the server that answers" in out and "address, names" not in out
    assert "--burstiness" in help_of(capsys, "bench", "serve", "--help", "load")


def test_unknown_help_topic_suggests_a_similar_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("serve", "--help", "cahce"), ("--help", "cahce")):
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, "")
        assert "there is no help on 'cahce' (did you mean cache?)" in err
        assert "speculation" in err
