"""Fields of LM Studio's REST API: OpenAI's, and three of its own."""

from quire.serve.bodies.open_body import Ignored
from quire.serve.bodies.pooling_protocol import EmbeddingBody
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest


class StudioChatBody(ChatCompletionRequest):
    """A body of /api/v0/chat/completions."""

    ttl: Ignored  # --idle-unload-s unloads models
    draft_model: Ignored  # the server's draft model changes no text


class StudioCompletionBody(CompletionRequest):
    """A body of /api/v0/completions."""

    ttl: Ignored
    draft_model: Ignored


class StudioEmbeddingBody(EmbeddingBody):
    """A body of /api/v0/embeddings."""

    ttl: Ignored
