"""What docs/results/numbers.md shows: all parts, in their order."""

from benchmarks.numbers.cpu import CPU, MODELS
from benchmarks.numbers.engine import MEMORY, SCHEDULER, SERVER
from benchmarks.numbers.others import GPU, PAPER, ROBUSTNESS

PARTS = (SERVER, SCHEDULER, MEMORY, CPU, MODELS, GPU, PAPER, *ROBUSTNESS)
