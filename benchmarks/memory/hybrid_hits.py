"""Measure the prefix hits of models with states, compared with the hits of full attention alone.

    python -m benchmarks.memory.hybrid_hits

A scheduler without a model runs in virtual time (tools/simulate), over pools of --gb as the engine
would divide them (kv/sizing.py). The hybrid model is of the 0.6B kind. It has 6 layers of full
attention, 0.2 MB for 16 tokens, and 18 with states, 20 MB for each. `full` has the 6 layers only
and all of the memory for them: the upper bound of hits. Shares are of all prompt tokens.

    chat      conversations; each prompt is the conversation so far and a new message
    thinking  the same, but the first half of each answer is dropped afterwards, and so are the
              last four tokens of the prompt before it (the template's beginning of an answer)
    agents    sessions that begin with one of four long prompts and a task, and call tools eight
              times; three others with their own tasks continue from the middle of each

Requests arrive as others end, --users at once, each turn in a new order.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE
from benchmarks.virtual.step_times import LLAMA_8B
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.kv.sizing import size_pools
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from quire.tools.report import benchmark_parser, print_head
from quire.tools.simulate.arrivals import OTHER, STOP, Arrival, simulated_request
from quire.tools.simulate.run import simulate
from quire.tools.workloads import SHAREGPT

BLOCK_SIZE, MAX_LEN, CHUNK = 16, 32768, 2048
FULL = CacheGroup("full", tuple(range(6)), num_kv_heads=2, head_dim=256)
STATES = CacheGroup("state", tuple(range(6, 24)), state_size=16 * 128 * 128 + 3 * 6144)
MAX_OUTPUT = 400  # tokens of an answer, here


@dataclass
class Talk:
    """Prompts and lengths of answers, by turn. begins: the turn of all in which its first comes."""

    begins: int = 0
    turns: list[tuple[list[int], int]] = field(default_factory=list)


def answer_of(length: int) -> list[int]:
    """Return the simulated answer."""
    return [OTHER] * (length - 1) + [STOP]


def chat(num_talks: int, num_turns: int, thinks: bool) -> Iterator[Talk]:
    rng = np.random.default_rng(0)
    inputs, outputs = SHAREGPT.sample(num_talks * num_turns, seed=0)
    lengths = zip(np.minimum(inputs, 1000).tolist(), outputs.tolist(), strict=True)
    system = rng.integers(10, VOCAB_SIZE, 120).tolist()
    for _ in range(num_talks):
        talk, history = Talk(), list(system)
        for _ in range(num_turns):
            num_input, num_output = next(lengths)
            num_output = min(max(2, num_output), MAX_OUTPUT)
            history = history + rng.integers(10, VOCAB_SIZE, num_input + 4).tolist()
            talk.turns.append((history, num_output))
            answer = answer_of(num_output)
            history = history[:-4] + answer[num_output // 2 :] if thinks else history + answer
        yield talk


def agents(num_talks: int, num_turns: int) -> Iterator[Talk]:
    rng = np.random.default_rng(0)
    systems = [rng.integers(10, VOCAB_SIZE, 3000).tolist() for _ in range(4)]

    def session(history: list[int], begins: int) -> Talk:
        talk = Talk(begins)
        for _ in range(begins, num_turns):
            history = history + rng.integers(10, VOCAB_SIZE, int(rng.integers(50, 700))).tolist()
            num_output = int(rng.integers(20, 150))
            talk.turns.append((history, num_output))
            history = history + answer_of(num_output)
        return talk

    for i in range(num_talks):
        first = session(systems[i % 4], 0)
        yield first
        if i % 4 == 0:
            middle = num_turns // 2
            prompt, num_output = first.turns[middle - 1]
            for _ in range(3):
                yield session(prompt + answer_of(num_output), middle)


WORKLOADS = {
    "chat": lambda talks: list(chat(talks, 6, thinks=False)),
    "thinking": lambda talks: list(chat(talks, 6, thinks=True)),
    "agents": lambda talks: list(agents(talks, 8)),
}


def measure(
    talks: list[Talk], groups: tuple[CacheGroup, ...], gb: float, users: int
) -> dict[str, Any]:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=CHUNK)
    sizes = [group.block_bytes(BLOCK_SIZE, 2) for group in groups]
    pools = size_pools(groups, sizes, int(gb * 1e9), BLOCK_SIZE, MAX_LEN, 64, CHUNK)
    kv = KVManager(groups, pools, BLOCK_SIZE)
    scheduler = Scheduler(Memory(kv, CHUNK), config, MAX_LEN)
    num_turns = max(talk.begins + len(talk.turns) for talk in talks)
    order, shuffle = [], random.Random(1)
    for number in range(num_turns):
        active = [i for i, t in enumerate(talks) if 0 <= number - t.begins < len(t.turns)]
        shuffle.shuffle(active)
        order += [(i, number - talks[i].begins) for i in active]
    busy: set[int] = set()

    def arrival(now: float) -> Arrival | None:
        for index, (i, turn) in enumerate(order):
            if i not in busy:
                del order[index]
                busy.add(i)
                prompt, num_output = talks[i].turns[turn]
                return Arrival(now, simulated_request(f"{i}.{turn}", prompt, 1024), num_output)
        return None

    def then(request_id: str, now: float) -> Arrival | None:
        busy.remove(int(request_id.split(".")[0]))
        return arrival(now)

    first = [found for _ in range(users) if (found := arrival(0.0)) is not None]
    run = simulate(scheduler, first, LLAMA_8B, then)
    served = run.by_id.values()
    assert len(served) == sum(len(talk.turns) for talk in talks)
    num_prompt = sum(s.num_prompt for s in served)
    return {
        "blocks": pools,
        "cached": sum(s.num_cached_tokens for s in served) / num_prompt,
        "num_prompt": num_prompt,
        "num_preemptions": run.num_preemptions,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--talks", type=int, default=60)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    options = parser.parse_args()
    print_head(f"{options.talks} conversations, {options.users} at once")
    print(f"{'':10} {'GB':>5} {'full':>7} {'hybrid':>7} {'share':>7}  blocks, states")
    found = []
    for name, make in WORKLOADS.items():
        talks = make(options.talks)
        for gb in options.gb:
            full = measure(talks, (FULL,), gb, options.users)
            hybrid = measure(talks, (FULL, STATES), gb, options.users)
            share = hybrid["cached"] / full["cached"]
            sizes = ", ".join(f"{num:,}" for num in hybrid["blocks"])
            print(
                f"{name:10} {gb:5.1f} {full['cached']:7.1%} {hybrid['cached']:7.1%} {share:7.1%}"
                f"  {sizes}"
                + (
                    f"; {hybrid['num_preemptions']} preemptions"
                    if hybrid["num_preemptions"]
                    else ""
                ),
                flush=True,
            )
            found.append({"workload": name, "gb": gb, "full": full, "hybrid": hybrid})
    write(options.output_json, "memory.hybrid_hits", found, options_of(options))


if __name__ == "__main__":
    main()
