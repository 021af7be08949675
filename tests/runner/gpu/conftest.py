"""Triton's interpreter on a CPU, as in tests/kernels."""

from tests.kernels.conftest import device, dtype  # noqa: F401 (fixtures)
