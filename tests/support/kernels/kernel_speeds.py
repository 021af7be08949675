"""Measurements of the core's kernels that tests make up."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.ops.weights import formats
from quire.ops.weights.formats import FORMATS
from quire.ops.weights.kernel_choice import Measurement, Speed


def keep_figures(faster: Mapping[str, str], tile_flops: float = 1e11) -> None:
    """Keep a measurement in which all instruction sets are alike, but for each of these formats one
    that is three times as fast."""
    file, here = formats.measurement_file(), formats.variants()
    found = {
        name: {
            each: Speed(1e10, tile_flops * (9 if each == faster.get(name) else 1)) for each in here
        }
        for name in FORMATS
    }
    file.directory.mkdir(parents=True, exist_ok=True)
    made = Measurement(file.machine, "a made-up CPU", 0.0, 0.1, found)
    file.path.write_bytes(made.encode())
    formats.measurement.cache_clear()


@contextmanager
def own_figures(directory: Path) -> Iterator[None]:
    """Keep measurements there, and let nothing that was measured or forced before count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.delenv("QUIRE_CPU_VARIANT", raising=False)
        formats.measurement.cache_clear()
        yield
    formats.measurement.cache_clear()
