"""Measure what adapters add to a decoding step on this CPU, and compare it with its limit.

    python -m benchmarks.models.adapters [--model shape:qwen3-0.6b] [--quantization int8]
                                         [--counts 1 4 16 64] [--rank 16] [--scratch DIR]

A step of N rows with 128 tokens of context each uses N different adapters of all linear layers. The
limit of the adapters' part is the time to read their bytes at the machine's bandwidth, measured in
the same run. `without` is the same step of rows without an adapter, by two engines in turn: one can
use adapters, the other cannot. It has medians, and the median of the rounds' ratios.

In a mixture, a row reads its adapter's matrices of the chosen experts only. The step's experts
include their adapters, so the adapters' part of them is the difference to the same step without
adapters.

The scratch directory holds one adapter's weights, which all adapters share as a file; each is
loaded into memory of its own.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.cpu.limits import Ceilings
from benchmarks.kernels.operations import Cost, Machine, Step
from benchmarks.result_files import Row, options_of, write
from quire.base.plan import Plan
from quire.models.checkpoint.adapter_files import PREFIX, WEIGHTS, adapter_digest
from quire.models.parts.experts import ExpertLinear, ExpertList, linears
from quire.models.parts.layers import Linear
from quire.spec.adapter_config import CONFIG
from quire.tools.report import benchmark_parser, print_head

CONTEXT, ROUNDS, MIN_ROUNDS = 128, 12, 3
ADAPT, EXPERTS = "adapt", "experts"  # names of operations in `benchmarks.kernels.operations`
AIM, AIM_WITHOUT = 1.5, 1.01
BYTES = 2  # of a number in bfloat16
Shapes = Mapping[str, tuple[int, int]]  # outputs and inputs of modules


def write_adapters(folder: Path, shapes: Shapes, rank: int, count: int) -> list[Path]:
    """Write adapters of one file of weights and different scales, so that their digests differ."""
    made, tensors = torch.Generator().manual_seed(0), {}
    for name, (outputs, inputs) in shapes.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=made) * 0.02
            tensors[f"{PREFIX}{name}.lora_{part}.weight"] = values.to(torch.bfloat16)
    paths = [folder / str(number) for number in range(count)]
    for number, path in enumerate(paths):
        path.mkdir(parents=True)
        if number:
            (path / WEIGHTS).hardlink_to(paths[0] / WEIGHTS)
        else:
            save_file(tensors, path / WEIGHTS)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + number}
        (path / CONFIG).write_text(json.dumps(config))
    return paths


def shapes_of(model: torch.nn.Module) -> Shapes:
    """Return the shapes of all modules that adapters can change."""
    return {
        name: (rows.count, layer.weight.shape[1])
        for layer in _adapted(model)
        for name, rows in layer.module_rows
    }


def numbers_read(model: torch.nn.Module, rank: int) -> int:
    """Return the numbers of an adapter of a rank that one row reads. A row reads the matrices of
    its own experts only. All experts have one shape."""
    layers = list(_adapted(model))
    found = sum(_inputs_and_outputs(each) for each in layers if not isinstance(each, ExpertLinear))
    for mixture in model.modules():
        if isinstance(mixture, ExpertList):
            first = linears(mixture.gate_up)[0], linears(mixture.down)[0]
            found += mixture.num_chosen * sum(map(_inputs_and_outputs, first))
    return rank * found


def _adapted(model: torch.nn.Module) -> Iterator[Linear]:
    return (each for each in model.modules() if isinstance(each, Linear) and each.adapted)


def _inputs_and_outputs(layer: Linear) -> int:
    """Return the sum over a layer's modules."""
    return sum(layer.weight.shape[1] + rows.count for _, rows in layer.module_rows)


class AdaptedMachine(Machine):
    """A runner with as many adapters as its largest step has rows."""

    def __init__(self, options: argparse.Namespace, steps: list[Step], folder: Path) -> None:
        count = max(step.num_rows for step in steps)
        lora = {"enable_lora": True, "max_loras": count, "max_lora_rank": options.rank}
        super().__init__(options, steps, **lora)
        shapes = shapes_of(self.model.model)
        self.numbers = numbers_read(self.model.model, options.rank)
        self.uses_adapters, self._ids = True, list[str]()
        for slot, path in enumerate(write_adapters(folder, shapes, options.rank, count)):
            self._ids.append(adapter_digest(path))
            self.built.load_adapter(slot, self._ids[-1], str(path))

    def plans(self, step: Step) -> list[Plan]:
        """Make plans whose row i uses adapter i."""
        first, *others = super().plans(step)
        if not self.uses_adapters:
            return [first, *others]
        started = tuple(
            dataclasses.replace(start, adapter_id=self._ids[start.row]) for start in first.started
        )
        return [first.replace(started=started), *others]


@dataclass(frozen=True)
class Part:
    """The adapters' part of a step. limit_s: the longer of reading them and of their arithmetic."""

    adapters: int
    step_s: float
    adapters_s: float
    num_bytes: float
    limit_s: float

    @property
    def ratio(self) -> float:
        return self.adapters_s / self.limit_s


def part_of(
    costs: Mapping[str, Cost],
    without: Mapping[str, Cost],
    count: int,
    numbers: int,
    ceilings: Ceilings,
) -> Part:
    """Return the adapters' part of a step's costs. without: costs of the step without adapters.
    numbers: of an adapter, read by a row."""
    work = Cost(0.0, float(BYTES * numbers * count), 2.0 * numbers * count)
    seconds = costs[ADAPT].seconds
    if EXPERTS in costs:
        seconds += costs[EXPERTS].seconds - without[EXPERTS].seconds
    return Part(count, _seconds(costs), seconds, work.num_bytes, work.lower_bound_s(ceilings))


def measure_without(
    plain: Machine, adapted: AdaptedMachine, steps: list[Step], rounds: int
) -> Iterator[Row]:
    """Yield the times of steps without adapters, by both engines in turn."""
    adapted.uses_adapters = False
    for step in steps:
        times: list[tuple[float, float]] = []
        for round_ in range(rounds):
            order = (plain, adapted) if round_ % 2 else (adapted, plain)
            found = {id(each): _seconds(each.run(step)) for each in order}
            times.append((found[id(plain)], found[id(adapted)]))
        yield {
            "step": f"{step.num_rows} rows without",
            "plain_s": statistics.median(each for each, _ in times),
            "adapted_s": statistics.median(each for _, each in times),
            "ratio": statistics.median(other / each for each, other in times),
            "aim": AIM_WITHOUT,
        }


def _seconds(costs: Mapping[str, Cost]) -> float:
    return sum(cost.seconds for cost in costs.values())


def show(parts: list[Part], without: list[Row], ceilings: Ceilings) -> None:
    """Print both tables."""
    print(f"# reading {ceilings.bytes_per_s / 1e9:.1f} GB/s")
    print(f"{'adapters':>9} {'step ms':>9} {'part ms':>9} {'MB':>8} {'limit ms':>9} {'times':>6}")
    for part in parts:
        print(
            f"{part.adapters:9d} {1e3 * part.step_s:9.2f} {1e3 * part.adapters_s:9.2f}"
            f" {part.num_bytes / 1e6:8.1f} {1e3 * part.limit_s:9.2f} {part.ratio:6.2f}"
        )
    print(f"# aim: {AIM} times the limit")
    for row in without:
        print(
            f"{row['step']}: {1e3 * row['plain_s']:.2f} ms without, {1e3 * row['adapted_s']:.2f} ms"
            f" with enable_lora, ratio {row['ratio']:.4f} (aim: {AIM_WITHOUT})"
        )


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[Part], list[Row], Ceilings]:
    """Measure all steps."""
    steps = [Step.parsed(f"{count}x{CONTEXT}", 0) for count in options.counts]
    adapted = AdaptedMachine(options, steps, folder)
    costs = [adapted.best(step) for step in steps]
    without = list(measure_without(Machine(options, steps), adapted, steps, options.rounds))
    bare = [adapted.best(step) for step in steps]  # its rows use no adapters any more
    ceilings = adapted.ceilings()
    parts = [
        part_of(*both, step.num_rows, adapted.numbers, ceilings)
        for step, *both in zip(steps, costs, bare, strict=True)
    ]
    return parts, without, ceilings


def rows_of(parts: list[Part], without: list[Row]) -> list[Row]:
    """Return the rows of the result file."""
    found: list[dict[str, Any]] = [
        {"step": f"{part.adapters} adapters", **asdict(part), "ratio": part.ratio, "aim": AIM}
        for part in parts
    ]
    return [*found, *without]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of steps without adapters")
    parser.add_argument("--scratch", type=Path, help="a directory for the adapters' file")
    options = parser.parse_args()
    options.chunk = max(options.counts)
    if options.rounds < MIN_ROUNDS or min(options.counts) < 1:
        parser.error(f"--rounds must be at least {MIN_ROUNDS}, and --counts at least 1.")
    print_head(f"{options.model}, {options.quantization or 'bfloat16'}, rank {options.rank}")
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        parts, without, ceilings = measure(options, Path(folder))
    show(parts, without, ceilings)
    settings = options_of(options) | {"ceilings": asdict(ceilings)}
    write(options.output_json, "models.adapters", rows_of(parts, without), settings)


if __name__ == "__main__":
    main()
