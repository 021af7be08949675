"""The table of formats. Each row describes how one family of models writes calls or reasoning.

Detection takes the first row whose marks are in the chat template, so special cases precede the
general format.
"""

from quire.render.answers.syntax import (
    CallFormat,
    CallSyntax,
    CodeBody,
    NamedBody,
    ObjectBody,
    ParametersBody,
    ReasoningFormat,
)

OBJECT = ObjectBody()

# {"name": "f", "arguments": {...}}, each between tags
HERMES = CallFormat(
    ("hermes", "qwen", "granite4", "ernie45"),
    (("<tool_call>",),),
    (CallSyntax(OBJECT, open="<tool_call>\n", close="\n</tool_call>", between="\n"),),
)

_QWEN_PARAMETERS = ParametersBody(">\n", "<parameter=", ">\n", "\n</parameter>\n")
QWEN3_CODER = CallFormat(
    ("qwen3_coder", "qwen3_xml"),
    (("<function=", "<parameter=", "<tool_call>"),),
    (
        CallSyntax(
            _QWEN_PARAMETERS,
            open="<tool_call>\n<function=",
            close="</function>\n</tool_call>",
            between="\n",
        ),
        CallSyntax(_QWEN_PARAMETERS, open="<function=", close="</function>"),
    ),
)
SEED_OSS = CallFormat(
    ("seed_oss",),
    (("<seed:tool_call>",),),
    (
        CallSyntax(
            ParametersBody(">\n", "<parameter=", ">", "</parameter>\n"),
            open="<seed:tool_call>\n<function=",
            close="</function>\n</seed:tool_call>",
            between="\n",
        ),
    ),
)
MINIMAX_M2 = CallFormat(
    ("minimax_m2",),
    (("<minimax:tool_call>",),),
    (
        CallSyntax(
            ParametersBody('">\n', '<parameter name="', '">', "</parameter>\n"),
            begin="<minimax:tool_call>\n",
            open='<invoke name="',
            close="</invoke>\n",
            end="</minimax:tool_call>",
        ),
    ),
)
GLM45 = CallFormat(
    ("glm45", "glm47"),
    (("<arg_key>", "<arg_value>"),),
    (
        CallSyntax(
            ParametersBody("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            open="<tool_call>",
            close="</tool_call>",
            between="\n",
        ),
    ),
)

LLAMA3 = CallFormat(
    ("llama3_json", "llama4_json"),
    (("<|python_tag|>",), ("<|start_header_id|>", '"parameters": dictionary of argument')),
    (
        CallSyntax(ObjectBody(("parameters", "arguments")), between="; "),
        CallSyntax(
            ObjectBody(("parameters", "arguments")), open="<|python_tag|>", between="; "
        ),
        CallSyntax(CodeBody(("code_interpreter", "ipython", "python")), open="<|python_tag|>"),
    ),
)  # fmt: skip

_MISTRAL_LIST = CallSyntax(OBJECT, begin="[TOOL_CALLS] [", between=", ", end="]")
_MISTRAL_NAMED = CallSyntax(NamedBody("[ARGS]"), open="[TOOL_CALLS]")
_MISTRAL_PLAIN = CallSyntax(NamedBody(""), open="[TOOL_CALLS]")
MISTRAL = CallFormat(
    ("mistral",),
    (("[TOOL_CALLS]", "[ARGS]"),),
    (_MISTRAL_NAMED, _MISTRAL_PLAIN, _MISTRAL_LIST),
    id_chars=9,
)
MISTRAL_LIST = CallFormat(
    ("mistral_list",),
    (("[TOOL_CALLS]",),),
    (_MISTRAL_LIST, _MISTRAL_NAMED, _MISTRAL_PLAIN),
    id_chars=9,
)

DEEPSEEK_V3 = CallFormat(
    ("deepseek_v3",),
    (("<｜tool▁calls▁begin｜>", "```json"),),
    (
        CallSyntax(
            NamedBody("\n```json\n"),
            begin="<｜tool▁calls▁begin｜>",
            open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            close="\n```<｜tool▁call▁end｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
)
DEEPSEEK_V31 = CallFormat(
    ("deepseek_v31",),
    (("<｜tool▁calls▁begin｜>",),),
    (
        CallSyntax(
            NamedBody("<｜tool▁sep｜>"),
            begin="<｜tool▁calls▁begin｜>",
            open="<｜tool▁call▁begin｜>",
            close="<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
)

PHI4_MINI = CallFormat(
    ("phi4_mini_json",),
    (("<|/tool_call|>",), ("<|/tool|>",), ("functools[",)),
    (
        CallSyntax(
            OBJECT, begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"
        ),
        CallSyntax(OBJECT, begin="functools[", between=", ", end="]"),
    ),
)  # fmt: skip
GRANITE3 = CallFormat(
    ("granite",),
    (("<|tool_call|>",),),
    (
        CallSyntax(OBJECT, begin="<|tool_call|>[", between=", ", end="]"),
        CallSyntax(OBJECT, begin="<tool_call>[", between=", ", end="]"),
    ),
)
JAMBA = CallFormat(
    ("jamba", "hunyuan_a13b"),
    (("<tool_calls>",),),
    (CallSyntax(OBJECT, begin="<tool_calls>[", between=", ", end="]</tool_calls>"),),
)

_HARMONY_ENDS = (" <|constrain|>json<|message|>", "<|message|>", " json<|message|>")
HARMONY = CallFormat(
    ("openai",),
    (("<|channel|>", "<|message|>"),),
    (
        *(
            CallSyntax(NamedBody(end), open=f"<|channel|>{channel} to=functions.", close="<|call|>")
            for channel in ("commentary", "analysis")
            for end in _HARMONY_ENDS
        ),
        *(
            CallSyntax(
                NamedBody(f"<|channel|>commentary{end}"),
                open=f"{begin}to=functions.",
                close="<|call|>",
            )
            for begin in ("<|start|>assistant ", "")  # the prompt may already contain it
            for end in _HARMONY_ENDS
        ),
    ),
    several=False,
    ends_the_answer=True,
)

CALLS = (
    HARMONY, GLM45, QWEN3_CODER, SEED_OSS, MINIMAX_M2, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL,
    MISTRAL_LIST, PHI4_MINI, GRANITE3, JAMBA, HERMES, LLAMA3,
)  # fmt: skip

THINK = ReasoningFormat(
    ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "ernie45", "olmo3",
     "nemotron_v3", "step3"),
    (("<think>",), ("</think>",)),
    "<think>",
    "</think>",
)  # fmt: skip
REASONING = (
    ReasoningFormat(
        ("openai_gptoss", "openai"),
        (("<|channel|>", "<|message|>"),),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        after="<|start|>assistant",
        content_open="<|channel|>final<|message|>",
        silent=(
            "<|start|>assistant",
            "<|end|>",
            "<|return|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
        ),
    ),
    ReasoningFormat(("mistral",), (("[THINK]",),), "[THINK]", "[/THINK]", after=""),
    ReasoningFormat(
        ("granite",),
        (("Here is my thought process:",),),
        "Here is my thought process:",
        "Here is my response:",
    ),
    ReasoningFormat(("seed_oss",), (("<seed:think>",),), "<seed:think>", "</seed:think>"),
    THINK,
)
