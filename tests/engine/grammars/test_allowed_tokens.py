"""The tokens that a grammar allows, against two oracles without llguidance.

The oracles are derivatives of regular expressions, and all values of a small set that `jsonschema`
finds valid. Where a grammar allows a single text, masks hold only its canonical token; elsewhere
they equal the oracle's.
"""

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import jsonschema
import numpy as np
import tokenizers as tk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.engine.grammars.vocabulary import Vocabulary, make_vocabulary
from quire.render.grammars.structured import grammar_of
from quire.render.tokens.tokenizer import Tokenizer

NUM_STEPS = 14
NUM_WALKS = 4
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Model:
    """A vocabulary of bytes and random words made of them. texts: the bytes of each token."""

    vocabulary: Vocabulary
    texts: list[bytes]
    end: int


@lru_cache(maxsize=8)
def model(seed: int) -> Model:
    rng = random.Random(seed)
    texts = [bytes([value]) for value in sorted(set(b'abcdex0123456789{}[]:,"ntrufls\xc3\xa9'))]
    merges = [(b"\xc3", b"\xa9")]
    while len(merges) < 180:
        first, second = rng.choice(texts), rng.choice(texts)
        if first + second not in texts and len(first + second) <= 6:
            texts.append(first + second)
            merges.append((first, second))
    texts += [b"\xc3\xa9"] if b"\xc3\xa9" not in texts else []
    shown = {text: _shown(text) for text in texts}
    ranks = {shown[text]: i for i, text in enumerate(texts)}
    pairs = [(shown[first], shown[second]) for first, second in merges]
    backend = tk.Tokenizer(tk.models.BPE(ranks, pairs))
    backend.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tk.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        tokenizer = Tokenizer.from_directory(folder)
    end = len(texts)
    return Model(make_vocabulary(tokenizer, end + 1, [end]), texts, end)


def _shown(text: bytes) -> str:
    """Return the characters that byte-level vocabularies write for these bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    return "".join(chr(v if v in plain else 256 + others.index(v)) for v in text)


def walk(
    made: Model,
    grammar: str,
    allowed: Callable[[bytes, bytes], bool],
    ends: Callable[[bytes], bool],
    num_next: Callable[[bytes], int],
    seed: int,
) -> None:
    """Generate at random, a few times, and compare at each step. allowed: whether an output can
    begin with both byte strings; ends: whether it can end here; num_next: the number of possible
    next bytes."""
    first = LLMatcher(made.vocabulary.tokens, grammar, log_level=0)
    assert not first.is_error(), first.get_error()
    rng = random.Random(seed)
    for _ in range(NUM_WALKS):
        matcher, done = first.deep_copy(), b""
        for _ in range(NUM_STEPS):
            words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask = set(np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist())
            expected = {i for i, text in enumerate(made.texts) if allowed(done, text)}
            if ends(done):
                expected.add(made.end)
            if num_next(done) == 1 and not ends(done):
                assert mask and mask <= expected
            else:
                assert mask == expected, (done, mask ^ expected)
            token_id = rng.choice(sorted(mask))
            if token_id == made.end:
                break
            assert matcher.consume_token(token_id)
            done += made.texts[token_id]


# ---- regular expressions ---------------------------------------------------------------------

# A set of bytes, ("empty",), ("seq", a, b), ("alt", a, b), or ("many", a, low, high).
Regex = Any
# The rest of a text matches one of several expressions: Antimirov's partial derivatives (1996).
# Their number is about that of an expression's letters, however long the text is.
Rest = frozenset[Regex]
EMPTY: Regex = ("empty",)


def seq(a: Regex, b: Regex) -> Regex:
    return b if a == EMPTY else a if b == EMPTY else ("seq", a, b)


@cache
def nullable(r: Regex) -> bool:
    if isinstance(r, frozenset):
        return False
    match r[0]:
        case "empty":
            return True
        case "seq":
            return nullable(r[1]) and nullable(r[2])
        case "alt":
            return nullable(r[1]) or nullable(r[2])
    return r[2] == 0 or nullable(r[1])


@cache
def partials(r: Regex, byte: int) -> Rest:
    """Return expressions for what may follow this byte in the texts of `r`."""
    if isinstance(r, frozenset):
        return frozenset([EMPTY] if byte in r else [])
    match r[0]:
        case "empty":
            return frozenset()
        case "seq":
            found = frozenset(seq(each, r[2]) for each in partials(r[1], byte))
            return found | partials(r[2], byte) if nullable(r[1]) else found
        case "alt":
            return partials(r[1], byte) | partials(r[2], byte)
    _, inner, low, high = r
    rest = ("many", inner, max(0, low - 1), None if high is None else high - 1)
    return frozenset(seq(each, EMPTY if rest[3] == 0 else rest) for each in partials(inner, byte))


@cache
def after(rest: Rest, text: bytes) -> Rest:
    for byte in text:
        rest = frozenset().union(*(partials(each, byte) for each in rest))
    return rest


# (the pattern as text, the same pattern as data)
def leaves() -> st.SearchStrategy[tuple[str, Regex]]:
    chars = [(c, frozenset(c.encode())) for c in "abcdex01"]
    sets = [("[a-d]", frozenset(b"abcd")), ("[0-9]", frozenset(b"0123456789"))]
    accent = ("é", seq(frozenset(b"\xc3"), frozenset(b"\xa9")))
    return st.sampled_from([*chars, *sets, accent])


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = st.sampled_from([("?", 0, 1), ("*", 0, None), ("+", 1, None), ("{2}", 2, 2),
                              ("{1,3}", 1, 3), ("{2,}", 2, None)])  # fmt: skip
    return st.one_of(
        st.tuples(inner, inner).map(lambda two: (two[0][0] + two[1][0], seq(two[0][1], two[1][1]))),
        st.tuples(inner, inner).map(
            lambda two: (f"({two[0][0]}|{two[1][0]})", ("alt", two[0][1], two[1][1]))),
        st.tuples(inner, counts).map(
            lambda two: (f"({two[0][0]}){two[1][0]}", ("many", two[0][1], *two[1][1:]))),
    )  # fmt: skip


@FEW
@given(regex=st.recursive(leaves(), grown, max_leaves=8), seed=st.integers(0, 7))
def test_masks_of_regular_expressions_match_their_derivatives(
    regex: tuple[str, Regex], seed: int
) -> None:
    pattern, data = regex
    whole = frozenset([data])
    walk(
        model(seed),
        grammar_of(StructuredOutputsParams(regex=pattern)),
        allowed=lambda done, text: bool(after(after(whole, done), text)),
        ends=lambda done: any(map(nullable, after(whole, done))),
        num_next=lambda done: sum(bool(after(after(whole, done), bytes([b]))) for b in range(256)),
        seed=seed,
    )


# ---- schemas ---------------------------------------------------------------------------------

SCALARS: list[Any] = [None, True, False, *range(13), "a", "b", "ab", "é"]
FLAT: list[Any] = [
    *SCALARS, [], *([a] for a in SCALARS), *([a, b] for a in SCALARS for b in SCALARS), {},
    *({"a": a} for a in SCALARS), *({"b": b} for b in SCALARS),
    *({"a": a, "b": b} for a in SCALARS for b in SCALARS),
]  # fmt: skip


def simple() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}]),
        st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4).map(lambda v: {"enum": v}),
        st.sampled_from(SCALARS).map(lambda value: {"const": value}),
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 2, 5])).map(
            lambda n: {"type": "integer", "minimum": n[0] * n[2] % 7, "multipleOf": n[2],
                       "exclusiveMaximum": n[0] * n[2] % 7 + n[2] + n[1] % 3}),
    )  # fmt: skip


def flat() -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(simple(), st.integers(0, 2), st.integers(0, 2)).map(
        lambda n: {"type": "array", "items": n[0], "minItems": min(n[1:]), "maxItems": max(n[1:])}
    )
    tuples_ = st.tuples(simple(), simple(), st.integers(0, 2)).map(
        lambda n: {"type": "array", "prefixItems": list(n[:2]), "items": False, "minItems": n[2]}
    )
    objects = st.tuples(simple(), simple(), st.sets(st.sampled_from("ab"))).map(
        lambda n: {
            "type": "object",
            "properties": {"a": n[0], "b": n[1]},
            "required": sorted(n[2]),
            "additionalProperties": False,
        }
    )
    return st.one_of(simple(), arrays, tuples_, objects)  # fmt: skip


def language(schema: dict[str, Any]) -> set[bytes]:
    """Return the texts of all valid values, written without white space."""
    check = jsonschema.Draft202012Validator(schema)
    valid = [value for value in FLAT if check.is_valid(value)]
    return {
        json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() for value in valid
    }


@FEW
@given(parts=st.lists(flat(), min_size=1, max_size=2), seed=st.integers(0, 7))
def test_masks_of_schemas_match_the_valid_values(parts: list[dict[str, Any]], seed: int) -> None:
    schema = parts[0] if len(parts) == 1 else {"anyOf": parts}
    texts = language(schema)
    assert texts
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    walk(
        model(seed),
        grammar_of(form, strict=True),
        allowed=lambda done, text: any(one.startswith(done + text) for one in texts),
        ends=lambda done: done in texts,
        num_next=lambda done: len(
            {one[len(done)] for one in texts if one.startswith(done) and len(one) > len(done)}
        ),
        seed=seed,
    )
