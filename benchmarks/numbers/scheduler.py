"""Tables of the scheduler, and of the code."""

from benchmarks.numbers.page import ZEN3, ZEN4, ZEN5, Page, Section, Table

SCHEDULER = Page("scheduler.md", "Scheduler", (
    Section(
        "Steps",
        "Milliseconds that the scheduler needs for one step (`schedule` and `update`), without a"
        " model. All rows decode. Their new blocks fall due in different steps (spread) or in the"
        " same step. With churn, 2 % of the rows end in each step and as many requests arrive. The"
        " aims: 0.2 ms for 256 rows, 0.6 ms for 1,024.",
        "python -m benchmarks.scheduler.steps --vllm PYTHON",
        (
            Table(ZEN5 + "steps.json", {
                "load": "{load}", "rows": "{rows:,}", "prefix cache": "{prefix_caching}",
                "spread": "{spread}", "median": "{ms.schedule + update.median:.2f}",
                "mean": "{ms.schedule + update.mean:.2f}",
                "vLLM 0.32, median": "{vllm_ms.schedule + update.median:.2f}"},
                {"load": ("steady", "churn")}),
        ),
    ),
    Section(
        "Requests that come and go",
        "Microseconds of scheduler time for a request, from its arrival to its end: prompts of 128"
        " tokens, 2 % of the rows end in each step, prefix caching is on. The time is the mean of"
        " such steps minus that of steps without arrivals, per request. The aim: 30. epyc-zen5-2,"
        " the machine of the table above, runs Python three to five times as fast.",
        "python -m benchmarks.scheduler.steps --loads churn",
        (
            Table(ZEN3 + "steps.json", {
                "rows": "{rows:,}", "requests per step": "{num_ends}",
                "step, ms": "{mean_ms:.2f}", "step without arrivals, ms": "{steady_ms:.2f}",
                "us per request": "{request_us:.0f}", "aim": "{aim_us:.0f}"}, {"load": "churn"}),
        ),
    ),
    Section(
        "Waiting requests",
        "Milliseconds of the same step while requests wait in the queue, by policy.",
        "python -m benchmarks.scheduler.steps",
        (Table(ZEN5 + "steps.json", {"waiting": "{num_waiting:,}"}, {"load": "waiting"},
            by="policy", cell="{ms.schedule + update.median:.2f}"),),
    ),
    Section(
        "Policies",
        "Simulated seconds to the first token of Llama-3.1-8B on an H200. The mean of `two-level`"
        " should be at most 1.1 times that of `srtf`. No request should wait more than twice as"
        " long as under `fifo`. The last column is the worst ratio of waits.",
        "python -m benchmarks.scheduler.policies",
        (Table(ZEN5 + "policies.json", {
            "workload": "{workload}", "policy": "{policy}", "mean": "{mean:.2f}",
            "p99": "{p99:.2f}", "longest": "{longest:.1f}", "of the wait under fifo":
            "{worst:.1f}"}, {
            "workload": ("long and short, 1% long, load 0.68", "long and short, 2% long, load 0.73",
                "long and short, 2% long, load 1.60", "turns", "tenants"),
            "policy": ("fifo", "srtf", "two-level", "one queue, fifo", "fair, fifo",
                "alone, fifo")}),),
    ),
    Section(
        "Plans in flight",
        "Share of the time in which a simulated device waits for its host. The aim with two plans:"
        " 2 %.",
        "python -m benchmarks.scheduler.async_scheduling",
        (Table(ZEN5 + "async_scheduling.json", {
            "core in": "{path}", "rows": "{rows:,}", "time of a step": "{step_ms} ms"},
            by="depth", cell="{idle:.1%}", headings={1: "1 plan", 2: "2 plans", 3: "3 plans"}),),
    ),
    Section(
        "Host time of a step on a GPU",
        "Microseconds of host work for a decoding step that the C++ core launches; its three calls"
        " into CUDA count 5 us each. The last column is the shortest possible step of Qwen3-0.6B on"
        " an H200, by formula.",
        "python -m benchmarks.scheduler.launching",
        (Table(ZEN3 + "launching.json", {
            "rows": "{rows}", "plan": "{native_us.schedule:.0f}",
            "pack and launch": "{native_us.launch:.0f}",
            "take the result": "{native_us.result:.0f}", "p99 of the sum": "{native_us.p99:.0f}",
            "shortest step": "{floor_us:,.0f}"}),),
    ),
    Section(
        "Host time of one launch on a GPU",
        "Microseconds of Python for a launch outside of a graph, before the call into CUDA: by"
        " Triton, and with `QUIRE_PREPARED_LAUNCHES=1`. The aim: 8. Both took turns on a busy"
        " machine, so compare them with one another.",
        "python -m benchmarks.scheduler.one_launch",
        (Table(ZEN3 + "one_launch.json", {
            "kernel": "{kernel}", "Triton": "{us.triton:.2f}", "prepared": "{us.prepared:.2f}"}),),
    ),
    Section(
        "Recording",
        "Milliseconds of `schedule` and `update` without and with a recorder, and of a snapshot."
        " The aim: less than 3 % of a step of 5 ms.",
        "python -m benchmarks.scheduler.recording",
        (Table(ZEN5 + "recording.json", {
            "rows": "{rows:,}", "load": "{load}", "device's step": "{device_ms:.0f} ms",
            "plain": "{plain_ms.median:.3f}", "recorded": "{recorded_ms.median:.3f}",
            "snapshot": "{snapshot_ms:.0f}"}),),
    ),
    Section(
        "A viewer of the page",
        "Share of the core's time that one viewer of the live page takes, with steps of 5 and of 20"
        " ms. The aim: less than 1 %.",
        "python -m benchmarks.scheduler.live_watcher",
        (Table(ZEN4 + "live_watcher.json", {
            "rows": "{rows:,}", "blocks": "{blocks:,}", "one frame": "{frame_ms:.1f} ms",
            "of 5 ms": "{shares.5.0:.2%}", "of 20 ms": "{shares.20.0:.2%}"}),),
    ),
    Section(
        "KV events",
        "Share of a step that KV events take, with and without a device that needs 5 ms for a"
        " step. The aim: less than 1 % with the device.",
        "python -m benchmarks.scheduler.kv_events",
        (Table(ZEN4 + "kv_events.json", {
            "rows": "{rows:,}", "load": "{load}", "token ids": "{tokens}"},
            by="device_ms", cell="{of_step:.2%}",
            headings={5.0: "steps of 5 ms", 0.0: "no device"}),),
    ),
    Section(
        "Simulations compared with real runs",
        "How far `quire simulate` is from real runs that it has not seen. The aims: throughput"
        " within 10 %, mean and median time to the first token within 15 %.",
        "python -m benchmarks.scheduler.fidelity",
        (Table(ZEN5 + "fidelity.json", {
            "model": "{model}", "workload": "{workload}", "tokens/s": "{off.tokens/s:+.1%}",
            "TTFT, mean": "{off.TTFT mean:+.1%}", "median": "{off.TTFT median:+.1%}", "p99":
            "{off.TTFT p99:+.1%}"}),),
    ),
    Section(
        "Mutations",
        "Small mistakes, put one at a time into the scheduler, the KV cache and the sampler, that"
        " the tests detect. The aim: 97 %. `tests/mutation/equivalent.txt` lists the changes that"
        " have no effect.",
        "make mutate",
        (Table(ZEN4 + "mutation.json", {
            "mistakes": "{num_mutations}", "detected": "{num_seen}", "share": "{share:.1%}"}),),
    ),
    Section(
        "The code",
        "Python files whose functions run, and the lines of these files. The actions are one step"
        " of the scheduler with its result, one forward pass on a CPU, and one chat through HTTP."
        " The front is the part of the chat that runs in an API process.",
        "python -m benchmarks.scheduler.trips",
        (Table(ZEN4 + "trips.json", {
            "action": "{trip}", "files": "{files}", "lines": "{lines:,}"}),),
    ),
), "How long the scheduler takes for a step, what features add to that, and what the tests"
   " detect.")  # fmt: skip
