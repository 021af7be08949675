"""A model whose text is certain to repeat itself. Its random weights change almost nothing. A few
neurons of the last layer lead from each token of a cycle to the next.

Every engine gives the same text in every format, so that all have the same work. A step costs as
much as with any other weights.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.cpu.checkpoints import write_checkpoint
from benchmarks.cpu.workloads import Shape

PERIOD, NUM_CYCLES = 48, 4
FIRST_TOKEN = 300  # behind single bytes
QUIET = 1e-3  # factor of the random layers' output
STRENGTH = 4.0  # of the next token, relative to the last
WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def cycle(number: int) -> list[int]:
    """Return the token ids of a cycle in order, all different."""
    first = FIRST_TOKEN + number * PERIOD
    return [first + 7 * i % PERIOD for i in range(PERIOD)]


def write_repeating(shape: Shape, directory: Path) -> Path:
    """Write the checkpoint, unless the directory is complete."""
    done = directory / "repeats"
    if done.exists():
        return directory
    write_checkpoint(shape, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith(WRITES):
            tensors[name] *= QUIET
    last = f"model.layers.{shape.num_layers - 1}.mlp."
    embedding = tensors["model.embed_tokens.weight"].float()
    for neuron, (token, following) in enumerate(_steps()):
        seen = embedding[token] * shape.hidden**0.5 / embedding[token].norm()
        product = float(embedding[token] @ seen) ** 2  # of gate and up, where this token stands
        tensors[f"{last}gate_proj.weight"][neuron] = embedding[token].to(torch.bfloat16)
        tensors[f"{last}up_proj.weight"][neuron] = embedding[token].to(torch.bfloat16)
        written = embedding[following] * STRENGTH / product
        tensors[f"{last}down_proj.weight"][:, neuron] = written.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    done.touch()
    return directory


def _steps() -> Iterator[tuple[int, int]]:
    """Yield each token of each cycle, and the token after it."""
    for number in range(NUM_CYCLES):
        tokens = cycle(number)
        yield from zip(tokens, tokens[1:] + tokens[:1], strict=True)
