"""Conversations that take turns, in a KV pool too small for them all (P 6.5, fig. 17).

    python benchmarks/memory/chat_turns.py [--cut half] [--virtual]

Each prompt is its conversation so far and a new message; prompt and answer have at most 1,024
tokens each, as in P. Lengths are ShareGPT-like (tools/workloads.py), tokens random, answers of the
lengths that were drawn. A few requests run at once. When one ends, the next turn of another
conversation arrives, in an order that is shuffled for each round of turns. So before a conversation
continues, others evict some or all of its blocks.

Scaled: all lengths (messages, answers, the limit on prompts) are divided by --scale. The block size
is not, so less of a prompt is in full blocks. The model is small, with random weights, where P has
OPT-13B; turns follow each other without pauses, where P has Poisson arrivals.

P cuts a prompt to its last 1,024 tokens, so it begins anywhere and no cache has its beginning (P
keeps no cache between turns). Here the oldest turns are dropped, whole ones:

    turns   as few as possible: what is left out changes with almost every turn from then on, so
            these turns find nothing either
    half    until half of the limit is left, so that the next turns continue there
    tokens  as in P

Engines, one after the other with the same work: no prefix caching; on the device only; with host
memory; with a directory. Host memory has --host-gb, which the system provides slowly at first use.
The directory's files stay in the page cache, with as much host memory as the pool has. That engine
is replaced by a new one after half of the turns, when no request runs, which does not count. `first
token`: from the arrival of a turn. `could hit`: turns that continue at least a full block of their
conversation's last computation. `cached`: of all prompt tokens; `directory`: in fetched blocks.

The limit: the answers take their time with all rows in use and no prompt at all. In addition, each
turn computes only the new tokens of its prompt, as far as blocks are full. Each of these tokens
costs its addition to a step. A first token comes after one step with those tokens. Both costs are
the lower of two measurements. `nothing cached` is the same formula with whole prompts.

--virtual: the same without scaling, in virtual time (tools/simulate). As in P, it has OPT-13B on an
A100 and a pool of 15,700 tokens; there is no directory.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from benchmarks.result_files import Row, columns, options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE
from benchmarks.virtual.step_times import OPT_13B
from quire import LLM
from quire.base.requests.sampling_params import RequestOutputKind
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.models.checkpoint.source import resolve_model
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from quire.spec.model_spec import load_spec
from quire.tools.bench.throughput import StepTimes, greedy, run_once
from quire.tools.report import benchmark_parser, print_head
from quire.tools.simulate.arrivals import OTHER, STOP, Arrival, simulated_request
from quire.tools.simulate.run import simulate
from quire.tools.workloads import SHAREGPT, random_prompts

LIMIT = 1024  # tokens of a prompt, and of an answer
BLOCK_SIZE = 16
CUTS = ("turns", "half", "tokens")
DECODE_STEPS = 24  # in which the cost of a step is measured
PROMPT_RUNS = 3  # in which the cost of a prompt token is; the best counts
VIRTUAL_POOL = 15_700  # tokens


@dataclass
class Turn:
    """A prompt and its outcome. Times in seconds.

    best_cached: tokens of full blocks that the conversation's last turn has computed already.
    is_cut: a turn was dropped for the first time.
    """

    talk: int
    number: int
    prompt: list[int]
    num_output: int
    best_cached: int
    is_cut: bool
    answer: list[int] = field(default_factory=list)
    first_s: float = 0.0
    num_cached: int = 0
    num_preemptions: int = 0

    @property
    def num_new(self) -> int:
        """Prompt tokens that must be computed at least."""
        return len(self.prompt) - self.best_cached


class Talk:
    """A conversation. messages, answer_lens: by turn."""

    def __init__(self, index: int, messages: list[list[int]], answer_lens: list[int]) -> None:
        self.index = index
        self.messages, self.answer_lens = messages, answer_lens
        self.history: list[list[int]] = []  # messages and answers of the turns that are kept
        self.computed: list[int] = []
        self.is_busy = False

    def begin(self, number: int, limit: int, cut: str) -> Turn:
        """Begin the next turn; its prompt has at most `limit` tokens."""
        self.is_busy = True
        message = self.messages[number]
        prompt = [token for turn in self.history for token in turn] + message
        is_cut = len(prompt) > limit
        if is_cut:
            prompt = self._cut(prompt, message, limit, cut)
        known = _num_common(prompt[:-1], self.computed)
        best = known - known % BLOCK_SIZE
        return Turn(self.index, number, prompt, self.answer_lens[number], best, is_cut)

    def _cut(self, prompt: list[int], message: list[int], limit: int, cut: str) -> list[int]:
        if cut == "tokens":
            self.history = [prompt[-limit : -len(message)]]
        max_length = limit // 2 if cut == "half" else limit
        while self.history and len(message) + sum(map(len, self.history)) > max_length:
            del self.history[0]
        return [token for turn in self.history for token in turn] + message

    def end(self, turn: Turn) -> None:
        """Take the answer. Its last token was sampled and not computed."""
        self.history.append(self.messages[turn.number] + turn.answer)
        self.computed = turn.prompt + turn.answer[:-1]
        self.is_busy = False


def _num_common(tokens: list[int], others: list[int]) -> int:
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def scaled_limit(scale: float) -> int:
    """Return the maximum number of tokens of a prompt, and of an answer."""
    return max(1, round(LIMIT / scale))


class Work:
    """Hands out the turns of all conversations; the same in every run with these numbers."""

    def __init__(self, num_talks: int, num_turns: int, scale: float, cut: str) -> None:
        self.limit, self._cut = scaled_limit(scale), cut
        self.talks = list(_talks(num_talks, num_turns, scale))
        self.turns: list[Turn] = []
        self._order: list[tuple[int, int]] = []  # number of the turn, conversation
        shuffle = random.Random(2)
        for number in range(num_turns):
            talks = list(range(num_talks))
            shuffle.shuffle(talks)
            self._order += [(number, talk) for talk in talks]

    def next(self, end: int) -> Turn | None:
        """Return the first turn with a number below `end` whose conversation waits for nothing."""
        for i, (number, talk) in enumerate(self._order):
            if number < end and not self.talks[talk].is_busy:
                del self._order[i]
                self.turns.append(self.talks[talk].begin(number, self.limit, self._cut))
                return self.turns[-1]
        return None

    def end(self, turn: Turn, answer: list[int]) -> None:
        turn.answer = answer
        self.talks[turn.talk].end(turn)

    @property
    def num_history(self) -> int:
        """Tokens of all conversations that a next turn could find."""
        return sum(len(talk.computed) for talk in self.talks)


def _talks(num_talks: int, num_turns: int, scale: float) -> Iterator[Talk]:
    inputs, outputs = SHAREGPT.sample(num_talks * num_turns, seed=0)
    rng = np.random.default_rng(1)
    lengths = [np.maximum(1, np.rint(drawn / scale)).astype(int) for drawn in (inputs, outputs)]
    by_talk = [drawn.reshape(num_talks, num_turns).tolist() for drawn in lengths]
    for i, (message_lens, answer_lens) in enumerate(zip(*by_talk, strict=True)):
        messages = [rng.integers(10, VOCAB_SIZE, length).tolist() for length in message_lens]
        yield Talk(i, messages, answer_lens)


def work_of(options: Any) -> Work:
    return Work(options.talks, options.turns, options.scale, options.cut)


def lengths_of(options: Any) -> Work:
    """Return all turns with dummy answers: lengths, cuts and common parts are the same."""
    work = work_of(options)
    while (turn := work.next(options.turns)) is not None:
        work.end(turn, [0] * turn.num_output)
    return work


@dataclass
class Measured:
    """A run. prompt_step_s: seconds of steps that computed prompts; from_host, from_disk: cached
    tokens; restart_s: closing, which keeps what the device has, and opening."""

    name: str
    turns: list[Turn]
    seconds: float = 0.0
    prompt_step_s: float = 0.0
    from_host: int = 0
    from_disk: int = 0
    restart_s: float = 0.0

    @property
    def num_prompt(self) -> int:
        return sum(len(turn.prompt) for turn in self.turns)

    @property
    def num_cached(self) -> int:
        return sum(turn.num_cached for turn in self.turns)

    def firsts_s(self, could_hit: bool = False) -> list[float]:
        return [turn.first_s for turn in self.turns if turn.best_cached or not could_hit]

    def summary(self) -> dict[str, Any]:
        """Return the figures of the report."""
        of = self.num_prompt
        near = self.num_cached - self.from_host - self.from_disk
        shares = {"device": near, "host": self.from_host, "directory": self.from_disk}
        return {
            "name": self.name,
            "seconds": self.seconds,
            "prompt_step_s": self.prompt_step_s,
            "restart_s": self.restart_s,
            "first_token_s": quantiles(self.firsts_s()),
            "first_token_could_hit_s": quantiles(self.firsts_s(could_hit=True)),
            "cached": self.num_cached / of,
            "cached_by_tier": {tier: num / of for tier, num in shares.items()},
            "num_preemptions": sum(turn.num_preemptions for turn in self.turns),
            "turns": columns(
                {
                    "talk": turn.talk,
                    "number": turn.number,
                    "num_prompt": len(turn.prompt),
                    "num_output": turn.num_output,
                    "num_cached": turn.num_cached,
                    "best_cached": turn.best_cached,
                    "is_cut": turn.is_cut,
                    "first_token_s": turn.first_s,
                }
                for turn in self.turns
            ),
        }


def quantiles(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds or [float("nan")])
    return {"median": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}


# ---- an engine -------------------------------------------------------------------------------


def open_engine(options: Any, settings: dict[str, Any]) -> LLM:
    """Return a warm engine with a pool of --pool-tokens."""
    spec = load_spec(resolve_model(options.model).directory)
    block_bytes = sum(group.block_bytes(BLOCK_SIZE, 2) for group in spec.cache_groups)
    llm = LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=longest(options),
        max_num_seqs=options.users,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=pool_tokens(options) // BLOCK_SIZE * block_bytes,
        disable_log_stats=True,
        **settings,
    )
    llm.generate([{"prompt_token_ids": [1] * (BLOCK_SIZE - 1)}], greedy(1), use_tqdm=False)
    return llm


def longest(options: Any) -> int:
    """Return the number of tokens of a prompt and an answer."""
    return 2 * scaled_limit(options.scale)


def pool_tokens(options: Any) -> int:
    """Return the size of the pool. By default all running requests fit at their maximum length."""
    blocks = options.users * -(-longest(options) // BLOCK_SIZE)
    return int(options.pool_tokens or blocks * BLOCK_SIZE)


def answer_turns(llm: LLM, work: Work, users: int, end: int, measured: Measured) -> None:
    """Serve all turns with numbers below `end`, `users` at once."""
    engine, times = llm.engine, StepTimes.of(llm)
    under_way: dict[str, Turn] = {}
    began = time.monotonic()  # the engine's clock
    while True:
        while len(under_way) < users and (turn := work.next(end)) is not None:
            params = greedy(turn.num_output)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            request = engine.requests.make(engine.renderer.render(turn.prompt), params)
            under_way[request.request_id] = turn
            engine.client.add(request)
        if not under_way:
            break
        for output in engine.client.step():
            if output.finished:
                turn = under_way.pop(output.request_id)
                assert output.metrics is not None and output.metrics.first_token_s is not None
                turn.first_s = output.metrics.first_token_s - output.metrics.arrival_s
                turn.num_cached = output.num_cached_tokens or 0
                turn.num_preemptions = output.metrics.num_preemptions
                work.end(turn, list(output.outputs[0].token_ids))
    ended = time.monotonic()
    measured.seconds += ended - began
    steps = times.steps(ended)
    measured.prompt_step_s += sum(step.duration_s for step in steps if not step.is_decode)
    count_tiers(llm.engine.client.core.scheduler, measured)


def count_tiers(scheduler: Scheduler, measured: Measured) -> None:
    """Count the sources of an engine's cached tokens. If a request was preempted, its hits on
    resumption count too."""
    tier, stores = scheduler.memory.kv.tier, scheduler.stores
    if tier is None:
        return
    fetched = 0 if stores is None else min(stores.num_fetched, tier.num_loaded)
    measured.from_disk += fetched * BLOCK_SIZE
    measured.from_host += (tier.num_loaded - fetched) * BLOCK_SIZE


def measure(options: Any, name: str, settings: dict[str, Any], restarts: bool = False) -> Measured:
    """Measure one kind of engine."""
    work = work_of(options)
    measured = Measured(name, work.turns)
    llm = open_engine(options, settings)
    try:
        answer_turns(llm, work, options.users, options.turns // 2, measured)
        if restarts:
            began = time.perf_counter()
            llm.close()
            llm = open_engine(options, settings)
            measured.restart_s = time.perf_counter() - began
        answer_turns(llm, work, options.users, options.turns, measured)
    finally:
        llm.close()
    return measured


def measure_all(options: Any) -> Iterator[Measured]:
    yield measure(options, "no prefix caching", {"enable_prefix_caching": False})
    yield measure(options, "device only", {"kv_host_gb": 0.0})
    yield measure(options, "host memory", {"kv_host_gb": options.host_gb})
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        disk = {"kv_disk_dir": directory, "kv_disk_gb": options.disk_gb}
        yield measure(options, "directory, new engine", disk, restarts=True)


# ---- the limit -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Measured costs.

    alone_s: of a prompt token, in steps of prompts alone.
    token_s: its addition to a step.
    step_s: of a step without prompts, all rows in use.
    """

    alone_s: float
    token_s: float
    step_s: float

    def seconds(self, num_prompt: int, num_decoded: int, users: int) -> float:
        return num_prompt * self.token_s + num_decoded / users * self.step_s

    def first_s(self, num_prompt: int) -> float:
        return num_prompt * self.token_s + self.step_s

    def better(self, other: "Costs") -> "Costs":
        """Return the lower of each cost; other load made the higher one."""
        return Costs(
            min(self.alone_s, other.alone_s),
            min(self.token_s, other.token_s),
            min(self.step_s, other.step_s),
        )


def measure_costs(options: Any, turns: list[Turn]) -> Costs:
    """Measure costs with prompts of the mean length, and contexts of the mean length of decoding
    rows."""
    prompt_len = round(np.mean([len(turn.prompt) for turn in turns]))
    weights = [turn.num_output for turn in turns]
    contexts = [len(turn.prompt) + turn.num_output / 2 for turn in turns]
    context_len = round(np.average(contexts, weights=weights))
    context_len = max(1, min(context_len, longest(options) - DECODE_STEPS))
    with open_engine(options, {"enable_prefix_caching": False}) as llm:
        times, vocab_size = StepTimes.of(llm), llm.engine.spec.vocab_size
        prompts = random_prompts(options.users, prompt_len, vocab_size, seed=3)
        runs = [run_once(llm, times, prompts, 1) for _ in range(PROMPT_RUNS)]
        prompts = random_prompts(options.users, context_len, vocab_size, seed=4)
        decoding = run_once(llm, times, prompts, DECODE_STEPS)
    step_s = median(
        step.duration_s
        for step in decoding.steps
        if step.is_decode and step.num_rows == options.users
    )
    alone = min(runs, key=lambda run: run.elapsed_s)
    added_s = max(0.0, alone.elapsed_s - len(alone.steps) * step_s)
    num_tokens = alone.num_prompt_tokens
    return Costs(alone.elapsed_s / num_tokens, added_s / num_tokens, step_s)


def limit_of(costs: Costs, turns: list[Turn], users: int) -> dict[str, Any]:
    """Return the docstring's formula, with the new tokens of each turn and with all of them."""
    num_decoded = sum(turn.num_output - 1 for turn in turns)
    num_prompt = sum(len(turn.prompt) for turn in turns)
    num_new = sum(turn.num_new for turn in turns)
    firsts = [costs.first_s(turn.num_new) for turn in turns]
    could_hit = [costs.first_s(turn.num_new) for turn in turns if turn.best_cached]
    return {
        **asdict(costs),
        "seconds": costs.seconds(num_new, num_decoded, users),
        "seconds_uncached": costs.seconds(num_prompt, num_decoded, users),
        "first_token_s": quantiles(firsts),
        "first_token_could_hit_s": quantiles(could_hit),
        "first_token_uncached_s": quantiles([costs.first_s(len(turn.prompt)) for turn in turns]),
        "cached": 1 - num_new / num_prompt,
    }


# ---- virtual time ----------------------------------------------------------------------------


def measure_virtual(options: Any, name: str, cached: bool, num_host: int | None) -> Measured:
    """Measure in virtual time. num_host: blocks of host memory for evicted blocks; None is no such
    tier."""
    work = Work(options.virtual_talks, options.turns, 1.0, options.cut)
    users = options.virtual_users
    config = SchedulerConfig(max_num_seqs=users, max_num_batched_tokens=2048)
    limits = None if num_host is None else (num_host,)
    group = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
    blocks = (VIRTUAL_POOL // BLOCK_SIZE,)
    kv = KVManager((group,), blocks, BLOCK_SIZE, cached, host_limits=limits)
    memory = Memory(kv, config.max_num_batched_tokens or 0)
    scheduler = Scheduler(memory, config, 2 * LIMIT)
    under_way: dict[str, Turn] = {}

    def arrival(now: float) -> Arrival | None:
        turn = work.next(options.turns)
        if turn is None:
            return None
        name = f"{turn.talk}.{turn.number}"
        under_way[name] = turn
        return Arrival(now, simulated_request(name, turn.prompt, LIMIT), turn.num_output)

    def then(request_id: str, now: float) -> Arrival | None:
        turn = under_way[request_id]
        work.end(turn, [OTHER] * (turn.num_output - 1) + [STOP])
        return arrival(now)

    first = [found for _ in range(users) if (found := arrival(0.0)) is not None]
    run = simulate(scheduler, first, OPT_13B, then)
    for request_id, turn in under_way.items():
        served = run.by_id[request_id]
        turn.first_s, turn.num_cached = served.wait_s, served.num_cached_tokens
        turn.num_preemptions = served.num_preemptions
    measured = Measured(name, work.turns, run.duration_s)
    count_tiers(scheduler, measured)
    return measured


def virtual(options: Any) -> list[dict[str, Any]]:
    """Measure the paper's lengths, model and pool."""
    print(
        f"virtual time: OPT-13B on an A100, {options.virtual_talks} conversations,"
        f" {options.virtual_users} at once, {options.turns} turns each, a pool of {VIRTUAL_POOL:,}"
        " tokens"
    )
    print_columns()
    max_length = options.virtual_talks * 2 * LIMIT // BLOCK_SIZE
    found = []
    for name, cached, num_host in (
        ("no prefix caching", False, None),
        ("device only", True, None),
        ("host memory for all", True, max_length),
    ):
        measured = measure_virtual(options, name, cached, num_host)
        show(measured)
        found.append(measured.summary())
    print_cuts(measured.turns)
    return found


# ---- what is printed -------------------------------------------------------------------------


def print_columns() -> None:
    print(
        f"{'':22} seconds  first token, s   could hit, s   cached  device    host directory"
        f"\n{'':22}          median     p90  median    p90"
    )


def show(got: Measured) -> None:
    found = got.summary()
    print_line(got.name, got.seconds, found)
    if found["num_preemptions"]:
        print(f"  preemptions: {found['num_preemptions']}; what they find again counts as cached")
    if got.restart_s:
        print(f"  the new engine: {got.restart_s:.1f} s, which are not in the seconds")


def print_line(name: str, seconds: float, found: dict[str, Any]) -> None:
    firsts, could_hit = found["first_token_s"], found["first_token_could_hit_s"]
    tiers = "".join(f"{share:8.1%}" for share in found.get("cached_by_tier", {}).values())
    print(
        f"{name:22}{seconds:8.1f}{firsts['median']:9.3f}{firsts['p90']:8.3f}"
        f"{could_hit['median']:8.3f}{could_hit['p90']:7.3f}{found['cached']:9.1%}{tiers}",
        flush=True,
    )


def print_cuts(turns: list[Turn]) -> None:
    num_cut, num_hit = sum(turn.is_cut for turn in turns), sum(t.best_cached > 0 for t in turns)
    num_prompt = sum(len(turn.prompt) for turn in turns)
    print(
        f"  {len(turns)} turns: {num_cut} were cut, {num_hit} could hit; {num_prompt:,} prompt"
        f" tokens, {sum(turn.num_new for turn in turns):,} of them new,"
        f" {sum(turn.num_output for turn in turns):,} tokens of answers",
        flush=True,
    )


def measure_engines(options: Any) -> list[Row]:
    """Return a row for each engine, and one for the limit."""
    plain = lengths_of(options)
    print_cuts(plain.turns)
    print(
        f"  the pool has {pool_tokens(options):,} tokens, all conversations"
        f" {plain.num_history:,} in the end; a prompt at most {plain.limit}",
        flush=True,
    )
    costs = measure_costs(options, plain.turns)
    print_columns()
    found, first = [], None
    for measured in measure_all(options):
        show(measured)
        first = first or measured
        answers = {(turn.talk, turn.number): turn.answer for turn in first.turns}
        same = sum(answers[turn.talk, turn.number] == turn.answer for turn in measured.turns)
        found.append(measured.summary() | {"num_same_answers": same})
    costs = costs.better(measure_costs(options, plain.turns))
    limit = limit_of(costs, plain.turns, options.users)
    print_line("limit", limit["seconds"], limit)
    print(
        f"  a prompt token adds {costs.token_s * 1e3:.2f} ms to a step (alone it takes"
        f" {costs.alone_s * 1e3:.2f}), a step of {options.users} rows {costs.step_s * 1e3:.1f} ms;"
        f" nothing cached: {limit['seconds_uncached']:.1f} s"
    )
    equal = ", ".join(str(engine["num_same_answers"]) for engine in found[1:])
    print(f"  answers that are the first engine's: {equal} of {len(plain.turns)}")
    return [*found, {"name": "limit", **limit}]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--scale", type=float, default=4.0, help="all lengths are divided by it")
    parser.add_argument("--talks", type=int, default=16, help="conversations")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation, at least 2")
    parser.add_argument("--users", type=int, default=6, help="requests that run at once")
    parser.add_argument("--cut", choices=CUTS, default="turns")
    parser.add_argument("--pool-tokens", type=int, help="as many as all that run need, if absent")
    parser.add_argument("--host-gb", type=float, default=1.0)
    parser.add_argument("--disk-gb", type=float, default=8.0)
    parser.add_argument("--directory", help="where the directory of blocks is made")
    parser.add_argument("--virtual", action="store_true", help="virtual time only")
    parser.add_argument("--virtual-talks", type=int, default=200)
    parser.add_argument("--virtual-users", type=int, default=8)
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("--turns must be at least 2: nothing of a first turn can be cached")
    if options.virtual:
        print_head(f"conversations in a small pool; cut: {options.cut}")
        rows = virtual(options)
    else:
        print_head(
            f"{options.talks} conversations of {options.turns} turns in a small pool,"
            f" {options.users} at once, lengths divided by {options.scale:g}; cut: {options.cut}"
        )
        rows = measure_engines(options)
    write(options.output_json, "memory.chat_turns", rows, options_of(options))


if __name__ == "__main__":
    main()
