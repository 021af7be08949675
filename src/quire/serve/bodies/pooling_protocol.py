"""Fields of the endpoints of pooling models: OpenAI's, Jina's and vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from quire.serve.bodies import schemas
from quire.serve.bodies.open_body import PROMPT, RESPONSE, Ignored, at_most, becomes, unsupported
from quire.serve.bodies.protocol import (
    ConversationFields,
    Natural,
    OrUnlimited,
    Positive,
    ServedBody,
    SomeMessages,
)

MAX_INPUTS = 2048
FIXED_FORM = "numbers are float32, little endian; remove it"

_TEXTS_SCHEMA = schemas.one_of(
    schemas.SOME_TEXT, schemas.list_of(schemas.SOME_TEXT, minItems=1, maxItems=MAX_INPUTS)
)
Input = Annotated[Any, WithJsonSchema(schemas.prompts_schema(MAX_INPUTS))]
Texts = Annotated[Any, at_most(MAX_INPUTS), WithJsonSchema(_TEXTS_SCHEMA)]


class PoolingBody(ServedBody):
    """The fields of all pooling endpoints.

    use_activation: whether embeddings are normalised to unit length, or the numbers of classes are
    probabilities. If absent, the model decides.
    """

    use_activation: bool | None = becomes(RESPONSE)
    metadata: Ignored
    mm_processor_kwargs: Any = unsupported("this model accepts text only; remove it", {})


class PromptBody(PoolingBody, ConversationFields):
    """One prompt or several, or a conversation in their place.

    The model's template turns a conversation into text. Special tokens are added to that text only
    on request.
    """

    input: Input = becomes(PROMPT)
    messages: SomeMessages | None = becomes(PROMPT)


class EmbeddingBody(PromptBody):
    """A body of /v1/embeddings. normalize: the older name of use_activation."""

    encoding_format: Literal["float", "base64"] | None = becomes(RESPONSE)
    dimensions: Positive | None = becomes(RESPONSE)  # leading numbers of an embedding to return
    normalize: bool | None = becomes(RESPONSE)
    embed_dtype: Any = unsupported(FIXED_FORM, "float32")
    endianness: Any = unsupported(FIXED_FORM, "native", "little")


class ClassifyBody(PromptBody):
    """A body of /classify."""


class ScoreBody(PoolingBody):
    """Texts to compare: one with each, or pairwise. All pairs of names are synonyms."""

    text_1: Texts = becomes(PROMPT)
    text_2: Texts = becomes(PROMPT)
    queries: Texts = becomes(PROMPT)
    documents: Texts = becomes(PROMPT)
    items: Texts = becomes(PROMPT)
    data_1: Texts = becomes(PROMPT)
    data_2: Texts = becomes(PROMPT)


class RerankBody(PoolingBody):
    """A query, and documents to sort by how well they match it."""

    query: Annotated[str, Field(min_length=1)] = becomes(PROMPT, default=...)
    documents: Annotated[
        list[Any], Field(min_length=1), at_most(MAX_INPUTS), WithJsonSchema(_TEXTS_SCHEMA)
    ] = becomes(PROMPT, default=...)
    top_n: Natural | None = becomes(RESPONSE)  # maximum number of documents shown; 0 shows all
    return_documents: bool | None = becomes(RESPONSE)
    max_tokens_per_doc: OrUnlimited | None = becomes(PROMPT)  # 0 and -1 truncate no document
    rank_fields: Any = unsupported("only text documents are supported; remove it", [])
