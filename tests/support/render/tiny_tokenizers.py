"""Tiny tokenizers, trained in the test: one per family of decoders, as model directories.

It also writes the files of models that accept images, without weights.
"""

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
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quire.render.media.media_renderer import MediaRenderer
from quire.render.renderer import Renderer
from quire.render.tokens.tokenizer import Tokenizer

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
    parts: replace those of the tokenizer."""
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
    """Return the `size` pieces of the corpus' words that save most letters, in order.

    continued: prefix of pieces that do not begin a word. All single letters are among the pieces.
    The library's trainers for Unigram and WordPiece are not deterministic.
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
    """Make a WordPiece model of 300 tokens from the corpus, split by the tokenizer."""
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
    """Build a tokenizer without a table of pieces, which is decoded by a window."""
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
    """Write a model directory with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    BUILDERS[family]().save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast"} | CONFIGS[family] | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def fresh_directory() -> Path:
    """Return an empty directory that is removed when this process ends."""
    path = Path(mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def directory(family: str) -> Path:
    """Return the directory of a family, which lasts for the whole test run."""
    return write_directory(fresh_directory(), family)


@cache
def tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_directory(directory(family))


# ---- models that accept images -----------------------------------------------------------------

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
GEMMA_TEMPLATE = (
    "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<start_of_image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}"
)
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %} {% endfor %}"
)
QWEN = {"min_pixels": 784, "max_pixels": 28 * 28 * 16}
GEMMA = {"size": {"height": 56, "width": 56}, "image_seq_length": 4,
         "pan_and_scan_min_crop_size": 32}  # fmt: skip
NEXT = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}  # fmt: skip
VISION_NAMES = {
    "gemma3": {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>",
               "eoi_token": "<end_of_image>"},
}  # fmt: skip
VISION_TOKENS = {
    "qwen2_vl": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                 "<|image_pad|>", "<|video_pad|>"],
    "gemma3": ["<bos>", "<start_of_turn>", "<end_of_turn>", *VISION_NAMES["gemma3"].values()],
    "llava": ["<image>"],
}  # fmt: skip
VISION_FAMILY = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen2_vl", "llava_next": "llava"}
VISION_TEMPLATES = {"qwen2_vl": QWEN_TEMPLATE, "gemma3": GEMMA_TEMPLATE, "llava": LLAVA_TEMPLATE}
VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN | {"patch_size": 16},
    "gemma3": GEMMA, "llava": {"size": {"shortest_edge": 28},
                               "crop_size": {"height": 28, "width": 42}},
    "llava_next": NEXT,
}  # fmt: skip


def vision_backend(model_type: str) -> tk.Tokenizer:
    """Return a byte-level tokenizer that joins line breaks, as the models' own do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    breaks = ["\u010a" * n for n in range(2, 7)]
    words = ["ab", *breaks]
    merges = [("a", "b"), *(("\u010a" * n, "\u010a") for n in range(1, 6))]
    vocab = {token: index for index, token in enumerate([*letters, *words])}
    found = tk.Tokenizer(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    tokens = VISION_TOKENS[VISION_FAMILY.get(model_type, model_type)]
    found.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in tokens])
    return found


def write_vision_model(
    folder: Path, model_type: str, preprocessor: dict[str, Any] | None = None
) -> Path:
    """Write all files of a model but its weights."""
    folder.mkdir(exist_ok=True)
    vision_backend(model_type).save(str(folder / "tokenizer.json"))
    config = {"model_type": model_type, "vision_config": {"patch_size": 14}}
    if model_type in ("llava", "llava_next"):
        config["vision_config"]["model_type"] = "siglip_vision_model"  # type: ignore[index]
        config["vision_feature_select_strategy"] = "full"
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "chat_template": VISION_TEMPLATES[VISION_FAMILY.get(model_type, model_type)],
            "extra_special_tokens": VISION_NAMES.get(model_type, {}),
        },
        "preprocessor_config.json": VISION_CONFIGS[model_type] | (preprocessor or {}),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def renderer_of(folder: Path) -> Renderer:
    tokenizer = Tokenizer.from_directory(folder)
    return Renderer(tokenizer, media=MediaRenderer.from_directory(folder, tokenizer))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


IMAGE_PART = {"type": "image"}
