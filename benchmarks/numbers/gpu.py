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
    Section(
        "Predictions",
        "Steps by the model of time, before any run with these changes. Each row includes the"
        " changes above it. The model has four fitted constants and reproduces 19 of 20 archived"
        " steps within 5 %. The column `half the host` assumes that half of the host's part stays,"
        " since no archived run shows what it consists of.",
        "python -m benchmarks.gpu.time_model",
        (Table("virtual-time/gpu_time_model.json", {
            "case": "{case}", "change": "{change}", "launches per layer": "{launches_per_layer}",
            "GPU, ms": "{gpu_ms:.2f}", "step, ms": "{predicted_ms:.2f}", "scaled from measured":
            "{from_measured_ms:.2f}", "half the host": "{half_host_ms:.2f}", "aim":
            "{aim_ms:.1f}"}),),
    ),
    Section(
        "Parts of the predicted steps",
        "Microseconds of the GPU with all changes. For one row of the 0.6B five changes lower the"
        " step: early starts, fewer launches, no launch for the merge and none for the rotation,"
        " and less work of the host. Reading all weights takes 0.27 ms, and the host 0.07 ms. Of"
        " the rest, a layer waits 4 us for its products and 4 us for attention. For 64 rows of the"
        " 8B the prediction meets the aim by 0.004 ms, which is far less than the model's error."
        " The last program of a shared tile does not load its own sums, which saves 0.9 us a layer."
        " The host takes 0.10 ms, since rows enter new blocks in each step. The prediction rests on"
        " assumptions. Each multiprocessor is taken to read 48 bytes per nanosecond from the L2"
        " cache. The rotation within attention is taken to end before the first keys arrive. The"
        " library is taken to need 69 us for gate and up; with four rows it needed 60. If it needs"
        " 62 with 64 rows, stream-K saves less, and the step takes 5.7 ms.",
        "python -m benchmarks.gpu.time_model",
        (Table("virtual-time/gpu_time_model.json", {
            "case": "{case}", "weights of the layers": "{us.weights}", "products beyond that":
            "{us.products}", "attention": "{us.attention}", "norms, gate, rotation": "{us.small}",
            "head": "{us.head}", "other launches": "{us.once}"},
            {"change": "repeated plans find their graph without hashing, 65 us of host"}),),
    ),
), "The speed of quire on an NVIDIA H200. Other engines, mixtures of experts, draft tokens and"
   " quantised weights have not been timed on a GPU. [The GPU page](../inside/gpu.md) describes the"
   " code and the checks.")  # fmt: skip
