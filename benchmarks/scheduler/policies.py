"""Compare scheduling policies by the requests' wait for the first token.

    python -m benchmarks.scheduler.policies

Virtual time: a scheduler without a model, and step times by a formula for Llama-3.1-8B on an H200
(tools/simulate). `wait`: from arrival to the first token. `hits`: share of cached prompt tokens.

`long and short`: prompts of 100 tokens and a few of 100,000 (T 4.5.1), at three loads. The load is
the time that all prompts take, alone, over the time in which they arrive. `worst`: the longest
wait, over the wait of the same request under FIFO. `beyond`: its excess over twice that, in
seconds. It is not above one step if no request is delayed; a step is 0.27 s at most.

`turns`: conversations in which each prompt is the conversation so far and 50 to 400 new tokens,
under a pool that cannot hold them all.

`tenants`: one tenant sends 2,000 prompts at once, another one prompt a second. The second one's
wait is measured in one common queue, with a counter for each tenant, and alone.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_run
from benchmarks.virtual.step_times import LLAMA_8B
from quire.base.settings.config import SchedulerConfig
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.tools.report import benchmark_parser, print_head
from quire.tools.simulate.arrivals import OTHER, Arrival, simulated_request
from quire.tools.simulate.run import simulate
from quire.tools.simulate.served import Served

POLICIES = ("fifo", "srtf", "two-level")
BLOCK_SIZE, MAX_LEN, BUDGET = 16, 131_072, 8192
LONG, SHORT = 100_000, 100
LOADS = ((0.01, 12.0), (0.02, 12.0), (0.02, 18.0))  # share of long prompts, requests per second
AIM_MEAN, AIM_WAIT = 1.1, 2.0


@dataclass(frozen=True)
class Waits:
    """Seconds, over the requests of one run."""

    workload: str
    policy: str
    mean: float
    p99: float
    longest: float
    hits: float
    worst: float | None = None
    beyond: float | None = None

    @classmethod
    def of(
        cls, workload: str, policy: str, served: Iterable[Served], fifo: list[float] | None = None
    ) -> "Waits":
        all_served = list(served)
        waits = np.array([s.wait_s for s in all_served])
        prompts = sum(s.num_prompt for s in all_served)
        hits = sum(s.num_cached_tokens for s in all_served) / prompts
        got = cls(workload, policy, waits.mean(), np.quantile(waits, 0.99), waits.max(), hits)
        if fifo is None:
            return got
        base = np.array(fifo)
        return replace(
            got, worst=float((waits / base).max()), beyond=float((waits - AIM_WAIT * base).max())
        )


def scheduler_of(policy: str, num_blocks: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=BUDGET)
    return dry_run(num_blocks, BLOCK_SIZE, config, MAX_LEN, True, make_policy=make_policy(policy))[
        0
    ]


def long_and_short(num: int, share: float, per_s: float, seed: int) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    times = rng.exponential(1 / per_s, num).cumsum().tolist()
    lengths = np.where(rng.random(num) < share, LONG, SHORT).tolist()
    return [
        Arrival(
            at_s,
            simulated_request(str(i), rng.integers(10, VOCAB_SIZE, length).tolist(), 200),
            int(rng.integers(20, 100)),
        )
        for i, (at_s, length) in enumerate(zip(times, lengths, strict=True))
    ]


def load_of(arrivals: list[Arrival]) -> float:
    num_tokens = sum(len(a.request.prompt_token_ids) for a in arrivals)
    return num_tokens * LLAMA_8B.token_s / arrivals[-1].at_s


def show(got: Waits) -> None:
    ratio = "" if got.worst is None else f"{got.worst:7.2f} {got.beyond:8.3f}"
    print(
        f"  {got.policy:22} {got.mean:8.3f} {got.p99:8.3f} {got.longest:8.2f} {got.hits:6.1%}"
        f" {ratio}",
        flush=True,
    )


def measure_long_and_short(num: int) -> list[Waits]:
    found = []
    for (share, per_s), seed in ((load, seed) for load in LOADS for seed in (0, 1)):
        arrivals = long_and_short(num, share, per_s, seed)
        name = f"long and short, {share:.0%} long, load {load_of(arrivals):.2f}"
        print(
            f"{name}\n  policy                     mean      p99  longest   hits   worst   beyond"
        )
        fifo: list[float] | None = None
        results = []
        for policy in POLICIES:
            run = simulate(scheduler_of(policy, 60_000), arrivals, LLAMA_8B)
            served = [run.by_id[a.request.request_id] for a in arrivals]
            fifo = fifo or [s.wait_s for s in served]
            results.append(Waits.of(name, policy, served, fifo))
            show(results[-1])
        print(f"  two-level: {results[2].mean / results[1].mean:.2f} x srtf's mean")
        found += results
    return found


class Turns:
    """Conversations of several turns; the next one follows the answer after a pause."""

    def __init__(self, num: int, seed: int, num_turns: int = 8) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_turns = num_turns
        self._history: dict[str, list[int]] = {}
        self.first = [self._turn(f"{i}.0", float(self._rng.exponential(20.0))) for i in range(num)]

    def _turn(self, name: str, at_s: float) -> Arrival:
        talk = name.split(".")[0]
        new = self._rng.integers(10, VOCAB_SIZE, self._rng.integers(50, 400)).tolist()
        prompt = self._history.get(talk, []) + new
        num_output = int(self._rng.integers(50, 400))
        self._history[talk] = prompt + [OTHER] * (num_output - 1)
        return Arrival(at_s, simulated_request(name, prompt, 500), num_output)

    def then(self, request_id: str, now: float) -> Arrival | None:
        talk, turn = request_id.split(".")
        if int(turn) + 1 == self._num_turns:
            return None
        return self._turn(f"{talk}.{int(turn) + 1}", now + float(self._rng.exponential(10.0)))


def measure_turns(num: int) -> list[Waits]:
    name = "turns"
    print(
        f"{name}, {num} conversations\n  policy                     mean      p99  longest   hits"
    )
    found = []
    for policy in POLICIES:
        turns = Turns(num, seed=0)
        run = simulate(scheduler_of(policy, 12_000), turns.first, LLAMA_8B, turns.then)
        found.append(Waits.of(name, policy, run.by_id.values()))
        show(found[-1])
    return found


def serve_light(policy: str, queue: str, num_heavy: int = 2000) -> list[Served]:
    """Serve a tenant next to another one's flood; return the light tenant's requests.

    queue: `one queue` for both, `fair` with a counter for each, or `alone`.
    """
    rng = np.random.default_rng(0)

    def arrival(tenant: str, number: int, at_s: float) -> Arrival:
        prompt = rng.integers(10, VOCAB_SIZE, 1000).tolist()
        name = tenant if queue == "fair" else ""
        return Arrival(at_s, simulated_request(f"{tenant}{number}", prompt, 200, name), 60)

    flood = [arrival("heavy", i, 0.0) for i in range(num_heavy)]
    light = [arrival("light", i, i + 0.5) for i in range(40)]
    arrivals = light if queue == "alone" else [*flood, *light]
    run = simulate(scheduler_of(policy, 60_000), arrivals, LLAMA_8B)
    return [run.by_id[each.request.request_id] for each in light]


def light_waits(policy: str, queue: str, num_heavy: int) -> list[float]:
    """Return the seconds that the light tenant waited for first tokens."""
    return [served.wait_s for served in serve_light(policy, queue, num_heavy)]


def measure_tenants() -> list[Waits]:
    """Measure the light tenant's waits."""
    print("tenants: the light one\n  queue                      mean      p99  longest   hits")
    found = []
    for queue in ("one queue", "fair", "alone"):
        for policy in POLICIES:
            found.append(Waits.of("tenants", f"{queue}, {policy}", serve_light(policy, queue)))
            show(found[-1])
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=1000, help="long and short")
    parser.add_argument("--num-talks", type=int, default=300, help="conversations")
    options = parser.parse_args()
    print_head("waits for the first token, in seconds of virtual time")
    print(
        f"  aims: two-level's mean at most {AIM_MEAN} x srtf's, nobody waits longer than"
        f" {AIM_WAIT:g} x under fifo"
    )
    found = measure_long_and_short(options.num_requests)
    found += measure_turns(options.num_talks)
    found += measure_tenants()
    write(
        options.output_json,
        "scheduler.policies",
        [asdict(result) for result in found],
        options_of(options),
    )


if __name__ == "__main__":
    main()
