"""Checks before loading, which need only the settings and a model's small files.

Every way to start an engine runs them first, so that a wrong path fails at once. They do not import
torch or other packages, because the supervisor runs them before it starts its processes.
"""

from pathlib import Path

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.config import EngineConfig, ModelConfig, ServerConfig
from quire.base.settings.lora import parse_modules
from quire.models.checkpoint.adapter_files import read_adapter
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.source import TEXT_FILES, ModelSource, load_format_of, resolve_model
from quire.render.answers.detect import check_names
from quire.render.templates.chat_template import load_template, no_template
from quire.render.tokens.tokenizer_files import DEFAULT_TEMPLATE, chat_templates
from quire.spec.config_defaults import DEFAULTS
from quire.spec.model_spec import TRANSFORMERS, load_spec, read_config, text_part


def check_before_loading(config: EngineConfig, source: ModelSource) -> None:
    """Raise ModelError if the files are not a model, and ConfigError if the settings do not fit it.
    A model type that quire does not implement is checked only when it is loaded, because asking
    transformers takes long."""
    model = config.model
    check_names(model.tool_call_parser, model.reasoning_parser)
    if model.chat_template is not None:
        load_template(model.chat_template)
    model_type = text_part(read_config(source.directory)).get("model_type")
    if model_type not in DEFAULTS or model.model_impl == TRANSFORMERS:
        return
    load_spec(source.directory).check_length(model.max_model_len)
    if load_format_of(config, source) != "dummy":
        checkpoint_files(source.directory)


def check_adapters(config: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError if a server's adapters are not adapters, or if adapters are disabled."""
    modules, lora = parse_modules(server.lora_modules), config.lora
    if (modules or server.lora_roots) and not lora.enable_lora:
        name = "lora_modules" if modules else "lora_roots"
        raise ConfigError(f"{name} needs adapters; set enable_lora, or remove it.")
    for module in modules:
        try:
            files = read_adapter(Path(module.path), lora.max_lora_rank)
            for each in () if files.is_gguf else files.modules:  # llama.cpp has other names
                lora.check_module(each.name, files.weights)
        except ModelError as error:
            raise ConfigError(f"lora_modules: the adapter {module.name!r}: {error}") from error


def check_conversations(config: ModelConfig, source: ModelSource) -> None:
    """Raise RequestError if there is no chat template, and ConfigError if the configured template
    cannot be read."""
    if config.chat_template is not None:
        load_template(config.chat_template)
        return
    named = chat_templates(tokenizer_source(config, source).directory)
    if DEFAULT_TEMPLATE not in named:
        raise no_template(named)


def tokenizer_source(config: ModelConfig, source: ModelSource) -> ModelSource:
    """Return the source of the tokenizer: the model's own, or the one in the settings."""
    if config.tokenizer is None and config.tokenizer_revision is None:
        return source
    name, revision = config.tokenizer or config.model, config.tokenizer_revision
    return resolve_model(name, revision, progress=False, files=TEXT_FILES)
