"""The `tokenizers` object of a model directory, with the settings of the files next to it.

Input: `TokenizerFiles`. Output: a `tokenizers.Tokenizer` whose ids equal the ids of transformers'
fast tokenizer.

The class `LlamaTokenizer` of transformers 5 keeps only parts of tokenizer.json: vocabulary, merges,
added tokens and post-processor. It builds the rest from `add_prefix_space` and `legacy` in
tokenizer_config.json. So spaces after special tokens do not follow tokenizer.json.
"""

import json
from typing import TYPE_CHECKING, Any

from quire.base.errors import ModelError
from quire.render.tokens.converted import other_vocabulary
from quire.render.tokens.tokenizer_files import TokenizerFiles
from quire.spec.config_fields import shown

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
# Types of models whose tokenizer.json transformers uses unchanged, whatever class the files name.
AS_IT_IS = ("mistral", "qwen2")
BYTE_LEVEL = '"type":"ByteLevel"'


def load_backend(files: TokenizerFiles) -> "tokenizers.Tokenizer":
    """Load tokenizer.json, or vocab.json with merges.txt, or convert another vocabulary. Raises
    ModelError, and MissingDependency for a conversion without its packages."""
    backend = _read_backend(files)
    finish_backend(backend, files)
    return backend


def finish_backend(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
    """Apply what the files next to the vocabulary say, and disable truncation and padding."""
    backend.no_truncation()
    backend.no_padding()
    if _is_llama(backend, files):
        _build_as_llama(backend, files.config)
    _mark_special(backend, files)
    _set_bos_eos(backend, files)


def _is_llama(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> bool:
    """Return whether transformers would load these files with `LlamaTokenizer`."""
    from tokenizers import models

    return (
        files.tokenizer_class == "LlamaTokenizer"
        and files.tokenizer_json.is_file()
        and files.model_type not in AS_IT_IS
        and isinstance(backend.model, models.BPE)
        and not any(_is_byte_level(part) for part in (backend.pre_tokenizer, backend.decoder))
    )


def _build_as_llama(backend: "tokenizers.Tokenizer", config: dict[str, Any]) -> None:
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


def _read_backend(files: TokenizerFiles) -> "tokenizers.Tokenizer":
    import tokenizers

    if not files.tokenizer_json.is_file() and not files.has_gpt2_pair:
        other = other_vocabulary(files.directory)
        assert other is not None, "has_tokenizer found one"
        return other.convert(files.config)
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
    state = state_of(backend.post_processor)
    parts = state.get("processors", [state])
    return any(part.get("type", "ByteLevel") != "ByteLevel" for part in parts)


def state_of(part: Any) -> dict[str, Any]:
    """Return a decoder or post-processor in tokenizer.json's form, which the library pickles."""
    return {} if part is None else json.loads(part.__getstate__())
