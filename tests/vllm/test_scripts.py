"""Each script of examples/vllm runs, or ends with the error that its docstring has. Covers
`vllm/__main__.py`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.random_model import write_seeing_model
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.processes.forks import run_forked
from tests.support.processes.servers import Server
from tests.support.runner.adapters import write_adapter
from tests.vllm.table import NEEDS, ROOT, SCRIPTS, Script

LIMIT_S = 120
SHAPE = (256, 256)  # outputs and inputs of the demo model's output projection
USUAL = ("basic",)  # of the default run; the others are slow


class Models:
    """Arguments of scripts by what they need: models, and servers that start when needed."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._servers: dict[str, str] = {}

    def arguments(self, needs: str) -> list[str]:
        if not needs:
            return []
        if needs.endswith("server"):
            return ["--base-url", self._server(needs)]
        if needs == "adapter":
            module = "model.layers.0.self_attn.o_proj"
            return ["--adapter", str(write_adapter(self._folder / needs, {module: SHAPE}))]
        if needs == "seeing":
            folder = self._folder / needs
            if not folder.exists():
                folder.mkdir()
                write_seeing_model(folder)
            return ["--model", str(folder), "--load-format", "dummy"]
        return ["--model", str(pooling_checkpoint(needs))]

    def _server(self, needs: str) -> str:
        if needs not in self._servers:
            given = ["demo"]
            if needs.startswith("embed"):
                given = [str(pooling_checkpoint("embed")), "--runner", "pooling"]
            server = Server(*given)
            self._stack.callback(server.stop)
            self._servers[needs] = f"{server.url}/v1"
        return self._servers[needs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with ExitStack() as stack:
        yield Models(stack, tmp_path_factory.mktemp("models"))


def marked(script: Script) -> object:
    marks = () if script.name in USUAL else pytest.mark.slow
    return pytest.param(script, id=script.name, marks=marks)


@pytest.mark.parametrize("script", list(map(marked, SCRIPTS)))
def test_a_script_does_what_its_docstring_says(
    script: Script, models: Models, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "quire.vllm", script.path, *models.arguments(script.needs)]
    if script.name in USUAL:  # a fork has imported the modules before, and does not shut down
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
        )
    else:
        done = run_forked(command, LIMIT_S, cwd=tmp_path)
    if script.refused:
        assert done.returncode == 1 and script.refused in done.stderr, done.stderr
    else:
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_every_script_says_what_it_follows() -> None:
    assert len(SCRIPTS) >= 40
    assert len({script.theirs for script in SCRIPTS}) == len(SCRIPTS)
    for script in SCRIPTS:
        assert script.theirs and script.what.endswith(".") and script.needs in NEEDS, script.name
        assert not (script.change and script.refused), script.name


def test_usage(tmp_path: Path) -> None:
    for words, status, text in (
        ([], 2, "usage: python -m quire.vllm SCRIPT"),
        (["--help"], 0, "imports of vllm find quire's names"),
        (["nowhere.py"], 2, "there is no script nowhere.py"),
        (["-m"], 2, "-m needs the name of a module"),
    ):
        command = [sys.executable, "-m", "quire.vllm", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, text in done.stdout + done.stderr) == (status, True), words


def test_a_script_gets_its_arguments_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import vllm\nNAME = vllm.__name__\n")
    (tmp_path / "script.py").write_text(
        "import sys, beside\nprint(beside.NAME, sys.argv[1:], __name__)\nsys.exit(3)\n"
    )
    command = [sys.executable, "-m", "quire.vllm", tmp_path / "script.py", "--x", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "vllm ['--x', '1'] __main__\n"), done.stderr
