"""The formats there are. A row is all that a model's way of writing calls or reasoning needs."""

from quire.render.answers.syntax import CallFormat, CallSyntax, ObjectBody, ReasoningFormat

HERMES = CallFormat(
    ("hermes", "qwen"),
    (("<tool_call>",),),
    (
        CallSyntax(
            ObjectBody(), open="<tool_call>\n", close="\n</tool_call>", between="\n"
        ),
    ),
)  # fmt: skip

THINK = ReasoningFormat(
    ("qwen3", "deepseek_r1"), (("<think>",), ("</think>",)), "<think>", "</think>"
)

CALLS = (HERMES,)
REASONING = (THINK,)
