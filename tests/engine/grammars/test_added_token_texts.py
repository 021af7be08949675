"""Text that equals an added token is spelled with ordinary tokens: forced, masked and drafted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.engine.grammars.vocabulary import Vocabulary, make_vocabulary
from quire.render.grammars.structured import grammar_of
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.tiny_tokenizers import byte_level, gemma, llama, tokenizer

FAMILIES = ["demo", "byte_level", "llama", "gemma"]


def load_tokenizer(family: str) -> Tokenizer:
    if family == "demo":
        return Tokenizer.from_directory(Path("src/quire/demo"))
    return tokenizer(family)


def forms(text: str) -> dict[str, tuple[StructuredOutputsParams, str]]:
    """Return constraints that allow only one output, which contains this text, and that output."""
    closed = {"type": "object", "additionalProperties": False}
    keyed = closed | {"properties": {text: {"const": 1}}, "required": [text]}
    compact = {"disable_any_whitespace": True}
    quoted = json.dumps(text, ensure_ascii=False)
    return {
        "const": (StructuredOutputsParams(json={"const": text}), quoted),
        "inside": (StructuredOutputsParams(json={"const": f"a{text}b"}), f'"a{text}b"'),
        "enum": (StructuredOutputsParams(json={"enum": [text]}), quoted),
        "pattern": (
            StructuredOutputsParams(json={"type": "string", "pattern": f"^{_escaped(text)}$"}),
            quoted,
        ),
        "name": (StructuredOutputsParams(json=keyed, **compact), f"{{{quoted}:1}}"),
        "regex": (StructuredOutputsParams(regex=_escaped(text)), text),
        "choice": (StructuredOutputsParams(choice=[f"x{text}"]), f"x{text}"),
        "quoted": (StructuredOutputsParams(grammar=f"start: {quoted}"), text),
    }


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "|[]()?*+.{}^$\\/" else c for c in text)


def written(vocabulary: Vocabulary, grammar: str, use_forced: bool) -> list[int]:
    """Return the tokens of an output: the forced ones, or the first that each mask allows."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0)
    found: list[int] = []
    for _ in range(200):
        ahead = matcher.compute_ff_tokens() if use_forced else []
        if not ahead:
            words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            ahead = np.flatnonzero(np.unpackbits(words, bitorder="little"))[:1].tolist()
        assert not matcher.is_error(), matcher.get_error()
        for token_id in ahead:
            if token_id in vocabulary.end_token_ids:
                return found
            assert matcher.consume_token(token_id), matcher.get_error()
            found.append(token_id)
    raise AssertionError("the output never ends")


@pytest.mark.parametrize("use_forced", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_each_added_token_is_spelled_with_ordinary_tokens(
    family: str, use_forced: bool
) -> None:
    ours = load_tokenizer(family)
    added = {text: token_id for token_id, text in ours.added_tokens.items()}
    vocabulary = make_vocabulary(ours, ours.vocab_size + 45, [1, 2])
    for text in added:
        for name, (form, answer) in forms(text).items():
            found = written(vocabulary, grammar_of(form, added), use_forced)
            assert not set(found) & set(added.values()), (text, name)
            assert vocabulary.tokens.decode_bytes(found) == answer.encode(), (text, name)


WORDS = ["ü", "é", "<table>", "[INST]", "  ", "the", "jumps over"]


@pytest.mark.parametrize("use_forced", [True, False])
@pytest.mark.parametrize("make", [byte_level, llama, gemma])
def test_text_of_added_words_is_spelled_with_ordinary_tokens(
    make: Callable[[], Any], use_forced: bool, tmp_path: Path
) -> None:
    """Tokens that are not special may represent their text, and our decoding determines for which
    words."""
    backend = make()
    backend.add_tokens([AddedToken(word, lstrip=True, rstrip=True) for word in WORDS])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_directory(tmp_path)
    vocabulary = make_vocabulary(ours, ours.vocab_size + 45, [1, 2])
    assert "<table>" in ours.added_ids and "the" not in ours.added_ids
    for text in WORDS:
        for name, (form, answer) in forms(text).items():
            found = written(vocabulary, grammar_of(form, ours.added_ids), use_forced)
            assert not set(found) & set(ours.added_ids.values()), (text, name)
            assert ours.pieces is not None
            pieces = [ours.pieces.table[token_id] for token_id in found]
            data = b"".join(one if isinstance(one, bytes) else one.encode() for one in pieces)
            assert data == answer.encode(), (text, name)
