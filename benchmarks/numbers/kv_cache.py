"""Tables of the KV cache."""

from benchmarks.numbers.page import ZEN4, ZEN5, Page, Section, Table

KV_CACHE = Page("kv-cache.md", "KV cache", (
    Section(
        "Live slots",
        "Share of the slots in allocated blocks that hold live tokens, with a full pool. The aim:"
        " 96 % with blocks of 16 and ShareGPT's lengths. The PagedAttention paper reports 96.3 %"
        " (fig. 2).",
        "python -m benchmarks.memory.live_slots",
        (Table(ZEN5 + "live_slots.json", {"lengths": "{workload}"}, by="block_size",
            cell="{live_share:.1%}",
            headings={8: "blocks of 8", 16: "blocks of 16", 32: "blocks of 32"}),),
    ),
    Section(
        "Shared prefixes",
        "16 requests that share 512 prompt tokens arrive at once. The limit is the speed-up if only"
        " the rest of each prompt is computed. The aim: 4 times.",
        "python -m benchmarks.memory.prefix_sharing",
        (Table(ZEN5 + "prefix_sharing.json", {
            "": "{side}", "times as fast": "{ratio:.2f}", "limit": "{limit:.2f}",
            "seconds": "{seconds:.2f}", "tokens computed": "{num_computed_tokens:,}"}),),
    ),
    Section(
        "Blocks saved by shared prefixes",
        "Share of blocks saved with blocks of 16, and the same by formula. The formula is 1 - (1 +"
        " (N - 1) own / all) / N, for N requests.",
        "python -m benchmarks.memory.prefix_savings",
        (Table(ZEN5 + "prefix_savings.json", {
            "scenario": "{scenario}", "shared tokens": "{shared:,}", "own tokens": "{own}",
            "requests": "{num_requests}", "by formula": "{formula:.1%}",
            "measured": "{measured:.1%}"}),),
    ),
    Section(
        "Chat turns",
        "16 conversations of 4 turns in a pool that is too small for them. The columns with history"
        " count only the turns whose history was cached at some time.",
        "python -m benchmarks.memory.chat_turns",
        (Table(ZEN5 + "chat_turns.json", {
            "": "{name}", "seconds": "{seconds:.1f}", "first token, median":
            "{first_token_s.median:.3f}", "p90": "{first_token_s.p90:.3f}", "with history, median":
            "{first_token_could_hit_s.median:.3f}", "with history, p90":
            "{first_token_could_hit_s.p90:.3f}", "cached prompt tokens": "{cached:.1%}"}),),
    ),
    Section(
        "Swapping and recomputation",
        "Milliseconds to swap tokens out and in, or to recompute them, on a CPU. The limit is the"
        " rate of copying memory. Figures for GPUs are in [the"
        " evaluation](evaluation-scheduling.md#swapping-and-recomputation-opt-13b).",
        "python -m benchmarks.memory.swap",
        (Table(ZEN5 + "swap.json", {
            "tokens": "{num_tokens:,}", "blocks of": "{block_size}", "out": "{out_s*1e3:.1f}",
            "in": "{in_s*1e3:.1f}", "limit of both": "{floor_s*1e3:.1f}",
            "recompute": "{recompute_s*1e3:,.0f}"},
            {"part": "measured", "block_size": (1, 8, 16, 32, 256)}),),
    ),
    Section(
        "Hits of models with states",
        "Share of cached prompt tokens of a model whose layers remember states, and of one with"
        " full attention in the same memory. The aim: 95 % of the latter. It"
        " takes memory for enough states.",
        "python -m benchmarks.memory.hybrid_hits",
        (Table(ZEN5 + "hybrid_hits.json", {
            "workload": "{workload}", "GB": "{gb:.0f}", "states": "{hybrid.blocks@min}",
            "cached": "{hybrid.cached:.1%}", "with full attention": "{full.cached:.1%}"}),),
    ),
    Section(
        "Forks",
        "Milliseconds to fork a retained request of 32,767 tokens, or to send its prompt again and"
        " hit the cache. The aims: 5 ms and one new block for each branch. The limit copies the"
        " token ids.",
        "python -m benchmarks.memory.fork",
        (Table(ZEN4 + "fork.json", {
            "way, branches": "{case}", "add": "{add_ms:.2f}", "add and plan":
            "{add_and_plan_ms:.2f}", "limit": "{settings.limit_ms:.2f}", "new blocks":
            "{num_blocks:.0f}"}),),
    ),
), "How well the KV cache uses memory, and what prefix hits, forks and swaps cost.")  # fmt: skip
