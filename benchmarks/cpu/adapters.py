"""Compare quire with llama.cpp and vLLM by one adapter.

    python -m benchmarks.cpu.adapters [--rounds 3] [--scratch DIR] [--small]

The model has Qwen3-0.6B's shape and random weights in bfloat16 or Q4_0. The adapter changes all
linear layers with rank 16. quire and llama.cpp read the same GGUF files of base and adapter, which
are written to the scratch directory first. vLLM reads the checkpoint and the adapter in PEFT's
form. It computes in float32, which is its faster format on AVX2.

One request of 128 tokens is continued by 63, and one prompt of 1,024 tokens is computed. Each round
starts one process per engine and workload, in turn. --small: with the small model, to test the
benchmark itself.

The limit is that of `benchmarks.cpu.limits`, for the base model alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.__main__ import Session
from benchmarks.cpu.checkpoints import config_of, weight_shapes, write_checkpoint
from benchmarks.cpu.engines import FLOAT16, FLOAT32, VLLM, Engine, llama, quire
from benchmarks.cpu.limits import Format
from benchmarks.cpu.session import arguments, scratch_of
from benchmarks.cpu.workloads import Shape, Workload, chosen_workload
from benchmarks.result_files import write
from quire.tools.report import plain_facts
from tests.support.models.gguf_writer import F16
from tests.support.runner.adapters import to_gguf, write_adapter

RANK = 16
WORKLOADS = ["single", "prefill"]
Q4 = Format(18 / 32, 18 / 32, "int8")
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
PEER = Engine(
    "vllm fp32", "16-bit", "vllm_llm", FLOAT32, VLLM,
    options={"dtype": "float32", "enforce_eager": True},
)  # fmt: skip


def engines() -> list[Engine]:
    """Return the engines. All but vLLM read the GGUF file of their kind."""
    found = []
    for kind, category, form in (("bf16", "16-bit", FLOAT16), ("q4_0", "4-bit", Q4)):
        ours = quire(kind, category, form)
        found.append(Engine(ours.name, category, ours.driver, form, source=f"gguf-{kind}"))
        found.append(llama(kind, category, form))
    return [*found, PEER]


def write_peft_adapter(shape: Shape, models: Path) -> Path:
    """Write an adapter of all linear layers of a shape's model in PEFT's form, unless it exists."""
    folder = models / f"{shape.name}-peft"
    if folder.exists():
        return folder
    modules = {
        name.removesuffix(".weight"): (size[0], size[1])
        for name, size in weight_shapes(shape).items()
        if name.endswith("_proj.weight")
    }
    unfinished = folder.with_suffix(".unfinished")
    write_adapter(unfinished, modules, RANK, alpha=float(RANK))
    return unfinished.rename(folder)


def write_gguf_adapter(shape: Shape, models: Path) -> Path:
    """Write the same adapter as a GGUF file, unless it exists."""
    path = models / f"{shape.name}-rank{RANK}.gguf"
    if path.exists():
        return path
    unfinished = path.with_suffix(".unfinished")
    to_gguf(write_peft_adapter(shape, models), unfinished, config_of(shape), F16)
    return unfinished.rename(path)


@dataclass
class AdapterSession(Session):
    """A comparison whose engines all use the same adapter."""

    def prepare(self, engine: Engine, workloads: list[Workload]) -> None:
        """See Comparison."""
        super().prepare(engine, workloads)
        for workload in workloads:
            self.adapter_of(engine, workload)

    def adapter_of(self, engine: Engine, workload: Workload) -> Path:
        """Return the adapter for a workload's model, in the form that an engine reads."""
        models = self.scratch.directory / "models"
        write_checkpoint(workload.shape, models / workload.shape.name)
        if engine.driver == PEER.driver:
            return write_peft_adapter(workload.shape, models)
        return write_gguf_adapter(workload.shape, models)

    def job(self, engine: Engine, workload: Workload, round_: int) -> dict[str, Any]:
        """See Session."""
        job = super().job(engine, workload, round_)
        options: dict[str, Any] = {"adapter": str(self.adapter_of(engine, workload))}
        options |= {} if engine.driver == "llama" else LORA
        return job | {"options": job["options"] | options}


def main() -> None:
    options = arguments(__doc__, WORKLOADS, 600.0, "the small model in both workloads")
    workloads = [chosen_workload(name, options.small) for name in options.workloads]
    results = AdapterSession(options, scratch_of(options)).compare(engines(), workloads)
    write(options.output_json, "cpu.adapters", *results, plain_facts)


if __name__ == "__main__":
    main()
