"""Tables of the server and its start."""

from benchmarks.numbers.page import ZEN3, ZEN4, ZEN5, Page, Section, Table

SERVER = Page("server.md", "Server and start", (
    Section(
        "Import",
        "Time of a fresh interpreter, in milliseconds. The aim: `import quire` adds less than 50"
        " ms.",
        "python -m benchmarks.server.import_time",
        (Table(ZEN5 + "import_time.json", {
            "bare interpreter": "{bare_ms:.1f}", "import quire adds": "{import_quire_ms:.1f}",
            "import torch adds": "{import_torch_ms:.0f}"}),),
    ),
    Section(
        "Start of the server",
        "Time from `quire serve` to the first text of a chat (the aim: 4 s), and the idle server's"
        " share of a core (0.5 %). The wheel with the demo model should have at most 15 MB.",
        "python -m benchmarks.server.startup",
        (Table(ZEN5 + "startup.json", {
            "fastest start": "{start_s@min:.2f} s", "median": "{start_s:.2f} s",
            "idle, of a core": "{idle_share_of_a_core:.2%}",
            "wheel": "{wheel_bytes*1e-6:.1f} MB"}, {"part": "server"}),),
    ),
    Section(
        "Start of a command",
        "Time of a whole command that generates one token, and its peak memory. A second start"
        " loads no torch; these are second starts. The aim: 0.5 s.",
        'quire generate "..." --max-tokens 1',
        (Table(ZEN4 + "start.json", {
            "command": "{command}", "seconds": "{seconds@min:.2f} to {seconds@max:.2f}",
            "peak memory, MB": "{most_mb:.0f}"}),),
    ),
    Section(
        "Front end",
        "Time that the HTTP server adds to the model's time. The 64 streams open at the same time,"
        " so the last one waits for the others.",
        "python -m benchmarks.server.front_end",
        (Table(ZEN4 + "front_end.json", {
            "load": "{load}", "per request, p50": "{request_ms.p50:.1f} ms",
            "per request, p99": "{request_ms.p99:.1f} ms", "per token, p50":
            "{token_ms.p50:.2f} ms", "per token, p99": "{token_ms.p99:.2f} ms"}),),
    ),
    Section(
        "Start of a turn",
        "A conversation of 16,000 tokens is known, and the client sends it again with 500 new"
        " tokens. `later` is the time to the first token minus the model's own time, which is"
        " always that of turns on the device. The aim is 10 ms, plus 1.3 times the moved bytes"
        " over the bandwidth of the place. `wide` is two layers of Qwen3-0.6B. The second table"
        " has the parts of a turn, each alone and without the model.",
        "python -m benchmarks.server.turns",
        (Table(ZEN3 + "turns.json", {
            "cell": "{cell}", "keys and values in": "{place}", "MB moved":
            "{moved_bytes*1e-6:.0f}", "first token": "{first_token_ms:.0f} ms", "model":
            "{model_ms:.0f} ms", "later": "{later_ms:.1f} ms", "aim": "{limit_ms:.1f} ms"},
            {"place": ("device", "host", "directory")}),
         Table(ZEN3 + "turns.json", {"part": "{part}", "CPU time": "{cpu_ms:.2f} ms"},
            {"part": ("body", "template", "tokens", "request", "core", "add", "schedule")})),
    ),
    Section(
        "Loading",
        "Rate of loading a checkpoint from the page cache, in GB/s. Plain reading into fresh memory"
        " is the limit. The aim: 0.8 of one reading thread.",
        "python -m benchmarks.server.loading --rounds 7",
        (Table(ZEN5 + "loading.json", {
            "": "{way}", "GB": "{settings.bytes*1e-9:.2f}", "median": "{gb_per_s:.1f}",
            "slowest": "{gb_per_s@min:.1f}", "fastest": "{gb_per_s@max:.1f}"}),),
    ),
    Section(
        "Hand-over",
        "One engine computes a prompt of 2,048 tokens and hands its KV blocks to a second engine"
        " through shared memory. The table compares the second engine's first token with one"
        " after computing the prompt. The aim: 10 % of that time.",
        "python -m benchmarks.memory.handover --store shm:bench --runs 5",
        (Table(ZEN4 + "handover.json", {
            "prompt computed": "{cold_s:.1f} s", "prompt handed over": "{warm_s:.2f} s",
            "share": "{share:.1%}", "data moved": "{moved_mb} MB"}),),
    ),
    Section(
        "Sessions of agents, compared with other servers",
        "Sessions of ten turns that run at the same time. Each turn resends the whole text so far"
        " with 16 new tokens to generate. quire and llama.cpp read the same GGUF file (Q8_0 for the"
        " 0.6B shape, F16 for the demo model); vLLM computes in float32. The job is all turns.",
        "python -m benchmarks.server.agents",
        (Table(ZEN3 + "agents.json", {
            "model": "{model}", "sessions": "{sessions}", "server": "{engine}",
            "job, s": "{seconds:.1f}", "first token of a turn, ms": "{first_token_ms.median:,.0f}",
            "longest, ms": "{first_token_ms.most:,.0f}", "prompt tokens computed":
            "{computed_tokens:,}"}),),
    ),
    Section(
        "Reuse with sessions of agents",
        "20 sessions of coding agents and their subagents, with contexts of up to 1,635 tokens. The"
        " pool holds two of the longest contexts, host memory six, and a directory the rest."
        " Reused is the share of the tokens that the client has sent or received before. The aim:"
        " 99 % of them with the demo model. `hybrid` has layers with states, which are stored only"
        " where blocks of 16 tokens end. Answers have few tokens here, so half of the turns compute"
        " a block or more again. A round of a model takes two minutes.",
        "python -m benchmarks.server.reuse",
        (Table(ZEN3 + "reuse.json", {
            "model": "{model}", "reused": "{reuse:.2%}", "computed again":
            "{recomputed_tokens:,.0f} tokens", "in the last block": "{recomputed.in_block:,.0f}",
            "evicted": "{recomputed.evicted:,.0f}", "costly to load": "{recomputed.costly:,.0f}",
            "from the device": "{from.device:.0%}", "host memory": "{from.host:.0%}", "directory":
            "{from.directory:.0%}", "first token, median": "{ttft_ms.p50:,.0f} ms", "p99":
            "{ttft_ms.p99:,.0f} ms"}),),
    ),
    Section(
        "Grammars",
        "How much slower a step of 20 ms with 64 rows gets with a grammar for every row or for"
        " none. The aims: 5 % and 1 %.",
        "python -m benchmarks.server.grammars",
        (Table(ZEN5 + "grammars.json", {
            "plans in flight": "{depth}", "rows": "{kind}", "slower": "{slower:+.1%}"},
            {"kind": ("grammars", "plain")}),),
    ),
    Section(
        "Largest bodies",
        "The costliest request body of the largest permitted size, 16 MiB, until the server has"
        " judged the prompt's length. The aims: 0.5 s of processor time, 4 times the body's size"
        " in memory.",
        "python -m benchmarks.server.worst_bodies",
        (Table(ZEN5 + "worst_bodies.json", {
            "body": "{body}", "processor time": "{cpu_s} s", "event loop blocked": "{held_s} s",
            "memory": "{memory} times the size"}),),
    ),
    Section(
        "Chaos",
        "A server whose processes are killed or stopped every 20 s. The test compares all answers"
        " with an undisturbed run.",
        "python -m tests.serve.chaos --minutes 20 --seed 20",
        (Table(ZEN5 + "chaos.json", {
            "answers": "{num_answers:,}", "wrong": "{num_wrong}", "ended by an error":
            "{num_cut:,}", "rejected as busy": "{num_busy}", "processes left over":
            "{num_left_over}", "slowest /health": "{slowest_health_s} s"}),),
    ),
), "How fast quire starts, what the server adds to the model's time, and how it behaves under"
   " attack.")  # fmt: skip
