"""JSON schemas, for the OpenAPI document, of fields whose Python type is a plain object.

They describe what clients may send. The code that reads these objects checks them.
"""

from typing import Any

from quire.serve.media.parts import DETAILS

Json = dict[str, Any]


def object_of(*required: str, **properties: Any) -> Json:
    """Return the schema of an object with these properties."""
    found: Json = {"type": "object", "properties": properties}
    return found | ({"required": list(required)} if required else {})


def list_of(items: Json, **limits: int) -> Json:
    """Return the schema of a list. limits: minItems and maxItems."""
    return {"type": "array", "items": items, **limits}


def one_of(*schemas: Json) -> Json:
    """Return the schema of a value that matches one of these schemas."""
    return {"anyOf": list(schemas)}


TEXT: Json = {"type": "string"}
SOME_TEXT: Json = {"type": "string", "minLength": 1}
NULL: Json = {"type": "null"}
FLAG: Json = {"anyOf": [{"type": "boolean"}, NULL]}
TOKEN_IDS = list_of({"type": "integer", "minimum": 0}, minItems=1)
ONE_PROMPT = one_of(SOME_TEXT, TOKEN_IDS)
ANY_OBJECT: Json = {"type": "object", "additionalProperties": True}


def prompts_schema(max_size: int) -> Json:
    """Return the schema of a field that holds one or several prompts, as texts or token ids."""
    texts, ids = (list_of(each, minItems=1, maxItems=max_size) for each in (SOME_TEXT, TOKEN_IDS))
    return one_of(SOME_TEXT, texts, TOKEN_IDS, ids)


def choice_schema(max_size: int, choice: Json) -> Json:
    """Return the schema of a tool choice: a word, or an object of at most `max_size` fields."""
    return one_of(
        {"enum": ["auto", "none", "required", None]}, choice | {"maxProperties": max_size}
    )


# An image in a conversation with a model that has a vision tower.
IMAGE = object_of(
    "type", "image_url",
    type={"const": "image_url"},
    image_url=object_of("url", url=SOME_TEXT, detail={"enum": [*DETAILS, None]}),
)  # fmt: skip
TEXT_PART = object_of("type", "text", type={"const": "text"}, text=TEXT)
MESSAGE = object_of(
    "role",
    role=SOME_TEXT | {"description": "such as system, user, assistant or tool"},
    content=one_of(TEXT, list_of(one_of(TEXT_PART, IMAGE)), NULL),
) | one_of({"required": ["content"]}, {"required": ["tool_calls"]})
NAMED_FUNCTION = object_of(
    "type", "function", type={"const": "function"}, function=object_of("name", name=TEXT)
)
PROCESSOR = one_of(
    TEXT,
    object_of("name", name=TEXT, kwargs={"type": "object"}) | {"additionalProperties": False},
)


def response_format_schema(max_size: int) -> Json:
    """Return the schema of `response_format`, an object of at most `max_size` fields."""
    text = {"anyOf": [TEXT, NULL]}
    schema = object_of(
        "name", "schema", name=SOME_TEXT, schema=ANY_OBJECT, strict=FLAG, description=text
    )
    forms = (
        object_of("type", type={"enum": ["text", "json_object"]}),
        object_of("type", "json_schema", type={"const": "json_schema"}, json_schema=schema),
        object_of(
            "type", type={"const": "structural_tag"}, format=ANY_OBJECT,
            structures=list_of(ANY_OBJECT), triggers=list_of(SOME_TEXT),
        ),
    )  # fmt: skip
    return one_of(*(form | {"maxProperties": max_size} for form in forms))


def structured_outputs_schema(max_size: int, max_choices: int) -> Json:
    """Return the schema of `structured_outputs`, an object of at most `max_size` fields."""
    flag = {"type": "boolean"}
    found = object_of(
        json=one_of(TEXT, ANY_OBJECT), regex=TEXT,
        choice=list_of(SOME_TEXT, minItems=1, maxItems=max_choices), grammar=TEXT,
        json_object=flag, structural_tag=one_of(TEXT, ANY_OBJECT), disable_any_whitespace=flag,
        disable_additional_properties=flag, whitespace_pattern=TEXT,
    )  # fmt: skip
    text = "exactly one of the first six, or an empty object"
    return found | {
        "maxProperties": max_size, "description": text, "additionalProperties": False,
    }  # fmt: skip
