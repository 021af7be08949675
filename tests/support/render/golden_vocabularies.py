"""The tokenizers of the golden files: small vocabularies, each built as in its family.

The special tokens are the real ones, in the real order where it fits. The words are learned from a
few sentences, so the ids differ from the real models'. Training is deterministic.
"""

import json
from collections.abc import Callable
from typing import Any

import tokenizers as tk
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "\u2581"
CORPUS = [
    "You are a helpful assistant. You may call one or more functions to assist with the user",
    "system user assistant model tool ipython Environment Cutting Knowledge Date Today Date",
    "Given the following functions, please respond with a JSON for a function call with its",
    "proper arguments that best answers the given prompt. Respond in the format name",
    '{"type": "function", "function": {"name": "get_weather", "description": "The weather",',
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": []',
    "Be brief. What is the weather like in Paris? It is 22 degrees and sunny there. Thank you!",
    "Grüße aus Köln, naïve café. Привет, мир. 你好，世界。",
] * 4
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA_WORDS.replace("{1,3}", "")

LLAMA_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_TAGS = ["tool_call", "tool_response", "think"]  # added tokens, not special ones
MISTRAL_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]


def _byte_level(words: str) -> tk.Tokenizer:
    """Build a tokenizer like GPT-2's: every byte is a token, a pattern splits words."""
    backend = tk.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tk.Regex(words), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def llama3() -> tk.Tokenizer:
    backend = _byte_level(LLAMA_WORDS)
    backend.model.ignore_merges = True
    backend.add_special_tokens(LLAMA_SPECIAL)
    bos = LLAMA_SPECIAL[0]
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
            ),
        ]
    )
    return backend


def qwen3() -> tk.Tokenizer:
    backend = _byte_level(QWEN_WORDS)
    backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(QWEN_SPECIAL)
    backend.add_tokens([f"<{end}{name}>" for name in QWEN_TAGS for end in ("", "/")])
    return backend


def _byte_fallback(special: list[str], pieces: list[Any]) -> tk.Tokenizer:
    """Build a tokenizer like SentencePiece's: unknown text falls back to byte tokens."""
    backend = tk.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")  # for training only
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special + bytes_,
        initial_alphabet=[chr(code) for code in range(33, 127)] + [SPACE],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
    backend = tk.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *pieces]
    )
    return backend


def _add_bos(backend: tk.Tokenizer, bos: str) -> tk.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def mistral() -> tk.Tokenizer:
    """Put a space before a text, but not after a special token."""
    backend = _byte_fallback(MISTRAL_SPECIAL, [decoders.Strip(" ", 1, 0)])
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _add_bos(backend, "<s>")


def gemma() -> tk.Tokenizer:
    """Put no space before a text; runs of line breaks are tokens."""
    backend = _byte_fallback(GEMMA_SPECIAL, [])
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.add_tokens([tk.AddedToken("\n" * count, normalized=False) for count in (2, 3)])
    return _add_bos(backend, "<bos>")


BUILDERS: dict[str, Callable[[], tk.Tokenizer]] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma": gemma,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen3": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
}
ADD_BOS = {"qwen3": False}


def config(name: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    flags = {"add_bos_token": ADD_BOS.get(name, True), "add_eos_token": False}
    rest = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    return CONFIGS[name] | flags | rest
