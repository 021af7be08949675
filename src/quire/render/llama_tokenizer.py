"""What transformers' `LlamaTokenizer` makes of a tokenizer.json: a rule for words of its own.

Since transformers 5 the class takes the file's vocabulary, merges, added tokens and post-processor,
and builds the rest anew from `add_prefix_space` and `legacy` of tokenizer_config.json. So a space
behind a special token is not what the file's own rule makes of it. (transformers 4 used the file's
rule, and refused `add_prefix_space` without tokenizer.model.)
"""

from typing import TYPE_CHECKING, Any

from quire.render.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
# Models whose tokenizer.json transformers takes as it is, whatever class their files name.
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
    """Give a tokenizer the rule, and the decoder, that the class builds. config: of the files."""
    from tokenizers import decoders, pre_tokenizers

    asked = config.get("add_prefix_space")
    prefixes = asked is None or bool(asked)
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
