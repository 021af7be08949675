"""Stop strings: found across tokens, cut exactly, and nothing is held back without reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.requests.sampling_params import SamplingParams
from quire.render.tokens.detokenizer import IncrementalDetokenizer, StopStrings
from tests.support.render.tiny_tokenizers import tokenizer

small = st.text(alphabet="ab🙂", max_size=30)
stops = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str], include: bool, floor: int = 0) -> tuple[str, str | None]:
    """Return the text up to the stop string that ends first after `floor`, and that string."""
    for end in range(floor + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@given(text=small, stops=stops, include=st.booleans(), sizes=st.lists(st.integers(1, 5)))
@settings(max_examples=150, deadline=None)
def test_text_is_cut_at_the_stop_string_that_ends_first(
    text: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    finder = StopStrings(stops, include)
    out, at = "", 0
    for size in [*sizes, len(text)]:
        out += finder.push(text[at : at + size])
        at += size
        if finder.matched:
            break
        seen = text[:at]
        held = seen[len(out) :]
        assert out + held == seen
        assert held == "" or any(stop.startswith(held) for stop in stops)
    out += finder.flush()
    assert (out, finder.matched) == expected(text, stops, include)


@pytest.mark.parametrize("family", ["byte_level", "llama"])
@given(text=small, stops=stops, include=st.booleans(), minimum=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_detokenizer_cuts_at_stop_strings_after_min_tokens(
    family: str, text: str, stops: list[str], include: bool, minimum: int
) -> None:
    tok = tokenizer(family)
    ids = tok.encode(text, add_special_tokens=False)
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=minimum, max_tokens=100
    )
    detokenizer = IncrementalDetokenizer(tok, params)
    out = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    plain = IncrementalDetokenizer(tok)
    floor = len(plain.update(ids[:minimum])) if minimum else 0
    text = tok.decode(ids)
    want, stop = expected(text, stops, include, floor)
    assert (out, detokenizer.stop_string) == (want, stop)
    if stop is None:
        assert detokenizer.num_tokens == len(ids)


def test_tokens_after_a_stop_string_do_not_count() -> None:
    tok = tokenizer("byte_level")
    ids = tok.encode("one STOP two")
    detokenizer = IncrementalDetokenizer(tok, SamplingParams(stop=" STOP"))
    assert detokenizer.update(ids) == "one"
    assert detokenizer.num_tokens < len(ids)
    assert detokenizer.update(ids) == "" == detokenizer.flush()


def test_hidden_token_counts_without_text() -> None:
    tok = tokenizer("byte_level")
    detokenizer = IncrementalDetokenizer(tok, SamplingParams(skip_special_tokens=False))
    assert detokenizer.push(tok.eos_token_id or 0, hidden=True) == ""
    assert detokenizer.num_tokens == 1
