"""Find out whether and how a model pools: from the settings, its config, and the files of
sentence-transformers next to the config. No torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.base.errors import ConfigError, ModelError
from quire.base.requests.pooling import (
    CLASSIFY,
    CLS,
    DENSE_ACTIVATIONS,
    EMBED,
    LAST,
    MEAN,
    NONE,
    SIGMOID,
    SOFTMAX,
    PoolingSpec,
)
from quire.base.settings.config import ModelConfig
from quire.base.settings.fields import json_object
from quire.spec.config_fields import MAX_COUNT, MAX_JSON_BYTES, Fields, read_object
from quire.spec.encoders import encoder_pooling, is_encoder, uses_segments
from quire.spec.gguf.container import is_gguf
from quire.spec.model_spec import QUIRE, ModelSpec, read_config

# sentence-transformers' names for kinds of pooling: the old flags and the new words.
ST_KINDS = {"cls_token": CLS, "cls": CLS, "mean_tokens": MEAN, "mean": MEAN, "lasttoken": LAST}
ST_ACTIVATIONS = {"Identity": NONE, "Sigmoid": SIGMOID, "Softmax": SOFTMAX}
ST_LENGTH_FILE = "sentence_bert_config.json"
ST_FILE = "config_sentence_transformers.json"
MAX_LABELS = 1 << 16
CLASSIFIERS = ("ForSequenceClassification",)
OF_TOKENS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
POOLER_FIELDS = ("pooling_type", "seq_pooling_type", "use_activation", "normalize")


def with_pooling(spec: ModelSpec, directory: Path, model: ModelConfig) -> ModelSpec:
    """Return the spec with its pooling, or unchanged if the model generates.

    A pooling model needs no language model head. Raises ModelError for invalid files, and
    ConfigError for settings that do not fit."""
    pooling = pooling_of(directory, model)
    if pooling is None:
        return spec
    if spec.implementation != QUIRE:
        raise ConfigError(
            f"models of type {spec.model_type!r} run by a class of transformers, which supports"
            " only generation. Set runner='generate'."
        )
    return replace(spec, pooling=pooling, tie_embeddings=True)


def pooling_of(directory: Path, model: ModelConfig) -> PoolingSpec | None:
    """Return how a model pools; None if it generates.

    Settings take precedence over the architecture's name and modules.json."""
    task = _task(directory, model)
    if task is None:
        _refuse_for_generating(model)
        return None
    if is_gguf(directory):
        raise ConfigError(
            "GGUF files support only generation; remove runner='pooling', or give the model's"
            " directory with safetensors."
        )
    fields = Fields(read_config(directory))
    settings = json_object("pooler_config", model.pooler_config)
    kind = encoder_pooling(fields, task) or LAST
    if task == CLASSIFY:
        found = _classifier(fields, directory, kind)
    else:
        found = _embedder(directory, kind)
        found = msgspec.structs.replace(found, dimensions=_dimensions(fields))
    if is_encoder(fields.text("model_type", "")):
        found = msgspec.structs.replace(
            found, has_text_pairs=uses_segments(fields), longest=_longest(directory)
        )
    return _with_settings(found, settings)


def _task(directory: Path, model: ModelConfig) -> str | None:
    """Return EMBED or CLASSIFY; None for a model that generates."""
    if is_gguf(directory):
        return EMBED if model.runner == "pooling" else None
    fields = Fields(read_config(directory))
    names = fields.texts("architectures") or ("",)
    always_pools = is_encoder(fields.text("model_type", ""))
    if always_pools:
        _check_encoder(names[0], model)
    elif model.runner == "generate":
        return None
    is_classifier = names[0].endswith(CLASSIFIERS)
    is_bare = names[0].endswith("Model") and not names[0].endswith(("LMHeadModel", "ChatModel"))
    pools = always_pools or is_classifier or is_bare or (directory / "modules.json").is_file()
    if model.convert in (EMBED, CLASSIFY):
        return model.convert
    if model.runner == "pooling" or pools:
        return CLASSIFY if is_classifier else EMBED
    return None


def _check_encoder(architecture: str, model: ModelConfig) -> None:
    """Raise ConfigError if the settings or the architecture do not fit an encoder."""
    if model.runner == "generate":
        raise ConfigError(
            "runner is generate, but the tokens of this model see each other in both directions:"
            " it returns embeddings, scores or classes, not text. Remove runner."
        )
    is_of_tokens = architecture.endswith(OF_TOKENS)
    if is_of_tokens and model.runner == "auto" and model.convert != EMBED:
        raise ConfigError(
            f"{architecture} returns a result for each token, which quire does not support; give"
            " runner='pooling' (--runner pooling) for embeddings of whole prompts."
        )


def _refuse_for_generating(model: ModelConfig) -> None:
    if model.convert in (EMBED, CLASSIFY):
        raise ConfigError(
            f"convert={model.convert!r} is for models that pool; give runner='pooling', or remove"
            " it."
        )
    if model.pooler_config is not None:
        raise ConfigError(
            "pooler_config is for models that pool; remove it, or give runner='pooling'."
        )


def _with_settings(found: PoolingSpec, settings: Mapping[str, Any]) -> PoolingSpec:
    """Return a spec in which the fields of `pooler_config` replace the files' values."""
    unknown = sorted(settings.keys() - set(POOLER_FIELDS))
    if unknown:
        raise ConfigError(
            f"pooler_config has no {unknown[0]!r}; it may have {', '.join(POOLER_FIELDS)}."
        )
    kind = settings.get("seq_pooling_type") or settings.get("pooling_type") or found.kind
    if not isinstance(kind, str) or kind.lower() not in (LAST, MEAN, CLS):
        raise ConfigError(f"pooler_config: seq_pooling_type must be LAST, MEAN or CLS, got {kind}.")
    is_active = settings.get("use_activation", settings.get("normalize"))
    found = msgspec.structs.replace(found, kind=kind.lower())
    if is_active is None:
        return found
    if not isinstance(is_active, bool):
        raise ConfigError(f"pooler_config: use_activation must be a boolean, got {is_active!r}.")
    if found.task == EMBED:
        return msgspec.structs.replace(found, normalize=is_active)
    return found if is_active else msgspec.structs.replace(found, activation=NONE)


# ---- classes ---------------------------------------------------------------------------------


def _classifier(fields: Fields, directory: Path, kind: str) -> PoolingSpec:
    """Read a config's classes and their activation. kind: the default pooling of the type."""
    tokens = fields.texts("classifier_from_token") or ()
    is_difference = fields.flag("is_original_qwen3_reranker")
    if is_difference and len(tokens) != 2:
        raise fields.error("classifier_from_token", 'a reranker has two, such as ["no", "yes"]')
    labels = ("LABEL_0",) if is_difference else tokens or _labels(fields)
    return PoolingSpec(
        CLASSIFY,
        kind,
        activation=_activation(fields, directory, len(labels)),
        labels=labels,
        label_tokens=tuple(_token_id(directory, token) for token in tokens),
        is_difference=is_difference,
    )


def _labels(fields: Fields) -> tuple[str, ...]:
    """Return the names of the classes in order; transformers' default names if there are none."""
    named = fields.inner("id2label")
    count = fields.integer("num_labels", default=2, maximum=MAX_LABELS)
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(count))
    keys = named.names()
    if sorted(keys) != sorted(str(index) for index in range(len(keys))):
        raise fields.error("id2label", "it must name the classes from 0 on")
    return tuple(str(named.value(str(index))) for index in range(len(keys)))


def _activation(fields: Fields, directory: Path, count: int) -> str:
    """Return the activation of the classes' scores.

    sentence-transformers' fields take precedence over the problem type."""
    inner = fields.inner("sentence_transformers")
    name = fields.text("sbert_ce_default_activation_function", "")
    if inner is not None:
        name = inner.text("activation_fn", name)
    if count == 1:  # with several classes the file omits an absent activation
        name = _of_cross_encoder(directory) or name
    if name:
        return _named_activation(name)
    problem = fields.text("problem_type", "")
    if problem == "regression":
        return NONE
    is_single = problem in ("", "single_label_classification")
    if not is_single and problem != "multi_label_classification":
        raise fields.error("problem_type", "it must be one of transformers' three")
    return SOFTMAX if is_single and count > 1 else SIGMOID


def _of_cross_encoder(directory: Path) -> str:
    """Read the activation from the separate file of a sentence-transformers 6 cross-encoder."""
    try:
        found = Fields(read_object(directory / ST_FILE), ST_FILE)
    except FileNotFoundError:
        return ""
    return found.text("activation_fn", "") if found.value("model_type") == "CrossEncoder" else ""


def _named_activation(name: str) -> str:
    found = ST_ACTIVATIONS.get(name.rpartition(".")[2])
    if found is None:
        known = ", ".join(ST_ACTIVATIONS)
        raise ModelError(f"the activation {name!r} is not supported; supported are {known}.")
    return found


def _token_id(directory: Path, token: str) -> int:
    """Return the id of a token of classifier_from_token, from tokenizer.json."""
    try:
        vocabulary = Fields(read_object(directory / "tokenizer.json")).inner("model")
    except FileNotFoundError as error:
        raise ModelError(
            f"classifier_from_token needs {directory}/tokenizer.json, which is not there."
        ) from error
    words = None if vocabulary is None else vocabulary.value("vocab")
    found = words.get(token) if isinstance(words, Mapping) else None
    if not isinstance(found, int):
        raise ModelError(f"classifier_from_token: the vocabulary has no token {token!r}.")
    return found


# ---- embeddings ------------------------------------------------------------------------------


def _embedder(directory: Path, kind: str) -> PoolingSpec:
    """Read modules.json. Without it, pool one token (`kind`) and normalize the embedding."""
    path = directory / "modules.json"
    if not path.is_file():
        return PoolingSpec(EMBED, kind, normalize=True)
    normalize, dense = False, list[tuple[str, str]]()
    for each in _modules(path):
        name, place = each.text("type", "").rpartition(".")[2], each.text("path", "")
        if name == "Pooling":
            kind = _st_kind(_module_config(directory, place))
        elif name == "Normalize":
            normalize = True
        elif name == "Dense":
            activation = _module_config(directory, place).text("activation_function", "")
            dense.append((place, _dense_activation(activation)))
        elif name != "Transformer":
            raise ModelError(
                f"{path} has a module of type {name!r}, which is not supported; supported are"
                " Transformer, Pooling, Dense and Normalize."
            )
    return PoolingSpec(EMBED, kind, normalize=normalize, dense=tuple(dense))


def _dimensions(fields: Fields) -> tuple[int, ...] | None:
    """Return the allowed sizes of an embedding; None for any, () for the full size only."""
    if fields.has("matryoshka_dimensions"):
        return fields.integers("matryoshka_dimensions")
    return None if fields.flag("is_matryoshka", True) else ()


def _longest(directory: Path) -> int | None:
    """Return sentence-transformers' limit of tokens per prompt; None if no file sets one."""
    try:
        found = Fields(read_object(directory / ST_LENGTH_FILE), ST_LENGTH_FILE)
    except FileNotFoundError:
        return None
    has_length = found.has("max_seq_length")
    return found.integer("max_seq_length", maximum=MAX_COUNT) if has_length else None


def _modules(path: Path) -> list[Fields]:
    """Return the entries of modules.json. Raises ModelError."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ModelError(f"{path} must hold a list of objects; fetch the file again.")
    return [Fields(each) for each in found]


def _module_config(directory: Path, place: str) -> Fields:
    """Read the config of a module. Its path must not leave the model's directory."""
    parts = Path(place).parts
    if not parts or ".." in parts or Path(place).is_absolute():
        raise ModelError(f"modules.json: the path {place!r} is not a directory of the model.")
    path = directory / place / "config.json"
    try:
        return Fields(read_object(path))
    except FileNotFoundError as error:
        raise ModelError(f"{path}, which modules.json needs, is not there.") from error


def _st_kind(fields: Fields) -> str:
    """Return the kind of pooling of a Pooling module."""
    mode = fields.text("pooling_mode", "")
    flags = [name for name in fields.names() if name.startswith("pooling_mode_")]
    chosen = [mode] if mode else [n.removeprefix("pooling_mode_") for n in flags if fields.flag(n)]
    if len(chosen) != 1 or chosen[0] not in ST_KINDS:
        raise ModelError(
            f"the Pooling module needs {' and '.join(chosen) or 'nothing'}; quire pools the last"
            " token, the first one (cls) or the mean. Choose one with pooler_config:"
            ' {"seq_pooling_type": "MEAN"}.'
        )
    return ST_KINDS[chosen[0]]


def _dense_activation(given: str) -> str:
    name = (given.rpartition(".")[2] or "Identity").lower()
    if name not in DENSE_ACTIVATIONS:
        known = ", ".join(DENSE_ACTIVATIONS)
        raise ModelError(f"the Dense module's activation {given!r} is not supported: only {known}.")
    return name
