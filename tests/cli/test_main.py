"""All commands: help, wrong usage, and imports, so that help stays fast."""

import re
import subprocess
import sys

import pytest

from quire.cli.main import with_dashes
from tests.support.commands import run

SETTINGS = ("--config FILE", "--log-level {debug,info,warning,error}", "--max-model-len TOKENS")


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("serve", ("--port NUMBER", "TCP port to listen on; 0 picks a free", *SETTINGS)),
        ("serve", ("--shutdown-timeout SECONDS", "(default: 30)", "--no-restart-engine")),
        ("serve", ("usage: quire serve [MODEL ...] [option ...]", "--api-key TEXT [TEXT ...]")),
        ("chat", ("--system TEXT", "--url URL", "--temperature FLOAT", *SETTINGS)),
        ("generate", ("--raw", "--temperature FLOAT", "--block-size TOKENS", *SETTINGS)),
        ("doctor", ("--json", "No weights are loaded", *SETTINGS)),
        ("fit", ("--json", "--device NAME", "how many requests fit")),
        ("bench", ("throughput", "serve")),
    ],
)
def test_help_shows_options_of_each_command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    lines: tuple[str, ...],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = run(capsys, command, "--help", "all")
    assert (status, err) == (0, "")
    assert "--grpc" not in out  # flags of vLLM alone are not listed
    for line in lines:
        assert line in out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for line in ("serve ", "chat ", "generate ", "bench ", "doctor ", "fit "):
        assert f"    {line}" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "COMMAND"),
        ("sing", "there is no command 'sing'; commands are: serve, chat,"),
        ("serv demo", "there is no command 'serv'; did you mean serve?"),
        ("serve --zzz", "there is no option --zzz; `quire serve --help all` lists the options"),
        ("serve --prot 8123", "there is no option --prot (did you mean --port?)"),
        ("bench serve --num-prompt 5", "did you mean --num-prompts?"),
        ("chat --max-model 5", "did you mean --max-model-len?"),
        ("serve --port eighty", "'eighty' is not a number such as 4096, 4k or 2G"),
        ("serve --port 1.5", "'1.5' is not a whole number"),
        ("serve --shutdown-timeout soon", "'soon' is not a number such as 0.9"),
        ("serve demo --port 1 other", "there is no option other (give all models before"),
        ("doctor --max-model-len inf", "'inf' is not a number"),
    ],
)
def test_wrong_usage_exits_with_status_2(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    status, out, err = run(capsys, *line.split())
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "line", ["serve --kv-stor={}", "serve --kv-stor {} --bad {}", "chat -x {}"]
)
def test_value_of_a_misspelt_flag_is_not_shown(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    status, _, err = run(capsys, *line.format("MARKER", "MARKER").split())
    assert status == 2 and "there is no option -" in err
    assert "MARKER" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --port 70000", "port must be from 0 to 65535, got 70000"),
        ("serve one --model two", "there are two models, 'one' and --model 'two'"),
        ("serve --model /nowhere", "there is no directory /nowhere"),
        ("serve --ssl-keyfile key", "ssl_certfile must be given together with ssl_keyfile"),
        ("serve --ssl-keyfile /no --ssl-certfile /no", "ssl_certfile='/no' and ssl_keyfile="),
        ("serve --served-model-name a b/c-1", "--served-model-name took the model 'b/c-1'"),
        ("serve --api-key a shape:gpt2", "--api-key took the model 'shape:gpt2'"),
        ("serve --max-model-len -5", "max_model_len must be at least 1, or auto (-1), got -5"),
        ("chat --api-key secret", "--api-key is for a server; add --url"),
        ("chat --url http://127.0.0.1:1 --block-size 8", "--block-size cannot be used with --url"),
        ("chat --url nonsense", "'nonsense' is not a server's address"),
    ],
)
def test_invalid_settings_are_refused(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    status, out, err = run(capsys, *line.split())
    assert (status, out) == (1, "")
    assert err.startswith("quire: ") and message in err


def test_underscores_in_flags_become_dashes() -> None:
    given = ["--max_model_len=a_b", "--block_size", "my_value", "-x_y", "--", "--as_is"]
    expected = ["--max-model-len=a_b", "--block-size", "my_value", "-x_y", "--", "--as_is"]
    assert list(with_dashes(given)) == expected


HEAVY = {"torch", "fastapi", "uvicorn", "yaml", "transformers", "prometheus_client"}
IMPORTS_OF = """
import sys
from quire.cli.main import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit:
        pass
    print("loaded:", *{name.split(".")[0] for name in sys.modules})
"""


def test_command_line_imports_no_heavy_packages() -> None:
    """`serve` of a missing model runs up to its supervisor."""
    lines = ["--help", "serve --help", "bench serve --help", "serve /no"]
    command = [sys.executable, "-c", IMPORTS_OF, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall("^loaded: (.*)$", done.stdout, re.MULTILINE)
    for line, names in zip(lines, found, strict=True):
        assert "argparse" in names.split()
        assert not HEAVY & set(names.split()), line


def test_server_receives_the_given_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags become fields of the dataclasses, lists become tuples, and MODEL sets the model."""
    from quire.serve import supervisor

    taken: list = []
    monkeypatch.setattr(supervisor, "serve", lambda *given: taken.append(given) or 7)
    line = (
        "serve my-model --api-key a b --api-key c --served-model-name x y --port 0"
        " --no-enable-prefix-caching --device-memory-utilization 0.5 --max-model-len auto"
        " --max_num_seqs 1K --shutdown-timeout 2.5 --restart-engine --log-level warning"
    )
    status, _, _ = run(capsys, *line.split())
    ((engine, server, log_level),) = taken
    assert (status, log_level) == (7, "warning")
    assert (engine.model.model, engine.model.max_model_len) == ("my-model", -1)
    assert (engine.cache.enable_prefix_caching, engine.cache.gpu_memory_utilization) == (False, 0.5)
    assert engine.scheduler.max_num_seqs == 1024
    assert (server.api_key, server.served_model_name) == (("a", "b", "c"), ("x", "y"))
    assert (server.port, server.shutdown_timeout, server.restart_engine) == (0, 2.5, True)
    assert run(capsys, "serve")[0] == 7
    assert (taken[1][0].model.model, taken[1][1].port, taken[1][2]) == ("demo", 8000, "info")
