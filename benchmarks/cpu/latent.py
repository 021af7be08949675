"""Compare quire with llama.cpp by a model of latent attention and experts, on one GGUF file.

    python -m benchmarks.cpu.latent [--rounds 3] [--scratch DIR] [--small]

The model has DeepSeek-V2-Lite's shape, random weights in Q4_0, and routers in float32. Both engines
read the same file of 8.9 GB, which is written to the scratch directory first. One prompt of 4,096
tokens is computed, and 32 tokens are decoded after it. Each round starts one process per engine, in
turn. --small: with three layers and a prompt of 256 tokens, to test the benchmark itself; llama.cpp
knows the shape by its 27 layers, and fails.

The limit is that of `benchmarks.cpu.limits`, with the weights that one token multiplies: six of 64
experts per layer. Attention is counted with expanded keys and values, 320 products and sums per
head and pair, which is the least.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cpu.__main__ import Session
from benchmarks.cpu.checkpoints import SPECIAL, tokenizer_of
from benchmarks.cpu.engines import Engine, llama, quire
from benchmarks.cpu.limits import Ceilings, Format
from benchmarks.cpu.report import ceiling_lines, legend, ratios, rows_of, summary, table
from benchmarks.cpu.session import arguments, scratch_of
from benchmarks.cpu.workloads import (
    LATENT,
    LATENT_METRICS,
    LatentShape,
    Workload,
    chosen_workload,
)
from benchmarks.result_files import Row, write
from quire.models.checkpoint.source import resolve_model
from quire.tools.report import plain_facts
from tests.support.models.gguf_writer import (
    F32,
    Q4_0,
    byte_level_metadata,
    header_of,
    model_metadata,
)

CATEGORY = "4-bit"
FORMAT = Format(18 / 32, 18 / 32, "int8")
ENGINES = [
    quire("q4_0", CATEGORY, FORMAT), llama("q4_0", CATEGORY, FORMAT),
]  # fmt: skip
BLOCK, BLOCK_BYTES, ALIGNMENT = 32, 18, 32  # elements and bytes of a block of Q4_0
SPREAD = 0.02
Bytes = npt.NDArray[np.uint8]


class RandomBlocks:
    """Blocks of Q4_0 whose weights have the standard deviation SPREAD."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._scale = np.frombuffer(np.float16(SPREAD / 4.6).tobytes(), np.uint8)

    def rows(self, shape: tuple[int, ...]) -> Bytes:
        """Return the bytes of a tensor [..., inputs]."""
        num_blocks = int(np.prod(shape)) // BLOCK
        found = self._rng.integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)
        found[:, :2] = self._scale
        return found.reshape(*shape[:-1], -1)

    def floats(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return a norm's ones, or a router's weights."""
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return self._rng.standard_normal(shape, np.float32) * np.float32(SPREAD)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their names in llama.cpp's files."""
    hidden, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, rotated, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    inner, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    shared, vocab = inner * config["n_shared_experts"], config["vocab_size"]
    attention = {
        "attn_norm": (hidden,), "attn_q": (heads * (plain + rotated), hidden),
        "attn_kv_a_mqa": (rank + rotated, hidden), "attn_kv_a_norm": (rank,),
        "attn_k_b": (heads, rank, plain), "attn_v_b": (heads, value, rank),
        "attn_output": (hidden, heads * value), "ffn_norm": (hidden,),
    }  # fmt: skip
    dense = _feed_forward("", (), hidden, config["intermediate_size"])
    routed = _feed_forward("_exps", (experts,), hidden, inner)
    routed |= _feed_forward("_shexp", (), hidden, shared) | {"ffn_gate_inp": (experts, hidden)}
    found = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    found["output.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        parts = attention | (dense if layer < config["first_k_dense_replace"] else routed)
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return found


def _feed_forward(
    suffix: str, stack: tuple[int, ...], hidden: int, inner: int
) -> dict[str, tuple[int, ...]]:
    rows, columns = (*stack, inner, hidden), (*stack, hidden, inner)
    return {f"ffn_gate{suffix}": rows, f"ffn_up{suffix}": rows, f"ffn_down{suffix}": columns}


def config_of(shape: LatentShape) -> dict[str, Any]:
    """Return the model's config, with the number of layers of a shape."""
    folder = resolve_model("shape:deepseek-v2-lite").directory
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    rope = config.pop("rope_scaling")
    config["rope_parameters"] = rope | {"rope_type": "yarn", "rope_theta": config["rope_theta"]}
    return config | {"num_hidden_layers": shape.num_layers}


def write_model(shape: LatentShape, path: Path) -> Path:
    """Write the GGUF file, tensor by tensor, unless it exists."""
    if path.exists():
        return path
    config, unfinished = config_of(shape), path.with_suffix(".unfinished")
    folder = path.parent / f"{shape.name}-tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of(shape)), "utf-8")
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    metadata = model_metadata(config) | byte_level_metadata(folder, "qwen2")
    del metadata["tokenizer.ggml.token_type"]  # optional; llama.cpp wants it signed
    shapes, blocks = tensor_shapes(config), RandomBlocks()
    infos = {name: info_of(name, size) for name, size in shapes.items()}
    with unfinished.open("wb") as file:
        file.write(header_of(metadata, infos))
        for kind, size, _ in infos.values():
            file.write(bytes(-file.tell() % ALIGNMENT))
            (blocks.floats(size) if kind == F32 else blocks.rows(size)).tofile(file)
    unfinished.rename(path)
    return path


def info_of(name: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
    """Return a tensor's type, shape and number of bytes. Norms and routers are in float32."""
    num = int(np.prod(shape))
    if len(shape) == 1 or ".ffn_gate_inp." in name:
        return F32, shape, 4 * num
    return Q4_0, shape, num // BLOCK * BLOCK_BYTES


@dataclass
class LatentSession(Session):
    """A comparison by one file."""

    def prepare(self, engine: Engine, workloads: list[Workload]) -> None:
        """See Comparison."""
        self.scratch.python(engine.environment)
        for workload in workloads:
            self.path_of(workload)

    def path_of(self, workload: Workload) -> Path:
        """Return the file of a workload's model, which is written if it does not exist."""
        assert isinstance(workload.shape, LatentShape)
        models = self.scratch.directory / "models"
        return write_model(workload.shape, models / f"{workload.shape.name}.gguf")

    def job(self, engine: Engine, workload: Workload, round_: int) -> dict[str, Any]:
        """See Session."""
        return {
            "model": str(self.path_of(workload)),
            "workload": workload.name,
            "is_small": self.options.small,
            "threads": self.options.threads,
            "seed": round_ + 1,
            "options": self.settings if engine.is_ours else {},
        }

    def finish(self, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
        """See Comparison."""
        ceilings = Ceilings.of(self.ceilings[str(self.options.threads)])
        found = summary(self.runs, engines, ceilings, self.options.small, LATENT_METRICS)
        print("", *ceiling_lines(self.ceilings), "", sep="\n")
        for key in ("best", "median"):
            print(*table(found, engines, key, LATENT_METRICS), sep="\n")
        print(*legend(LATENT_METRICS), sep="\n")
        compared = ratios(found, engines, metrics=LATENT_METRICS)
        print(*(f"failed: {name}: {reason}" for name, reason in self.failures.items()), sep="\n")
        rows = rows_of(found, compared, [asdict(run) for run in self.runs])
        return rows, self.written_settings(engines)


def main() -> None:
    options = arguments(__doc__, [LATENT], 1200.0, "three layers and a short prompt")
    workloads = [chosen_workload(LATENT, options.small)]
    results = LatentSession(options, scratch_of(options)).compare(ENGINES, workloads)
    write(options.output_json, "cpu.latent", *results, plain_facts)


if __name__ == "__main__":
    main()
