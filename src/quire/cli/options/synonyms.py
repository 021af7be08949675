"""Flags of llama.cpp, Ollama, SGLang and TGI, and quire's flags for them: one table, data only.
vLLM's flags are in serve/vllm_flags.py. docs/use/other-flags.md is generated from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LLAMA, SGLANG, TGI, OLLAMA = "llama.cpp", "SGLang", "TGI", "Ollama"


@dataclass(frozen=True)
class Synonym:
    """quire's replacement for a flag of another engine."""

    becomes: tuple[str, ...] = ()  # replacement words; empty without a counterpart
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by value, if not the same
    others: bool = True  # whether other values stay as they are
    ignored: str = ""  # reason to ignore the flag
    advice: str = ""  # advice on what to use instead
    is_switch: bool = False  # whether the flag has no value


@dataclass(frozen=True)
class Spellings:
    """The spellings of one flag, and the engines that have it."""

    flags: tuple[str, ...]
    engines: tuple[str, ...]
    meaning: Synonym


def _same(ours: str, flags: str, *engines: str, **values: tuple[str, ...]) -> Spellings:
    """Return a flag with the same values. `values` are replaced values, with `_` for a minus."""
    changed = {value.replace("_", "-"): words for value, words in values.items()}
    return Spellings(tuple(flags.split()), engines, Synonym((ours,), changed))


def _switch(ours: str, flags: str, *engines: str) -> Spellings:
    return Spellings(tuple(flags.split()), engines, Synonym(tuple(ours.split()), is_switch=True))


def _ignored(why: str, flags: str, *engines: str, is_switch: bool = True) -> Spellings:
    return Spellings(tuple(flags.split()), engines, Synonym(ignored=why, is_switch=is_switch))


def _advice(advice: str, flags: str, *engines: str) -> Spellings:
    return Spellings(tuple(flags.split()), engines, Synonym(advice=advice))


KV_TYPES = {
    "f16": ("--kv-cache-dtype", "auto"),
    "bf16": ("--kv-cache-dtype", "auto"),
    "q8_0": ("--kv-cache-dtype", "int8"),
}
SPECULATION = (
    'use --speculative-config, such as \'{"method": "draft_model", "model": "DIR",'
    ' "num_speculative_tokens": 4}\''
)
STEP = "use --max-num-batched-tokens, the maximum number of tokens in one step"
BATCHING = "requests are always batched continuously"
ADAPTERS = "use --enable-lora and --lora-modules NAME=PATH"

FLAGS = (
    # Model
    _same("--model", "-m --model-path --model-id --hf-repo -hf -hfr", LLAMA, SGLANG, TGI),
    _same("--tokenizer", "--tokenizer-path --tokenizer-name", SGLANG, TGI),
    _same("--max-model-len", "-c --ctx-size --context-length --num-ctx --max-total-tokens",
          LLAMA, SGLANG, OLLAMA, TGI, **{"0": ()}),
    _same("--quantization", "--quantize", TGI),
    _same("--seed", "-s --random-seed", LLAMA, SGLANG),
    _same("--chat-template", "--chat-template-file", LLAMA),
    _same("--default-chat-template-kwargs", "--chat-template-kwargs", LLAMA),
    _same("--hf-overrides", "--json-model-override-args", SGLANG),
    _switch("--runner pooling", "--embedding --embeddings --is-embedding", LLAMA, SGLANG),
    _switch("--convert classify", "--rerank --reranking", LLAMA),
    _ignored("chat templates are always rendered with Jinja", "--jinja", LLAMA),
    _advice("give the file's path as --model", "--hf-file -hff", LLAMA),
    _advice("give a local path as --model; URLs are not downloaded", "--model-url -mu", LLAMA),
    _advice("set --hf-overrides, such as '{\"rope_theta\": 1e6}'",
            "--rope-freq-base --rope-freq-scale --rope-scale --yarn-orig-ctx", LLAMA),
    _advice("use --reasoning-parser; none leaves the reasoning in the text",
            "--reasoning-format", LLAMA),
    _advice("use --default-chat-template-kwargs '{\"enable_thinking\": false}'",
            "--reasoning-budget", LLAMA),
    _advice("use --max-model-len, which limits prompt and output together",
            "--max-input-length --max-input-tokens", TGI),
    _advice(ADAPTERS, "--lora --lora-scaled --lora-adapters --lora-paths", LLAMA, TGI, SGLANG),
    # Scheduling
    _same("--max-num-seqs", "-np --parallel --num-parallel --max-running-requests",
          LLAMA, OLLAMA, SGLANG, _1=()),
    _same("--max-num-queued-reqs", "--max-queue --max-queued-requests", OLLAMA, SGLANG),
    _ignored(BATCHING, "-cb --cont-batching", LLAMA),
    _advice(STEP, "-b --batch-size -ub --chunked-prefill-size --max-prefill-tokens"
            " --max-batch-prefill-tokens", LLAMA, SGLANG, TGI),
    _advice("use --scheduling-policy fifo, srtf or two-level", "--schedule-policy", SGLANG),
    _advice("use --max-num-seqs for running and --max-num-queued-reqs for waiting requests",
            "--max-concurrent-requests", TGI),
    _ignored(BATCHING, "--waiting-served-ratio --schedule-conservativeness", TGI, SGLANG,
             is_switch=False),
    # Cache
    _same("--gpu-memory-utilization", "--mem-fraction-static --cuda-memory-fraction",
          SGLANG, TGI),
    Spellings(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "--kv-cache-type"),
              (LLAMA, OLLAMA), Synonym(
                  values=KV_TYPES, others=False, advice="use --kv-cache-dtype auto, int8 or fp8")),
    _same("--block-size", "--page-size", SGLANG),
    _switch("--no-enable-prefix-caching", "--disable-radix-cache --no-cache-prompt",
            SGLANG, LLAMA),
    _ignored("shared prefixes are cached by default", "--cache-prompt --cache-reuse", LLAMA),
    _advice("use --kv-cache-memory-bytes, the size of the KV pool",
            "--max-batch-total-tokens --max-total-token", TGI, SGLANG),
    # Speculation
    _advice(SPECULATION, "-md --model-draft --draft --draft-max --draft-n --draft-min"
            " --speculative-algorithm --speculative-draft-model-path --speculative-num-steps"
            " --speculative-num-draft-tokens --speculate", LLAMA, SGLANG, TGI),
    # Device and processes
    Spellings(("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"), (LLAMA, OLLAMA), Synonym(
        values={"0": ("--device", "cpu")},
        ignored="the whole model runs on one device, which --device chooses")),
    _advice("set the environment variable QUIRE_NUM_THREADS; by default every core is used",
            "-t --threads -tb --threads-batch --num-thread", LLAMA, OLLAMA),
    _ignored("--attention-backend auto takes the fastest kernels", "-fa --flash-attn", LLAMA,
             is_switch=False),
    _ignored("weights are mapped from their files", "--mlock --no-mmap --mmap", LLAMA),
    _switch("--enforce-eager", "--disable-cuda-graph --disable-cuda-graphs", SGLANG, TGI),
    _switch("--deterministic", "--enable-deterministic-inference", SGLANG),
    _same("--tensor-parallel-size", "--tp --tp-size --num-shard", SGLANG, TGI),
    _same("--pipeline-parallel-size", "--pp --pp-size", SGLANG),
    _same("--data-parallel-size", "--dp --dp-size", SGLANG),
    _switch("--enable-expert-parallel", "--ep", SGLANG),
    _advice("use --tensor-parallel-size, and CUDA_VISIBLE_DEVICES to choose the GPUs",
            "-sm --split-mode -ts --tensor-split -mg --main-gpu", LLAMA),
    _advice("use --master-addr and --master-port", "--dist-init-addr", SGLANG),
    # Server
    _same("--host", "--hostname --address", TGI, LLAMA),
    _same("--served-model-name", "-a --alias", LLAMA),
    _same("--idle-unload-s", "--sleep-idle-seconds", LLAMA, _1=()),
    _same("--max-loaded-models", "--models-max", LLAMA),
    _same("--root-path", "--api-prefix", LLAMA),
    _same("--ssl-keyfile", "--ssl-key-file", LLAMA),
    _same("--ssl-certfile", "--ssl-cert-file", LLAMA),
    _same("--allowed-origins", "--cors-allow-origin --origins", TGI, OLLAMA),
    _switch("--no-page", "--no-webui --no-ui", LLAMA),
    _ignored("/metrics always answers", "--metrics --enable-metrics", LLAMA, SGLANG),
    _ignored("/v1/engine/live and the page at / show every request", "--slots --props", LLAMA),
    _advice("use --idle-unload-s, in seconds", "--keep-alive --keepalive", OLLAMA),
    _advice("put the keys into the file of --config, as `api-key: [KEY, KEY]`",
            "--api-key-file", LLAMA),
    _advice("use --shutdown-timeout for the end; a request sets its own limit as timeout_s",
            "-to --timeout", LLAMA),
    _switch("--log-level debug", "--verbose --log-verbose", LLAMA, OLLAMA),
    _switch("--log-format json", "--json-output", TGI),
    # Clients: chat, generate, bench
    _same("--url", "--endpoint --base-url --api-base", "clients"),
    _same("--temperature", "--temp", LLAMA),
    _same("--max-tokens", "-n --predict --n-predict --num-predict --max-new-tokens",
          LLAMA, OLLAMA, TGI, _1=()),
    _same("--repetition-penalty", "--repeat-penalty", LLAMA, OLLAMA),
    _same("--system", "-sys --system-prompt", LLAMA),
    _advice("use --port for the port; quire generate takes the prompt as its first word",
            "-p --prompt", LLAMA, TGI),
)  # fmt: skip
SYNONYMS = {flag: each for each in FLAGS for flag in each.flags}
# Commands of other engines, and what to run instead.
COMMANDS = {
    "start": "use `quire serve MODEL`",
    "server": "use `quire serve MODEL`",
    "api-server": "use `quire serve MODEL`",
    "complete": "use `quire generate PROMPT`",
    "benchmark": "use `quire bench`",
    "help": "use `quire --help`, or `quire COMMAND --help`",
    "version": "use `quire --version`",
}
