"""An environment for each client, made from requirements/NAME.txt when that file changes."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".venv-clients"
CLIENTS = tuple(sorted(path.name.removesuffix("_cases.py") for path in HERE.glob("*_cases.py")))
# No telemetry is sent, and no file is fetched.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
}
OTHERS_KEYS = (
    "ANTHROPIC_", "OPENAI_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "VLLM_", "PYTEST_",
    "PYTHONPATH",
)  # fmt: skip


def python_of(client: str) -> Path:
    """Return the Python of a client's environment, which is made if it is missing."""
    folder = FOLDER / client
    required = requirements(client)
    stamp = folder / "installed.txt"
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == required:
        return python
    print(f"making {folder.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    files = ["-r", "/dev/stdin"]
    if "\ntorch" not in required:
        files += ["-c", HERE / "requirements" / "constraints.txt"]
    subprocess.run([*pip, *files], input=required, text=True, check=True)
    stamp.write_text(required)
    return python


def requirements(client: str) -> str:
    """Return the requirements of a client: its own packages, and pytest."""
    return "pytest>=8\n" + (HERE / "requirements" / f"{client}.txt").read_text()


def version_of(client: str) -> str:
    """Return the version of the first package that a client's requirements name."""
    name = requirements(client).splitlines()[1].partition(">")[0].partition("[")[0]
    [packages] = (FOLDER / client / "lib").glob("python*/site-packages")
    [version] = {
        found.version
        for found in distributions(path=[str(packages)])
        if found.name.replace("_", "-") == name
    }
    return f"{name} {version}"


def variables(urls: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of a client's process. urls: servers by model."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(OTHERS_KEYS)
    }
    places = {f"QUIRE_{model.upper()}_URL": url for model, url in urls.items()}
    return inherited | QUIET | places
