"""Write the weights for the package: python -m demo_model.export --checkpoint run/checkpoint.pt.

While the learning rate is still high the running average of the weights is written, after the
final decay the weights themselves.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .tokenizer import DEFAULT_FOLDER

GENERATION = {
    "bos_token_id": None,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "max_new_tokens": 1024,
}


def weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the named weights of a checkpoint in bf16."""
    decay = state["counters"]["decay"]
    decayed = decay is not None and state["counters"]["step"] >= sum(decay)
    if decayed:
        named = {name: state["model"][name] for name in state["names"]}
    else:
        named = dict(zip(state["names"], state["average"], strict=True))
    return {name: weight.bfloat16().contiguous() for name, weight in named.items()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file with a line end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    options = parser.parse_args()
    state = torch.load(options.checkpoint, map_location="cpu", weights_only=False)
    new = options.folder / "model.safetensors.new"
    save_file(weights(state), new, metadata={"format": "pt"})
    new.chmod(0o644)
    os.replace(new, options.folder / "model.safetensors")
    write_json(options.folder / "config.json", state["shape"].config())
    write_json(options.folder / "generation_config.json", GENERATION)
    print(f"step {state['counters']['step']}, {state['counters']['tokens'] / 1e6:.1f} M tokens")


if __name__ == "__main__":
    main()
