"""Tiny tokenizers, trained in the test: one per family of decoders, as model directories."""

import atexit
import json
import math
import shutil
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers as tk
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.render.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Paged attention keeps keys and values in blocks; a block table maps them.",
    "Hello world! How are you today? I am fine, thanks. STOP here, stop there.",
    "你好世界，今天天气很好。日本語のテキスト。한국어 문장.",
    "Grüße aus Köln — naïve café, déjà vu… “quotes”",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))\n",
] * 3
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
FAMILIES = ("byte_level", "llama", "gemma", "metaspace", "wordpiece")


def byte_level(**parts: Any) -> tk.Tokenizer:
    """GPT-2, Llama 3, Qwen: all bytes are in the vocabulary, so every text can be written.
    parts: of the tokenizer, in the place of its own."""
    backend = tk.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CHAT_TOKENS,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool_call>"])
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def _with_byte_fallback(parts: list[Any], normalizer: Any) -> tk.Tokenizer:
    backend = tk.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizer
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    special = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=special + bytes_,
        show_progress=False,
        initial_alphabet=[chr(c) for c in range(32, 127)] + ["\u2581"],
        limit_alphabet=110,
    )
    backend.train_from_iterator(CORPUS[:3], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    state["decoder"] = {"type": "Sequence", "decoders": parts}
    return tk.Tokenizer.from_str(json.dumps(state))


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
JOIN = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def llama() -> tk.Tokenizer:
    """Llama 2, Mistral: a space is put before the text and taken off when decoding."""
    normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    backend = _with_byte_fallback([*JOIN, strip], normalizer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def gemma() -> tk.Tokenizer:
    return _with_byte_fallback(JOIN, normalizers.Replace(" ", "\u2581"))


def _frequent_pieces(backend: tk.Tokenizer, continued: str, size: int) -> list[tuple[str, int]]:
    """Count all pieces of the corpus' words; returns the size that save most letters, ordered.

    continued: what stands before a piece that does not begin a word. All single letters are among
    the pieces. The library's trainers for Unigram and WordPiece give other vocabularies each time.
    """
    counts: Counter[str] = Counter()
    for text in CORPUS:
        text = backend.normalizer.normalize_str(text) if backend.normalizer else text
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(text):
            for start, stop in combinations(range(len(word) + 1), 2):
                piece = word[start:stop]
                counts[continued + piece if start and continued else piece] += 1
    letters = {each for each in counts if len(each.removeprefix(continued)) == 1}

    def rank(piece: str) -> tuple[bool, int, str]:
        return piece not in letters, -counts[piece] * len(piece), piece

    return [(each, counts[each]) for each in sorted(counts, key=rank)[:size]]


def wordpiece_model(backend: tk.Tokenizer, special: list[str], unknown: str) -> models.WordPiece:
    """Make a WordPiece model of 300 tokens, of the corpus as the tokenizer splits it."""
    pieces = _frequent_pieces(backend, "##", 300 - len(special))
    tokens = special + [piece for piece, _ in pieces]
    return models.WordPiece({each: i for i, each in enumerate(tokens)}, unk_token=unknown)


def metaspace() -> tk.Tokenizer:
    backend = tk.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    pieces = _frequent_pieces(backend, "", 300 - len(special))
    total = sum(count for _, count in pieces)
    scores = [(piece, math.log(count / total)) for piece, count in pieces]
    backend.model = models.Unigram([(each, 0.0) for each in special] + scores, unk_id=0)
    backend.add_special_tokens(special)
    return backend


def wordpiece() -> tk.Tokenizer:
    """No table for this one: decoded by window."""
    backend = tk.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[A]", "[B]"]
    backend.model = wordpiece_model(backend, special, "[UNK]")
    backend.add_special_tokens(special)
    return backend


BUILDERS = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
END = {"__type": "AddedToken", "content": "</s>", "special": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<s>", "eos_token": "</s>"},
    "metaspace": {"eos_token": END, "model_max_length": 512},
    "wordpiece": {"unk_token": "[UNK]"},
}


def write_directory(folder: Path, family: str, **config: Any) -> Path:
    """A model directory with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    BUILDERS[family]().save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast"} | CONFIGS[family] | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def fresh_directory() -> Path:
    """An empty one, for as long as this process runs."""
    path = Path(mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def directory(family: str) -> Path:
    """One directory per family for the whole test run."""
    return write_directory(fresh_directory(), family)


@cache
def tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_directory(directory(family))
