"""Measure each operation of a step on this CPU, and compare it with its limit.

    python -m benchmarks.kernels.operations [--model shape:qwen3-0.6b] [--quantization int8]
                                    [--steps 1x128 16x128 64x128 1x8192 prompt:1024 prompt:8192]

A step `16x128` decodes 16 rows with 128 tokens of context each; `prompt:1024` computes one prompt
in chunks of --chunk tokens. Each operation has its time, summed over the layers, and its share of
the step. It has its minimum of memory bytes and arithmetic, and its share of the limit. The limit
is the longer of two times, both measured in the same run. One reads these bytes at the machine's
bandwidth, the other does the arithmetic at the peak of the format's instructions. Operations in the
cache (norms, rotations, rounding of activations) have no limit there. `rest` is all outside of the
program: gathering inputs, sampling, Python. The fastest of several steps counts, whole. The time
for one thread to see another's write is shown as well. A host that moves virtual cores about
changes it, because they may share a complex of cores or not.
"""

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.cpu.limits import Ceilings, measure_ceilings
from benchmarks.result_files import Row, options_of, write
from quire.base.plan import BlockWrites, Plan, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.models.parts.layers import LMHead
from quire.ops.host.native import needed_core
from quire.ops.host.threads import num_threads
from quire.ops.trace.program import Experts, Instruction, Kind
from quire.ops.weights.formats import rounds_activations
from quire.ops.weights.packed import PackedWeight
from quire.runner.build import build_runner
from quire.runner.native_model import NativeModel
from quire.runner.setup.built import BuiltRunner
from quire.tools.report import benchmark_parser, print_head

STEPS = ("1x128", "16x128", "64x128", "1x8192", "prompt:1024", "prompt:8192")
ROUNDS, PROMPT_ROUNDS = 12, 2
BLOCK_SIZE, POOL_BYTES = 16, 2 << 30
REST, HEAD, ATTENTION = "rest", "head", "attention"


@dataclass(frozen=True)
class Step:
    """A step of num_rows rows, each with `context` tokens at its end. chunk: tokens computed at a
    time, from the first on; 0: the last one alone."""

    name: str
    num_rows: int
    context: int
    chunk: int = 0

    @classmethod
    def parsed(cls, text: str, chunk: int) -> "Step":
        """Read a step as the command line names it. Raises ValueError, with what it may be."""
        found = re.fullmatch(r"(prompt:|[1-9]\d*x)([1-9]\d*)", text, re.ASCII)
        if not found:
            raise ValueError(
                f"--steps: {text!r} is none; take ROWSxTOKENS, such as 16x128, or prompt:TOKENS."
            )
        rows, context = found.groups()
        if rows == "prompt:":
            return cls(text, 1, int(context), chunk)
        return cls(text, int(rows[:-1]), int(context))

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Return the parts in order: tokens known before, and new ones. Decoding rows have decoded
        once before, in a step that does not count, so their start is excluded."""
        if not self.chunk:
            return [(known, 1) for known in range(max(0, self.context - 2), self.context)]
        starts = range(0, self.context, self.chunk)
        return [(start, min(self.chunk, self.context - start)) for start in starts]


ALL = "all"  # the operation of a row that is of the whole step


@dataclass(frozen=True)
class Cost:
    """An operation's work over all layers and chunks: time, bytes of memory that must be read,
    products and sums of floats and of int8."""

    seconds: float = 0.0
    num_bytes: float = 0.0
    floats: float = 0.0
    int8: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Cost(*(a + b for a, b in pairs))

    def lower_bound_s(self, ceilings: Ceilings) -> float:
        """Return the shortest time that a machine of these ceilings takes."""
        arithmetic = self.floats / ceilings.float_per_s + self.int8 / ceilings.int8_per_s
        return max(self.num_bytes / ceilings.bytes_per_s, arithmetic)


class TimedHead:
    """A model whose head's time is measured."""

    def __init__(self, model: NativeModel) -> None:
        self.model, self.seconds = model, 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.model(*args, **named)

    def logits(self, hidden_RD: Any) -> Any:
        began = time.perf_counter()
        found = self.model.logits(hidden_RD)
        self.seconds += time.perf_counter() - began
        return found


class Machine:
    """A runner over random weights, and the ceilings of the machine. settings: more of the
    engine's."""

    def __init__(self, options: argparse.Namespace, steps: Sequence[Step], **settings: Any) -> None:
        longest = max(step.context for step in steps) + 1
        rows = max(step.num_rows for step in steps)
        blocks = max(step.num_rows * -(-(step.context + 1) // BLOCK_SIZE) for step in steps)
        config = config_from_flat(
            model=options.model,
            dtype="bfloat16",
            device="cpu",
            load_format="dummy",
            quantization=options.quantization,
            block_size=BLOCK_SIZE,
            max_model_len=longest,
            max_num_seqs=rows,
            max_num_batched_tokens=max(options.chunk, rows),
            kv_cache_memory_bytes=POOL_BYTES,
            disable_log_stats=True,
            **settings,
        )
        self.built: BuiltRunner = build_runner(config, resolve_model(options.model))
        model = self.built.runner.model
        if not isinstance(model, NativeModel):
            raise SystemExit(f"{options.model} does not run as a program of the C++ core.")
        self.model, self.head = model, TimedHead(model)
        self.built.runner.model = self.head
        if blocks > self.built.memory.num_blocks[0]:
            raise SystemExit(f"the steps need {blocks} blocks of {BLOCK_SIZE}; take shorter ones.")
        self._ceilings = [measure_ceilings(num_threads())]
        self.seconds_apart = [needed_core().seconds_between_threads()]
        self.weight = head_weight(model)
        self._step_id = 0

    def ceilings(self) -> Ceilings:
        """Measure again what the machine can do: the best that was seen counts."""
        self._ceilings.append(measure_ceilings(num_threads()))
        self.seconds_apart.append(needed_core().seconds_between_threads())
        names = self._ceilings[0]
        return Ceilings.of({name: max(each[name] for each in self._ceilings) for name in names})

    def best(self, step: Step) -> dict[str, Cost]:
        """Measure a step several times; the fastest counts."""
        rounds = PROMPT_ROUNDS if step.chunk else ROUNDS
        found = [self.run(step) for _ in range(rounds)]
        return min(found, key=lambda costs: sum(cost.seconds for cost in costs.values()))

    def run(self, step: Step) -> dict[str, Cost]:
        """Carry out a step on fresh rows; returns the cost of each operation."""
        found: dict[str, Cost] = defaultdict(Cost)
        plans = self.plans(step)
        if not step.chunk:
            for plan in plans[:-1]:
                self.built.run(plan)
            plans = plans[-1:]
        for plan in plans:
            self.head.seconds = 0.0
            self.model.compiled.time_phases()
            began = time.perf_counter()
            self.built.run(plan)
            whole = time.perf_counter() - began
            for instructions, seconds in self.model.compiled.phase_times():
                name = operation_name(instructions)
                found[name] += self._cost(instructions, plan, seconds)
                whole -= seconds
            found[HEAD] += product(self.weight, len(plan.sample_rows), self.head.seconds)
            found[REST] += Cost(whole - self.head.seconds)
        return dict(found)

    def plans(self, step: Step) -> list[Plan]:
        """Make plans of a step whose earlier tokens count as computed, whatever their blocks hold.
        Tokens are random; keys that were not computed are zeros or another round's."""
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.built.spec.vocab_size, (step.num_rows, step.context + 1))
        params, rows = SamplingParams(temperature=0.0), np.arange(step.num_rows, dtype=np.int32)
        plans: list[Plan] = []
        for known, new in step.parts:
            is_last = known + new == step.context
            plan = Plan(
                self._step_id,
                rows,
                np.full(len(rows), new, np.int32),
                np.full(len(rows), known, np.int32),
                rows if is_last else rows[:0],
                np.full(len(rows) if is_last else 0, -1, np.int32),
            )
            if not plans:
                given = tokens[:, : step.context].astype(np.int32)
                starts = (
                    RowStart(row, given[row], known, step.context, params, seed=row)
                    for row in range(step.num_rows)
                )
                writes = self._tables(step)
                plan = plan.replace(released=rows, started=tuple(starts), block_writes=writes)
            plans.append(plan)
            self._step_id += 1
        return plans

    def _tables(self, step: Step) -> BlockWrites:
        """Give each row blocks of its own, in all cache groups."""
        num_blocks, num_groups = (
            -(-(step.context + 1) // BLOCK_SIZE),
            len(self.built.spec.cache_groups),
        )
        group, row, index = np.meshgrid(
            np.arange(num_groups), np.arange(step.num_rows), np.arange(num_blocks), indexing="ij"
        )
        block = row * num_blocks + index
        return BlockWrites(*(each.ravel().astype(np.int32) for each in (group, row, index, block)))

    def _cost(self, phase: Sequence[Instruction], plan: Plan, seconds: float) -> Cost:
        first = phase[0]
        if first.kind in (Kind.MULTIPLY, Kind.HEAD_PRODUCT):
            weights = [each.packed for each in phase if each.packed is not None]
            works = (product(weight, plan.num_scheduled_tokens, 0.0) for weight in weights)
            return sum(works, Cost(seconds))
        if first.kind == Kind.EXPERTS:
            layer = self.model.compiled.draft.experts[first.layer]
            return experts(layer, plan.num_scheduled_tokens, seconds)
        if first.kind == Kind.ATTEND:
            return self._attention(first, plan, seconds)
        return Cost(seconds)

    def _attention(self, first: Instruction, plan: Plan, seconds: float) -> Cost:
        """Count pairs of a query and a key that the mask leaves, and each key and value once. A
        latent vector is both."""
        group = next(each for each in self.built.spec.cache_groups if first.layer in each.layers)
        before, new = plan.computed_bound.astype(float), plan.num_tokens.astype(float)
        if not group.keeps_all:
            return Cost(seconds)
        pairs = float((new * before + new * (new + 1) / 2).sum())
        token_bytes = group.block_bytes(1, self.built.dtype.itemsize) / len(group.layers)
        num_bytes = float((before + new).sum()) * token_bytes
        values = first.size or group.head_dim
        return Cost(seconds, num_bytes, 2.0 * pairs * first.heads * (group.head_dim + values))


def product(weight: PackedWeight, num_tokens: int, seconds: float) -> Cost:
    """Count the work of a matrix product; none where no token takes part."""
    outputs, inputs = weight.shape
    operations, num_bytes = 2.0 * num_tokens * outputs * inputs, weight.nbytes * min(num_tokens, 1)
    if rounds_activations(weight.format):
        return Cost(seconds, num_bytes, int8=operations)
    return Cost(seconds, num_bytes, operations)


def experts(layer: Experts, num_tokens: int, seconds: float) -> Cost:
    """Count the work of a layer's experts. Their number with tokens is what uniform choices give on
    average: the router of random weights chooses about so."""
    num_held, num_chosen = len(layer.down), layer.route.num_chosen
    num_used = num_held * (1 - (1 - num_chosen / layer.num_all) ** num_tokens)
    num_pairs = num_tokens * num_chosen * num_held / layer.num_all
    both = (layer.gate_up[0], layer.down[0])
    work = sum((product(weight, 1, 0.0) for weight in both), Cost())
    num_bytes = num_used * sum(weight.nbytes for weight in both)
    return Cost(seconds, num_bytes, work.floats * num_pairs, work.int8 * num_pairs)


def head_weight(model: NativeModel) -> PackedWeight:
    """Find the weight of a model's head."""
    for module in model.model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, LMHead) and isinstance(weight, PackedWeight):
            return weight
    raise SystemExit("the model's head is not packed for the C++ core.")


def operation_name(instructions: Sequence[Instruction]) -> str:
    """Name a phase by what it does."""
    first = instructions[0]
    if first.kind == Kind.MULTIPLY and first.packed is not None:
        outputs, inputs = first.packed.shape
        return f"product {outputs} x {inputs}"
    if first.kind == Kind.HEAD_PRODUCT and first.packed is not None:
        outputs, inputs = first.packed.shape
        return f"{len(instructions)} products {outputs} x {inputs}"
    if first.kind == Kind.ATTEND:
        return ATTENTION
    return " + ".join(dict.fromkeys(each.kind.name.lower() for each in instructions))


def share(part: float, whole: float) -> str:
    """Return a share in per cent, or that there is none."""
    return f"{100 * part / whole:.0f} %" if part and whole else "-"


def show(name: str, costs: dict[str, Cost], ceilings: Ceilings) -> None:
    """Print a table of a step's operations, the longest first."""
    whole_s = sum(cost.seconds for cost in costs.values())
    lower_bound_s = sum(cost.lower_bound_s(ceilings) for cost in costs.values())
    summary = f"limit {1e3 * lower_bound_s:.2f} ms, {share(lower_bound_s, whole_s)}"
    print(f"\n{name}: {1e3 * whole_s:.2f} ms, {summary}")
    print(f"{'operation':<50} {'ms':>9} {'of step':>8} {'MB':>8} {'GFLOP':>8} {'of limit':>9}")
    for operation, cost in sorted(costs.items(), key=lambda item: -item[1].seconds):
        print(
            f"{operation:<50} {1e3 * cost.seconds:9.2f} {share(cost.seconds, whole_s):>8}"
            f" {cost.num_bytes / 1e6:8.1f} {(cost.floats + cost.int8) / 1e9:8.2f}"
            f" {share(cost.lower_bound_s(ceilings), cost.seconds):>9}"
        )


def rows_of(found: dict[str, dict[str, Cost]], ceilings: Ceilings) -> list[Row]:
    """Return one row for each operation of each step, and one for all of a step together."""
    rows = []
    for step, costs in found.items():
        whole = sum(costs.values(), Cost())
        lower_bound_s = sum(cost.lower_bound_s(ceilings) for cost in costs.values())
        rows.append({"step": step, "operation": ALL, **asdict(whole), "limit_s": lower_bound_s})
        rows += [
            {
                "step": step,
                "operation": name,
                **asdict(cost),
                "limit_s": cost.lower_bound_s(ceilings),
            }
            for name, cost in costs.items()
        ]
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", nargs="+", default=STEPS)
    options = parser.parse_args()
    try:
        steps = [Step.parsed(text, options.chunk) for text in options.steps]
    except ValueError as error:
        parser.error(str(error))
    machine = Machine(options, steps)
    print_head(f"{options.model}, {options.quantization or 'bfloat16'}: the operations of a step")
    found = {step.name: machine.best(step) for step in steps}
    ceilings = machine.ceilings()
    print(
        f"# reading {ceilings.bytes_per_s / 1e9:.1f} GB/s, floats"
        f" {ceilings.float_per_s / 1e9:.0f} GFLOP/s, int8 {ceilings.int8_per_s / 1e9:.0f} GOP/s"
    )
    apart = " and ".join(f"{seconds * 1e9:.0f}" for seconds in machine.seconds_apart)
    print(f"# from thread to thread, before and behind: {apart} ns")
    for name, costs in found.items():
        show(name, costs, ceilings)
    settings = options_of(options) | {
        "ceilings": asdict(ceilings), "between_threads_s": list(machine.seconds_apart)
    }  # fmt: skip
    write(options.output_json, "kernels.operations", rows_of(found, ceilings), settings)


if __name__ == "__main__":
    main()
