"""Tables of GPUs."""

from benchmarks.numbers.page import Page, Section, Table

H200 = "h200/"

GPU = Page("gpu.md", "GPUs", (
    Section(
        "Limits and answers",
        "The limits of the device, and answers compared with the answers of a CPU in float32.",
        "make gpu-check PART=bench",
        (Table(H200 + "gpu_first.json", {
            "case": "{case}", "ms": "{seconds*1e3:.3f}", "measured limit, ms":
            "{measured_floor_s*1e3:.3f}", "GB/s": "{detail.GB/s}", "TFLOP/s": "{detail.TFLOP/s}",
            "answers": "{figure}", "aim": "{aim}"}),),
    ),
    Section(
        "Decoding steps",
        "Random weights in bf16, two plans in flight, CUDA graphs of whole steps. The limit is the"
        " longer of reading and arithmetic, at the rates above.",
        'PIECES="llama-8b qwen3-0.6b" bash .ci/gpu-check bench',
        (Table(H200 + "gpu_engine.json", {
            "model": "{model}", "rows": "{rows}", "context": "{context:,}", "mean, ms":
            "{mean_ms:.2f}", "tokens/s": "{tokens_per_s:,.0f}", "limit, ms": "{limit_ms:.2f}",
            "share": "{share:.0%}"}, {"what": "decode"}),),
    ),
    Section(
        "Prompts",
        "One prompt at a time, by its number of tokens.",
        'PIECES="llama-8b qwen3-0.6b" bash .ci/gpu-check bench',
        (Table(H200 + "gpu_engine.json", {
            "model": "{model}", "tokens": "{tokens:,}", "median, ms": "{median_ms:.2f}",
            "fastest": "{fastest_ms:.2f}", "limit, ms": "{limit_ms:.2f}", "share":
            "{share:.0%}"}, {"what": "prompt"}),),
    ),
    Section(
        "Profiles",
        "How long the GPU works in a step (rows x context, or a prompt), and its launches.",
        'PIECES="llama-8b qwen3-0.6b" bash .ci/gpu-check bench',
        (Table(H200 + "gpu_engine.json", {
            "model": "{model}", "step": "{step}", "the GPU works, ms": "{busy_ms:.2f}", "of ms":
            "{span_ms:.2f}", "launches": "{launches}"}, {"what": "profile"}),),
    ),
    Section(
        "Attention",
        "One decoding layer whose keys and values are in no cache. The share is that of the"
        " device's own rate of reading.",
        "PIECES=attention bash .ci/gpu-check bench",
        (Table(H200 + "gpu_attention.json", {
            "model": "{model}", "rows": "{rows}", "context": "{context:,}", "us": "{cold_us}",
            "in the cache, us": "{warm_us}", "GB/s": "{kv_gb_per_s:,.0f}", "share":
            "{of_reading:.0%}"}),),
    ),
    Section(
        "Products of few rows",
        "Microseconds of cuBLAS and of quire's kernel with its fastest tile. The limit is reading"
        " the weight.",
        "PIECES=kernels bash .ci/gpu-check bench",
        (Table(H200 + "gpu_few_rows.json", {
            "model": "{model}", "product": "{product}", "rows": "{rows}", "limit": "{floor_us}",
            "cuBLAS": "{cublas_us}", "kernel": "{best_us}"},
            {"rows": (1, 2, 4)}),),
    ),
), "The speed of quire on an NVIDIA H200. Other engines, mixtures of experts, draft tokens and"
   " quantised weights have not been timed on a GPU. [The GPU page](../inside/gpu.md) describes the"
   " code and the checks.")  # fmt: skip
