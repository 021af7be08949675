"""`TrainingModel`: a torch module whose forward pass is the engine's.

Shape legend: T tokens of all samples, R response tokens of all samples, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from quire.base.errors import ConfigError, ModelError, RequestError
from quire.base.plan import Int16
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.source import resolve_source
from quire.models.load.assembly import empty_model
from quire.models.load.contents import Contents
from quire.models.parts.layers import Layer
from quire.models.registry import model_spec
from quire.ops.host.native import core
from quire.runner.derive import choose_dtype
from quire.spec.gguf.container import is_gguf
from quire.spec.model_options import SILU
from quire.spec.model_spec import QUIRE, ModelSpec
from quire.training.engine_pass import CPU, EnginePass, PassValues
from quire.training.gradients import (
    LayerFormula,
    Padding,
    Recipe,
    Recomputed,
    head_formula,
)
from quire.training.packing import PackedStep, pack_routes

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_ROWS = 1024  # rows whose logits are in memory at a time
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class TrainingModel(nn.Module):
    """A model to train, from a checkpoint of safetensors files.

        model = TrainingModel("demo", dtype="bfloat16")
        logprobs = model(samples.prompts, samples.responses)  # == samples.logprobs
        llm.update_weights(model.state_dict())

    Parameters are float32 and have the checkpoint's names. The forward pass rounds them to `dtype`,
    as an engine with this dtype does, and runs the engine's program on them. dtype: float32,
    bfloat16, float16, or `auto` for the engine's choice. It must be the engine's. device: cpu.

    Raises ModelError for a model or checkpoint that cannot be trained, and ConfigError for another
    device or dtype, and without the C++ core.
    """

    def __init__(self, model: str = "demo", *, dtype: str = "auto", device: str = "cpu") -> None:
        super().__init__()
        if device != CPU.type or core() is None:
            raise ConfigError(
                "training runs on a CPU with quire's C++ core;"
                + (" the core was not built." if device == CPU.type else f" device is {device}.")
            )
        directory = resolve_source(ModelConfig(model)).directory
        self._spec = _trainable(directory)
        name = choose_dtype(dtype, self._spec, device)
        if name not in DTYPES:
            raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}; got {dtype!r}.")
        self._dtype = DTYPES[name]
        for each, tensor in _tensors(directory, self._spec).items():
            _register(self, each, nn.Parameter(tensor))
        self._pass = EnginePass(self._spec, self._dtype)

    def forward(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        routes: Sequence[Int16] | None = None,
    ) -> torch.Tensor:
        """Return the log-probability of each response token given its prompt and the tokens before
        it, float32 [R], in the order of the samples.

        The values equal the `logprobs` of an engine with the same weights and dtype. Both come from
        the raw logits: before temperature, penalties, masks, top-k, top-p and min-p. routes: the
        experts that each sample's tokens must use (`Samples.routes`); by default the parameters
        choose them. Raises RequestError for token ids, lengths or experts that the model does not
        have.
        """
        self._check(prompts, responses)
        sequences = [[*prompt, *end] for prompt, end in zip(prompts, responses, strict=True)]
        # No logits are needed after the last token.
        step = PackedStep.of([each[:-1] or each for each in sequences])
        rows, begin = list[int](), 0
        for prompt, end, length in zip(prompts, responses, step.lengths, strict=True):
            rows += range(begin + len(prompt) - 1, begin + len(prompt) - 1 + len(end))
            begin += length
        rows_R = torch.tensor(rows, dtype=torch.int64)
        ids_R = torch.tensor([token for end in responses for token in end], dtype=torch.int64)
        packed = None if routes is None else pack_routes(routes, step.lengths, self._spec)
        return self._logprobs(step, rows_R, ids_R, packed)

    def _logprobs(
        self,
        step: PackedStep,
        rows_R: torch.Tensor,
        ids_R: torch.Tensor,
        routes_TLC: torch.Tensor | None,
    ) -> torch.Tensor:
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            self._load(parameters)
            values = self._pass.run(step, routes_TLC)
        x_TD = self._layers(step, values, parameters)
        pieces, eps = [], self._spec.layers.norm_eps
        weights = parameters[NORM], parameters.get(HEAD, parameters[EMBEDDING])
        for rows, ids in zip(rows_R.split(HEAD_ROWS), ids_R.split(HEAD_ROWS), strict=True):
            with torch.no_grad():
                found = self._pass.logprobs(values.hidden_TD, rows, ids)
            pieces.append(self._part(found, head_formula(rows, ids, eps), x_TD, *weights))
        return torch.cat(pieces)

    def _layers(
        self, step: PackedStep, values: PassValues, parameters: dict[str, nn.Parameter]
    ) -> torch.Tensor:
        """Return the last layer's output [T, D], in a graph of all layers."""
        first_TD, *others = values.inputs

        def look_up(table_VD: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(step.ids_T, table_VD)

        x_TD, padding = self._part(first_TD, look_up, parameters[EMBEDDING]), Padding(step.lengths)
        mixtures = iter(() if values.experts_TLC is None else values.experts_TLC.unbind(1))
        experts = self._spec.experts
        for layer, after_TD in enumerate(others):
            prefix = f"model.layers.{layer}."
            own = {name: each for name, each in parameters.items() if name.startswith(prefix)}
            names = [name.removeprefix(prefix) for name in own]
            is_sparse = experts is not None and experts.is_sparse(layer)
            chosen_TC = next(mixtures) if is_sparse else None
            formula = LayerFormula(self._spec, layer, names, padding, chosen_TC)
            x_TD = self._part(after_TD, formula, x_TD, *own.values())
        return x_TD

    def _part(
        self, values: torch.Tensor, formula: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        recipe = Recipe(values, formula, self._dtype)
        found: torch.Tensor = Recomputed.apply(recipe, *inputs)  # type: ignore[no-untyped-call]
        return found

    def _load(self, parameters: dict[str, nn.Parameter]) -> None:
        """Pack the parameters for the engine's program. Each forward pass does so, because not all
        optimizers count their changes (fused ones do not)."""
        if any(each.device != CPU or each.dtype != torch.float32 for each in parameters.values()):
            raise ConfigError(
                "parameters must be float32 on the CPU; do not move or cast the model."
            )
        self._pass.load({name: each.detach() for name, each in parameters.items()})

    def _check(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> None:
        """Raise RequestError for samples that the model cannot compute."""
        if len(prompts) != len(responses) or not any(responses):
            raise RequestError(
                "each sample needs a prompt and a response, of at least one token in all; got"
                f" {len(prompts)} prompts and {len(responses)} responses.",
                "responses",
            )
        longest, size = self._spec.max_position, self._spec.vocab_size
        for prompt, response in zip(prompts, responses, strict=True):
            length = len(prompt) + len(response)
            if not prompt or length > longest:
                raise RequestError(
                    f"a sample has {len(prompt)} prompt tokens and {length} tokens; a prompt needs"
                    f" at least 1, and the model takes at most {longest}.",
                    "prompts",
                )
            if not all(0 <= token < size for token in (*prompt, *response)):
                raise RequestError(f"token ids must be from 0 to {size - 1}.", "prompts")


def _trainable(directory: Path) -> ModelSpec:
    """Return the spec of a model that can be trained. Raises ModelError for any other."""
    spec = None if is_gguf(directory) else model_spec(directory)
    if spec is None or spec.quantization is not None:
        raise ModelError(f"{directory} is quantised; training needs an unquantised checkpoint.")
    is_known = spec.implementation == QUIRE and spec.model_type in MODEL_TYPES
    if not is_known or spec.pooling is not None or spec.layers.activation not in SILU:
        raise ModelError(
            f"a {spec.type_name} model with the activation {spec.layers.activation} cannot be"
            f" trained; supported are generating models of type {', '.join(MODEL_TYPES)} with silu."
        )
    return spec


def _tensors(directory: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors in float32, by the names of the model's layers."""
    files = checkpoint_files(directory)
    model = empty_model(spec, torch.float32, CPU)
    Contents(files, model).check()
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    expected = {source.name for layer in layers for source in layer.sources()}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for stored in opened.keys():  # noqa: SIM118 (not a dictionary)
                for name in expected.intersection(model.names_of(stored)):
                    found[name] = opened.get_tensor(stored).float().clone()
    return found


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, with a module for each part of it."""
    *path, last = name.split(".")
    for each in path:
        if each not in dict(root.named_children()):
            root.add_module(each, nn.Module())
        root = root.get_submodule(each)
    root.register_parameter(last, parameter)
