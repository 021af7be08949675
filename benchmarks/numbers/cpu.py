"""Tables of engines and kernels on CPUs."""

from typing import Any

from benchmarks.numbers.page import ZEN3, ZEN4, ZEN5, Page, Section, Table

XEON = "xeon-amx-12/"
FIGURES = {
    "ttft_s": "first token, s", "decode_rate": "decode, tokens/s",
    "prefill_rate": "prompt of 1,024, tokens/s", "batch_rate": "16 rows, tokens/s",
}  # fmt: skip
OTHER_FIGURES = {
    "cold_rate": "shared, new", "warm_rate": "shared, cached", "rows_rate": "64 rows",
    "long_rate": "prompt of 2,048", "deep_rate": "decode after it", "tiny_ms": "8 M model, ms",
}  # fmt: skip
OURS = ("quire bf16", "quire int8", "quire int4")
SHARE, MEDIAN = "{best:sig} ({share:.0%})", "{median:sig} ({share:.0%})"
STEP = {
    "step": "{step}", "ms": "{seconds*1e3:,.1f}", "limit, ms": "{limit_s*1e3:,.1f}",
    "GB read": "{num_bytes*1e-9:.2f}",
}  # fmt: skip
OPERATIONS = {
    "operation": "{operation}", "ms": "{seconds*1e3:.2f}", "limit, ms": "{limit_s*1e3:.2f}"
}  # fmt: skip
CASES = {
    "case": "{case}", "kernels": "{variant}", "layer, us": "{layer_us:,.0f}",
    "GB/s": "{kv_gb_per_s:.1f}", "of plain reading": "{of_reading:.0%}",
    "GFLOP/s": "{gflop_per_s:,.0f}", "of the peak": "{of_products:.0%}",
}  # fmt: skip


def engines(
    file: str, headings: dict[str, str], cell: str, folder: str = ZEN4, **where: Any
) -> Table:
    chosen = {"figure": tuple(headings)} | where
    return Table(folder + file, {"": "{engine}"}, chosen, "figure", cell, headings)


def steps(folder: str) -> tuple[Table, ...]:
    return tuple(
        Table(f"{folder}operations_{name}.json", {f"{name}: step": "{step}"} | {
            heading: cell for heading, cell in STEP.items() if heading != "step"},
            {"operation": "all"})
        for name in ("bf16", "int8", "int4")
    )  # fmt: skip


ENGINES = Page("cpu-engines.md", "Engines on a CPU", (
    Section(
        "Speed",
        "Each engine serves a model of Qwen3-0.6B's shape on two cores, in alternating rounds. The"
        " cell is the best round, with its share of the limit that reading weights and arithmetic"
        " set. The machine's rate of reading changes by a factor of two within seconds.",
        "python -m benchmarks.cpu --rounds 5 --workloads single prefill batch",
        (engines("cpu.json", FIGURES, SHARE),),
    ),
    Section(
        "Times the best other engine",
        "The best round of quire over the best round of the fastest other engine with weights of as"
        " many bits.",
        "python -m benchmarks.cpu --rounds 5 --workloads single prefill batch",
        (engines("cpu.json", FIGURES, "{ratio:.2f} ({peer})",
            engine=("quire bf16", "quire int8", "quire int4", "quire int4 head int4")),),
    ),
    Section(
        "Memory",
        "Median memory of the process, in MiB, above its weights and KV cache.",
        "python -m benchmarks.cpu --rounds 5 --workloads single prefill batch",
        (engines("cpu.json", {"above_mib": "MiB"}, "{median:sig}"),),
    ),
    Section(
        "Shared prefix, small model, start",
        "Tokens/s of 16 requests that share 512 of 544 prompt tokens, for a new prefix and for a"
        " cached one. The other columns are milliseconds per token of a Llama with 8 million"
        " weights, and seconds from the command to a token.",
        "python -m benchmarks.cpu --rounds 1 --workloads start shared tiny",
        (engines("cpu_others.json", {
            "cold_rate": "shared, new", "warm_rate": "shared, cached", "tiny_ms": "8 M model, ms",
            "start_s": "start, s"}, "{best:sig}"),),
    ),
    Section(
        "Long prompts",
        "Tokens/s and share of the limit for a prompt of 8,192 tokens, and for decoding after it.",
        "python -m benchmarks.cpu --rounds 2 --workloads long",
        (engines("cpu_long.json", {
            "long_rate": "prompt of 8,192", "deep_rate": "decode after it"}, SHARE),),
    ),
    Section(
        "64 rows",
        "Tokens/s and share of the limit for 64 requests of 128 tokens in and 64 out.",
        "python -m benchmarks.cpu --workloads rows",
        (engines("cpu_rows.json", {"rows_rate": "64 rows"}, SHARE),),
    ),
    Section(
        "Images",
        "Seconds to the first token for an image of 1,024 x 1,024 pixels and 64 text tokens, with a"
        " model of Qwen3-VL-2B's shape; and images per second with that model's vision tower and"
        " three small text layers. Each with its share of the limit, of the tower's own limit, and"
        " how many first tokens are those of transformers.",
        "python -m benchmarks.cpu.images --rounds 3",
        (engines("cpu_images.json", {
            "image_ttft_s": "first token, s", "images_rate": "images/s"}, SHARE),
         Table(ZEN4 + "cpu_images.json", {
            "": "{engine}", "of the tower's limit": "{tower_share:.0%}",
            "equal first tokens": "{equal_first_tokens}"}, {"figure": "images_rate"})),
    ),
    Section(
        "Beam search",
        "4 beams of 64 tokens, and the bytes of their keys and values, compared with transformers."
        " The aims: 2 times as fast for the demo model, as fast for the 0.6B shape.",
        "python -m benchmarks.models.beam_search",
        (Table(ZEN5 + "beam_search.json", {
            "model": "{model_id}", "dtype": "{dtype}", "prompts": "{num_prompts}", "tokens/s":
            "{tokens_per_second.quire:,.1f}", "times transformers": "{ratio:.2f}", "KV, MB":
            "{kv_bytes.quire*1e-6:.1f}", "KV of transformers, MB":
            "{kv_bytes.transformers*1e-6:.1f}"}),),
    ),
    Section(
        "Several ranks",
        "Tokens/s of Qwen3-0.6B's shape in bf16 on two cores, split over ranks in different ways."
        " The last column is the share of tokens that one process gives as well; pipeline stages"
        " draw other random weights.",
        "python -m benchmarks.models.ranks",
        (Table(ZEN5 + "ranks.json", {
            "": "{way}", "start, s": "{start_s:.1f}", "1 row": "{decode_1:.1f}", "16 rows":
            "{decode_16:.0f}", "prompt of 700": "{prompt:.0f}", "equal": "{equal:.0%}"}),),
    ),
), "How quire compares with other engines on the same CPU. All engines come from PyPI, each in an"
   " environment of its own.")  # fmt: skip

AVX2 = Page("cpu-avx2.md", "Engines on a CPU with AVX2 only", (
    Section(
        "Speed",
        "Two cores without AVX-512, and shorter prompts (`SHORT` in `benchmarks/cpu/workloads.py`):"
        " medians of up to five alternating rounds on a noisy machine, with the share of the limit."
        " An engine that was clearly slower in the first round has fewer.",
        "python -m benchmarks.cpu.held",
        (
            engines("cpu_held.json", FIGURES, MEDIAN, ZEN3),
            engines("cpu_held.json", OTHER_FIGURES, MEDIAN, ZEN3),
        ),
    ),
    Section(
        "Times the best other engine",
        "The median of quire over the median of the fastest other engine with weights of as many"
        " bits. In 16 bits a product is close to the measured rate of float32 multiply-adds, so no"
        " engine can be much faster. Smaller chunks, larger blocks of rows, other strides, large"
        " pages and prefetching into the first cache changed nothing. In int8, CTranslate2 has one"
        " scale for each row of a weight. quire has one for each 128 numbers, which is more exact,"
        " and converts a sum for each. So prompts and 64 rows take both about as long. A step of"
        " the small model takes about 1 ms in all formats, and between 0.8 and 1.9 ms from one"
        " process to the next on this machine, by one thread as well as by two.",
        "python -m benchmarks.cpu.held",
        (
            engines("cpu_held.json", FIGURES, "{ratio:.2f} ({peer})", ZEN3, engine=OURS),
            engines("cpu_held.json", OTHER_FIGURES, "{ratio:.2f} ({peer})", ZEN3, engine=OURS),
        ),
    ),
    Section(
        "Steps in bf16",
        "Whole steps of Qwen3-0.6B's shape: rows x context, or a prompt.",
        "python -m benchmarks.kernels.operations",
        (Table(ZEN3 + "operations_bf16.json", STEP, {"operation": "all"}),),
    ),
    Section(
        "Latent attention and experts",
        "DeepSeek-V2-Lite's shape with random weights in Q4_0: both engines read one GGUF file of"
        " 8.8 GB. A prompt of 4,096 tokens, and decoding after it.",
        "python -m benchmarks.cpu.latent",
        (engines("cpu_latent.json", {
            "long_rate": "prompt of 4,096", "deep_rate": "decode after it"
        }, SHARE, ZEN3),),
    ),
), "The comparison of [engines](cpu-engines.md) on a CPU that has AVX2 and nothing above"
   " it.")  # fmt: skip

DECODES = ("decode, 16 rows of 128", "decode, 16 rows of 1024", "decode, 1 row of 2048",
           "prompt, 256", "chunk, 256 after 1792", "mixed, 128 and 15 rows of 256")  # fmt: skip
KERNELS = Page("cpu-kernels.md", "CPU kernels", (
    Section(
        "Steps",
        "Whole steps of Qwen3-0.6B's shape by format: rows x context, or a prompt. The limit is the"
        " longer of reading and arithmetic, at the peaks that the same run measured. First two"
        " cores of an EPYC, then twelve cores of a Xeon with AMX.",
        "python -m benchmarks.kernels.operations --quantization int8",
        (*steps(ZEN4), *steps(XEON)),
    ),
    Section(
        "Operations of a step",
        "The step of 16 rows in bf16 by operation.",
        "python -m benchmarks.kernels.operations --steps 16x128",
        (Table(ZEN4 + "operations_bf16.json", OPERATIONS, {"step": "16x128"}),),
    ),
    Section(
        "Attention of one layer",
        "Microseconds of a layer in bf16, its rate of reading keys and values, and its arithmetic."
        " First the EPYC with two threads, then the Xeon with twelve.",
        "python -m benchmarks.kernels.attention",
        (
            Table(ZEN4 + "attention.json", {k: v for k, v in CASES.items() if k != "kernels"},
                {"part": "cases", "case": DECODES}),
            Table(XEON + "attention.json", CASES,
                {"part": "cases", "threads": 12, "case": DECODES}),
        ),
    ),
    Section(
        "Ways of attention",
        "Blocks of 16 compared with one block for each row; contexts split over threads compared"
        " with one pass. Cascade reads a shared prefix once, and not for each row.",
        "python -m benchmarks.kernels.attention",
        (Table(ZEN4 + "attention.json", {
            "case": "{case}", "way": "{way}", "us": "{layer_us:,.0f}", "other way": "{other}",
            "its us": "{other_us:,.0f}", "times": "{ratio:.2f}"},
            {"part": ("paged", "split", "cascade"), "case": (
                "16 rows of 128", "16 rows of 1,024", "16 rows of 4,096",
                "1 row of 2,048, 8 KV heads", "1 row of 32,768, 8 KV heads",
                "1 row of 2,048, 1 KV heads", "1 row of 32,768, 1 KV heads",
                "16 rows share 256, own 64", "16 rows share 4,096, own 64")}),),
    ),
    Section(
        "Formats of keys and values",
        "The same layer with keys and values in other formats.",
        "python -m benchmarks.kernels.attention",
        (Table(ZEN4 + "attention.json", {
            "case": "{case}", "format": "{format}", "us": "{layer_us:,.0f}", "of plain reading":
            "{of_reading:.0%}", "GFLOP/s": "{gflop_per_s:,.0f}"}, {"part": "formats"}),),
    ),
    Section(
        "Products with and without AMX",
        "10^9 operations/s of one layer's products by rows, and GB/s for one row, with the share of"
        " the peak.",
        "python -m benchmarks.kernels.linear",
        (
            Table("xeon-amx-16/linear.json", {
                "shape": "{shape}", "format": "{format}", "kernels": "{variant}"},
                {"rows": (16, 1024)}, "rows", "{gop_per_s:,} ({share:.0%})",
                {16: "16 rows", 1024: "1,024 rows"}),
            Table("xeon-amx-16/linear.json", {
                "shape": "{shape}", "format": "{format}", "kernels": "{variant}", "GB/s of one row":
                "{gb_per_s} ({share:.0%})"}, {"rows": 1}),
        ),
    ),
    Section(
        "Products with AVX2 and AVX-VNNI",
        "10^9 operations/s of one thread with AVX2 in 16 bits, with the share of the measured rate"
        " of fused multiply-adds on 256 bits. The machine was busy, so figures are noisy. For 32"
        " products of bytes AVX2 takes four instructions with int8 weights and three with 4-bit"
        " weights; AVX-VNNI takes one. So dot products should be up to 4 and 3 times as fast. As"
        " AVX-512 encodes the instruction, dots in registers are 3.3 and 2.2 times as fast as with"
        " AVX2 on this machine. Products of 64 rows are 2.5 (int8), 1.8 (int4) and 1.4 times (Q4_K)"
        " as fast. No CPU with AVX-VNNI has been measured.",
        "QUIRE_CPU_VARIANT=avx2 python -m benchmarks.kernels.linear --threads 1"
        " --rows 16 64 128 1024",
        (Table(ZEN4 + "linear_avx2.json", {"shape": "{shape}", "format": "{format}"}, {}, "rows",
            "{gop_per_s:.0f} ({share:.0%})",
            {16: "16 rows", 64: "64 rows", 128: "128 rows", 1024: "1,024 rows"}),),
    ),
    Section(
        "Layers with states",
        "The delta rule of one layer. The limit is the rate of copying memory.",
        "python -m benchmarks.kernels.states",
        (Table(ZEN5 + "states.json", {
            "case": "{case}", "us": "{delta_rule_us:,}", "GB/s":
            "{gb_per_s@min} to {gb_per_s@max}", "copying, GB/s": "{settings.copy_gb_per_s}",
            "GFLOP/s": "{gflop_per_s}"}),),
    ),
), "How near [the CPU kernels](../inside/cpu.md) are to the limits of the machine.")  # fmt: skip
