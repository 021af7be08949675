"""The installs and builds of make, with a stand-in for Python and pip. A copy of the Makefile runs
in an empty directory; nothing is downloaded or compiled."""

import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = r"""#!/usr/bin/env bash
# Makes an environment of itself, answers what .ci asks for, and notes what pip is asked to do.
here=$(cd "$(dirname "$0")" && pwd)
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\n' > "$3/bin/quire"
        chmod +x "$3/bin/quire" ;;
    *"pip install"*) echo "$*" >> "$PWD/pip.log"
        case "${NO_PACKAGES:-} $*" in
            1*" -r "*) echo "ERROR: no such package"; exit 1 ;;
            1*" -e "*) exec sleep 600 ;;
        esac
        case "$*" in *" -e "*)
            [ -z "${FAILS:-}" ] || { echo "ERROR: no such compiler option"; exit 1; }
            echo "Running command Building editable for quire (pyproject.toml)"
            echo "  *** Building project with Ninja..."
            echo "  [1/2] Building CXX object CMakeFiles/_core.dir/csrc/attention.cpp.o"
            echo "  [2/2] Linking CXX shared module _core.so" ;;
        esac ;;
    "- "*) exec "$REAL_PYTHON" "$@" ;;
esac
exit 0
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(
    project: Path, *targets: str, pass_fds: Sequence[int] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", f"PYTHON={project}/python", *targets]
    given = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command,
        cwd=project,
        env=given | more | {"REAL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        pass_fds=pass_fds,
    )


def builds(project: Path) -> list[str]:
    lines = (project / "pip.log").read_text().splitlines()
    return [line for line in lines if " -e " in line]


def test_serving_builds_for_this_cpu_and_tests_for_all(project: Path) -> None:
    done = make(project, "serve")
    assert done.returncode == 0, done.stdout + done.stderr
    [build] = builds(project)
    assert "--no-deps" in build and "QUIRE_VARIANTS=native" in build
    done = make(project, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(builds(project)) == 2 and "QUIRE_VARIANTS=all" in builds(project)[1]
    assert "pytest-xdist" in (project / ".venv" / "requirements-test.txt").read_text()
    assert "torch>=" in (project / ".venv" / "requirements.txt").read_text()
    before = (project / "pip.log").read_text()
    assert make(project, "serve").returncode == make(project, "install").returncode == 0
    assert (project / "pip.log").read_text() == before, "nothing has changed"


def test_a_change_of_the_sources_builds_once(project: Path) -> None:
    """From nothing, and again when a source is newer."""
    assert make(project, "install").returncode == 0
    assert len(builds(project)) == 1
    later = time.time() + 5
    os.utime(next((project / "csrc").glob("*.cpp")), (later, later))
    assert make(project, "test").returncode == 0
    assert len(builds(project)) == 2


def test_building_shows_how_far_it_is(project: Path) -> None:
    done = make(project, "serve")
    for stage in ("Building project with Ninja...", "[1/2] attention.cpp.o", "[2/2] _core.so"):
        assert re.search(rf"\b\d+ s  {re.escape(stage)}", done.stdout), stage
    assert "Running command" not in done.stdout
    assert "Running command" in (project / ".venv" / "build.log").read_text()


def test_a_build_that_fails_says_why_and_is_done_again(project: Path) -> None:
    done = make(project, "serve", FAILS="1")
    assert done.returncode != 0 and "no such compiler option" in done.stdout
    assert "build.log" in done.stdout
    assert make(project, "serve").returncode == 0 and len(builds(project)) == 2


def test_packages_that_cannot_be_installed_end_the_build(project: Path) -> None:
    """The build runs alongside pip. It holds the pipe open until it ends."""
    reader, writer = os.pipe()
    done = make(project, "serve", pass_fds=(writer,), NO_PACKAGES="1")
    os.close(writer)
    assert done.returncode != 0 and "no such package" in done.stdout
    assert "Building" not in done.stdout
    assert select.select([reader], [], [], 30)[0] and os.read(reader, 1) == b""
    os.close(reader)
    assert make(project, "serve").returncode == 0
