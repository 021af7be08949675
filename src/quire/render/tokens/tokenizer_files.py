"""Reads the tokenizer's files of a model directory, without interpreting them.

Input: a directory in the Hugging Face layout. Output: `TokenizerFiles`. Nothing is downloaded.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError
from quire.render.tokens.converted import other_vocabulary
from quire.spec.config_fields import read_object
from quire.spec.gguf.container import GGUFFile, is_gguf

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# All files that make a tokenizer, besides named templates. Conversions read added_tokens.json.
FILE_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tekken.json", "tokenizer.model", "tiktoken.model",
    "chat_template.json", "chat_template.jinja",
)  # fmt: skip
GPT2_END = "<|endoftext|>"
GPT2_CLASSES = ("", "GPT2Tokenizer", "GPT2TokenizerFast")
DEFAULT_TEMPLATE, NAMED_TEMPLATES = "default", "additional_chat_templates"
# Keys of a GGUF file's metadata: chat template, vocabulary, or the whole of tokenizer.json.
GGUF_TEMPLATE = "tokenizer.chat_template"
GGUF_TOKENS, WHOLE_TOKENIZER = "tokenizer.ggml.tokens", "tokenizer.huggingface.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """The paths of the vocabulary's files, and the settings next to them."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    named_tokens: dict[str, str] = field(default_factory=dict)  # by name, such as eos_token
    special_tokens: tuple[str, ...] = ()  # special texts besides tokenizer.json's
    chat_templates: dict[str, str] = field(default_factory=dict)  # by name, such as `default`

    @property
    def tokenizer_class(self) -> str:
        """The name of transformers' class in the files, without `Fast`; may be empty."""
        name = self.config.get("tokenizer_class") or self._model_config.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""

    @property
    def model_type(self) -> str | None:
        """The model type in config.json."""
        return self._model_config.get("model_type")

    @property
    def _model_config(self) -> dict[str, Any]:
        return read_json(self.directory / "config.json")

    @property
    def tokenizer_json(self) -> Path:
        return self.directory / "tokenizer.json"

    @property
    def has_gpt2_pair(self) -> bool:
        """Whether there is a GPT-2 vocabulary: vocab.json and merges.txt."""
        return self.vocab_json.is_file() and self.merges_txt.is_file()

    @property
    def vocab_json(self) -> Path:
        return self.directory / "vocab.json"

    @property
    def merges_txt(self) -> Path:
        return self.directory / "merges.txt"


def has_tokenizer(directory: str | Path) -> bool:
    """Return whether `Tokenizer.from_directory` finds a vocabulary there."""
    if is_gguf(directory):
        return any(key in GGUFFile(directory).metadata for key in (GGUF_TOKENS, WHOLE_TOKENIZER))
    files = TokenizerFiles(Path(directory))
    own = files.tokenizer_json.is_file() or files.has_gpt2_pair
    return own or other_vocabulary(files.directory) is not None


def read_tokenizer_files(directory: str | Path) -> TokenizerFiles:
    """Read the JSON and template files of a directory. Raises ModelError without a vocabulary."""
    folder = Path(directory)
    if not has_tokenizer(folder):
        raise ModelError(_no_tokenizer(folder))
    config = read_json(folder / "tokenizer_config.json")
    legacy = read_json(folder / "special_tokens_map.json")
    named, files = _named_tokens(config, legacy), TokenizerFiles(folder)
    other = None if files.has_gpt2_pair else other_vocabulary(folder)
    if files.tokenizer_json.is_file():
        pass
    elif other is not None:
        config, named = other.config | config, other.named_tokens | named
    else:
        _check_gpt2(folder, config)
        named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), GPT2_END) | named
    return TokenizerFiles(
        folder, config, named, _special_tokens(config, legacy, named), _templates(folder, config)
    )


def chat_templates(directory: str | Path) -> dict[str, str]:
    """Return the chat templates of a directory or a GGUF file by name.

    Does not read the vocabulary. Returns none if there is no tokenizer."""
    if is_gguf(directory):
        return gguf_templates(GGUFFile(directory))
    if not has_tokenizer(directory):
        return {}
    folder = Path(directory)
    return _templates(folder, read_json(folder / "tokenizer_config.json"))


def text_files(directory: Path) -> list[Path]:
    """Return the files of a directory that change its tokenizer or chat templates. Its config.json,
    of which `TokenizerFiles` reads two fields, is not among them."""
    named = sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
    return [path for path in [*(directory / name for name in FILE_NAMES), *named] if path.is_file()]


def gguf_templates(file: GGUFFile) -> dict[str, str]:
    """Return a GGUF file's chat templates by name."""
    found = {}
    for key in file.metadata:
        named = re.fullmatch(rf"{re.escape(GGUF_TEMPLATE)}(?:\.(.+))?", key)
        if named:
            found[named.group(1) or DEFAULT_TEMPLATE] = file.text(key)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


def _no_tokenizer(folder: Path) -> str:
    advice = 'without a tokenizer prompts must be token ids: {"prompt_token_ids": [...]}.'
    return (
        f"{folder} has no tokenizer.json, no vocab.json with merges.txt, no tokenizer.model and no"
        f" tekken.json; {advice}"
    )


def _check_gpt2(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("tokenizer_class") or ""
    if kind not in GPT2_CLASSES:
        raise ModelError(
            f"{folder} has vocab.json and merges.txt for a {kind}, but no tokenizer.json; make one"
            " (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )


def _token_text(value: Any) -> str | None:
    """Return a token's text, from a text or an object with `content`; None for neither."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for source in sources:
        extra = source.get("extra_special_tokens")
        texts = {name: _token_text(source.get(name)) for name in NAMED_TOKENS}
        if isinstance(extra, dict):
            texts |= {name: _token_text(value) for name, value in extra.items()}
        for name, text in texts.items():
            if text is not None:
                named.setdefault(name, text)
    return named


def _special_tokens(
    config: dict[str, Any], legacy: dict[str, Any], named: dict[str, str]
) -> tuple[str, ...]:
    texts = dict.fromkeys(named.values())
    for source in (config, legacy):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            values = source.get(key)
            if isinstance(values, list):
                texts |= dict.fromkeys(t for v in values if (t := _token_text(v)) is not None)
    return tuple(texts)


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return templates by name. Template files override the text in tokenizer_config.json."""
    found = _inline_templates(config.get("chat_template"))
    if not found:
        found = _inline_templates(read_json(folder / "chat_template.json").get("chat_template"))
    own = folder / "chat_template.jinja"
    if own.is_file():
        found[DEFAULT_TEMPLATE] = own.read_text("utf-8")
    for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja")):
        found[path.stem] = path.read_text("utf-8")
    return found


def _inline_templates(value: Any) -> dict[str, str]:
    """Return templates by name, from a text, a list of {name, template}, or an object."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        pairs = [
            (item.get("name"), item.get("template")) for item in value if isinstance(item, dict)
        ]
    elif isinstance(value, dict):
        pairs = list(value.items())
    else:
        pairs = []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
