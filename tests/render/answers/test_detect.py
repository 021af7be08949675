"""Formats detected from chat templates (excerpts with the marks of real ones), and by name."""

from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.render.answers import table
from quire.render.answers.detect import check_names, detect_format, special_token_ids_in
from quire.render.answers.format import AnswerFormat
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.answers import reasoning_row

THINKS = "{% if '</think>' in content %}{% endif %}"
TOOLS = "{% if tools %}{% endif %}"

EXCERPTS = [
    ("{{ '<tool_call>\\n{\"name\": ' }}" + THINKS, "hermes", "qwen3"),
    ("<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>", "qwen3_coder", None),
    ("{{ '<tool_call>' + n }}<arg_key>{{ k }}</arg_key><arg_value>" + THINKS, "glm45", "qwen3"),
    ("{{ '<|start_header_id|>ipython' }}{{ '<|python_tag|>' + name }}", "llama3_json", None),
    ('{{ "<|start_header_id|>" }} "parameters": dictionary of argument name', "llama3_json", None),
    ("{{ '[TOOL_CALLS] [' }}{{ tool_call.function|tojson }}", "mistral_list", None),
    ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}[THINK]{{ x }}[/THINK]", "mistral", "mistral"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + '```json' " + THINKS,
     "deepseek_v3", "deepseek_r1"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'" + THINKS,
     "deepseek_v31", "deepseek_r1"),
    ("<|start|>assistant to=functions.{{ n }}<|channel|>commentary json<|message|>", "openai",
     "openai_gptoss"),
    ("{{ '<|tool_call|>' + (calls | tojson) }} Here is my thought process: Here is my response:",
     "granite", "granite"),
    ("{{ '<|tool|>' + tools + '<|/tool|>' }}", "phi4_mini_json", None),
    ("<seed:tool_call>\n<function=f>\n<seed:think>", "seed_oss", "seed_oss"),
    ("<minimax:tool_call>\n<invoke name=\"f\"><think>", "minimax_m2", "qwen3"),
    ("<tool_calls>[{{ calls }}]</tool_calls>", "jamba", None),
    ("{{ message.content }}", "hermes", None),
]  # fmt: skip


@pytest.mark.parametrize(("excerpt", "calls", "reasoning"), EXCERPTS)
def test_formats_are_detected_from_the_template(
    excerpt: str, calls: str, reasoning: str | None
) -> None:
    found = detect_format(TOOLS + excerpt, None)
    assert found.calls is not None
    assert calls in found.calls.names
    assert found.reasoning == (None if reasoning is None else reasoning_row(reasoning))


def test_template_without_marks_gets_the_hermes_format() -> None:
    """The default format allows forced calls on any model."""
    usual = AnswerFormat(table.HERMES, None)
    assert detect_format("{{ message.content }}", None) == usual
    assert detect_format(None, None) == usual


def test_added_tokens_decide_where_the_template_has_no_marks() -> None:
    class WithTokens(Tokenizer):
        def __init__(self) -> None:
            self.added_tokens = {5: "[TOOL_CALLS]", 6: "[ARGS]"}
            self.special_ids = frozenset(self.added_tokens)

    assert detect_format(TOOLS, WithTokens()).calls == table.MISTRAL
    assert detect_format("<tool_call>", WithTokens()).calls == table.HERMES


def test_parser_sees_the_special_tokens_of_its_format() -> None:
    class WithTokens(Tokenizer):
        def __init__(self) -> None:
            names = ["</s>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[THINK]", "<|message|>", "x"]
            self.added_tokens = dict(enumerate(names))
            self.special_ids = frozenset(range(6))

    def shown(form: AnswerFormat) -> tuple[int, ...]:
        return special_token_ids_in(form, WithTokens())

    assert shown(AnswerFormat(table.MISTRAL, reasoning_row("mistral"))) == (1, 2, 4)
    assert shown(AnswerFormat(table.HARMONY)) == (5,)
    assert shown(AnswerFormat(None)) == ()


def test_formats_are_selected_by_the_names_of_parsers() -> None:
    assert detect_format("", None, "llama3_json", "granite") == AnswerFormat(
        table.LLAMA3, reasoning_row("granite")
    )
    assert detect_format(TOOLS + THINKS, None, "none", "none") == AnswerFormat(None, None)
    check_names("auto", "none")
    with pytest.raises(ConfigError, match="format of tool calls 'x'; there are auto, none, openai"):
        detect_format("", None, "x")
    with pytest.raises(ConfigError, match="format of reasoning 'hermes'; .*qwen3"):
        check_names("hermes", "hermes")


@pytest.mark.parametrize(
    ("prompt", "begins", "is_over"),
    [
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        ("<|Assistant|></think>", False, True),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False, False),
    ],
)
def test_prompt_shows_whether_reasoning_has_begun_or_ended(
    prompt: str, begins: bool, is_over: bool
) -> None:
    found = AnswerFormat(None, table.THINK)
    assert (found.begins_in_reasoning(prompt), found.has_reasoned(prompt)) == (begins, is_over)
    nothing = AnswerFormat(None, None)
    assert (nothing.begins_in_reasoning(prompt), nothing.has_reasoned(prompt)) == (False, False)


def test_mark_that_ends_any_message_does_not_end_reasoning() -> None:
    """In Harmony, only the mark that opens the content ends the reasoning."""
    harmony = next(row for row in table.REASONING if row.content_open)
    assert not AnswerFormat(None, harmony).has_reasoned("<|start|>user<|message|>Hi<|end|>")


def test_docs_list_all_formats() -> None:
    text = (Path(__file__).parents[3] / "docs" / "use" / "tools.md").read_text(encoding="utf-8")
    for row in (*table.CALLS, *table.REASONING):
        assert f"\n| {', '.join(f'`{name}`' for name in row.names)} |" in text
