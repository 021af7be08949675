"""Golden files of four families' chat formats: a conversation in, its text and token ids out.

The texts in golden/<format>/cases.json are written by hand from the formats' descriptions. They are
compared with Quire and, as a check of the files themselves, with transformers.
`python -m tests.render.golden.make` shows what a change of template or tokenizer would change.
"""

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError

from quire.base.errors import RequestError
from quire.render.renderer import Renderer
from quire.render.tokens.detokenizer import open_stream
from quire.render.tokens.tokenizer import Tokenizer
from tests.render.golden import make
from tests.support.render.golden_cases import (
    FORMATS,
    ROOT,
    Case,
    ids_difference,
    read_cases,
    reference,
    text_difference,
)

CASES = [case for name in FORMATS for case in read_cases(ROOT / name)]
PROMPTS = [case for case in CASES if case.error is None]
REFUSALS = [case for case in CASES if case.error is not None]


@cache
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_directory(folder)


def check(case: Case, text: str, ids: list[int], by: str) -> None:
    differences = [text_difference(case, text, by), ids_difference(case, ids, by)]
    if any(differences):
        pytest.fail("\n\n".join(filter(None, differences)), pytrace=False)


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_prompts_equal_the_golden_text_and_ids(case: Case) -> None:
    renderer = Renderer(tokenizer(case.folder), now=lambda: case.now)
    rendered = renderer.render(case.messages, case.chat_options, case.template)
    check(case, rendered.text or "", rendered.token_ids, "quire")


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_transformers_gives_the_golden_text_and_ids(case: Case) -> None:
    check(case, *reference(case), "transformers")


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_templates_refuse_invalid_conversations(case: Case) -> None:
    renderer = Renderer(tokenizer(case.folder), now=lambda: case.now)
    words = re.escape(case.error or "")
    with pytest.raises(RequestError, match="the chat template refuses .*" + words):
        renderer.render(case.messages, case.chat_options, case.template)
    with pytest.raises(TemplateError, match=words):
        reference(case)


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_golden_ids_decode_to_the_text(case: Case) -> None:
    """Decode at once and token by token; check the number of special tokens as well."""
    tok, ids = tokenizer(case.folder), case.token_ids or []
    assert tok.decode(ids) == (case.decoded or case.text)
    stream = open_stream(tok, skip_special_tokens=False, spaces_between_special_tokens=False)
    streamed = "".join(map(stream.push, ids)) + stream.flush()
    assert streamed == (case.decoded or case.text)
    if case.special_tokens is not None:
        assert sum(token_id in tok.special_ids for token_id in ids) == case.special_tokens


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_enough_distinct_cases(name: str) -> None:
    cases = read_cases(ROOT / name)
    assert len(cases) >= 8
    assert len({case.name for case in cases}) == len(cases)
    assert tokenizer(ROOT / name).vocab_size <= 1000
    assert all((case.text is None) != (case.error is None) for case in cases)


def test_difference_names_the_case_and_shows_the_lines() -> None:
    case = PROMPTS[0]
    assert not text_difference(case, case.text or "", "quire")
    shown = text_difference(case, (case.text or "").replace("03 Feb", "04 Feb"), "quire")
    assert str(case) in shown
    assert "-'Today Date: 03 Feb 2026\\n'\n" in shown and "+'Today Date: 04 Feb 2026\\n'\n" in shown
    assert "- " in ids_difference(case, (case.token_ids or [])[1:], "quire")


def test_make_writes_only_on_request_and_never_a_wrong_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FORMATS:
        shutil.copytree(ROOT / name, tmp_path / name)
    path = tmp_path / "qwen3" / "cases.json"
    found = path.read_text("utf-8")
    path.write_text(found.replace("1234567", "7654321"), "utf-8")
    edited = path.read_text("utf-8")
    assert make.run(tmp_path, write=False) == 1
    assert "qwen3/cases.json" in capsys.readouterr().out
    assert path.read_text("utf-8") == edited
    make.run(tmp_path, write=True)
    assert path.read_text("utf-8") != edited
    path.write_text(found.replace("Be brief.<|im_end|>", "Be long.<|im_end|>", 1), "utf-8")
    wrong = path.read_text("utf-8")
    capsys.readouterr()
    assert make.run(tmp_path, write=True) == 1
    assert "correct the text by hand" in capsys.readouterr().out
    assert path.read_text("utf-8") == wrong
