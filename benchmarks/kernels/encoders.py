"""Embeddings per second of encoders here and by transformers, of random weights on this CPU.

    python -m benchmarks.kernels.encoders [--dtype float32] [--shape base] [--prompts 64]
        [--tokens 128]

Prompts have from half as many tokens to as many. transformers gets them in batches of 16, sorted by
length and padded, as sentence-transformers does; here they are requests like others.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quire import LLM, PoolingParams

BATCH = 16
# Of BERT base, of multilingual E5 small, and of ModernBERT base.
SHAPES: dict[str, dict[str, Any]] = {
    "base": {"model_type": "bert", "vocab_size": 30_522, "hidden_size": 768}
    | {"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "e5-small": {"model_type": "xlm-roberta", "vocab_size": 250_037, "hidden_size": 384}
    | {"intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"max_position_embeddings": 514, "type_vocab_size": 1},
    "modernbert": {"model_type": "modernbert"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    draws = np.random.default_rng(0)
    lengths = draws.integers(arguments.tokens // 2, arguments.tokens + 1, arguments.prompts)
    prompts = [draws.integers(10, 30_000, length).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        fields = SHAPES[arguments.shape]
        config = transformers.AutoConfig.for_model(**fields)
        raw = config.to_dict() | {"architectures": ["AutoModel"]}
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        ours = seconds_here(folder, arguments.dtype, prompts)
    theirs = seconds_by_transformers(config, arguments.dtype, prompts)
    num_tokens = int(lengths.sum())
    print(f"{arguments.shape}, {arguments.dtype}, {torch.get_num_threads()} threads:", end=" ")
    print(f"{len(prompts)} prompts, {num_tokens} tokens")
    for name, seconds in (("quire", ours), ("transformers", theirs)):
        rates = f"{len(prompts) / seconds:8.1f} prompts/s {num_tokens / seconds:10.0f} tokens/s"
        print(f"  {name:14}{rates}")


def seconds_here(folder: str, dtype: str, prompts: list[list[int]]) -> float:
    """Take the better of two times."""
    given = [{"prompt_token_ids": each} for each in prompts]
    with LLM(folder, load_format="dummy", dtype=dtype, disable_log_stats=True) as llm:
        return min(_timed(lambda: llm.embed(given, PoolingParams(), False)) for _ in range(2))


@torch.inference_mode()
def seconds_by_transformers(config: Any, dtype: str, prompts: list[list[int]]) -> float:
    """Take the better of two times."""
    model = transformers.AutoModel.from_config(config, dtype=getattr(torch, dtype)).eval()
    ordered = sorted(prompts, key=len)

    def embed() -> None:
        for first in range(0, len(ordered), BATCH):
            batch = ordered[first : first + BATCH]
            longest = len(batch[-1])
            ids = torch.tensor([each + [0] * (longest - len(each)) for each in batch])
            mask = torch.tensor([[1] * len(e) + [0] * (longest - len(e)) for e in batch])
            model(input_ids=ids, attention_mask=mask)

    return min(_timed(embed) for _ in range(2))


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
