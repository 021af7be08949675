"""Vocabularies of other formats than tokenizer.json: SentencePiece's tokenizer.model, the ranks of
tiktoken, and Mistral's tekken.json.

transformers converts them to a `tokenizers.Tokenizer`, with the packages of each format. Code that
comes with a checkpoint is never run.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import MissingDependency, ModelError

if TYPE_CHECKING:
    import tokenizers

EXTRA = 'pip install "quire[tokenizers]"'
SENTENCE_PIECE, TIKTOKEN, TEKKEN = "SentencePiece", "tiktoken", "Mistral's tekken"
PACKAGES = {
    SENTENCE_PIECE: ("transformers", "sentencepiece", "google.protobuf"),
    TIKTOKEN: ("transformers", "tiktoken"),
    TEKKEN: ("transformers",),
}
# Names of special tokens in SentencePiece and tekken, unless tokenizer_config.json has others.
USUAL_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PROTOBUF = b"\n"  # first byte of SentencePiece's files; tiktoken's are lines of base64


@dataclass(frozen=True)
class OtherVocabulary:
    """A vocabulary's file, and its format."""

    path: Path
    format: str

    @property
    def named_tokens(self) -> dict[str, str]:
        """The texts of special tokens by name, which tokenizer_config.json may change."""
        return {} if self.format == TIKTOKEN else dict(USUAL_NAMES)

    @property
    def config(self) -> dict[str, Any]:
        """The defaults of tokenizer_config.json: whether a text begins with a token."""
        return {} if self.format == TIKTOKEN else {"add_bos_token": True}

    def convert(self, config: dict[str, Any]) -> "tokenizers.Tokenizer":
        """Return the vocabulary, which adds no tokens to a text. config: tokenizer_config.json.

        Raises MissingDependency, and ModelError for a file that cannot be converted."""
        missing = [name for name in PACKAGES[self.format] if not _is_installed(name)]
        if missing:
            raise MissingDependency(
                f"{self.path} is a vocabulary of {self.format}, whose conversion needs"
                f" {' and '.join(missing)}: {EXTRA}."
            )
        if self.format == TIKTOKEN and "auto_map" in config:
            raise ModelError(
                f"{self.path} is split by code that comes with the checkpoint (auto_map in"
                " tokenizer_config.json), which is never run. Name another tokenizer (--tokenizer)."
            )
        from transformers import TokenizersBackend

        try:
            made = TokenizersBackend.from_pretrained(self.path.parent, local_files_only=True)
        except Exception as error:  # any error of its code
            reason = " ".join(str(error).split())
            raise ModelError(
                f"{self.path} cannot be read as a vocabulary of {self.format} ({reason}). Fetch it"
                " again, convert it to tokenizer.json, or name another tokenizer (--tokenizer)."
            ) from error
        backend: tokenizers.Tokenizer = made.backend_tokenizer
        backend.post_processor = None
        return backend


def other_vocabulary(folder: Path) -> OtherVocabulary | None:
    """Return the vocabulary that can be converted; None if there is none."""
    if (path := folder / "tekken.json").is_file():
        return OtherVocabulary(path, TEKKEN)
    if (path := folder / "tokenizer.model").is_file():
        with path.open("rb") as file:
            is_protobuf = file.read(1) == PROTOBUF
        return OtherVocabulary(path, SENTENCE_PIECE if is_protobuf else TIKTOKEN)
    path = folder / "tiktoken.model"
    return OtherVocabulary(path, TIKTOKEN) if path.is_file() else None


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
