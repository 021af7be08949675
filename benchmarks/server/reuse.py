"""Measure the share of reusable tokens that a server reuses, under 20 sessions of agents.

    python -m benchmarks.server.reuse --output-json reuse.json

`quire bench agents` plays the sessions and their subagents against a server of its own. The pool
holds two of the longest contexts, host memory holds six, and a directory holds the rest. A round
takes about two minutes for each model.

reuse       share of the reusable tokens that came from a cache. Reusable is the longest beginning
            that a client has sent or received before, generated tokens included
from        shares of the cached tokens that were on the device, in host memory, in the directory
recomputed  reusable tokens that were computed: `in_block` in the last block only, since blocks and
            states end there, and `more` of turns that lost whole blocks. `evicted` and `costly`
            are of turns whose first missing block was evicted, or cheaper to compute than to load
load        the machine's average number of runnable threads at the end of a round

`hybrid` has six layers with states and two with attention, and random weights. States are stored
where blocks end. A turn leaves one at the last block end that is at least eight tokens before the
end of its prompt. It leaves another at the last block end in its answer. Most answers have one to
three tokens here. So a turn often ends after the first place and before the second, and the next
turn computes a block again.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result_files import Row, columns, options_of, write
from benchmarks.server.servers import free_port, running
from quire.base.prefix import COSTLY, EVICTED
from quire.tools.bench import agents
from quire.tools.bench.arguments import add_agents_arguments
from quire.tools.report import benchmark_parser, plain_facts, print_head

READY_S = 180
MAX_LEN = 1664  # the longest context of the sessions is 1,635 tokens
BLOCK_SIZE = 16
NUM_ON_DEVICE, NUM_ON_HOST = 2, 6  # contexts of MAX_LEN tokens
TIERS = {"device": "device", "host": "host", "store": "directory"}  # names in `usage`: here
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 1536,
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One model. context_bytes: cache memory of a context of MAX_LEN tokens. config: written to a
    directory and served with random weights; None for the demo model."""

    name: str
    context_bytes: int
    config: dict[str, Any] | None = None


# A context of `hybrid` has 1,024 bytes per token, and eight states of 228 KiB.
MODELS = (
    Model("demo", MAX_LEN * 3072),
    Model("hybrid", MAX_LEN * 1024 + 8 * 228 * 1024, HYBRID),
)


def command_of(model: Model, port: int, folder: Path) -> list[str]:
    """Return the command of a model's server. folder: for the model, and for its blocks."""
    name, flags = model.name, list[str]()
    if model.config is not None:
        name, flags = str(folder / model.name), ["--load-format", "dummy", "--tokenizer", "demo"]
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    pool, host = NUM_ON_DEVICE * model.context_bytes, NUM_ON_HOST * model.context_bytes
    return [
        sys.executable, "-m", "quire.cli.main", "serve", name, *flags, "--port", str(port),
        "--max-model-len", str(MAX_LEN), "--block-size", str(BLOCK_SIZE),
        "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(pool),
        "--kv-host-gb", f"{host / (1 << 30):.6f}", "--kv-disk-dir", str(folder / "blocks"),
        "--kv-disk-gb", "2", "--reuse-partial-blocks", "--scheduler-extensions", "sessions",
        "--log-level", "warning",
    ]  # fmt: skip


def play(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """Play the sessions against a model's server. Return the report of `quire bench agents`."""
    parser, port = argparse.ArgumentParser(), free_port()
    add_agents_arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agents.json"
        line = [
            "--base-url", f"http://127.0.0.1:{port}", "--ready-check-timeout-sec", str(READY_S),
            "--num-sessions", str(options.sessions), "--scale", str(options.scale), "--speed",
            str(options.speed), "--num-alone", "0", "--disable-tqdm", "--extra-body",
            '{"user": "agents"}', "--output-json", str(path),
        ]  # fmt: skip
        with running(command_of(model, port, Path(folder))):
            if agents.run(parser.parse_args(line)):
                raise SystemExit(f"{model.name}: turns failed; the errors are above.")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def figures(found: dict[str, Any]) -> Row:
    """Return the figures of one round."""
    tiers = {name: found["cached_tokens_by_tier"].get(tier, 0) for tier, name in TIERS.items()}
    cached = sum(found["cached_tokens_by_tier"].values())
    reasons = found["recomputed_tokens_by_reason"]
    lost = [max(0, t["reusable_tokens"] - t["cached_tokens"]) for t in found["turns"]]
    in_block = sum(num for num in lost if num < BLOCK_SIZE)
    return {
        "num_turns": len(found["turns"]),
        "num_subagents": found["num_subagents"],
        "reuse": found["reuse"],
        "reusable_tokens": found["reusable_tokens"],
        **{f"from.{name}": num / max(1, cached) for name, num in tiers.items()},
        "recomputed_tokens": sum(lost),
        "recomputed.in_block": in_block,
        "recomputed.more": sum(lost) - in_block,
        **{f"recomputed.{reason}": reasons.get(reason, 0) for reason in (EVICTED, COSTLY)},
        "turns_with_lost_blocks": sum(num >= BLOCK_SIZE for num in lost),
        "ttft_ms.p50": found["ttft_ms"]["p50"],
        "ttft_ms.p99": found["ttft_ms"]["p99"],
        "duration_s": found["duration_s"],
        "load": os.getloadavg()[0],
    }


def row_of(model: Model, rounds: list[Row]) -> Row:
    """Return a model's row, with the figures of all rounds."""
    return {"model": model.name, "context_bytes": model.context_bytes} | columns(rounds)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=20, help="without their subagents")
    parser.add_argument("--scale", type=float, default=0.005, help="of all numbers of tokens")
    parser.add_argument("--speed", type=float, default=20.0, help="divisor of all pauses")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    print_head("reuse with sessions of agents")
    models = [model for model in MODELS if model.name in options.models]
    rounds: dict[str, list[Row]] = {model.name: [] for model in models}
    for _ in range(options.rounds):
        for model in models:
            rounds[model.name].append(figures(play(model, options)))
            print(json.dumps({"model": model.name} | rounds[model.name][-1]), flush=True)
    rows = [row_of(model, rounds[model.name]) for model in models]
    sizes = {"max_len": MAX_LEN, "on_device": NUM_ON_DEVICE, "on_host": NUM_ON_HOST}
    write(options.output_json, "server.reuse", rows, options_of(options) | sizes, plain_facts)


if __name__ == "__main__":
    main()
