"""Tables of the server, the scheduler and the KV cache."""

from benchmarks.numbers.page import Part, Section, Table

ZEN4, ZEN5 = "epyc-zen4-2/", "epyc-zen5-2/"

SERVER = Part("Server and start", (
    Section(
        "Import",
        "Milliseconds of fresh interpreters, medians; aim: `import quire` in less than 50 ms on top"
        " of the bare interpreter.",
        "python -m benchmarks.server.import_time",
        (Table(ZEN5 + "import_time.json", {
            "bare interpreter": "{bare_ms:.1f}", "import quire": "{import_quire_ms:.1f}",
            "import torch": "{import_torch_ms:.0f}"}),),
    ),
    Section(
        "Start of the server",
        "Seconds from `quire serve` to the first text of a chat (aim: 4); the share of a core that"
        " the idle server uses (aim: 0.5 %); the wheel with the demo model (aim: 15 MB).",
        "python -m benchmarks.server.startup",
        (Table(ZEN5 + "startup.json", {
            "start, least": "{start_s@min:.2f} s", "median": "{start_s:.2f} s",
            "idle": "{idle_share_of_a_core:.2%}", "wheel": "{wheel_bytes*1e-6:.1f} MB"},
            {"part": "server"}),),
    ),
    Section(
        "Start of a command",
        "Wall clock of the whole command with one token, from its second start on, which needs no"
        " torch (aim: 0.5 s), and the most memory.",
        'quire generate "..." --max-tokens 1',
        (Table(ZEN4 + "start.json", {
            "command": "{command}", "seconds": "{seconds@min:.2f} to {seconds@max:.2f}",
            "MB": "{most_mb:.0f}"}),),
    ),
    Section(
        "Front end",
        "What the front end adds to the model's time, per request and per token. With 64 streams"
        " that open at once the last one waits for the others.",
        "python -m benchmarks.server.front_end",
        (Table(ZEN5 + "front_end.json", {
            "open streams": "{streams}", "request, p50": "{request_ms.p50:.1f} ms",
            "p99": "{request_ms.p99:.1f} ms", "token, p50": "{token_ms.p50:.2f} ms",
            "p99 of tokens": "{token_ms.p99:.2f} ms"}),),
    ),
    Section(
        "Loading",
        "GB/s of a checkpoint in the page cache. The limit is what plain reading into"
        " fresh memory gives; aim: 0.8 of one reading thread.",
        "python -m benchmarks.server.loading --rounds 7",
        (Table(ZEN5 + "loading.json", {
            "way": "{way}", "GB": "{settings.bytes*1e-9:.2f}", "median": "{gb_per_s:.1f}",
            "least": "{gb_per_s@min:.1f}", "most": "{gb_per_s@max:.1f}"}),),
    ),
    Section(
        "Hand-over",
        "The first token of a second engine after another engine's prompt of 2,048 tokens, through"
        " shared memory, against computing the prompt (aim: at most 10 %).",
        "python -m benchmarks.memory.handover --store shm:bench --runs 5",
        (Table(ZEN4 + "handover.json", {
            "cold": "{cold_s:.1f} s", "after the other engine": "{warm_s:.2f} s",
            "share": "{share:.1%}", "moved": "{moved_mb} MB"}),),
    ),
))  # fmt: skip

SCHEDULER = Part("Scheduler", (
    Section(
        "Steps",
        "Milliseconds of `schedule` and `update` in a step, without a model. All rows decode; they"
        " enter new blocks in different steps (spread) or in the same one. In churn 2 % of the rows"
        " end in each step and as many requests arrive. Aims: 0.2 ms at 256 rows, 0.6 at 1,024.",
        "python -m benchmarks.scheduler.steps --vllm PYTHON",
        (
            Table(ZEN5 + "steps.json", {
                "load": "{load}", "rows": "{rows:,}", "prefix cache": "{prefix_caching}",
                "spread": "{spread}", "median": "{ms.schedule + update.median:.2f}",
                "mean": "{ms.schedule + update.mean:.2f}",
                "vLLM 0.32, median": "{vllm_ms.schedule + update.median:.2f}"},
                {"load": ("steady", "churn")}),
            Table(ZEN5 + "steps.json", {"waiting": "{num_waiting:,}"},
                {"load": "waiting"}, by="policy", cell="{ms.schedule + update.median:.2f}"),
        ),
    ),
    Section(
        "Policies",
        "Seconds of virtual time until the first token, of Llama-3.1-8B on an H200 by formula."
        " Aims: a mean under two-level of at most 1.1 times that of srtf, and no request waits more"
        " than twice as long as under fifo (last column: the most).",
        "python -m benchmarks.scheduler.policies",
        (Table(ZEN5 + "policies.json", {
            "workload": "{workload}", "policy": "{policy}", "mean": "{mean:.2f}",
            "p99": "{p99:.2f}", "longest": "{longest:.1f}", "of fifo's wait": "{worst:.1f}"}),),
    ),
    Section(
        "One step ahead",
        "The share of time for which a virtual device waits for its host, by the number of plans in"
        " flight (aim with two: at most 2 %).",
        "python -m benchmarks.scheduler.async_scheduling",
        (Table(ZEN5 + "async_scheduling.json", {
            "path": "{path}", "rows": "{rows:,}", "step": "{step_ms} ms"},
            by="depth", cell="{idle:.1%}", headings={1: "1 plan", 2: "2 plans", 3: "3 plans"}),),
    ),
    Section(
        "Recording",
        "`schedule` and `update` with a recorder and without, and a snapshot (aim: less than 3 %).",
        "python -m benchmarks.scheduler.recording",
        (Table(ZEN5 + "recording.json", {
            "rows": "{rows:,}", "load": "{load}", "step": "{device_ms:.0f} ms",
            "plain": "{plain_ms.median:.3f} ms", "recorded": "{recorded_ms.median:.3f} ms",
            "snapshot": "{snapshot_ms:.0f} ms"}),),
    ),
    Section(
        "A watcher of the page",
        "The share of the core's time that one watcher takes, in steps of 5 and of 20 ms (aim: less"
        " than 1 %).",
        "python -m benchmarks.scheduler.live_watcher",
        (Table(ZEN4 + "live_watcher.json", {
            "rows": "{rows:,}", "blocks": "{blocks:,}", "a frame": "{frame_ms:.1f} ms",
            "of 5 ms": "{shares.5.0:.2%}", "of 20 ms": "{shares.20.0:.2%}"}),),
    ),
    Section(
        "KV events",
        "The share of a step that KV events take, with a device that takes 5 ms (aim: less than 1"
        " %) and without a device.",
        "python -m benchmarks.scheduler.kv_events",
        (Table(ZEN4 + "kv_events.json", {
            "rows": "{rows:,}", "load": "{load}", "token ids": "{tokens}"},
            by="device_ms", cell="{of_step:.2%}",
            headings={5.0: "steps of 5 ms", 0.0: "no device"}),),
    ),
    Section(
        "Grammars",
        "What a step of 20 ms with 64 rows takes when all rows have a grammar (aim: less than 5 %"
        " slower), or none in an engine that knows grammars (aim: less than 1 %).",
        "python -m benchmarks.server.grammars",
        (Table(ZEN5 + "grammars.json", {
            "plans in flight": "{depth}", "rows have": "{kind}", "slower": "{slower:+.1%}"},
            {"kind": ("grammars", "plain")}),),
    ),
))  # fmt: skip

MEMORY = Part("KV cache", (
    Section(
        "Live slots",
        "The share of the slots in held blocks that hold live tokens, with a full pool (aim: 96 %"
        " with blocks of 16 and ShareGPT's lengths; P fig. 2: 96.3 %).",
        "python -m benchmarks.memory.live_slots",
        (Table(ZEN5 + "live_slots.json", {"lengths": "{workload}"}, by="block_size",
            cell="{live_share:.1%}", headings={8: "blocks of 8", 16: "of 16", 32: "of 32"}),),
    ),
    Section(
        "Block pool",
        "Nanoseconds to allocate and free a block (aim: flat). The indexed path misses the caches"
        " of a larger table, as a plain list accessed at random does.",
        "python -m benchmarks.memory.block_pool",
        (Table(ZEN5 + "block_pool.json", {
            "blocks": "{blocks:,}", "plain": "{ns.plain:.0f}", "indexed": "{ns.indexed:.0f}",
            "at random": "{ns.random:.0f}", "a list at random": "{ns.list:.0f}"}),),
    ),
    Section(
        "Block tables",
        "Nanoseconds per block (aim: flat); append and copy per operation.",
        "python -m benchmarks.memory.block_tables",
        (Table(ZEN5 + "block_tables.json", {
            "blocks": "{blocks:,}", "fork": "{ns.fork:.0f}", "truncate": "{ns.truncate:.0f}",
            "free": "{ns.free:.0f}", "append": "{ns.append:.0f}", "copy": "{ns.copy:.0f}"}),),
    ),
    Section(
        "Blocks saved by sharing",
        "The share of blocks that samples and beams save (P fig. 15). How much beams share depends"
        " on how they branch: `sureness` and `alike` say how random candidates are drawn.",
        "python -m benchmarks.memory.sharing",
        (
            Table(ZEN5 + "sharing.json", {
                "lengths": "{workload}", "samples": "{num}", "saved": "{saved:.1%}",
                "paper": "{paper:.1%}"}, {"method": "samples"}),
            Table(ZEN5 + "sharing.json", {
                "lengths": "{workload}", "beams": "{num}", "sureness": "{sureness}",
                "alike": "{alike}", "saved": "{saved:.1%}", "paper": "{paper:.1%}"},
                {"method": "beams", "alike": 0.0}),
            Table(ZEN5 + "sharing.json", {
                "demo model's own beams": "{num}", "lengths": "{workload}", "saved": "{saved:.1%}"},
                {"method": "demo beams"}),
        ),
    ),
    Section(
        "Shared prefixes",
        "Requests that share a prefix and arrive at once, against the same without sharing (aim: 4"
        " times for 16 requests). The limit: nothing but the rest is computed. P fig. 16 has 1.67"
        " times for 80 and 3.58 times for 341 shared tokens.",
        "python -m benchmarks.memory.prefix_sharing --num-prompts 48 --shared N --own 40"
        " --output-len 40",
        tuple(
            Table(f"{ZEN5}prefix_sharing{end}.json", {
                f"{title} shared tokens": "{side}", "times": "{ratio:.2f}", "limit": "{limit:.2f}",
                "seconds": "{seconds:.2f}", "tokens computed": "{num_computed_tokens:,}"})
            for end, title in (("", "16 requests, 512"), ("_80", "48 requests, 80"),
                               ("_341", "48 requests, 341"))
        ),
    ),
    Section(
        "What prefixes save",
        "The share of blocks saved, with blocks of 16 and by the formula 1 - (1 + (N - 1) own /"
        " all) / N, which blocks that divide all lengths reach.",
        "python -m benchmarks.memory.prefix_savings",
        (Table(ZEN5 + "prefix_savings.json", {
            "scenario": "{scenario}", "shared": "{shared:,}", "own": "{own}",
            "requests": "{num_requests}", "formula": "{formula:.1%}", "measured": "{measured:.1%}",
            "text H": "{text_h:.0%}"}),),
    ),
    Section(
        "Chat turns",
        "16 conversations of 4 turns in a pool that is too small for them (P 6.5, fig. 17): seconds"
        " to the first token, of all turns and of those whose history was there once.",
        "python -m benchmarks.memory.chat_turns",
        (Table(ZEN5 + "chat_turns.json", {
            "": "{name}", "seconds": "{seconds:.1f}", "first token, median":
            "{first_token_s.median:.3f}", "p90": "{first_token_s.p90:.3f}", "with history, median":
            "{first_token_could_hit_s.median:.3f}", "p90 of these":
            "{first_token_could_hit_s.p90:.3f}", "prompt tokens found": "{cached:.1%}"}),),
    ),
    Section(
        "Swapping against recomputation",
        "Milliseconds to swap tokens out and in, and to compute them again (P fig. 19), on a CPU"
        " and by formula for OPT-13B on a GPU: with a transfer for each block as in the paper's"
        " engine, and with one transfer as here.",
        "python -m benchmarks.memory.swap",
        (
            Table(ZEN5 + "swap.json", {
                "tokens": "{num_tokens:,}", "blocks of": "{block_size}", "out": "{out_s*1e3:.1f}",
                "in": "{in_s*1e3:.1f}", "limit of both": "{floor_s*1e3:.1f}",
                "computed again": "{recompute_s*1e3:,.0f}"}, {"part": "measured"}),
            Table(ZEN5 + "swap.json", {
                "device": "{device}", "blocks of": "{block_size}",
                "a transfer a block": "{per_block.swap_s*1e3:,.0f}",
                "one transfer": "{batched.swap_s*1e3:.0f}",
                "computed again": "{recompute_s*1e3:.0f}"},
                {"part": "formula", "block_size": (1, 4, 16, 64, 256)}),
        ),
    ),
    Section(
        "Hits of models with states",
        "The share of prompt tokens found, by a model whose layers remember states and by full"
        " attention in the same bytes; aim: 95 % of the latter.",
        "python -m benchmarks.memory.hybrid_hits",
        (Table(ZEN5 + "hybrid_hits.json", {
            "workload": "{workload}", "GB": "{gb:.0f}", "states": "{hybrid.blocks@min}",
            "found": "{hybrid.cached:.1%}", "by full attention": "{full.cached:.1%}"}),),
    ),
    Section(
        "Forks",
        "Milliseconds to fork a request of 32,767 tokens that is held, and to name its prompt"
        " again; aim: less than 5 ms and one block a branch. The limit copies tokens.",
        "python -m benchmarks.memory.fork",
        (Table(ZEN4 + "fork.json", {
            "way, branches": "{case}", "add": "{add_ms:.2f}", "with the plan":
            "{add_and_plan_ms:.2f}", "limit": "{settings.limit_ms:.2f}", "blocks":
            "{num_blocks:.0f}"}),),
    ),
))  # fmt: skip
