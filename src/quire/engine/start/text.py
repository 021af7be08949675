"""Text side of an engine: tokenizer, renderer and request maker. It needs no torch."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.config import ModelConfig
from quire.base.settings.fields import json_object
from quire.engine.client.request_maker import RequestMaker
from quire.engine.grammars.vocabulary import Vocabulary, make_vocabulary
from quire.engine.start.preflight import tokenizer_source
from quire.models.checkpoint.source import ModelSource
from quire.render.answers.detect import check_names
from quire.render.generation import read_generation_defaults
from quire.render.media.model_files import takes_images
from quire.render.renderer import Renderer
from quire.render.templates.template_pool import TemplatePool
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import has_tokenizer
from quire.spec.model_spec import TRANSFORMERS

if TYPE_CHECKING:
    from quire.render.media.media_renderer import MediaRenderer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSide:
    """Objects that turn text into requests. tokenizer: None if the model takes only token ids."""

    renderer: Renderer
    tokenizer: Tokenizer | None
    requests: RequestMaker


def build_text_side(config: ModelConfig, source: ModelSource, maker_id: int = 0) -> TextSide:
    """Build the text side from a model's files. Raises ModelError or ConfigError.

    maker_id: number of the front end; it makes the seeds of an engine's front ends differ.
    """
    check_names(config.tool_call_parser, config.reasoning_parser)
    tokenizer = _read_tokenizer(config, source)
    media = None if tokenizer is None else _media_renderer(config, source, tokenizer)
    eos = None if tokenizer is None else tokenizer.eos_token_id
    use_sampling = config.generation_config == "auto"
    override = json_object("override_generation_config", config.override_generation_config)
    defaults = read_generation_defaults(source.directory, eos, use_sampling, override)
    return TextSide(
        Renderer(
            tokenizer,
            config.chat_template,
            templates=TemplatePool(),
            parsers=(config.tool_call_parser, config.reasoning_parser),
            template_kwargs=json_object(
                "default_chat_template_kwargs", config.default_chat_template_kwargs
            ),
            media=media,
        ),
        tokenizer,
        RequestMaker(tokenizer, defaults, config.seed, maker_id, config.stream_interval),
    )


def _media_renderer(
    config: ModelConfig, source: ModelSource, tokenizer: Tokenizer
) -> "MediaRenderer | None":
    """Return the renderer of images; None for a model without a vision tower, or run without it.
    If the model's image files are unusable, log a warning and return None."""
    if config.model_impl == TRANSFORMERS or not takes_images(source.directory):
        return None
    from quire.render.media.media_renderer import MediaRenderer  # imports Pillow

    try:
        return MediaRenderer.from_directory(source.directory, tokenizer)
    except ModelError as error:
        logger.warning("images are not accepted: %s", error)
        return None


def read_vocabulary(config: ModelConfig, source: ModelSource, vocab_size: int) -> Vocabulary:
    """Read the vocabulary for grammars. vocab_size: number of the model's logits. Raises
    ModelError, ConfigError or MissingDependency."""
    tokenizer = _read_tokenizer(config, source)
    eos = None if tokenizer is None else tokenizer.eos_token_id
    override = json_object("override_generation_config", config.override_generation_config)
    defaults = read_generation_defaults(source.directory, eos, False, override)
    return make_vocabulary(tokenizer, vocab_size, defaults.eos_token_ids)


def check_same_tokens(config: ModelConfig, source: ModelSource, drafter: ModelSource) -> None:
    """Raise ConfigError if the draft model's tokens differ from the served model's. A draft model
    without a tokenizer passes."""
    ours = _read_tokenizer(config, source)
    if ours is None or not has_tokenizer(drafter.directory):
        return
    theirs = Tokenizer.from_directory(drafter.directory)
    num = min(ours.vocab_size, theirs.vocab_size)
    pairs = zip(ours.tokens(range(num)), theirs.tokens(range(num)), strict=True)
    found = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
    if found is not None:
        raise ConfigError(
            f"the draft model {drafter.name} has a different vocabulary from {source.name}: token"
            f" {found} is {theirs.token(found)!r}, not {ours.token(found)!r}. Use a draft model of"
            " the same family, with the same tokenizer."
        )


def _read_tokenizer(config: ModelConfig, source: ModelSource) -> Tokenizer | None:
    directory = tokenizer_source(config, source).directory
    return Tokenizer.from_directory(directory) if has_tokenizer(directory) else None
