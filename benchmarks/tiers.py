"""Time to the first token of prompts that share a prefix, by where the prefix is found.

    python benchmarks/tiers.py

One request of 512 shared tokens and one of its own, then 16 with 32 of their own, at once: cold,
from the device, from host memory, from a directory, and after a restart, whose files are in the
page cache or not. Between two of them other prompts push the prefix out of the nearer tiers. The
rates of the moves stand beside what the machine copies, and reads from its disk.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.tools.report import benchmark_parser, print_head, write_report

SHARED, OWN, REQUESTS = 512, 32, 16
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
ROUNDS = 3  # of restarts; the best counts
FILLERS = 4  # prompts of as many tokens as fill the pool
HOST_FILLERS = 20  # and the host tier: memory that a system hands out for the first time is slow

Prompt = dict[str, list[int]]


class Prompts:
    """Random tokens. The shared ones stay the same, own ones never come again."""

    def __init__(self) -> None:
        self._numbers = random.Random(1)
        self._shared = self.tokens(SHARED)

    def tokens(self, count: int) -> list[int]:
        return [self._numbers.randrange(50_000) for _ in range(count)]

    def sharing(self, num: int, own: int) -> list[Prompt]:
        return [{"prompt_token_ids": self._shared + self.tokens(own)} for _ in range(num)]

    def new_prefix(self) -> None:
        self._shared = self.tokens(SHARED)


def pool_bytes(model_block_bytes: int) -> int:
    """Of a pool that holds the shared prefix, all own tokens, and not much more."""
    return (SHARED + REQUESTS * (OWN + 16) + 256) // 16 * model_block_bytes


@contextmanager
def engine(model: str, settings: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=SHARED + OWN + 64,
        max_num_seqs=REQUESTS,
        kv_cache_memory_bytes=pool_bytes(28 * 8 * 128 * 2 * 2 * 16),
        disable_log_stats=True,
        **settings,
    )
    with llm:
        llm.generate([{"prompt_token_ids": [1] * 40}], ONE, use_tqdm=False)  # warms up
        yield llm


def first_s(llm: LLM, prompts: list[Prompt]) -> tuple[float, int]:
    """Seconds until all have their first token, and how many prompt tokens were cached."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, ONE, use_tqdm=False)
    elapsed = time.perf_counter() - began
    return elapsed, sum(output.num_cached_tokens or 0 for output in outputs)


def push_out(llm: LLM, prompts: Prompts, num: int = FILLERS) -> None:
    for _ in range(num):
        llm.generate([{"prompt_token_ids": prompts.tokens(SHARED)}], ONE, use_tqdm=False)


def forget_files(directory: Path) -> None:
    """Out of the page cache, once they are written."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(llm: LLM, prompts: Prompts, far: bool = False) -> dict[str, float]:
    """One request, then 16 at once. far: the prefix is pushed out before both."""
    found = {}
    for name, num, own in (("one", 1, 1), ("all", REQUESTS, OWN)):
        if far:
            push_out(llm, prompts)
        found[name], cached = first_s(llm, prompts.sharing(num, own))
        found[f"{name}_cached"] = cached / num
    return found


def measure_all(model: str, directory: Path) -> dict[str, dict[str, float]]:
    prompts, found = Prompts(), {}
    with engine(model, {"kv_host_gb": 1.0}) as llm:
        push_out(llm, prompts, HOST_FILLERS)
        found["cold"] = {}
        for name, num, own in (("one", 1, 1), ("all", REQUESTS, OWN)):
            prompts.new_prefix()
            found["cold"][name], found["cold"][f"{name}_cached"] = first_s(
                llm, prompts.sharing(num, own)
            )
        found["device"] = measure(llm, prompts)
        found["host"] = measure(llm, prompts, far=True)
    disk = {"kv_disk_dir": str(directory), "kv_disk_gb": 8.0}
    with engine(model, disk) as llm:
        first_s(llm, prompts.sharing(1, 1))
    for name in ("restart, files in the page cache", "restart, files on the disk"):
        found[name] = {}
        for size, num, own in (("one", 1, 1), ("all", REQUESTS, OWN)):
            times = []
            for _ in range(ROUNDS):
                if name.endswith("disk"):
                    forget_files(directory)
                with engine(model, disk) as llm:
                    elapsed, cached = first_s(llm, prompts.sharing(num, own))
                times.append(elapsed)
            found[name] |= {size: min(times), f"{size}_cached": cached / num}
    return found


def copy_rate() -> float:
    """Bytes per second of copying memory that fits in no cache, on one thread."""
    source, to = torch.ones(256 << 20, dtype=torch.uint8), torch.ones(256 << 20, dtype=torch.uint8)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        to.numpy()[:] = source.numpy()
        best = max(best, source.nbytes / (time.perf_counter() - began))
    return best


def read_rate(directory: Path) -> float:
    """Bytes per second of reading all files of a directory that are in no cache."""
    forget_files(directory)
    began, total = time.perf_counter(), 0
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            total += len(path.read_bytes())
    return total / (time.perf_counter() - began)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    options = parser.parse_args()
    print_head("where a shared prefix is found")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found = measure_all(options.model, directory)
        rates = {"copy": copy_rate(), "disk": read_rate(directory)}
    cold = found["cold"]
    print(f"{'':34s} one request        16 at once, 32 tokens of their own each")
    for place, times in found.items():
        print(
            f"{place:34s} {times['one'] * 1e3:7.0f} ms {times['one'] / cold['one']:6.1%}"
            f"   {times['all'] * 1e3:7.0f} ms {times['all'] / cold['all']:6.1%}"
            f"   cached {times['one_cached']:.0f}, {times['all_cached']:.0f}"
        )
    print(f"copying memory {rates['copy'] / 1e9:.1f} GB/s, reading files {rates['disk'] / 1e9:.2f}")
    write_report(options.output_json, {"times_s": found, "rates": rates})


if __name__ == "__main__":
    main()
