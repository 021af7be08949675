"""`Tokenizer`: converts text to token ids and back, from a model directory or a GGUF file.

A thin layer over the `tokenizers` library. It adds the settings of the files next to
tokenizer.json: special tokens, begin and end tokens, chat templates. Its ids equal the ids of
transformers' fast tokenizer. `tokenizers` is imported when the first tokenizer is loaded.

The class `LlamaTokenizer` of transformers 5 keeps only parts of tokenizer.json: vocabulary, merges,
added tokens and post-processor. It builds the rest from `add_prefix_space` and `legacy` in
tokenizer_config.json. So spaces after special tokens do not follow tokenizer.json.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ModelError, RequestError
from quire.render.tokens.cuts import PART_CHARS, Cuts, read_cuts
from quire.render.tokens.gguf_tokenizer import gguf_tokenizer
from quire.render.tokens.pieces import Pieces, read_pieces
from quire.render.tokens.text_bound import TextBound, text_bound
from quire.render.tokens.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TokenizerFiles,
    read_tokenizer_files,
)
from quire.spec.config_fields import shown
from quire.spec.gguf.container import GGUFFile, is_gguf

if TYPE_CHECKING:
    import tokenizers


SPACE = "\u2581"
# Types of models whose tokenizer.json transformers uses unchanged, whatever class the files name.
AS_IT_IS = ("mistral", "qwen2")
BYTE_LEVEL = '"type":"ByteLevel"'


def is_llama(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> bool:
    """Return whether transformers would load these files with `LlamaTokenizer`."""
    from tokenizers import models

    return (
        files.tokenizer_class == "LlamaTokenizer"
        and files.tokenizer_json.is_file()
        and files.model_type not in AS_IT_IS
        and isinstance(backend.model, models.BPE)
        and not any(_is_byte_level(part) for part in (backend.pre_tokenizer, backend.decoder))
    )


def build_as_llama(backend: "tokenizers.Tokenizer", config: dict[str, Any]) -> None:
    """Replace pre-tokenizer and decoder by LlamaTokenizer's. config: tokenizer_config.json."""
    from tokenizers import decoders, pre_tokenizers

    prefix_setting = config.get("add_prefix_space")
    prefixes = prefix_setting is None or bool(prefix_setting)
    scheme = "never"
    if prefixes:
        scheme = "always" if config.get("legacy", False) else "first"
    backend.model.fuse_unk, backend.model.byte_fallback = True, True
    backend.model.unk_token = None
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)


def _is_byte_level(part: Any) -> bool:
    return part is not None and BYTE_LEVEL in part.__getstate__().decode().replace(" ", "")


def is_mark(text: str, is_special: bool) -> bool:
    """Return whether an added token is a mark such as `<tool_call>`, not an ordinary text."""
    return is_special or (text.startswith("<") and text.endswith(">"))


class Tokenizer:
    """One vocabulary. Immutable after loading, so it may be shared between threads."""

    def __init__(self, backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
        self._backend = backend
        self._files = files
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def added_ids(self) -> dict[str, int]:
        """Return the ids of added tokens that are marks, by their texts.

        Other added tokens are words, which grammars treat as ordinary tokens."""
        return {
            text: token_id
            for token_id, text in self.added_tokens.items()
            if is_mark(text, token_id in self.special_ids)
        }

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Load tokenizer.json, or vocab.json with merges.txt, or a GGUF file's vocabulary.

        Raises ModelError if there is none."""
        if is_gguf(path):
            backend, files = gguf_tokenizer(GGUFFile(path))
        else:
            files = read_tokenizer_files(path)
            backend = _load_backend(files)
        backend.no_truncation()
        backend.no_padding()
        if is_llama(backend, files):
            build_as_llama(backend, files.config)
        _mark_special(backend, files)
        _set_bos_eos(backend, files)
        return cls(backend, files)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with begin and end tokens as the files configure them.

        Releases the GIL: of the library's calls, only those for batches do. A long text is
        tokenized in parts if that gives the same ids. Raises RequestError for invalid Unicode.
        """
        if len(text) <= 2 * PART_CHARS or self._cuts is None:
            return self._encode(text, add_special_tokens)
        before, after = self._around if add_special_tokens else ([], [])
        token_ids = list(before)
        for part in self._cuts.parts(text):
            token_ids += self._encode(part, False)
        return token_ids + after

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise RequestError(
                f"the prompt cannot be tokenised ({error}); it must be a text of valid Unicode."
            ) from error
        return found.ids

    @cached_property
    def _cuts(self) -> Cuts | None:
        return read_cuts(self._backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text."""
        whole, text = self._encode("a", True), self._encode("a", False)
        start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        return whole[:start], whole[start + len(text) :]

    def frame(self, num_parts: int) -> list[list[int]]:
        """Return the special tokens around one text or a pair of texts.

        The lists hold the tokens before the first text, between the texts, and after the last."""
        if num_parts == 1:
            return [list(part) for part in self._around]
        text = self._encode("a", False)
        [pair] = self._backend.encode_batch_fast([("a", "a")], add_special_tokens=True)
        rest, found = pair.ids, list[list[int]]()
        for _ in range(2):
            start = next(i for i in range(len(rest)) if rest[i : i + len(text)] == text)
            found.append(rest[:start])
            rest = rest[start + len(text) :]
        return [*found, rest]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of all ids at once, and release the GIL. Unknown ids give no text."""
        return self._backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )[0]

    @cached_property
    def bound(self) -> TextBound | None:
        """The lower bound on a text's tokens, to reject long texts cheaply; None without one."""
        return text_bound(self._backend)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None outside of the vocabulary."""
        return self._backend.id_to_token(token_id)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens of several ids, with an empty string for unknown ids."""
        return [self.token(token_id) or "" for token_id in token_ids]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling; None if there is none."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """Return the tokenizer as tokenizer.json, including the settings of other files."""
        return self._backend.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens with added ones. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def named_tokens(self) -> dict[str, str]:
        """The texts of bos_token, eos_token and so on, as chat templates refer to them."""
        return self._files.named_tokens

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name."""
        return self._files.chat_templates

    @property
    def chat_template(self) -> str | None:
        """The text of the default chat template; None if there is none."""
        return self._files.chat_templates.get(DEFAULT_TEMPLATE)

    @cached_property
    def pieces(self) -> Pieces | None:
        """The table of each token's text; None if the decoder needs context."""
        return read_pieces(_state(self._backend.decoder), self.token)

    def _named_id(self, name: str) -> int | None:
        text = self._files.named_tokens.get(name)
        return None if text is None else self.token_id(text)


def _load_backend(files: TokenizerFiles) -> "tokenizers.Tokenizer":
    import tokenizers

    path = files.tokenizer_json if files.tokenizer_json.is_file() else files.vocab_json
    try:
        if path == files.tokenizer_json:
            return tokenizers.Tokenizer.from_file(str(path))
        return _gpt2_backend(files)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read as a tokenizer ({error}).") from error


def _gpt2_backend(files: TokenizerFiles) -> "tokenizers.Tokenizer":
    """Build GPT-2's tokenizer: byte-level BPE over vocab.json and merges.txt."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    model = models.BPE.from_file(str(files.vocab_json), str(files.merges_txt))
    backend = Backend(model)
    prefix = bool(files.config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


def _mark_special(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
    """Add tokens that only tokenizer_config.json declares; mark named tokens as special."""
    from tokenizers import AddedToken

    for token_id, fields in _declared(files):
        known = backend.id_to_token(token_id) is not None
        if known or token_id != backend.get_vocab_size(with_added_tokens=True):
            continue
        flags = {
            name: bool(fields.get(name, False))
            for name in ("single_word", "lstrip", "rstrip", "normalized")
        }
        token = AddedToken(fields["content"], special=bool(fields.get("special")), **flags)
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    for text in files.special_tokens:
        if text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([text])


def _declared(files: TokenizerFiles) -> list[tuple[int, dict[str, Any]]]:
    """Return the tokens of tokenizer_config.json by id, in order. Raises ModelError."""
    name = "added_tokens_decoder"
    declared = files.config.get(name) or {}
    found: list[tuple[int, dict[str, Any]]] = []
    for key, value in declared.items() if isinstance(declared, dict) else [("", None)]:
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        if not (is_id and isinstance(value, dict) and isinstance(value.get("content"), str)):
            path = files.directory / "tokenizer_config.json"
            raise ModelError(
                f"{path}: {name} must map token ids to objects with a content, got for example"
                f" {key!r}: {shown(value)}; fetch the file again."
            )
        found.append((int(key), value))
    return sorted(found, key=lambda pair: pair[0])


def _set_bos_eos(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
    """Set the begin and end tokens from tokenizer_config.json if there is no tokenizer.json.

    Otherwise tokenizer.json's post-processor applies, even if absent, because transformers 5 then
    ignores add_bos_token and add_eos_token.
    """
    from tokenizers import processors

    if files.tokenizer_json.is_file() or _adds_tokens(backend):
        return
    if not {"add_bos_token", "add_eos_token"} & files.config.keys():
        return
    before, after = "", ""
    special: list[tuple[str, int]] = []
    for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        text = files.named_tokens.get(name)
        token_id = None if text is None else backend.token_to_id(text)
        if not files.config.get(flag) or text is None or token_id is None:
            continue
        special.append((text, token_id))
        if name == "bos_token":
            before = f"{text}:0 "
        else:
            after = f" {text}:0"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{before}$A:0{after}", special_tokens=special
    )


def _adds_tokens(backend: "tokenizers.Tokenizer") -> bool:
    """Return whether the post-processor can add tokens; a purely byte-level one cannot."""
    state = _state(backend.post_processor)
    parts = state.get("processors", [state])
    return any(part.get("type", "ByteLevel") != "ByteLevel" for part in parts)


def _state(part: Any) -> dict[str, Any]:
    """Return a decoder or post-processor in tokenizer.json's form, which the library pickles."""
    return {} if part is None else json.loads(part.__getstate__())
