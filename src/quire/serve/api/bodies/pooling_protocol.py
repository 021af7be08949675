"""What clients may send to models that pool: OpenAI's, Jina's and vLLM's fields."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from quire.serve.api.bodies.open_body import unsupported
from quire.serve.api.bodies.protocol import (
    Ignored,
    Messages,
    ServedBody,
    TemplateKwargs,
    at_most,
    prompts_schema,
)

MAX_INPUTS = 2048
AS_IT_IS = "numbers are float32, little endian; remove it"

_TEXT = {"type": "string", "minLength": 1}
_TEXTS_SCHEMA = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}]
}
Input = Annotated[Any, WithJsonSchema(prompts_schema(MAX_INPUTS))]
Texts = Annotated[Any, at_most(MAX_INPUTS), WithJsonSchema(_TEXTS_SCHEMA)]


class PoolingBody(ServedBody):
    """The fields of all of them. use_activation: of embeddings whether they have length 1, of
    classes whether their numbers are probabilities; if absent as the model says."""

    use_activation: bool | None = None
    metadata: Ignored
    mm_processor_kwargs: Any = unsupported("this model accepts text only; remove it", {})


class PromptBody(PoolingBody):
    """input: a text, token ids, or a list of either. messages: in its place a conversation, of
    which the text counts that the model's template makes; to it no special tokens are added if
    nothing is said."""

    input: Input = None
    messages: Annotated[Messages, Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class EmbeddingBody(PromptBody):
    """dimensions: numbers, the first ones. normalize: the older name of use_activation."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None
    embed_dtype: Any = unsupported(AS_IT_IS, "float32")
    endianness: Any = unsupported(AS_IT_IS, "native", "little")


class ClassifyBody(PromptBody):
    """As of embeddings, without their own fields."""


class ScoreBody(PoolingBody):
    """Texts to compare: one with each, or as many with as many. All pairs of names mean the
    same."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None


class RerankBody(PoolingBody):
    """documents: what is put in the order in which it goes with the query. top_n: how many are
    shown; 0 is all. max_tokens_per_doc: after which a document is cut; 0 and -1 are never."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        list[Any], Field(min_length=1), at_most(MAX_INPUTS), WithJsonSchema(_TEXTS_SCHEMA)
    ]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    rank_fields: Any = unsupported("only text documents are supported; remove it", [])
