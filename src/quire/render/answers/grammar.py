"""Build the grammar of a whole answer from the same table of formats that the parser uses.

    reasoning?  (calls | content)        forced calls, or constrained content
    reasoning?  text  calls?             optional calls, some of them strict
    reasoning?  text                     no calls, although the prompt shows tools

A format's words are mandatory; the white space in its marks is optional. Free text contains no
added tokens except the format's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.structured_outputs import FIELD, StructuredOutputsParams
from quire.render.answers.calls import can_read_name
from quire.render.answers.format import AnswerFormat, NamedTool, RequestedAnswer
from quire.render.answers.parameters_grammar import NO_WORDS, parameters_rule
from quire.render.answers.syntax import (
    CallFormat,
    CallSyntax,
    NamedBody,
    ObjectBody,
    ParametersBody,
    ReasoningFormat,
    Tool,
    content_marks,
    reasoning_marks,
)
from quire.render.grammars.lark import ANY_TEXT, Lark, regex
from quire.render.grammars.structured import content_rule
from quire.render.renderer import RenderedPrompt, Renderer

TOOLS_FIELD = "tools"
NO_CALLS = (
    "a tool cannot be forced: this model's chat template shows no format of tool calls; start the"
    " server with --tool-call-parser, or remove tool_choice."
)
NO_REASONING = (
    "thinking_token_budget={}: no reasoning format is known for this prompt; remove it and use"
    " max_tokens, or set --reasoning-parser."
)
_NO_OBJECT = r"/(\s*[^\s{](?s:.*))?/"
_SPACES = re.compile(r"(\s+)")


def params_grammar(
    renderer: Renderer,
    params: SamplingParams,
    prompt: RenderedPrompt,
    form: AnswerFormat | None = None,
) -> str:
    """Return the unchecked grammar of a request's answer; empty if it is unconstrained.

    form: format that belongs to the prompt's template. Without it, the model's own format applies
    if the prompt ends within reasoning. Raises RequestError."""
    if not params.is_constrained:
        return ""
    text = prompt.text or ""
    if form is None:
        own = renderer.answer_format() if renderer.has_template else AnswerFormat()
        form = own if own.begins_in_reasoning(text) else AnswerFormat()
    answer = RequestedAnswer(
        form,
        content=params.structured_outputs,
        begins_in_reasoning=form.begins_in_reasoning(text),
        has_reasoned=form.has_reasoned(text),
        thinking_token_budget=params.thinking_token_budget,
    )
    return answer_grammar(answer, renderer.added_ids(FIELD))


def answer_grammar(answer: RequestedAnswer, added_tokens: Mapping[str, int]) -> str:
    """Return the Lark grammar of the whole answer; an empty string if it is unconstrained.

    added_tokens: the tokenizer's added tokens, from text to id. Raises RequestError."""
    if not answer.is_constrained:
        return ""
    lark = Lark(added_tokens)
    reasoning = answer.format.reasoning
    rest = _after_reasoning(answer, lark)
    budget = answer.thinking_token_budget
    if budget is not None and reasoning is None:
        raise RequestError(NO_REASONING.format(budget), "thinking_token_budget")
    if reasoning is None:
        assert rest is not None, "then only a budget is set"
        return lark.text(rest)
    rest = rest or _anything(answer, lark, reasoning)
    if answer.has_reasoned:
        return lark.text(rest)
    first = reasoning_rule(lark, reasoning, answer.begins_in_reasoning, budget)
    return lark.text(f"{first} {rest}")


def _after_reasoning(answer: RequestedAnswer, lark: Lark) -> str | None:
    """Return the expression for the text after the reasoning; None if it is unconstrained."""
    content = None
    if answer.content is not None:
        content = content_rule(
            lark, answer.content, strict=answer.strict, field=answer.content_field
        )
        content = f"{spaced(lark, _content_open(answer))} {content}"
    calls = answer.calls
    if calls is None:
        if answer.choice not in ("auto", "none"):
            raise RequestError(NO_CALLS, "tool_choice")
        if content is None and answer.bans_calls:
            return no_calls_rule(lark, answer.format)
        return content
    if answer.choice != "auto":
        several = answer.parallel and answer.choice == "required"
        return calls_rule(lark, calls, _choosable(answer), several)
    if content is not None:
        return f"({calls_rule(lark, calls, answer.tools, answer.parallel)} | {content})"
    if answer.has_bound_calls:
        return free_rule(lark, calls, answer.format.reasoning, answer.tools, answer.parallel)
    return None


def _anything(answer: RequestedAnswer, lark: Lark, reasoning: ReasoningFormat) -> str:
    """Return the expression for any text after the reasoning, except a second reasoning."""
    if not reasoning.content_open:
        return lark.tokens(but=[reasoning.open])
    if answer.calls is not None:
        return free_rule(lark, answer.calls, reasoning, answer.tools, answer.parallel)
    return f"{spaced(lark, reasoning.content_open)} {ANY_TEXT}"


def _content_open(answer: RequestedAnswer) -> str:
    return answer.format.reasoning.content_open if answer.format.reasoning is not None else ""


def _choosable(answer: RequestedAnswer) -> tuple[Tool, ...]:
    """Return the tools that `choice` allows. Raises RequestError for an unknown name."""
    if not isinstance(answer.choice, NamedTool):
        return answer.tools
    name = answer.choice.name
    found = tuple(tool for tool in answer.tools if tool.name == name)
    if not found:
        raise RequestError(f"tool_choice names {name!r}, which is not in tools.", "tool_choice")
    return found


def spaced(lark: Lark, text: str) -> str:
    """Return the expression for this text, in which each run of white space is optional."""
    parts = [
        f"({lark.literal(part)})?" if part.isspace() else lark.literal(part)
        for part in _SPACES.split(text)
        if part
    ]
    return " ".join(parts)


def calls_rule(lark: Lark, form: CallFormat, tools: Sequence[Tool], several: bool) -> str:
    """Add rules for one call, or for one or more if `several`; return the first rule's name."""
    syntax = form.syntaxes[0]
    return lark.rule(_section(lark, form, syntax, tools, several, syntax.begin + syntax.open))


def free_rule(
    lark: Lark,
    form: CallFormat,
    reasoning: ReasoningFormat | None,
    tools: Sequence[Tool],
    several: bool,
) -> str:
    """Add rules for free text that calls may follow; return the first rule's name.

    In the text, an opening mark always begins calls. Formats without an opening mark, or with a
    mark before the content, allow either text or calls."""
    syntax = form.syntaxes[0]
    text = text_without(lark, content_marks(form, reasoning), may_be_object=not syntax.is_bare)
    content_open = reasoning.content_open if reasoning is not None else ""
    if syntax.is_bare or content_open:
        calls = calls_rule(lark, form, tools, several)
        return lark.rule(f"{spaced(lark, content_open)} {text} | {calls}")
    head = syntax.begin + syntax.open
    opener = head.split()[0]
    rest = _section(lark, form, syntax, tools, several, head.removeprefix(opener))
    return lark.rule(f"{text} | {lark.until([opener], text)} {rest}")


def no_calls_rule(lark: Lark, form: AnswerFormat) -> str:
    """Return the expression for free text in which no mark opens a call."""
    text = text_without(lark, content_marks(form.calls, form.reasoning))
    content_open = form.reasoning.content_open if form.reasoning is not None else ""
    return f"{spaced(lark, content_open)} {text}"


def text_without(
    lark: Lark, words: Sequence[str], max_chars: int | None = None, may_be_object: bool = True
) -> str:
    """Add a terminal for texts without these words, and return the terminal's name.

    The words may not be spelled by ordinary tokens either. max_chars: maximum length.
    may_be_object: whether the text may begin with a brace, like a JSON object."""
    parts = [ANY_TEXT if max_chars is None else f"/(?s:.{{0,{max_chars}}})/"]
    if not may_be_object:
        parts.append(_NO_OBJECT)
    parts.append("~" + regex(f"(?s:.*)({'|'.join(map(re.escape, words))})(?s:.*)"))
    return lark.terminal(" & ".join(parts))


def reasoning_rule(lark: Lark, form: ReasoningFormat, begun: bool, budget: int | None) -> str:
    """Add rules for the reasoning and the text after it; return the first rule's name.

    begun: the prompt opens the reasoning; otherwise the rule makes all reasoning optional.
    budget: maximum number of tokens. If no token closes the reasoning, characters are counted."""
    if budget is not None and lark.is_token(form.close):
        body = f"{lark.tokens(at_most=budget)} {lark.literal(form.close)}"
    else:
        body = lark.until([form.close], text_without(lark, reasoning_marks(form), budget))
    body += f" ({spaced(lark, form.after)})" if form.after else ""
    return lark.rule(body if begun else f"({spaced(lark, form.open)} {body})?")


def _section(
    lark: Lark,
    form: CallFormat,
    syntax: CallSyntax,
    tools: Sequence[Tool],
    several: bool,
    head: str,
) -> str:
    """Return the expression for one or more calls; `head` opens the first one."""
    bodies = [_body(lark, syntax, tool) for tool in tools]
    close = spaced(lark, syntax.close)
    close = f"({close})?" if form.ends_the_answer else close
    one = lark.rule(f"({' | '.join(bodies)}) {close}")
    parts = [spaced(lark, head), one]
    if several and form.several:
        parts.append(f"({spaced(lark, syntax.between + syntax.open)} {one})*")
    parts.append(spaced(lark, syntax.end))
    return " ".join(filter(None, parts))


def _body(lark: Lark, syntax: CallSyntax, tool: Tool) -> str:
    """Return the expression for a call of one tool. Raises RequestError for an ambiguous name."""
    body = syntax.body
    if isinstance(body, ObjectBody):
        name = json.dumps(tool.name, ensure_ascii=False)
        before = f'{{"{body.name_key}": {name}, "{body.arguments_keys[0]}": '
        return f"{lark.spelled(before)} {_arguments(lark, tool)} {lark.literal('}')}"
    assert isinstance(body, NamedBody | ParametersBody)
    if not can_read_name(tool.name):
        message = f"{TOOLS_FIELD}: a tool is called {tool.name!r}, {NO_WORDS}; rename it."
        raise RequestError(message, TOOLS_FIELD)
    before = f"{lark.spelled(tool.name)} {spaced(lark, body.after_name)}"
    if isinstance(body, NamedBody):
        return f"{before} {_arguments(lark, tool)}"
    return f"{before} {parameters_rule(lark, body, tool, TOOLS_FIELD)}"


def _arguments(lark: Lark, tool: Tool) -> str:
    """Return the name of a rule for the arguments as a JSON object."""
    constraint = StructuredOutputsParams(
        json=object_schema(tool.parameters), disable_additional_properties=True
    )
    return content_rule(lark, constraint, strict=tool.strict, field=TOOLS_FIELD)


def object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, empty if there are no parameters."""
    return dict(parameters or {"properties": {}}) | {"type": "object"}
