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

# Letters with case, as far as DeepSeek's tokenizer takes them for parts of words.
CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_IDEOGRAPHS = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}"))
_DEEPSEEK = PreTokenizer(
    (
        r"[\r\n]",
        rf"\s?[{CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _IDEOGRAPHS,
        r"\p{N}",
    )
)
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3))

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
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK_V3,
}
