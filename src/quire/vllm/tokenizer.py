"""The tokenizer that `llm.get_tokenizer()` returns: quire's, with the methods of transformers' that
scripts for vLLM call."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.base.errors import RequestError
from quire.models.checkpoint.source import TEXT_FILES, resolve_model
from quire.render.renderer import Messages, Renderer
from quire.render.templates.chat_template import ChatOptions
from quire.render.tokens.tokenizer import Tokenizer


class Encoding(dict[str, list[Any]]):
    """Token ids of one text, or of each of several."""

    @property
    def input_ids(self) -> list[Any]:
        return self["input_ids"]


class ChatTokenizer:
    """A model's tokenizer together with its chat template."""

    def __init__(self, renderer: Renderer) -> None:
        if renderer.tokenizer is None:
            raise RequestError("this model has no tokenizer.")
        self._renderer = renderer
        self._tokenizer: Tokenizer = renderer.tokenizer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of quire's tokenizer, such as vocab_size or eos_token_id."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """Return the ids of a text, or of each of several texts."""
        if isinstance(text, str):
            return Encoding(input_ids=self.encode(text, add_special_tokens))
        return Encoding(input_ids=[self.encode(each, add_special_tokens) for each in text])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> Any:
        """Return a conversation, or each of several, as token ids; as text without `tokenize`.
        template_kwargs: further variables of the template. Raises RequestError."""
        if conversation and not isinstance(conversation[0], dict):
            own = (tools, chat_template, add_generation_prompt, continue_final_message, tokenize)
            several: Any = conversation
            return [self.apply_chat_template(each, *own, **template_kwargs) for each in several]
        options = ChatOptions(
            add_generation_prompt, continue_final_message, tools, template_kwargs=template_kwargs
        )
        text = self._renderer.chat_text(conversation, options, chat_template)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of one token or the ids of several; None for an unknown token."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(each) for each in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of one id or the tokens of several, in the vocabulary's spelling."""
        if isinstance(ids, int):
            return self._tokenizer.token(ids)
        return [self._tokenizer.token(each) for each in ids]

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids."""
        tokens = self._tokenizer.tokens(range(self._tokenizer.vocab_size))
        return {token: token_id for token_id, token in enumerate(tokens) if token}

    @cached_property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("bos_token")


def get_tokenizer(tokenizer_name: str | Path, **settings: Any) -> ChatTokenizer:
    """Return a model's tokenizer. settings: `revision`; the others change nothing here."""
    found = resolve_model(str(tokenizer_name), settings.get("revision"), files=TEXT_FILES)
    return ChatTokenizer(Renderer.from_directory(found.directory))
