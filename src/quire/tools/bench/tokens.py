"""Tokenizers of the measured model: from its files on this machine, or by the server's routes."""

import asyncio
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.models.checkpoint.source import TEXT_FILES, resolve_model
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import has_tokenizer, read_json
from quire.tools.http_client import HttpClient, HttpError

SAFE_VOCAB_SIZE = 1000


class LocalTokens:
    """The tokenizer of a model directory, hub id or shape. A shape only has a vocabulary size."""

    def __init__(self, model: str, tokenizer: str | None = None, revision: str | None = None):
        directory = resolve_model(model, revision, files=TEXT_FILES).directory
        text_side = directory
        if tokenizer is not None:
            text_side = resolve_model(tokenizer, files=TEXT_FILES).directory
        self._name = tokenizer or model
        self._tokenizer = Tokenizer.from_directory(text_side) if has_tokenizer(text_side) else None
        size = read_json(directory / "config.json").get("vocab_size")
        self.vocab_size = size if isinstance(size, int) else self._known.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._known.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        return self._known.decode(token_ids)

    @property
    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError(
                f"{self._name} has no tokenizer, which datasets of texts need; choose a dataset of"
                " random tokens, or name one with --tokenizer."
            )
        return self._tokenizer


@dataclass(frozen=True)
class ServerTokens:
    """Tokenizes through /tokenize and /detokenize. `runner` runs the client's event loop."""

    runner: asyncio.Runner
    client: HttpClient
    model: str
    vocab_size: int = SAFE_VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._request("/tokenize", {"prompt": text}, "tokens")
        return ids

    def decode(self, token_ids: list[int]) -> str:
        text: str = self._request("/detokenize", {"tokens": token_ids}, "prompt")
        return text

    def _request(self, path: str, body: dict[str, Any], key: str) -> Any:
        exchange = self.client.request(path, "POST", {"model": self.model} | body)
        try:
            return self.runner.run(exchange).json()[key]
        except HttpError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"the server has no {path}; name the model's tokenizer with --tokenizer."
            ) from error
