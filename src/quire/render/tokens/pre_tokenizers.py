"""The rules by which byte-level vocabularies of GGUF files split a text into words.

A GGUF file only names its rule (tokenizer.ggml.pre), by llama.cpp's names; this file defines the
rules. Where llama.cpp only approximates the model's tokenizer.json, these rules follow
tokenizer.json.
"""

from dataclasses import dataclass

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PLAIN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _MODERN.replace("DIGITS", r"\p{N}{1,3}")
QWEN2 = _MODERN.replace("DIGITS", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One rule: patterns that split a text, applied one after the other, and its flags.

    Both the matches of a pattern and the texts between them are words.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # whether a word in the vocabulary is one token despite the merges
    add_bos: bool = False  # whether texts get a begin token if the file does not set it
    is_composed: bool = False  # whether texts are normalized to Unicode's composed form (NFC)


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((QWEN2,), is_composed=True)
_TEKKEN = PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True)
_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": PreTokenizer((GPT2,), is_composed=True),
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "dbrx": PreTokenizer((LLAMA3,)),
    "chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4": PreTokenizer((LLAMA3,), ignore_merges=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "command-r": PreTokenizer((r"\p{N}", GPT2), is_composed=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": PreTokenizer((QWEN35,), is_composed=True),
    "stablelm2": PreTokenizer((QWEN2,)),
    "tekken": _TEKKEN,
    "deepseek-coder": _CODER,
}
