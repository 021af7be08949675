"""Chat templates of four families give the texts of transformers; errors name their cause.

Covers `render/templates/conversation.py`.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.base.errors import ConfigError, RequestError
from quire.render.renderer import Renderer
from quire.render.templates.chat_template import ChatOptions, ChatTemplate, load_template
from tests.support.render.chat_templates import GEMMA, LLAMA3, MISTRAL, QWEN
from tests.support.render.tiny_tokenizers import directory, write_directory

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Wie heißt <b>du</b>? 你好"}
REPLY = {"role": "assistant", "content": "  Quire. "}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <b>cold</b> & naïve",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALLS = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln"}},
        },
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}
THOUGHT = {"role": "assistant", "content": "Hm.", "reasoning_content": "think"}

CASES: list[tuple[str, str, list[dict[str, Any]], dict[str, Any]]] = [
    ("byte_level", LLAMA3, [SYSTEM, USER], {}),
    ("byte_level", LLAMA3, [USER, REPLY, USER], {"add_generation_prompt": False}),
    ("byte_level", QWEN, [SYSTEM, USER], {}),
    ("byte_level", QWEN, [USER], {"enable_thinking": False}),
    ("byte_level", QWEN, [SYSTEM, USER, CALLS, RESULT], {"tools": TOOLS}),
    ("byte_level", QWEN, [USER, THOUGHT, USER], {}),
    ("llama", MISTRAL, [USER, REPLY, USER], {}),
    ("gemma", GEMMA, [USER, REPLY, USER], {}),
    ("gemma", GEMMA, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], {}),
    ("byte_level", LLAMA3, [USER, REPLY], {"continue_final_message": True}),
    ("byte_level", QWEN, [USER, REPLY], {"continue_final_message": True}),
    ("llama", MISTRAL, [USER, REPLY], {"continue_final_message": True}),
    ("gemma", GEMMA, [USER, REPLY], {"continue_final_message": True}),
]


def options_of(values: dict[str, Any]) -> ChatOptions:
    known = dict(values)
    final = known.pop("continue_final_message", False)
    prompt = known.pop("add_generation_prompt", not final)
    tools = known.pop("tools", None)
    return ChatOptions(prompt, final, tools, template_kwargs=known)


@pytest.mark.parametrize(("family", "template", "messages", "values"), CASES)
def test_prompts_equal_those_of_transformers(
    family: str, template: str, messages: list[dict[str, Any]], values: dict[str, Any]
) -> None:
    theirs = AutoTokenizer.from_pretrained(directory(family))
    renderer = Renderer.from_directory(directory(family), template)
    options = options_of(values)
    given = {"add_generation_prompt": options.add_generation_prompt} | values
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **given)
    assert renderer.chat_text(messages, options) == text
    ids = theirs.encode(text, add_special_tokens=False)
    assert renderer.render_prompt(messages, options) == ids


GOLDEN = {
    "llama3": (LLAMA3, [SYSTEM, USER], (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWie heißt <b>du</b>? 你好<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )),
    "qwen": (QWEN, [SYSTEM, USER, REPLY, USER], (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWie heißt <b>du</b>? 你好<|im_end|>\n"
        "<|im_start|>assistant\n  Quire. <|im_end|>\n"
        "<|im_start|>user\nWie heißt <b>du</b>? 你好<|im_end|>\n"
        "<|im_start|>assistant\n"
    )),
    "mistral": (MISTRAL, [USER, REPLY, USER], (
        "<s>[INST] Wie heißt <b>du</b>? 你好 [/INST]   Quire. </s>"
        "[INST] Wie heißt <b>du</b>? 你好 [/INST]"
    )),
    "gemma": (GEMMA, [USER, REPLY], (
        "<s><start_of_turn>user\nWie heißt <b>du</b>? 你好<end_of_turn>\n"
        "<start_of_turn>model\nQuire.<end_of_turn>\n<start_of_turn>model\n"
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_equal_the_golden_texts(name: str) -> None:
    template, messages, text = GOLDEN[name]
    made = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)
    assert made == text


def test_tools_calls_and_results_are_written() -> None:
    text = ChatTemplate(QWEN).render([USER, CALLS, RESULT, RESULT], ChatOptions(tools=TOOLS))
    assert '{"type": "function", "function": {"name": "weather", "description": "It\'s <b>' in text
    call = '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}'
    assert call + "\n</tool_call><|im_end|>\n" in text
    response = "\n<tool_response>\n7 degrees\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{response}{response}<|im_end|>\n<|im_start|>assistant\n")


def test_call_arguments_may_be_json_text_and_other_fields_are_kept() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    as_text = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = ChatTemplate(QWEN)
    assert template.render([USER, as_text]) == template.render([USER, CALLS])
    assert call["function"]["arguments"] == '{"city": "Köln"}'  # the caller's call is unchanged
    empty = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}")
    assert (
        empty.render([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]) == "{}"
    )
    reasoning = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].name }}")
    message = {"role": "assistant", "content": "x", "reasoning": "r", "name": "n"}
    assert reasoning.render([message]) == "rn"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (LLAMA3, "a\nb"),
        (QWEN, "a\nb"),
        (GEMMA, "ab"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "ab",
        ),
        (
            "{% for m in messages %}{% set c = m['content'] %}"
            "{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}",
            "ab",
        ),
        (
            "{% macro show(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{{ show(messages[0].content) }}",
            "ab",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
    ],
)
def test_template_that_loops_over_content_parts_gets_them(source: str, written: str) -> None:
    """A template that loops over the parts gets them; any other gets their joined texts."""
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert written in ChatTemplate(source).render([{"role": "user", "content": content}])


def test_content_format_forces_parts_or_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    plain = ChatTemplate("{{ messages[0].content }}")
    assert plain.render(parts) == "a\nb"
    looping = ChatTemplate("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}")
    assert looping.render(parts) == "[a][b]"
    assert looping.render([{"role": "user", "content": "ab"}]) == "[ab]"
    assert plain.render(parts, ChatOptions(content_format="openai")).startswith("[{")
    with pytest.raises(RequestError, match="auto, string, openai"):
        plain.render(parts, ChatOptions(content_format="other"))


def test_templates_have_strftime_now_tojson_and_break() -> None:
    now = datetime(2031, 2, 3)
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}{{ x | tojson(indent=1) }}", now=lambda: now
    )
    options = ChatOptions(template_kwargs={"x": ["<é>"], "messages": "not this"})
    assert template.render([USER], options) == '03 Feb 2031[\n "<é>"\n]'
    loop = "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert ChatTemplate(loop).render([USER]) == "012"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('no system role') }}", "refuses this conversation: no system role"),
        ("{{ messages + 1 }}", "fails on this conversation"),
        ("{{ nothing.at.all }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for i in range(10**6) %}{% endfor %}", "fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{% for i in range(20) %}{{ 'x' * 1000000 }}{% endfor %}", "more than"),
    ],
)
def test_failing_templates_raise_request_errors(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(source).render([USER])


DEEP: list[Any] = []
for _ in range(80):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], "needs a role"),
        ([{"role": "user"}], "needs a content"),
        ([{"role": "user", "content": 3}], "type int"),
        ([{"role": "user", "content": [3]}], "part of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "send text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without a text"),
        ([USER, {"role": "assistant", "tool_calls": 3}], r"messages\[1\] has tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "without a function name"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds a object"),
        ([{"role": "user", "content": "x", "extra": DEEP}], "nested"),
    ],
)
def test_malformed_messages_are_rejected(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(QWEN).render(messages)


@pytest.mark.parametrize("tools", [3, [3], [{}], [{"function": {"name": ""}}]])
def test_malformed_tools_are_rejected(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools"):
        ChatTemplate(QWEN).render([USER], ChatOptions(tools=tools))


def test_chat_template_kwargs_must_be_an_object() -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs must be an object"):
        ChatTemplate(QWEN).render([USER], ChatOptions(template_kwargs=[1]))  # type: ignore[arg-type]


def test_final_message_that_cannot_be_continued_is_rejected() -> None:
    template = ChatTemplate(QWEN)
    with pytest.raises(RequestError, match="exclude each other"):
        template.render([USER, REPLY], ChatOptions(True, True))
    with pytest.raises(RequestError, match="text to continue"):
        template.render([USER, CALLS], ChatOptions(False, True))
    with pytest.raises(RequestError, match="does not work with this chat template"):
        ChatTemplate("fixed").render([USER], ChatOptions(False, True))


def test_renderer_accepts_every_kind_of_prompt(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_level", chat_template=QWEN)
    renderer = Renderer.from_directory(tmp_path)
    assert renderer.tokenizer is not None
    hello = renderer.tokenizer.encode("Hello")
    assert renderer.render_prompt("Hello") == renderer.render_prompt({"prompt": "Hello"}) == hello
    assert renderer.render_prompt([1, 2]) == renderer.render_prompt({"prompt_token_ids": [1, 2]})
    assert renderer.render({"prompt_token_ids": [1], "prompt": "x"}).text == "x"
    chat = renderer.render([USER])
    assert chat.text is not None and chat.text.startswith("<|im_start|>user\n")
    assert renderer.tokenizer.decode(chat.token_ids) == chat.text
    for wrong in ("", 3, [], [True], [-1], {"prompt_token_ids": []}, {}, {"prompt_token_ids": "x"}):
        with pytest.raises(RequestError):
            renderer.render_prompt(wrong)


def test_template_is_chosen_by_name_tools_text_or_file(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "usual {{ eos_token }}"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "rag"},
    ]
    write_directory(tmp_path, "byte_level", chat_template=named)
    renderer = Renderer.from_directory(tmp_path)
    assert renderer.chat_text([USER]) == "usual <|im_end|>"
    assert renderer.chat_text([USER], ChatOptions(tools=TOOLS)) == "tools"
    assert renderer.chat_text([USER], template="rag") == "rag"
    for count in range(20):
        assert renderer.chat_text([USER], template=f"{{# #}}{count}") == str(count)
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert Renderer(renderer.tokenizer, str(own)).chat_text([USER]) == "own"
    with pytest.raises(ConfigError, match="neither a file"):
        load_template("nowhere.jinja")


def test_renderer_without_tokenizer_or_template_rejects_text_or_chats(tmp_path: Path) -> None:
    bare = Renderer.from_directory(tmp_path)
    assert bare.render_prompt([3]) == [3]
    with pytest.raises(RequestError, match="must be token ids"):
        bare.render_prompt("text")
    with pytest.raises(RequestError, match="no chat template"):
        Renderer.from_directory(directory("llama")).render_prompt([USER])
