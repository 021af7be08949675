"""A model's tokens for llguidance, converted once, when the first grammar arrives.

Where a grammar leaves only one text, masks allow only its canonical tokens, so llguidance tokenises
while it makes masks. It reads the whole tokenizer for that, and then needs no Python. Grammars name
added tokens, special or not, by id (`<[151657]>`).

A tokenizer finds added tokens in any text. So llguidance would read the text `<|im_end|>` as the
token, which the grammar then rejects. `without_added_texts` hides these texts, so that text is
always spelled with ordinary tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.base.errors import ConfigError, MissingDependency
from quire.base.plan import Int32
from quire.render.tokens.tokenizer import Tokenizer, is_mark

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model, and the bits of masks that stand for some of them."""

    size: int  # rows of the model's table, and so logits of a token
    num_tokens: int  # ids below this are tokens, the others are padding
    end_token_ids: tuple[int, ...]  # tokens that may end an answer
    tokens: "LLTokenizer"  # includes tokens beyond the table

    @cached_property
    def ends(self) -> Int32:
        """[W] int32: bits of the end tokens."""
        return self._words(list(self.end_token_ids))

    @cached_property
    def padding(self) -> Int32:
        """[P] int32: the last words of a mask, with ones for tokens and zeros for padding.

        They begin with the first word that has padding; at least one word."""
        words = self._words(slice(0, self.num_tokens))
        return words[min(self.num_tokens // 32, len(words) - 1) :]

    def _words(self, token_ids: list[int] | slice) -> Int32:
        bits = np.zeros(num_words(self.size) * 32, bool)
        bits[token_ids] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words with one bit for each token."""
    return (vocab_size + 31) // 32


def make_vocabulary(
    tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Sequence[int]
) -> Vocabulary:
    """Return a tokenizer's vocabulary. It takes about a second for 150,000 tokens.

    vocab_size: rows of the model's table, including padding.
    Raises ConfigError for a model that no grammar can be used with; MissingDependency."""
    if tokenizer is None:
        raise ConfigError(
            "structured output needs a tokenizer, which this model does not have; set tokenizer,"
            " or remove the grammar."
        )
    ends = tuple(token_id for token_id in end_token_ids if 0 <= token_id < vocab_size)
    if not ends:
        raise ConfigError(
            "structured output needs an end token: this model has no eos_token_id in"
            " generation_config.json or config.json; add one."
        )
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise MissingDependency(
            "grammars need llguidance, which is not installed: pip install llguidance"
        ) from error
    num_tokens = min(vocab_size, tokenizer.vocab_size)
    num_known = max(vocab_size, tokenizer.vocab_size)
    try:
        readable = without_added_texts(tokenizer.to_json())
        plain = LLTokenizer(readable, num_known, list(ends), slices=[])
        # Masks of JSON texts take a third of the time with slices. Two calls, because each holds
        # Python's lock, so the engine's loop waits.
        tokens = plain.with_slices(LLTokenizer.general_slices())
    except Exception as error:
        raise ConfigError(
            "structured output is not available for this model's tokenizer, because llguidance"
            f" cannot read it ({error}); remove the grammar."
        ) from error
    return Vocabulary(vocab_size, num_tokens, ends, tokens)


def without_added_texts(tokenizer: str) -> str:
    """Return a tokenizer.json whose added tokens keep their ids and have hidden texts.

    Added words (not `is_mark`) stand for their text, so they keep it. In a byte-level model such a
    word may equal the name of a byte token with other bytes; then it is hidden, too."""
    state = json.loads(tokenizer)
    model = state["model"]
    is_byte_level = '"ByteLevel"' in json.dumps([state.get("pre_tokenizer"), state.get("decoder")])
    names = _names(model["vocab"])
    hidden: dict[str, str] = {}
    for token in state.get("added_tokens") or []:
        text = token["content"]
        if is_mark(text, token["special"]) or (is_byte_level and text in names):
            hidden[text] = (
                f"\ufdd0{token['id']}\ufdd1"  # Unicode noncharacters, which occur in no text
            )
            token |= {"content": hidden[text], "special": True}
        else:
            token |= {"lstrip": False, "rstrip": False, "single_word": False}
    _rename(model, hidden)
    return json.dumps(state)


def _names(vocab: Any) -> set[str]:
    """Return the texts of a model's tokens: keys with ids, or pieces with scores."""
    return set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens of a tokenizer's model, and remove the merges that involve them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("merges"):
        pairs = [(merge, _pair(merge)) for merge in model["merges"]]
        model["merges"] = [
            merge for merge, pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _pair(merge: Any) -> list[str]:
    """Return the two tokens of a merge, which older files write as one text."""
    return merge.split(" ") if isinstance(merge, str) else merge


MakeVocabulary = Callable[[], Vocabulary]
