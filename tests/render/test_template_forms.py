"""Messages are adapted to each template: content, call arguments and the developer role.

The templates below are short versions of published ones.

Covers `render/templates/conversation.py`.
"""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.render.templates.chat_template import ChatOptions, ChatTemplate

Json = dict[str, Any]

# DeepSeek R1 and V3: joins the arguments as text, and writes calls only if the content is none.
JOINING = """\
{%- for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}{{ 'CALL ' + call['function']['name'] + ' '
    + call['function']['arguments'] + ';' }}{% endfor %}
{%- else %}{{ m['role'] + ':' + m['content'] + ';' }}{% endif %}
{%- endfor %}"""
# Qwen: an object is written as JSON.
DUMPING = """\
{%- for m in messages %}
{{- m.role + ':' + m.content }}
{%- for call in m.tool_calls or [] %}{{ 'CALL ' + call.function.name + ' ' }}
{{- call.function.arguments | tojson }}{% endfor %}{{ ';' }}
{%- endfor %}"""
# GLM: loops over the parts of a user's content, and writes other contents as they are.
MIXED = """\
{%- macro show(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}
{{- m.role + ':' }}
{%- if m.role == 'user' %}{{ show(m.content) }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}CALL {{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
{%- endfor %};
{%- endfor %}"""
STRICT = """\
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('unknown role ' + m.role) }}{% endif %}
{{- m.role + ':' + m.content + ';' }}
{%- endfor %}"""
DROPPING = """\
{%- for m in messages %}
{%- if m.role == 'system' or m.role == 'user' %}{{ m.role + ':' + m.content + ';' }}{% endif %}
{%- endfor %}"""
NAMING = """\
{%- for m in messages %}
{{- ('DEV' if m.role in ('system', 'developer') else m.role) + ':' + m.content + ';' }}
{%- endfor %}"""
LISTED_ONLY = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"

USER: Json = {"role": "user", "content": "hi"}


def parts(*texts: str, kind: str = "text") -> list[Json]:
    return [{"type": kind, "text": text} for text in texts]


def calling(arguments: object, content: object = None) -> Json:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def rendered(template: str, *messages: Json, **options: Any) -> str:
    return ChatTemplate(template).render(messages, ChatOptions(**options))


def last(template: str, *messages: Json) -> str:
    """Return the text that a template writes for the last message."""
    return rendered(template, *messages).split(";")[-2]


@pytest.mark.parametrize("arguments", ['{"city":"Köln"}', {"city": "Köln"}])
@pytest.mark.parametrize("content", [None, ""])
def test_call_arguments_are_text_or_object_as_the_template_expects(
    arguments: object, content: object
) -> None:
    call = calling(arguments, content)
    text = arguments if isinstance(arguments, str) else '{"city": "Köln"}'
    assert last(JOINING, USER, call) == f"CALL f {text}"
    assert last(DUMPING, USER, call) == 'assistant:CALL f {"city": "Köln"}'
    assert last(MIXED, USER, call).endswith("CALL f city=Köln")


@pytest.mark.parametrize("arguments", [None, "", "  ", "null", "{}", {}])
def test_missing_call_arguments_become_an_empty_object(arguments: object) -> None:
    assert last(JOINING, USER, calling(arguments)) == "CALL f {}"
    assert last(DUMPING, USER, calling(arguments)) == "assistant:CALL f {}"
    assert last(MIXED, USER, calling(arguments)).endswith("CALL f")


@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        ('{"city": "Kö', '{"city": "Kö"}'),
        ('{"city": "K\\', '{"city": "K"}'),
        ('{"city": "K\\u00', '{"city": "K"}'),
        ('{"city": "Köln", "da', '{"city": "Köln"}'),
        ('{"city": "Köln", "days": ', '{"city": "Köln"}'),
        ('{"city": "Köln", "days": tr', '{"city": "Köln"}'),
        ('{"days": [1, {"a": 2},', '{"days": [1, {"a": 2}]}'),
        ('{"a": {"b": [', '{"a": {"b": []}}'),
        ("{", "{}"),
        ("{a: 1}", '{"INVALID_JSON": "{a: 1}"}'),
        ("[1]", '{"INVALID_JSON": "[1]"}'),
        ("[1", '{"INVALID_JSON": "[1"}'),
        ('{"a": 1} x', '{"INVALID_JSON": "{\\"a\\": 1} x"}'),
    ],
)
def test_truncated_or_invalid_call_arguments_are_rendered(arguments: str, held: str) -> None:
    """Text stays unchanged; an object holds everything before the cut."""
    assert last(JOINING, USER, calling(arguments)) == f"CALL f {arguments}"
    assert last(DUMPING, USER, calling(arguments)) == f"assistant:CALL f {held}"
    assert "CALL f" in last(MIXED, USER, calling(arguments))


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_are_joined_where_the_template_writes_the_content(kind: str) -> None:
    two = parts("a", "b", kind=kind)
    system = {"role": "system", "content": two}
    user = {"role": "user", "content": two}
    result = {"role": "tool", "tool_call_id": "call00001", "content": two}
    reply = {"role": "assistant", "content": two}
    text = rendered(MIXED, system, user, calling({"x": 1}), result, reply, user)
    assert text == (
        "system:a\nb;user:[a][b];assistant:CALL f x=1;tool:a\nb;assistant:a\nb;user:[a][b];"
    )
    assert last(DUMPING, system, user) == "user:a\nb"


def test_text_becomes_a_part_only_for_templates_that_need_parts() -> None:
    assert rendered(LISTED_ONLY, USER, calling({}, "x"), USER) == "hi;x;hi;"
    assert rendered(MIXED, USER) == "user:hi;"
    assert rendered(MIXED, USER, content_format="openai") == "user:hi;"


def test_template_that_reads_only_the_first_part_gets_a_single_part() -> None:
    """The template of LLaVA reads only the first part, and does not accept text."""
    template = "{% for m in messages %}{{ m.content[0]['text'] + ';' }}{% endfor %}"
    assert rendered(template, USER, {"role": "assistant", "content": parts("a", "b")}) == (
        "hi;a\nb;"
    )


def test_parts_of_a_tool_result_are_joined_if_the_template_skips_lists() -> None:
    """The template writes the call, but skips a result that is a list of parts."""
    template = """\
{%- for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}
{%- endfor %}{% if m.content is string %}{{ m.content }}{% endif %};{% endfor %}"""
    result = {"role": "tool", "tool_call_id": "call00001", "content": parts("a", "b")}
    assert last(template, USER, calling({"x": 1}), result) == "a\nb"


def test_refusal_is_rendered_as_text() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert last(DUMPING, USER, refused) == "assistant:no"
    with pytest.raises(RequestError, match="without a text"):
        rendered(DUMPING, USER, {"role": "assistant", "content": [{"type": "refusal"}]})


def test_parts_are_joined_for_a_template_that_writes_them_as_json() -> None:
    """Llama 3.1 writes tool results as JSON: it must get text, not a list of parts."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content | tojson }};{% endfor %}"
    result = {"role": "tool", "tool_call_id": "call00001", "content": parts("7 degrees")}
    assert last(template, USER, calling({}), result) == 'tool:"7 degrees"'


@pytest.mark.parametrize("template", [STRICT, DROPPING, DUMPING])
def test_developer_becomes_system_for_templates_without_that_role(template: str) -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert rendered(template, developer, USER) == "system:Be brief.;user:hi;"
    assert last(template, USER, developer) == "system:Be brief."


def test_developer_stays_for_templates_that_name_the_role() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert rendered(NAMING, developer, USER) == "DEV:Be brief.;user:hi;"
    named = "{% for m in messages %}{% if m.role == 'developer' %}<{{ m.content }}>{% endif %}"
    assert rendered(f"{named}{{% endfor %}}", developer, USER) == "<Be brief.>"


@pytest.mark.parametrize(
    ("condition", "written"),
    [
        ("m.role != 'system'", "developer:late"),  # drops late system messages
        ("m.role not in ('developer', 'tool')", "system:late"),  # drops late developer messages
        ("m.role not in ('system', 'developer')", "user:hi"),  # drops both
        ("true", "system:late"),
    ],
)
def test_late_developer_message_gets_a_role_that_the_template_writes(
    condition: str, written: str
) -> None:
    shown = "{{ m.role + ':' + m.content + ';' }}"
    shown = f"{{% if loop.first or {condition} %}}{shown}{{% endif %}}"
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    system = {"role": "system", "content": "Be brief."}
    late = {"role": "developer", "content": "late"}
    assert last(template, system, USER, late) == written
    assert rendered(template, late, USER).startswith(
        "developer:late" if "developer" in condition else "system:late"
    )


def test_adjacent_system_and_developer_messages_are_merged() -> None:
    """Many templates accept only one system message, at the beginning."""
    system = {"role": "system", "content": parts("a", "b")}
    developer = {"role": "developer", "content": "c"}
    assert rendered(STRICT, system, developer, USER) == "system:a\nb\n\nc;user:hi;"
    assert rendered(STRICT, system, USER, developer) == "system:a\nb;user:hi;system:c;"
    assert rendered(STRICT, developer, developer, USER) == "system:c\n\nc;user:hi;"
    first = "{{ messages[0].content }};{% if messages[0].role == 'developer' %}{% endif %}"
    assert rendered(first, system, developer, USER) == "a\nb\n\nc;"
    assert rendered(first, developer, system, USER) == "c\n\na\nb;"


def test_null_fields_are_removed() -> None:
    """OpenAI's client sends every field that a message might have, most of them null."""
    template = "{% for m in messages %}{{ m.keys() | sort | join(',') }};{% endfor %}"
    nulls = dict.fromkeys(["refusal", "audio", "function_call", "tool_calls", "reasoning"])
    reply = {"role": "assistant", "content": "x", **nulls}
    assert last(template, USER, reply) == "content,role"


def test_template_is_probed_only_for_what_the_conversation_needs() -> None:
    """A template that fails on unknown messages still renders the messages that it knows."""
    template = "{% if messages | length != 1 %}{{ raise_exception('one') }}{% endif %}x"
    assert rendered(template, USER) == "x"
    with pytest.raises(RequestError, match="refuses this conversation: one"):
        rendered(template, USER, calling({}))
