"""Fill in the middle: which models support it, and their prompts token by token."""

import json
from pathlib import Path

import pytest

from quire.render.infill import FAMILIES, Infill
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.tiny_tokenizers import tokenizer, write_directory

CODE, REST = "def f(x):\n    return", "\n\nprint(f(2))"
SENTENCES = ("byte_level", "llama", "gemma", "metaspace")


def with_tokens(folder: Path, family: str, names: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer with these tokens added after its own."""
    write_directory(folder, family)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    size = tokenizer(family).vocab_size
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    state["added_tokens"] += [
        {"id": size + i, "content": name, "special": True, **flags} for i, name in enumerate(names)
    ]
    path.write_text(json.dumps(state))
    return Tokenizer.from_directory(folder)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.first)
@pytest.mark.parametrize("kind", SENTENCES)
def test_prompts_have_the_tokens_of_their_family(tmp_path: Path, family: object, kind: str) -> None:
    first, between, last = family.first, family.between, family.last  # type: ignore[attr-defined]
    names = (last, first, between, "<|other|>", *family.ends[:1])  # type: ignore[attr-defined]
    tok = with_tokens(tmp_path, kind, names)
    infill = Infill.of(tok)
    assert infill is not None
    assert [tok.token(each) for each in infill.ends] == list(names[4:])
    ids = infill.prompt(CODE, REST)
    begin = tok.encode("")[:1]
    assert ids[: len(begin) + 1] == [*begin, tok.token_id(first)]
    assert infill.prompt(CODE, REST, add_special_tokens=False) == ids[len(begin) :]
    place = ids.index(tok.token_id(between))  # type: ignore[arg-type]
    assert ids[len(begin) + 1 : place] == tok.encode(CODE, add_special_tokens=False)
    assert ids[-1] == tok.token_id(last)
    assert tok.decode(ids[place + 1 : -1]) == REST, "no blank is put before the suffix"
    token_ids = tok.encode(CODE)
    assert infill.prompt(token_ids, REST)[1 : len(token_ids) + 1] == token_ids


@pytest.mark.parametrize("rest", ["", "x", " x", "\n", "\n\n\n", "é世", "return x + 1"])
def test_suffix_is_tokenized_as_in_the_middle_of_a_text(tmp_path: Path, rest: str) -> None:
    """The tokenizer puts a space before every text."""
    tok = with_tokens(
        tmp_path, "llama", tuple(vars(FAMILIES[2])[n] for n in ("first", "between", "last"))
    )
    infill = Infill.of(tok)
    assert infill is not None
    ids = infill.prompt("a", rest)
    place = ids.index(infill.between)
    whole = tok.encode("a", False) + ids[place + 1 : -1]
    assert tok.decode(whole) == "a" + rest


def test_models_without_infill_tokens_do_not_support_it() -> None:
    for kind in (*SENTENCES, "wordpiece"):
        assert Infill.of(tokenizer(kind)) is None
