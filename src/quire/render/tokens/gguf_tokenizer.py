"""The tokenizer inside a GGUF file: vocabulary, special tokens, chat templates, end tokens.

Input: an opened file. Output: a tokenizer of the `tokenizers` library, and the settings that a
model directory has in tokenizer_config.json. There are two families. `gpt2` merges bytes by a list
of merges. `llama` (SentencePiece) merges characters by the score of the resulting token, and uses
byte tokens for characters outside of the vocabulary.
"""

import math
from typing import TYPE_CHECKING, Any

from quire.base.errors import ModelError
from quire.render.tokens.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.render.tokens.tokenizer_files import WHOLE_TOKENIZER, TokenizerFiles, gguf_templates
from quire.spec.gguf.config import NO_TOKEN
from quire.spec.gguf.container import GGUFFile

if TYPE_CHECKING:
    import tokenizers

KEY = "tokenizer.ggml"
SPACE = "\u2581"

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled like this in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
LLAMA_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}  # defaults if the file names none
STOP_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn. Files of chat models often name only one of their end tokens.
RETURN, END = "<|return|>", "<|end|>"  # with RETURN, END only ends a message, not a turn
STOP_TEXTS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|call|>",
        RETURN,
        END,
    )
)
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def gguf_tokenizer(file: GGUFFile) -> tuple["tokenizers.Tokenizer", TokenizerFiles]:
    """Build the tokenizer. Raises ModelError for an unsupported kind of vocabulary."""
    vocabulary = Vocabulary(file)
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    model = file.text(f"{KEY}.model", "")
    if model not in builders and WHOLE_TOKENIZER not in file.metadata:
        raise ModelError(
            f"{file.path} has a tokenizer of the kind {model!r}; supported are gpt2 and llama."
            " Name another tokenizer for it (--tokenizer)."
        )
    try:
        if WHOLE_TOKENIZER in file.metadata:
            backend = _whole(file)
        else:
            backend = builders[model](vocabulary)
            _add_tokens(backend, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path} holds a tokenizer that cannot be used ({error}).") from error
    return backend, _settings(file, vocabulary)


def gguf_generation(file: GGUFFile) -> dict[str, Any]:
    """Return end tokens and sampling defaults, under the names of generation_config.json."""
    vocabulary = Vocabulary(file)
    names = [f"{KEY}.{name}" for name in STOP_IDS]
    ids = [file.integer(name) for name in names if name in file.metadata]
    ids = [token_id for token_id in ids if token_id not in NO_TOKEN]
    ends = STOP_TEXTS - {END} if RETURN in vocabulary.ids else STOP_TEXTS
    ids += [i for i in vocabulary.of_kind(CONTROL) if vocabulary.texts[i] in ends]
    found = {name: file.number(key) for name, key in SAMPLING_KEYS.items() if key in file.metadata}
    if "top_k" in found:
        found["top_k"] = file.integer(SAMPLING_KEYS["top_k"])
    return found | {"eos_token_id": ids}


class Vocabulary:
    """The vocabulary of a GGUF file.

    texts: text of each id.
    kinds: token type of each id.
    ids: from text to id, without unused tokens.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.texts = file.texts(f"{KEY}.tokens")
        kinds = file.numbers(f"{KEY}.token_type")
        if not all(map(math.isfinite, kinds)):
            raise ModelError(f"{file.path}: {KEY}.token_type holds numbers that are not whole.")
        self.kinds = [int(kind) for kind in kinds]
        self.kinds = self.kinds or [NORMAL] * len(self.texts)
        if len(self.kinds) != len(self.texts):
            raise ModelError(
                f"{file.path} has {len(self.texts)} tokens, but types of {len(self.kinds)}."
            )
        self.ids: dict[str, int] = {}
        for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind != UNUSED:
                self.ids.setdefault(text, token_id)

    def of_kind(self, kind: int) -> list[int]:
        return [token_id for token_id, own in enumerate(self.kinds) if own == kind]

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """The rule that splits texts into words, for byte-level vocabularies."""
        name = self.file.text(f"{KEY}.pre", "default")
        if name not in PRE_TOKENIZERS:
            raise ModelError(
                f"{self.file.path} cuts texts by the rule {name!r}; supported are"
                f" {', '.join(PRE_TOKENIZERS)}. Name another tokenizer for it (--tokenizer)."
            )
        return PRE_TOKENIZERS[name]


def _whole(file: GGUFFile) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(file.text(WHOLE_TOKENIZER))


def _byte_level(vocabulary: Vocabulary) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    rule, ids = vocabulary.pre_tokenizer, vocabulary.ids
    pairs = (text.partition(" ") for text in vocabulary.file.texts(f"{KEY}.merges"))
    merges = [(a, b) for a, _, b in pairs if a in ids and b in ids and a + b in ids]
    backend = Backend(models.BPE(ids, merges, ignore_merges=rule.ignore_merges))
    if rule.is_composed:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    prefix = vocabulary.file.boolean(f"{KEY}.add_space_prefix", False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: Vocabulary) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = [vocabulary.texts[token_id] for token_id in vocabulary.of_kind(UNKNOWN)]
    backend = Backend(
        models.BPE(
            vocabulary.ids,
            _merges_by_score(vocabulary),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", SPACE)
    if vocabulary.file.boolean(f"{KEY}.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        joined.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(joined)
    return backend


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """List the pairs of tokens that join to a token, highest score first.

    SentencePiece merges the neighbours whose joined token has the highest score. A merge for each
    such pair, ranked by that score, gives the same result.
    """
    scores = vocabulary.file.numbers(f"{KEY}.scores")
    if len(scores) != len(vocabulary.texts):
        raise ModelError(
            f"{vocabulary.file.path} has {len(vocabulary.texts)} tokens, but {len(scores)} scores."
        )
    normal = {vocabulary.texts[token_id]: token_id for token_id in vocabulary.of_kind(NORMAL)}
    found = [
        (-scores[token_id], normal[text[:cut]], normal[text[cut:]], text[:cut], text[cut:])
        for text, token_id in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _add_tokens(backend: "tokenizers.Tokenizer", vocabulary: Vocabulary) -> None:
    """Add the tokens that are matched in a text before it is split or merged."""
    from tokenizers import AddedToken

    def tokens(kind: int, special: bool) -> list[AddedToken]:
        texts = (vocabulary.texts[token_id] for token_id in vocabulary.of_kind(kind))
        return [AddedToken(text, normalized=False, special=special) for text in texts if text]

    backend.add_special_tokens(tokens(UNKNOWN, True) + tokens(CONTROL, True))
    backend.add_tokens(tokens(USER_DEFINED, False))


def _settings(file: GGUFFile, vocabulary: Vocabulary) -> TokenizerFiles:
    """Return the settings that a model directory has in tokenizer_config.json."""
    is_llama = file.text(f"{KEY}.model", "") == "llama"
    if is_llama:
        adds_bos = True
    else:
        rule = PRE_TOKENIZERS.get(file.text(f"{KEY}.pre", "default"))
        adds_bos = rule is not None and rule.add_bos
    config = {
        "add_bos_token": file.boolean(f"{KEY}.add_bos_token", adds_bos),
        "add_eos_token": file.boolean(f"{KEY}.add_eos_token", False),
    }
    named = {}
    for name, key in NAMED_IDS.items():
        default = LLAMA_IDS.get(name, -1) if is_llama else -1
        token_id = file.integer(f"{KEY}.{key}", default)
        if 0 <= token_id < len(vocabulary.texts):
            named[name] = vocabulary.texts[token_id]
    return TokenizerFiles(file.path, config, named, tuple(named.values()), gguf_templates(file))
