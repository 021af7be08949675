"""Train the demo model: python -m demo_model.training --folder run [--processes 2].

Training ends after --steps. The file `decay` in the run folder requests the final decay of the
learning rate; its content is the number of steps. A run resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .batches import Packer
from .model import Llama, Shape
from .optimizer import Muon
from .tokenizer import DEFAULT_FOLDER

AVERAGE = 0.99
COMPILED_BELOW = 1024


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_FOLDER / "tokenizer.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the work")
    parser.add_argument("--rank", type=int, default=0, help="set by the first process")
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096, help="per pass and process")
    parser.add_argument("--passes", type=int, default=1, help="passes per step")
    parser.add_argument("--steps", type=int, default=9000, help="start the decay here")
    parser.add_argument("--decay-steps", type=int, default=900)
    parser.add_argument("--short-steps", type=int, default=1000, help="steps of short rows only")
    parser.add_argument("--early-steps", type=int, default=700, help="steps of mostly copying")
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.003)
    parser.add_argument("--save-seconds", type=float, default=120)
    parser.add_argument("--pid-file", type=Path)
    return parser.parse_args()


class Trainer:
    """The state of a run: model, optimizers, averaged weights and counters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        self.model = Llama(Shape()).to(options.device)
        named = dict(self.model.named_parameters())
        inner = [w for name, w in named.items() if w.dim() == 2 and "embed" not in name]
        rest = [w for name, w in named.items() if w.dim() != 2 or "embed" in name]
        self.parameters = list(named.values())
        self.muon = Muon(inner, lr=options.muon_rate)
        self.adam = torch.optim.AdamW(
            rest, lr=options.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.average = [w.detach().clone() for w in self.parameters]
        self.counters: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "decay": None}
        tokenizer = Tokenizer.from_file(str(options.tokenizer))
        self.packer = Packer(tokenizer, options.seed, options.tokens)
        self.loss = torch.compile(self.plain_loss, dynamic=False)
        if self.checkpoint.exists():
            self.load()

    @property
    def checkpoint(self) -> Path:
        """Where the state is kept."""
        return self.options.folder / "checkpoint.pt"

    def load(self) -> None:
        """Take up the state of the checkpoint."""
        state = torch.load(self.checkpoint, map_location=self.options.device, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.average = state["average"]
        self.counters = state["counters"]

    def save(self, name: str = "checkpoint.pt") -> None:
        """Write the state in one move, so that a reader never sees half of it."""
        names = [name for name, _ in self.model.named_parameters()]
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "average": self.average,
            "names": names,
            "counters": self.counters,
            "shape": self.model.shape,
        }
        new = self.options.folder / (name + ".new")
        torch.save(state, new)
        os.replace(new, self.options.folder / name)

    def plain_loss(self, tokens: Tensor, loss_indices: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the target places [places] of tokens [B, T]."""
        with torch.autocast(self.options.device, torch.bfloat16):
            hidden = self.model.hidden(tokens).flatten(0, 1)[loss_indices]
            return F.cross_entropy(self.model.logits(hidden).float(), targets)

    def rate(self) -> float:
        """Return the factor of the learning rates: warm-up, constant, linear decay to zero."""
        step, decay = self.counters["step"], self.counters["decay"]
        factor = min(1.0, (step + 1) / self.options.warmup)
        if decay is not None:
            factor *= max(0.0, 1 - (step - decay[0]) / decay[1])
        return factor

    def step(self) -> float:
        """Do one optimizer step over all processes; return the loss of this process."""
        options, number = self.options, self.counters["step"]
        length = self.packer.length(number, options.short_steps)
        total = 0.0
        for index in range(options.passes):
            part = options.rank * options.passes + index
            batch = self.packer.batch(number, part, length, number < options.early_steps)
            inputs = (batch.tokens, batch.loss_indices, batch.targets)
            measure = self.loss if length < COMPILED_BELOW else self.plain_loss
            loss = measure(*(tensor.to(options.device) for tensor in inputs)) / options.passes
            loss.backward()
            total += loss.item()
        self.share_gradients()
        factor = self.rate()
        for optimizer, rate in ((self.muon, options.muon_rate), (self.adam, options.adam_rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - AVERAGE)
        self.counters["step"] += 1
        self.counters["tokens"] += options.tokens * options.passes * options.processes
        return total

    def share_gradients(self) -> None:
        """Average the gradients over the processes."""
        if self.options.processes == 1:
            return
        flat = torch.cat([weight.grad.flatten() for weight in self.parameters])
        must_decay = self.options.rank == 0 and self.is_decay_requested()
        flag = torch.tensor([float(must_decay)])
        flat = torch.cat((flat / self.options.processes, flag.to(flat.device)))
        dist.all_reduce(flat)
        sizes = [weight.numel() for weight in self.parameters]
        parts = flat[:-1].split(sizes)
        for weight, part in zip(self.parameters, parts, strict=True):
            weight.grad.copy_(part.view_as(weight))
        self.begin_decay(bool(flat[-1] > 0))

    def is_decay_requested(self) -> bool:
        """Return whether the final decay should begin now."""
        is_requested = (self.options.folder / "decay").exists()
        return is_requested or self.counters["step"] >= self.options.steps

    def begin_decay(self, requested: bool) -> None:
        """Begin the final decay if wanted and not yet begun."""
        if not requested or self.counters["decay"] is not None:
            return
        request = self.options.folder / "decay"
        text = request.read_text().strip() if request.exists() else ""
        steps = int(text) if text else self.options.decay_steps
        if self.options.rank == 0:
            self.save("stable.pt")
        self.counters["decay"] = (self.counters["step"], steps)

    def finished(self) -> bool:
        """Return whether the decay is over."""
        decay = self.counters["decay"]
        return decay is not None and self.counters["step"] >= sum(decay)

    def run(self) -> None:
        """Train to the end of the decay, logging and saving on the way."""
        saved = began = time.monotonic()
        while not self.finished():
            if self.options.processes == 1:
                self.begin_decay(self.is_decay_requested())
            loss = self.step()
            now = time.monotonic()
            self.counters["seconds"] += now - began
            if self.options.rank == 0 and self.counters["step"] % 10 == 0:
                speed = self.options.tokens * self.options.passes * self.options.processes
                print(
                    f"step {self.counters['step']} loss {loss:.4f} rate {self.rate():.3f} "
                    f"{speed / (now - began):.0f} tokens/s "
                    f"{self.counters['tokens'] / 1e6:.2f} M",
                    flush=True,
                )
            began = now
            if self.options.rank == 0 and now - saved > self.options.save_seconds:
                self.save()
                saved = time.monotonic()
        if self.options.rank == 0:
            self.save()


def main() -> None:
    """Run this process, and as the first of several start the others."""
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.rank == 0 and options.pid_file:
        options.pid_file.write_text(f"{os.getpid()}\n")
    if options.processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // options.processes))
        if options.rank == 0:
            for rank in range(1, options.processes):
                module = [sys.executable, "-m", "demo_model.training"]
                subprocess.Popen([*module, *sys.argv[1:], "--rank", str(rank)])
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{options.port}",
            rank=options.rank,
            world_size=options.processes,
            timeout=datetime.timedelta(hours=6),
        )
    Trainer(options).run()


if __name__ == "__main__":
    main()
