"""Run a checkpoint in transformers' class: collect its layers' outputs and its greedy tokens.

Shape legend: L tokens of the sequence, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import MissingDependency, ModelError
from quire.models.hf.configs import EXTRA, is_available
from quire.spec.model_spec import TRANSFORMERS, ModelSpec
from quire.tools.verify.precision import WholePrecision
from quire.tools.verify.watch import Trace, Watcher

Tensors = Mapping[str, torch.Tensor]
# Plain torch, also for experts, because grouped products do not support float64.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
MAX_NAMED = 3


@dataclass(frozen=True)
class Reference:
    """transformers' results for a prompt."""

    tokens: list[int]  # prompt and greedy tokens
    num_prompt: int
    trace: Trace  # all tokens in one pass
    cache_error: float  # relative error of its logits with a cache against `trace`
    has_experts: bool


def check_transformers() -> None:
    """Raise MissingDependency if transformers is not installed."""
    if not is_available():
        raise MissingDependency(
            f"quire verify compares with the transformers package, which is not installed: {EXTRA}."
        )


class Theirs:
    """transformers' model.

    tensors: the weights; None to read them from the directory. Raises ModelError if the class
    rejects the config or the weights.
    """

    def __init__(
        self, directory: Path, spec: ModelSpec, dtype: torch.dtype, tensors: Tensors | None
    ) -> None:
        self._spec, self._dtype = spec, dtype
        # transformers' own class computes equal frequencies in both; quire's uses float64.
        is_same = spec.implementation == TRANSFORMERS
        with nullcontext() if is_same else self._precision():
            self._model = _load(directory, spec, dtype, tensors)

    def reference(self, prompt: Sequence[int], num_tokens: int) -> Reference:
        """Choose `num_tokens` greedy tokens with a cache, then compute all tokens in one pass.

        Raises ModelError if transformers' code fails."""
        head = self._model.get_output_embeddings()
        watcher = Watcher(self._model, self._spec.num_layers, head)
        with self._precision(), torch.inference_mode():
            try:
                tokens, cached_LV = self._greedy(prompt, num_tokens)
                with watcher.watching():
                    logits_LV = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
            except Exception as failure:  # transformers' code may raise anything
                reason = _first_line(failure)
                raise ModelError(f"transformers does not run this model: {reason}") from failure
            trace = watcher.trace(logits_LV)
        whole_LV = logits_LV[len(prompt) - 1 : -1] if num_tokens else logits_LV[:0]
        error = (cached_LV - whole_LV).norm() / whole_LV.norm() if num_tokens else torch.zeros(())
        has_experts = any(name.endswith(".experts") for name, _ in self._model.named_modules())
        return Reference(tokens, len(prompt), trace, error.item(), has_experts)

    def _greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Return prompt and greedy tokens, and the logits [new tokens, V] that chose them."""
        tokens, ids, cache, rows = list(prompt), list(prompt), None, []
        for _ in range(num_tokens):
            out = self._model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
            ids = [int(rows[-1].argmax())]
            tokens += ids
        return tokens, torch.stack(rows) if rows else torch.empty(0)

    def _precision(self) -> Any:
        return WholePrecision() if self._dtype == torch.float64 else nullcontext()


def _load(directory: Path, spec: ModelSpec, dtype: torch.dtype, tensors: Tensors | None) -> Any:
    import transformers

    with _quiet():
        try:
            if tensors is None:
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    directory, dtype=dtype, output_loading_info=True, **EAGER
                )
            else:
                config = _config(spec.raw)
                classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
                model, info = classes[type(config)].from_pretrained(
                    None, config=config, state_dict=dict(tensors), dtype=dtype,
                    output_loading_info=True, **EAGER,
                )  # fmt: skip
        except Exception as error:  # transformers' checks may raise anything
            reason = _first_line(error)
            raise ModelError(f"transformers does not load this model: {reason}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        named = ", ".join(missing[:MAX_NAMED])
        raise ModelError(f"transformers finds no weights for {len(missing)} tensors: {named}.")
    _take_divisors(model, spec)
    return model.eval()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), repr(error))


def _config(raw: Mapping[str, Any]) -> Any:
    """Return transformers' config from quire's, which may come from a GGUF file."""
    import transformers

    values = {n: v for n, v in raw.items() if n not in ("model_type", "quantization_config")}
    values.setdefault("pad_token_id", None)  # the default may exceed the vocabulary
    rope = values.get("rope_parameters") or {}
    if "divisors" in rope:  # of a GGUF file; _take_divisors applies them
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return transformers.AutoConfig.for_model(raw["model_type"], **values)


def _take_divisors(model: Any, spec: ModelSpec) -> None:
    """Divide the frequencies by a GGUF file's divisors, which transformers has no field for."""
    divisors = (spec.raw.get("rope_parameters") or {}).get("divisors")
    if divisors is not None:
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                buffer /= torch.tensor(divisors, dtype=buffer.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars and warnings."""
    from transformers.utils import logging

    level, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_progress:
            logging.enable_progress_bar()
