"""The files for running a server in the repository: the files and flags that they name exist."""

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.base.events import Admitted, Finished, Planned, Queued, Stepped
from quire.base.settings.cache_config import CacheConfig
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics
from tests.engine.observability.test_metrics import feed, idle_scheduler

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "quire.json"
METRIC = re.compile(r"\b(?:quire:|process_)\w+")
SELECTED = re.compile(r"(\w+)\s*=~?\s*\"")
GROUPED = re.compile(r"by \(([^)]*)\)")
OF_PROMETHEUS = {"job", "instance"}


def served() -> dict[str, set[str]]:
    """The samples of a server that has done a bit of everything: name -> labels."""
    metrics = EngineMetrics(num_rows=4, max_model_len=100, counts_hits=True)
    feed(
        metrics,
        Queued(0.0, "a", 8, tenant="key 1"),
        Admitted(0.0, "a", 0, 4),
        Planned(0.0, 0, 1, 8),
        Stepped(1.0, 0, np.asarray([0], np.int32), 8, 0.1, 1, 2, (1,)),
        Finished(2.0, "a", "stop", 5),
    )
    text = Exposition(metrics, idle_scheduler().view, "fox", CacheConfig()).text()
    families = text_string_to_metric_families(text)
    return {s.name: set(s.labels) for family in families for s in family.samples}


def queries(node: Any) -> Iterator[str]:
    """All that is asked of Prometheus, in panels and variables."""
    if isinstance(node, list):
        for each in node:
            yield from queries(each)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    known, num = served(), 0
    for query in queries(json.loads(DASHBOARD.read_text())):
        names = METRIC.findall(query)
        num += bool(names)
        asked = {label for group in GROUPED.findall(query) for label in group.split(", ")}
        asked |= set(SELECTED.findall(query))
        for name in names:
            assert name in known, f"there is no {name}: {query}"
            assert asked <= known[name] | OF_PROMETHEUS, query
    assert num > 30


def test_panels_have_places_and_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) == 23


def test_the_image_copies_what_there_is_and_is_given() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    given = [line[1:] for line in ignored if line.startswith("!")]
    copied = [
        name
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert set(copied) == set(given)


def test_wheels_are_built_for_the_pythons_that_are_named() -> None:
    """The image's Python is one of them, the oldest one that quire runs on is another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = re.findall(r"cp3(\d+)-", " ".join(project["tool"]["cibuildwheel"]["build"]))
    [oldest] = re.findall(r">=3\.(\d+)", project["project"]["requires-python"])
    [image] = re.findall(r"ARG PYTHON=3\.(\d+)", (ROOT / "Dockerfile").read_text())
    assert oldest == built[0] and image in built


def test_the_images_first_words_are_a_command() -> None:
    """What a container does if nothing is said, and what the image is tried with, are taken."""
    text = (ROOT / "Dockerfile").read_text()
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    [given] = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    [tried] = re.findall(r"quire (generate [^\\\n]*)", text)
    assert json.loads(entry) == ["quire"]
    for words in (json.loads(given), shlex.split(tried)):
        command = [sys.executable, "-m", "quire.cli.main", *words, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and f"quire {words[0]}" in done.stdout, done.stderr


def test_a_wheel_is_checked(tmp_path: Path) -> None:
    """One of just this package passes; what is too much or missing is named."""
    source = ROOT / "src"
    files = [
        path
        for path in source.rglob("*")
        if path.is_file() and not any(fnmatch.fnmatch(path.name, p) for p in ("*.pyc", "*.so"))
    ]

    def told(*more: str, without: str = "") -> str:
        path = tmp_path / "quire-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for file in files:
                if file.name != without:
                    wheel.writestr(file.relative_to(source).as_posix(), b"")
            for name in more:
                wheel.writestr(name, b"quire = quire")
        command = [sys.executable, ROOT / ".ci" / "check-wheel", path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == (0 if "as it should be" in done.stdout else 1)
        return done.stdout

    info = ("quire-1.dist-info/entry_points.txt", "quire-1.dist-info/licenses/LICENSE")
    core = "quire/_core.cpython-312-x86_64-linux-gnu.so"
    assert "as it should be" in told(core, *info)
    assert "tests/conftest.py is too much" in told("tests/conftest.py", core, *info)
    assert "quire/demo/model.safetensors is missing" in told(
        core, *info, without="model.safetensors"
    )
    assert "one C++ core, has none" in told(*info)
    assert "no command" in told(core) and "no LICENSE" in told(core)


@pytest.mark.parametrize("name", ["quire.yaml", "environment"])
def test_the_service_and_its_page_name_the_same_files(name: str) -> None:
    unit = (ROOT / "deploy" / "systemd" / "quire.service").read_text()
    page = (ROOT / "docs" / "operate" / "processes.md").read_text()
    assert f"/etc/quire/{name}" in unit and f"/etc/quire/{name}" in page
