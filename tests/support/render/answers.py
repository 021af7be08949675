"""Hand-written answers in the syntax of each format, and the parts that they hold."""

from dataclasses import dataclass

from quire.render.answers import table
from quire.render.answers.format import AnswerFormat
from quire.render.answers.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from quire.render.answers.syntax import CallFormat, ReasoningFormat, Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1},
            "units": {"enum": ["metric", "imperial"]},
            "at": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
            "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "maxItems": 2},
        },
        "required": ["city"],
        "$defs": {
            "spot": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "open": {"type": "boolean"}},
                "required": ["x"],
            }
        },
    },
    strict=True,
)
NOW = Tool("now")
PYTHON = Tool("python", {"type": "object", "properties": {"code": {"type": "string"}}})
TOOLS = (WEATHER, NOW, PYTHON)


def reasoning_row(name: str) -> ReasoningFormat:
    return next(row for row in table.REASONING if name in row.names)


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallBegun(index, name, ""), CallArguments(index, arguments), CallEnded(index)]


@dataclass(frozen=True)
class Golden:
    """is_written: whether grammars, with tools forced, write such an answer."""

    name: str
    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    text: str
    parts: list[Part]
    is_written: bool = True

    @property
    def format(self) -> AnswerFormat:
        return AnswerFormat(self.calls, self.reasoning)


OSLO, OSLO_TEXT = '{"city": "Oslo", "days": 2}', '{"city": "Ålesund \\"n\\"\\n</x>", "days": 2}'
THINK, HARMONY = table.THINK, reasoning_row("openai")
TWO = [*call(0, "get_weather", OSLO), *call(1, "now", "{}")]

_HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_CODER_WEATHER = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nÅlesund "n"\n</x>\n</parameter>\n'
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
_GLM_WEATHER = (
    '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ålesund "n"\n</x></arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
_LIST = f'{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}'
_LLAMA = '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}'
_V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
_V3_WEATHER = f"{_V3_CALL}get_weather\n```json\n{OSLO}\n```<｜tool▁call▁end｜>"
_V3_NOW = f"{_V3_CALL}now\n```json\n{{}}\n```<｜tool▁call▁end｜>"
_V31_WEATHER = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜>"
_V31_NOW = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_ANALYSIS = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
_TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"

GOLDENS = (
    Golden("hermes", table.HERMES, THINK, f"<think>\nRain?\n</think>\n\n{_HERMES}",
           [Reasoning("Rain?"), *TWO]),
    Golden("hermes after text", table.HERMES, THINK, f"I look.\n{_HERMES}",
           [Content("I look."), *TWO], False),
    Golden("qwen3 coder", table.QWEN3_CODER, None,
           f"{_CODER_WEATHER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
           [*call(0, "get_weather", OSLO_TEXT), *call(1, "now", "{}")]),
    Golden("qwen3 coder, all types", table.QWEN3_CODER, THINK,
           "<tool_call>\n<function=get_weather>\n<parameter=city>\n5\n</parameter>\n"
           "<parameter=units>\nmetric\n</parameter>\n<parameter=at>\nnull\n</parameter>\n"
           '<parameter=spots>\n[{"x": 1.5, "open": true}]\n</parameter>\n'
           "</function>\n</tool_call>",
           call(0, "get_weather", '{"city": "5", "units": "metric", "at": null, '
                '"spots": [{"x": 1.5, "open": true}]}')),
    Golden("qwen3 coder, loosely", table.QWEN3_CODER, None,
           "Well: <function=get_weather><parameter=city>Oslo</parameter><parameter=other>{\"a\": 1}"
           "</parameter><parameter=at>noon</parameter><parameter=days>two</parameter></function>!",
           [Content("Well:"), *call(0, "get_weather", '{"city": "Oslo", "other": {"a": 1}, '
                                    '"at": "noon", "days": "two"}'), Content(" !")], False),
    Golden("glm 4.5", table.GLM45, THINK,
           f"<think>Rain?</think>\n{_GLM_WEATHER}\n<tool_call>now\n</tool_call>",
           [Reasoning("Rain?"), *call(0, "get_weather", OSLO_TEXT), *call(1, "now", "{}")], False),
    Golden("glm 4.5, forced", table.GLM45, THINK, f"<think></think>{_GLM_WEATHER}",
           call(0, "get_weather", OSLO_TEXT)),
    Golden("seed", table.SEED_OSS, reasoning_row("seed_oss"),
           "<seed:think>\nRain?\n</seed:think>\n\n<seed:tool_call>\n<function=get_weather>\n"
           "<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n</function>\n"
           "</seed:tool_call>",
           [Reasoning("Rain?"), *call(0, "get_weather", OSLO)], False),
    Golden("minimax", table.MINIMAX_M2, THINK,
           '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo'
           '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n'
           "</invoke>\n</minimax:tool_call>", TWO),
    Golden("llama 3", table.LLAMA3, None, f'{_LLAMA}; {{"name": "now", "parameters": {{}}}}', TWO),
    Golden("llama 3, python tag", table.LLAMA3, None, f"<|python_tag|>{_LLAMA}",
           call(0, "get_weather", OSLO), False),
    Golden("llama 3, code", table.LLAMA3, None, '<|python_tag|>print("a")\n{1}',
           call(0, "python", '{"code": "print(\\"a\\")\\n{1}"}'), False),
    Golden("llama 3, another object", table.LLAMA3, None, '{"name": "Bob", "parameters": {}}',
           [Content('{"name": "Bob", "parameters": {}}')], False),
    Golden("mistral", table.MISTRAL, reasoning_row("mistral"),
           f"[THINK]Rain?[/THINK][TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}",
           [Reasoning("Rain?"), *TWO]),
    Golden("mistral, no mark", table.MISTRAL, None, f"[TOOL_CALLS]get_weather{OSLO}",
           call(0, "get_weather", OSLO), False),
    Golden("mistral, list", table.MISTRAL_LIST, None, f"[TOOL_CALLS] [{_LIST}]", TWO),
    Golden("mistral, tight list", table.MISTRAL_LIST, None, f"Hm[TOOL_CALLS][{_LIST}]",
           [Content("Hm"), *TWO], False),
    Golden("deepseek v3", table.DEEPSEEK_V3, THINK,
           f"<｜tool▁calls▁begin｜>{_V3_WEATHER}\n{_V3_NOW}<｜tool▁calls▁end｜>", TWO),
    Golden("deepseek v3.1", table.DEEPSEEK_V31, THINK,
           f"<｜tool▁calls▁begin｜>{_V31_WEATHER}{_V31_NOW}<｜tool▁calls▁end｜>", TWO),
    Golden("phi 4 mini", table.PHI4_MINI, None, f"<|tool_call|>[{_LIST}]<|/tool_call|>", TWO),
    Golden("phi 4 mini, functools", table.PHI4_MINI, None, f"functools[{_LIST}]", TWO, False),
    Golden("granite 3", table.GRANITE3, reasoning_row("granite"),
           f"Here is my thought process: Rain?\nHere is my response:\n\n<|tool_call|>[{_LIST}]",
           [Reasoning("Rain?"), *TWO], False),
    Golden("granite 3, forced", table.GRANITE3, None, f"<|tool_call|>[{_LIST}]", TWO),
    Golden("jamba", table.JAMBA, None, f"<tool_calls>[{_LIST}]</tool_calls>", TWO),
    Golden("harmony", table.HARMONY, HARMONY, f"{_ANALYSIS}{_TO}{OSLO}<|call|>",
           [Reasoning("Rain?"), *call(0, "get_weather", OSLO)]),
    Golden("harmony, no end", table.HARMONY, HARMONY, f"{_ANALYSIS}{_TO}{OSLO}",
           [Reasoning("Rain?"), *call(0, "get_weather", OSLO)]),
    Golden("harmony, final", table.HARMONY, HARMONY,
           f"{_ANALYSIS}<|channel|>final<|message|>No rain.<|return|>",
           [Reasoning("Rain?"), Content("No rain.")], False),
    Golden("harmony, preamble", table.HARMONY, HARMONY,
           "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now"
           "<|channel|>commentary json<|message|>{}<|call|>",
           [Content("I look."), *call(0, "now", "{}")], False),
)  # fmt: skip
