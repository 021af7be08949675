"""generation_config.json: what ends a sequence, and how the model's makers would sample.

A GGUF file has the same in its metadata.
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
    """eos_token_ids: all ids that end a sequence. sampling: fields of SamplingParams."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)

    def default_sampling_params(self) -> SamplingParams:
        """Make SamplingParams with the model's defaults in place of ours."""
        return SamplingParams(**self.sampling)


def read_generation_defaults(
    directory: str | Path,
    tokenizer_eos: int | None = None,
    use_sampling: bool = True,
    override: Mapping[str, Any] = MappingProxyType({}),
) -> GenerationDefaults:
    """Read a model directory or a GGUF file.

    tokenizer_eos: the tokenizer's end of sequence, which comes first. config.json is asked where
    there is no generation_config.json. use_sampling: False for `generation_config="none"`.
    override: fields in place of the file's.
    """
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
