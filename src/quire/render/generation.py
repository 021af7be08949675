"""Reads generation_config.json: the end tokens and the recommended sampling of a model.

A GGUF file has the same values in its metadata.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.base.errors import ModelError
from quire.base.requests.sampling_params import SamplingParams
from quire.render.tokens.gguf_tokenizer import gguf_generation
from quire.render.tokens.tokenizer_files import read_json
from quire.spec.config_fields import Fields
from quire.spec.gguf.container import GGUFFile, is_gguf

SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class GenerationDefaults:
    """A model's end tokens and its default sampling."""

    eos_token_ids: tuple[int, ...] = ()  # ids that end a sequence
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the model's defaults; other fields keep quire's defaults."""
        return SamplingParams(**self.sampling)


def read_generation_defaults(
    directory: str | Path,
    tokenizer_eos: int | None = None,
    use_sampling: bool = True,
    override: Mapping[str, Any] = MappingProxyType({}),
) -> GenerationDefaults:
    """Read the defaults of a model directory or a GGUF file. Raises ModelError for invalid ones.

    tokenizer_eos: the tokenizer's end token, which comes first in `eos_token_ids`.
    use_sampling: False for `generation_config="none"`; only end tokens are read.
    override: fields that replace the file's.
    If no end token is set, config.json's is used."""
    folder = Path(directory)
    from_gguf = is_gguf(folder)
    path = folder if from_gguf else folder / "generation_config.json"
    values = gguf_generation(GGUFFile(folder)) if from_gguf else read_json(path)
    if not use_sampling:
        values = {name: value for name, value in values.items() if name not in SAMPLING_FIELDS}
    values = {**values, **override}
    ids = Fields(values, str(path)).integers("eos_token_id")
    if values.get("eos_token_id") is None:
        ids = _config_eos(folder / "config.json")
    known = () if tokenizer_eos is None else (tokenizer_eos,)
    eos = tuple(dict.fromkeys((*known, *ids)))
    sampling = {
        name: values[key] for key, name in SAMPLING_FIELDS.items() if values.get(key) is not None
    }
    where = f"{path} with override_generation_config" if override else str(path)
    return GenerationDefaults(eos, _checked(sampling, where))


def _config_eos(path: Path) -> tuple[int, ...]:
    fields = Fields(read_json(path), str(path))
    inner = fields.inner("text_config")
    own = fields if inner is None or fields.has("eos_token_id") else inner
    return own.integers("eos_token_id")


def _checked(sampling: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        SamplingParams(**sampling)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{where} has sampling defaults that do not work: {error} Correct them, or switch the"
            ' model\'s off with generation_config="none".'
        ) from error
    return sampling
