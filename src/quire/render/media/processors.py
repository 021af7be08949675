"""Choose the image processor of a model.

Input: the model's files (`model_files.py`). Output: `MediaSettings`, which are sent to the decoding
process, and the processor for these settings.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from quire.base.errors import ModelError
from quire.base.plugins import IMAGE_PROCESSORS, all_names, load_plugin
from quire.render.media.gemma3 import GemmaImages
from quire.render.media.llava import LlavaImages, LlavaNextImages
from quire.render.media.model_files import QWEN, QWEN3, ModelFiles, is_known
from quire.render.media.processor import ImageProcessor
from quire.render.media.qwen_vl import QwenImages
from quire.render.media.videos import QwenVideos
from quire.spec.media_families import FAMILIES

LLAVA: dict[str, type[LlavaImages] | type[LlavaNextImages]] = {
    "llava": LlavaImages,
    "llava_next": LlavaNextImages,
}


@dataclass(frozen=True)
class MediaSettings:
    """The settings that determine how a model's images are preprocessed."""

    model_type: str
    config: dict[str, Any]  # the processor's settings; for another package's: fields of ModelFiles
    patch_size: int = 14  # side of the tower's patches in pixels; LLaVA families only
    num_extra_tokens: int = 0  # tokens without a patch; LLaVA families only
    video: dict[str, Any] = field(default_factory=dict)  # settings of videos; images' if empty


def media_settings(files: ModelFiles) -> MediaSettings:
    """Return the settings of a model. Raises ModelError if no processor for the model exists."""
    model_type, processor = str(files.config.get("model_type")), files.processor
    _check_family(model_type)
    if model_type not in FAMILIES:
        return MediaSettings(model_type, asdict(files))
    config = {**(processor.get("image_processor") or {}), **files.preprocessor}
    if model_type == "gemma3" and processor.get("image_seq_length") is not None:
        config.setdefault("image_seq_length", processor["image_seq_length"])
    if model_type in LLAVA:
        return MediaSettings(model_type, config, *_tower_layout(files.config, processor))
    video = {**(processor.get("video_processor") or {}), **files.video}
    return MediaSettings(model_type, config, video=video)


def image_processor(settings: MediaSettings) -> ImageProcessor:
    """Return the processor of these settings."""
    _check_family(settings.model_type)
    if settings.model_type in QWEN:
        return QwenImages.from_config(settings.config)
    if settings.model_type == "gemma3":
        return GemmaImages.from_config(settings.config)
    if settings.model_type in LLAVA:
        family = LLAVA[settings.model_type]
        return family.from_config(settings.config, settings.patch_size, settings.num_extra_tokens)
    found = load_plugin(IMAGE_PROCESSORS, settings.model_type, FAMILIES)
    made: ImageProcessor = found(ModelFiles(**settings.config))
    return made


def video_processor(settings: MediaSettings) -> QwenVideos | None:
    """Return the processor of videos, or None for a model without videos.

    Without settings for videos, the settings for images apply."""
    if settings.model_type not in QWEN:
        return None
    config = settings.video or settings.config
    return QwenVideos.from_config(config, counts_all=settings.model_type in QWEN3)


def _check_family(model_type: str) -> None:
    if not is_known(model_type):
        raise ModelError(
            f"there is no image processor for models of type {model_type!r};"
            f" use a model of one of the types {all_names(IMAGE_PROCESSORS, FAMILIES)}."
        )


def _tower_layout(model: dict[str, Any], processor: dict[str, Any]) -> tuple[int, int]:
    """Return the patch size, and the number of tokens in addition to one for each patch.

    Values in `processor_config.json` take precedence. Otherwise a CLIP tower adds one class
    feature. The "default" selection drops one feature.
    """
    vision = model.get("vision_config") or {}
    is_clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    patch_size = processor.get("patch_size") or vision.get("patch_size") or 14
    extra = processor.get("num_additional_image_tokens")
    strategy = processor.get("vision_feature_select_strategy")
    strategy = strategy or model.get("vision_feature_select_strategy") or "default"
    num_extra = int(is_clip) if extra is None else int(extra)
    return int(patch_size), num_extra - (strategy == "default")
