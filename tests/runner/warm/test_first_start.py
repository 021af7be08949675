"""Which first starts run plain plans without torch; `test_warm_start.py` compares their tokens."""

from pathlib import Path

import pytest

from quire.runner.warm import first_start
from tests.runner.warm.test_warm_start import Run, model  # noqa: F401 (a fixture)


def test_plug_in_model_class_runs_with_torch(
    model: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its head may use torch operations that a traced program does not contain."""
    assert Run(model[0], tmp_path / "own").plain is not None
    monkeypatch.setattr(first_start, "OWN", {})
    assert Run(model[0], tmp_path / "other").plain is None
