"""Environments and models, made in the scratch directory when an engine first needs them.

    SCRATCH/venvs/NAME, SCRATCH/models/SHAPE, SCRATCH/models/SHAPE-SOURCE, SCRATCH/logs/*.log

Complete ones are used again; a failure raises Unavailable with the reason.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.cpu.checkpoints import is_written, write_checkpoint, write_gguf_file
from benchmarks.cpu.compressed import write_compressed
from benchmarks.cpu.engines import (
    CTRANSLATE2_EXPORT,
    K_QUANT,
    LLAMA,
    OPENVINO_EXPORT,
    Engine,
    Environment,
    export_command,
    quantise_command,
)
from benchmarks.cpu.workloads import Shape

MAX_S = 3600.0
BUILD_JOBS = "2"


class Unavailable(Exception):
    """An engine cannot run here; the message is one line."""


@dataclass
class Scratch:
    """pythons: interpreters given by hand, by the environment's name."""

    directory: Path
    pythons: dict[str, Path] = field(default_factory=dict)

    def python(self, environment: Environment | None) -> Path:
        """Return the interpreter of a complete environment. Raises Unavailable."""
        if environment is None:
            return Path(sys.executable)
        if environment.name in self.pythons:
            return self.pythons[environment.name]
        directory = self.directory / "venvs" / environment.name
        done, python = directory / "complete.json", directory / "bin" / "python"
        if not done.exists():
            self._install(environment, directory, python)
            done.write_text(json.dumps(self._versions(python)))
        return python

    def versions(self, environment: Environment | None) -> dict[str, str]:
        """Return the versions of an environment's requested distributions."""
        return self._versions(self.python(environment))

    def model(self, source: str, shape: Shape) -> Path:
        """Return the path of an engine's form of a model of random weights. Raises Unavailable."""
        checkpoint = self.directory / "models" / shape.name
        if not is_written(shape, checkpoint):
            self._forget_forms(shape.name)
        write_checkpoint(shape, checkpoint)
        return self.form(source, checkpoint, shape.name, shape.hidden)

    def _forget_forms(self, name: str) -> None:
        """Delete engines' forms of a checkpoint that is written again."""
        for form in (self.directory / "models").glob(f"{name}-*"):
            if form.is_dir():
                shutil.rmtree(form)
            else:
                form.unlink()

    def form(self, source: str, checkpoint: Path, name: str, hidden: int) -> Path:
        """Return the path of an engine's form of a checkpoint. Raises Unavailable."""
        models = self.directory / "models"
        models.mkdir(parents=True, exist_ok=True)
        peer, _, kind = source.partition("-")
        if peer == "checkpoint":
            return checkpoint
        if kind == K_QUANT:
            target = models / f"{name}-{kind}.gguf"
            plain = write_gguf_file(checkpoint, "f16", models / f"{name}-f16.gguf")
            if not target.exists():
                unfinished = target.with_suffix(".unfinished")
                command = [str(self.python(LLAMA)), *quantise_command(kind, plain, unfinished)]
                self.run_tool(f"quantise-{target.name}", command)
                unfinished.rename(target)
            return target
        if peer == "gguf":
            return write_gguf_file(checkpoint, kind, models / f"{name}-{kind}.gguf")
        target = models / f"{name}-{source}"
        if peer == "compressed":
            return write_compressed(checkpoint, int(kind.removeprefix("int")), target)
        if not (target / "complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            exporter = OPENVINO_EXPORT if peer == "openvino" else CTRANSLATE2_EXPORT
            binaries = self.python(exporter).parent
            command = export_command(source, hidden, checkpoint, target, binaries)
            self.run_tool(f"export-{target.name}", command)
            (target / "complete").touch()
        return target

    def _install(self, environment: Environment, directory: Path, python: Path) -> None:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        name = f"install-{environment.name}"
        self.run_tool(name, [sys.executable, "-m", "venv", str(directory)])
        packages = list(environment.packages)
        if environment.alone:
            self.run_tool(name, [*pip, "install", "--no-deps", environment.alone])
            packages += requirements_of(environment, directory)
        self.run_tool(name, [*pip, "install", *packages], dict(environment.variables))
        if environment.unwanted:
            self.run_tool(name, [*pip, "uninstall", "-y", *environment.unwanted])

    def _versions(self, python: Path) -> dict[str, str]:
        command = [str(python), "-m", "pip", "list", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True)
        listed = json.loads(done.stdout) if done.returncode == 0 else []
        return {package["name"]: package["version"] for package in listed}

    def run_tool(
        self, name: str, command: list[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """Run a command with low priority, and append its output to a log. Raises Unavailable."""
        log = self.directory / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{name} (log: {log})", file=sys.stderr, flush=True)
        jobs = {"CMAKE_BUILD_PARALLEL_LEVEL": BUILD_JOBS, "OMP_NUM_THREADS": BUILD_JOBS}
        with log.open("a") as out:
            try:
                subprocess.run(
                    ["nice", "-n", "10", *command], check=True, timeout=MAX_S, stdout=out,
                    stderr=subprocess.STDOUT, env=os.environ | jobs | dict(variables or {}),
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as error:
                raise Unavailable(f"{name} failed: {type(error).__name__}, see {log}") from error


def requirements_of(environment: Environment, directory: Path) -> list[str]:
    """Return the requirements of the package that was installed alone, without the omitted ones."""
    name = Requirement(environment.alone).name
    (site,) = directory.glob("lib/python*/site-packages")
    (found,) = distributions(name=name, path=[str(site)])
    required = [Requirement(line) for line in found.requires or []]
    return [
        f"{each.name}{_extras(each)}{each.specifier}"
        for each in required
        if each.name not in environment.omitted
        and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def prepare(scratch: Scratch, engine: Engine, shapes: set[Shape]) -> None:
    """Prepare everything that the engine needs. Raises Unavailable."""
    scratch.python(engine.environment)
    for shape in sorted(shapes, key=lambda shape: shape.name):
        scratch.model(engine.source, shape)
