"""Layers after pooling: classifiers, and the dense layers of sentence-transformers.

They are few and small, so they run in float64, one row at a time. A prompt's result therefore does
not depend on other prompts in the step.

Shape legend: N rows, D inputs, K outputs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quire.base.errors import ModelError
from quire.base.requests.pooling import CLASSIFY, DENSE_ACTIVATIONS, PoolingSpec
from quire.models.checkpoint.files import weight_files
from quire.ops.host.torch_import import new_generator
from quire.spec.encoders import BERT, MODERNBERT, ROBERTA_TYPES
from quire.spec.model_spec import ModelSpec

CLASSIFIER_TENSORS = ("score.weight", "score.bias")
TABLES = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
WIDTH = 0.02  # standard deviation of random weights
FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.clone,
    torch.tanh,
    torch.relu,
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
)
ACTIVATIONS = dict(zip(DENSE_ACTIVATIONS, FUNCTIONS, strict=True))
# Tensor prefixes of an encoder's classifier: the dense layer, and the layer of the classes.
ENCODER_HEADS = {
    BERT: ("pooler.dense", "classifier"),
    MODERNBERT: ("head.dense", "classifier"),
    **dict.fromkeys(ROBERTA_TYPES, ("classifier.dense", "classifier.out_proj")),
}


@dataclass(frozen=True)
class PoolingLayer:
    """A dense layer. weight: [K, D] float64. bias: [K] float64, or None. activation: a name in
    DENSE_ACTIVATIONS. norm: norm after the activation, if any."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    activation: str = "identity"
    norm: "PoolingNorm | None" = None

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return [N, K] for x [N, D]; each row is multiplied separately."""
        rows = [torch.mv(self.weight, x_D) for x_D in x_ND]
        y_NK = torch.stack(rows) if rows else x_ND.new_empty(0, len(self.weight))
        y_NK = y_NK if self.bias is None else y_NK + self.bias
        y_NK = ACTIVATIONS[self.activation](y_NK)
        return y_NK if self.norm is None else self.norm(y_NK)


@dataclass(frozen=True)
class PoolingNorm:
    """A layer norm. weight: [K] float64. bias: [K] float64, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x_NK: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            x_NK, self.weight.shape, self.weight, self.bias, self.eps
        )


def load_pooling_layers(
    directory: Path, spec: ModelSpec, device: torch.device, load_format: str, seed: int
) -> list[PoolingLayer]:
    """Load the layers, or make random ones with load_format `dummy`. Raises ModelError for a
    missing tensor or a wrong shape."""
    pooling = spec.pooling
    assert pooling is not None, "a model that generates has none"
    if load_format == "dummy":
        return _random(pooling, spec.hidden_size, device, seed)
    if pooling.task == CLASSIFY and spec.is_encoder:
        return _encoder_head(directory, spec, device)
    if pooling.task == CLASSIFY:
        return [_classifier(directory, pooling, spec.hidden_size, device)]
    layers, width = [], spec.hidden_size
    for subfolder, activation in pooling.dense:
        files = weight_files(directory / subfolder)
        weight = _needed(files, ("linear.weight",))
        _check(weight, (None, width), f"linear.weight of {subfolder}")
        bias = _tensor(files, ("linear.bias",))
        layers.append(_layer(weight, bias, device, activation))
        width = len(weight)
    return layers


def _classifier(
    directory: Path, pooling: PoolingSpec, width: int, device: torch.device
) -> PoolingLayer:
    files = weight_files(directory)
    if pooling.label_tokens:
        rows = _rows(files, pooling.label_tokens).double()
        _check(rows, (len(pooling.label_tokens), width), "the rows of classifier_from_token")
        return _layer(rows[1:] - rows[:1] if pooling.is_difference else rows, None, device)
    weight = _needed(files, ("score.weight", "model.score.weight"))
    _check(weight, (len(pooling.labels), width), "score.weight")
    return _layer(weight, _tensor(files, ("score.bias", "model.score.bias")), device)


def _encoder_head(directory: Path, spec: ModelSpec, device: torch.device) -> list[PoolingLayer]:
    """Load the two layers of an encoder's classifier."""
    files, fields, size = weight_files(directory), spec.fields, spec.hidden_size
    first, last = ENCODER_HEADS[spec.model_type]
    assert spec.pooling is not None, "a model of classes pools"
    activation, norm = "tanh", None
    if spec.model_type == MODERNBERT:
        activation = fields.text("classifier_activation", "gelu")
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise fields.error("classifier_activation", f"supported are {known}")
        eps = spec.layers.norm_eps
        weight = _needed(files, ("head.norm.weight",)).to(device, torch.float64)
        norm = PoolingNorm(weight, _exact(_tensor(files, ("head.norm.bias",)), device), eps)
    dense = _dense(files, first, (size, size), device, spec.model_type)
    classes = _dense(files, last, (len(spec.pooling.labels), size), device, spec.model_type)
    return [replace(dense, activation=activation, norm=norm), classes]


def _dense(
    files: Sequence[Path], name: str, shape: tuple[int, int], device: torch.device, prefix: str
) -> PoolingLayer:
    weight = _needed(files, (f"{name}.weight", f"{prefix}.{name}.weight"))
    _check(weight, shape, f"{name}.weight")
    return _layer(weight, _tensor(files, (f"{name}.bias", f"{prefix}.{name}.bias")), device)


def _exact(values: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if values is None else values.to(device, torch.float64)


def _layer(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    device: torch.device,
    activation: str = "identity",
) -> PoolingLayer:
    return PoolingLayer(weight.to(device, torch.float64), _exact(bias, device), activation)


def _random(
    pooling: PoolingSpec, width: int, device: torch.device, seed: int
) -> list[PoolingLayer]:
    if pooling.task != CLASSIFY:
        return []
    generator = new_generator(seed)
    weight = torch.empty(len(pooling.labels), width).normal_(0.0, WIDTH, generator=generator)
    return [_layer(weight, None, device)]


def _needed(files: Sequence[Path], names: tuple[str, ...]) -> torch.Tensor:
    found = _tensor(files, names)
    if found is None:
        raise ModelError(
            f"{files[0].parent} has no tensor {names[0]}, which a pooling model needs. Set"
            " runner='generate' if it generates text, or convert='embed' for embeddings."
        )
    return found


def _tensor(files: Iterable[Path], names: tuple[str, ...]) -> torch.Tensor | None:
    """Return the first of these names from the first file that holds any; None without one."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in (each for each in names if each in opened.keys()):  # noqa: SIM118
                    found: torch.Tensor = opened.get_tensor(name)
                    return found
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}. Download it again.") from error
    return None


def _rows(files: Sequence[Path], token_ids: tuple[int, ...]) -> torch.Tensor:
    """Return rows of the language model's head, or of its tied embedding, [tokens, D]."""
    for table in TABLES:
        found = _tensor(files, (table,))
        if found is not None and max(token_ids) < len(found):
            return found[list(token_ids)]
    raise ModelError(f"{files[0].parent} has no {TABLES[0]} with the tokens {token_ids}.")


def _check(found: torch.Tensor, shape: tuple[int | None, ...], name: str) -> None:
    is_right = len(found.shape) == len(shape) and all(
        required in (None, have) for have, required in zip(found.shape, shape, strict=True)
    )
    if not is_right:
        expected_words = " x ".join("any" if each is None else str(each) for each in shape)
        raise ModelError(f"{name} has the shape {tuple(found.shape)}; it must be {expected_words}.")
