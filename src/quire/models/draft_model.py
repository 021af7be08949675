"""Load and check the draft model of a target model, and number the draft model's layers."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.speculation import EAGLE3, MTP, Speculation
from quire.models.checkpoint.files import has_weights, weight_files
from quire.models.checkpoint.source import ALL_FILES, ModelSource, resolve_model
from quire.models.draft_head import DraftHead
from quire.models.load.contents import tensor_names
from quire.models.model import Model
from quire.models.parts.layers import Attention
from quire.models.registry import model_spec
from quire.spec.cache_group import STATE
from quire.spec.deepseek.multi_token import OF_LAYERS, MultiTokenLayer, multi_token_layer
from quire.spec.eagle3_spec import head_spec
from quire.spec.gguf.container import is_gguf
from quire.spec.model_spec import PART_OF, QUIRE, ModelSpec, parse_spec


def with_drafter(
    spec: ModelSpec,
    speculation: Speculation | None,
    target: ModelSource,
    files: tuple[str, ...] = ALL_FILES,
) -> tuple[ModelSpec, ModelSource | None]:
    """Return the target's spec with the drafter's spec set, and the drafter's source, which is the
    target's own for an MTP layer.

    Without a draft model, return the spec unchanged and None. files: see resolve_model. Raises
    ModelError, and ConfigError if the draft model does not fit the target.
    """
    if speculation is not None and speculation.method == MTP:
        return replace(spec, drafter=multi_token_spec(spec, target.directory)), target
    if speculation is None or speculation.model is None:
        return spec, None
    source = resolve_model(speculation.model, files=files)
    if speculation.method == EAGLE3:
        return replace(spec, drafter=head_spec(source.directory, spec)), source
    drafter = model_spec(source.directory)
    _check(spec, drafter, source.name)
    return replace(spec, drafter=drafter), source


def join(drafter: Model, target: Model, num_layers: int, max_tokens: int) -> None:
    """Number the drafter's layers after the target's, and attach a draft head to the target.

    num_layers: layers of the target. max_tokens: maximum number of tokens of a step. Raises
    ModelError if the head does not fit.
    """
    offset_layer_numbers(drafter, num_layers)
    if isinstance(drafter, DraftHead):
        drafter.attach(target)
        target.record_layer_inputs(drafter.target_layers, max_tokens)


def multi_token_spec(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Return the spec of the target's MTP layer as a drafter. directory: of the target, or its GGUF
    file. Raises ModelError if the target has no such layer."""
    layer: MultiTokenLayer | str = "quire reads none of GGUF files"
    if not is_gguf(directory):
        layer = multi_token_layer(spec.fields, spec.model_type, spec.num_layers)
    if isinstance(layer, str):
        raise _no_layer(directory, layer)
    if spec.implementation != QUIRE:
        raise _no_layer(directory, "classes of transformers run without them")
    if has_weights(directory):
        names = tensor_names(weight_files(directory))
        if not any(name.startswith(layer.prefix) for name in names):
            raise _no_layer(directory, f"no tensor of its files begins with {layer.prefix}")
    raw = {name: value for name, value in spec.raw.items() if name != PART_OF}
    return replace(parse_spec(raw | OF_LAYERS), multi_token=layer, max_position=spec.max_position)


def _no_layer(directory: Path, reason: str) -> ModelError:
    return ModelError(
        f"{directory} has no layer for multi-token prediction, which the method {MTP} needs:"
        f" {reason}. Use another method of speculative_config (ngram, suffix, draft_model, eagle3)."
    )


def _check(spec: ModelSpec, drafter: ModelSpec, name: str) -> None:
    is_head = any("eagle3" in each.lower() for each in drafter.fields.texts("architectures") or ())
    if is_head:
        raise ConfigError(
            f"{name} is an EAGLE-3 head, which needs the model that it was trained for; use the"
            f" method {EAGLE3}."
        )
    if drafter.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"the draft model {name} has {drafter.vocab_size:,} tokens, but the served model has"
            f" {spec.vocab_size:,}. Use a draft model of the same family, with the same tokenizer."
        )
    if any(group.kind == STATE for group in drafter.own_groups):
        raise ConfigError(
            f"the draft model {name} ({drafter.model_type}) has layers with states, which cannot"
            " be rewound to the last accepted draft token. Use a draft model without such layers."
        )
    if drafter.implementation != QUIRE:
        raise ConfigError(
            f"the draft model {name} ({drafter.model_type}) would run by a class of transformers;"
            " use one that quire has a class for."
        )


def offset_layer_numbers(model: nn.Module, num_layers: int) -> None:
    """Add num_layers to the layer numbers of a model that shares another model's attention
    backend."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Attention):
                setattr(module, name, replace(value, layer=num_layers + value.layer))
