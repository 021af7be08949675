"""vLLM's parameters of a request, and their translation to quire's.

The classes here take what quire's own refuse or name differently: arguments of logits processors,
older names of constraints, a pooling task, adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import RequestError
from quire.base.requests import pooling_params, sampling_params
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.base.settings.kv_transfer import FIELD as KV_TRANSFER
from quire.serve.python import beam_search


class SamplingParams(sampling_params.SamplingParams, kw_only=True):
    """quire's parameters with vLLM's further fields. Raises RequestError, a ValueError."""

    # the older name of structured_outputs
    guided_decoding: StructuredOutputsParams | None = None
    flat_logprobs: bool = False  # a faster container in vLLM; here always lists of dictionaries

    def __post_init__(self) -> None:
        given = self.extra_args
        if isinstance(given, dict):  # arguments of logits processors; checked by them
            self.extra_args = {name: given[name] for name in given if name == KV_TRANSFER} or None
        super().__post_init__()
        self.extra_args = given
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError(
                    "guided_decoding and structured_outputs mean the same; give one of them.",
                    "structured_outputs",
                )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """Return parameters for which None stands for the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """Return a copy whose lists and dictionaries can be changed independently."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in fields.items():
            if isinstance(value, list | dict):
                fields[name] = value.copy()
        return SamplingParams(**fields)

    def to_quire(self, processors: Sequence[Any] = ()) -> sampling_params.SamplingParams:
        """Return quire's parameters. processors: logits processors of this request, which have
        read extra_args."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        extra = self.extra_args or {}
        fields["extra_args"] = {KV_TRANSFER: extra[KV_TRANSFER]} if KV_TRANSFER in extra else None
        own = [*(self.logits_processors or ()), *processors]
        fields["logits_processors"] = own or None
        constraint = self.structured_outputs
        if constraint is not None:
            names = StructuredOutputsParams.__struct_fields__
            values = {name: getattr(constraint, name) for name in names}
            fields["structured_outputs"] = StructuredOutputsParams(**values)
        return sampling_params.SamplingParams(**fields)


_FIELDS = sampling_params.SamplingParams.__struct_fields__


class GuidedDecodingParams(StructuredOutputsParams, frozen=True, kw_only=True):
    """vLLM's older name of StructuredOutputsParams. One library compiles all grammars, so the
    backend and its options are ignored."""

    backend: str | None = None
    disable_fallback: bool = False


@dataclass(frozen=True)
class BeamSearchParams(beam_search.BeamSearchParams):
    """quire's beam search with vLLM's temperature, which must be 0: beams are never sampled."""

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature:
            raise RequestError(
                f"temperature={self.temperature!r}: beams are the most probable texts, which no"
                " temperature changes; remove it.",
                "temperature",
            )


@dataclass(frozen=True)
class PoolingParams(pooling_params.PoolingParams):
    """quire's pooling parameters with vLLM's task."""

    task: str | None = None  # embed or classify; None for the model's


def refuse_adapter(lora_request: object) -> None:
    """Raise RequestError for a pooling request with an adapter, or with a list of them."""
    given = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    if any(each is not None for each in given):
        raise RequestError(
            "lora_request: adapters are for models that generate. Merge the adapter into the model"
            " (merge_and_unload of peft), and give that checkpoint as the model.",
            "lora_request",
        )


def absent(owner: str, name: str, refused: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that a class of vLLM has and quire's has not. refused: the
    alternatives, by the names of attributes that quire does not offer on purpose."""
    if (reason := refused.get(name)) is not None:
        return AttributeError(f"quire has no {owner}.{name}: {reason}.")
    return AttributeError(f"{owner!r} object has no attribute {name!r}")
