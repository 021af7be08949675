"""vLLM's types of prompts. They are dictionaries, which `LLM.generate` takes as they are."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    multi_modal_data: NotRequired[Any]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Any]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, which quire refuses."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


SingletonPrompt = str | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType = SingletonPrompt
