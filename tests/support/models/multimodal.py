"""Tiny checkpoints of models that read images, prompts with images, and their logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.models.vision.positions import mrope_positions
from quire.ops.attention_inputs import Int32
from quire.render.media.llava import LlavaNextImages
from quire.spec.model_spec import ModelSpec
from quire.tools.verify.paged import PagedRun, Paging
from quire.tools.verify.precision import WholePrecision
from tests.support.models.checkpoints import EAGER
from tests.support.models.vision_checkpoints import (
    CONFIGS,
    MODELS,
    looked_up,
    qwen_image,
    random_image,
)

IMAGE_TOKEN, HIDDEN = 60, 24  # the width is that of the towers in vision_checkpoints.py
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2}
GEMMA = {
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SECTIONS = {"qwen2_vl": [1, 1, 2], "qwen2_5_vl": [2, 1, 1], "qwen3_vl": [2, 1, 1]}
SPECIAL = {
    f"{name}_token_id": 61 + i for i, name in enumerate(("video", "vision_start", "vision_end"))
}
LLAVA_NEXT_SIZES = [(12, 24), (40, 11), (13, 14)]


def config_of(family: str, text_type: str = "", **text: Any) -> dict[str, Any]:
    """Return the config of a family's whole model. text_type: of LLaVA's text part."""
    own = TEXT | {"model_type": text_type or "llama"} if family.startswith("llava") else TEXT
    if family.startswith("qwen"):
        sections = SECTIONS[family.removesuffix("_moe")]
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": sections}
        own = own | {"rope_parameters": rope} | (EXPERTS if family.endswith("_moe") else {})
    tokens = {"image_token_id": IMAGE_TOKEN, **SPECIAL}
    if family == "gemma3":
        own = TEXT | GEMMA
    if not family.startswith("qwen"):
        tokens = {"image_token_index": IMAGE_TOKEN}
    return {**CONFIGS[family], **tokens, "text_config": own | text}


def write_multimodal(
    folder: Path, family: str, text_type: str = "", *, ties: bool = False, **text: Any
) -> Any:
    """Write a checkpoint in float64; return transformers' model, loaded from it."""
    torch.manual_seed(3)
    kind = MODELS[family]
    with WholePrecision():
        config = kind.config_class(**config_of(family, text_type, **text), tie_word_embeddings=ties)
        model = kind(config).double()
        for parameter in model.parameters():
            scale = 0.1 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter.data.normal_(0.0, scale).add_(parameter.dim() == 1)
        model.save_pretrained(folder)
        return kind.from_pretrained(folder, dtype=torch.float64, **EAGER).eval()


@dataclass(frozen=True)
class Prompt:
    """tokens: with placeholders. images: with the index of the first placeholder of each."""

    tokens: list[int]
    images: list[tuple[int, Any]]
    sizes: list[tuple[int, int]]  # pixels of the original images, for LLaVA-NeXT

    def ends(self) -> Int32:
        """Return for each token the end of the image that it belongs to, 0 for text, [T]."""
        found = np.zeros(len(self.tokens), np.int32)
        for (start, _), length in zip(self.images, self.lengths, strict=True):
            found[start : start + length] = start + length
        return found

    @property
    def lengths(self) -> list[int]:
        """Return the number of placeholders of each image."""
        ends = [start for start, _ in self.images[1:]] + [len(self.tokens)]
        return [
            self.tokens[start:end].count(IMAGE_TOKEN)
            for (start, _), end in zip(self.images, ends, strict=False)  # one more than none
        ]

    def positions(self, axes: int) -> torch.Tensor:
        """Return the positions, [axes, T] or [T]."""
        if axes == 1:
            return torch.arange(len(self.tokens))
        grids = [(start, image.grid) for start, image in self.images]
        return torch.from_numpy(mrope_positions(len(self.tokens), grids, 2)[0])


def images_of(family: str) -> list[tuple[Any, int, tuple[int, int]]]:
    """Return images of odd sizes, the number of their tokens, and their sizes before processing."""
    if family.startswith("qwen"):
        grids = [(2, 14), (6, 10), (2, 2), (10, 2)]
        return [
            (qwen_image(seed, *grid), grid[0] * grid[1] // 4, grid)
            for seed, grid in enumerate(grids)
        ]
    if family == "gemma3":
        return [(random_image(seed, (1, 14, 14, 3), (1,)), 4, (14, 14)) for seed in range(3)]
    if family == "llava":
        return [(random_image(seed, (1, 12, 12, 3), (4, 4)), 16, (12, 12)) for seed in range(3)]
    config = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12},
              "image_grid_pinpoints": CONFIGS[family]["image_grid_pinpoints"]}  # fmt: skip
    processor, random = LlavaNextImages.from_config(config, 3, 0), np.random.default_rng(3)
    found = []
    for size in LLAVA_NEXT_SIZES:
        image = processor.process(random.integers(0, 256, (*size, 3), np.uint8))
        found.append((image, image.num_tokens, size))
    return found


def prompt_of(family: str, numbers: Sequence[int]) -> Prompt:
    """Return a prompt with these images, and text before, between and after them."""
    random, images = np.random.default_rng([*numbers]), images_of(family)
    tokens: list[int] = [1, *random.integers(3, 60, 2).tolist()]
    placed, sizes = [], []
    for number in numbers:
        image, length, size = images[number]
        tokens.append(SPECIAL["vision_start_token_id"])
        placed.append((len(tokens), image))
        sizes.append(size)
        tokens += [IMAGE_TOKEN] * length + [SPECIAL["vision_end_token_id"]]
        tokens += random.integers(3, 60, int(random.integers(1, 4))).tolist()
    return Prompt(tokens, placed, sizes)


def reference_logits(model: Any, family: str, prompt: Prompt) -> torch.Tensor:
    """Return transformers' logits of a prompt, [T, V]."""
    images = [image for _, image in prompt.images]
    ids = torch.tensor([prompt.tokens])
    named: dict[str, Any] = {}
    if images and family.startswith("qwen"):
        values = [looked_up(image, 1)[:, :, None].expand(-1, -1, 2, -1, -1) for image in images]
        named["pixel_values"] = torch.cat([each.flatten(1) for each in values])
        named["image_grid_thw"] = torch.tensor([image.grid for image in images])
        named["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    elif images:
        squares = [looked_up(image, 3).permute(0, 3, 1, 2) for image in images]
        if family == "gemma3":
            named["token_type_ids"] = (ids == IMAGE_TOKEN).int()
        if family in ("gemma3", "llava"):
            named["pixel_values"] = torch.cat(squares)
        else:
            most = max(map(len, squares))
            padded = [torch.cat((s, s.new_zeros(most - len(s), *s.shape[1:]))) for s in squares]
            named["pixel_values"] = torch.stack(padded)
            named["image_sizes"] = torch.tensor(prompt.sizes)
    with torch.inference_mode(), WholePrecision():
        logits: torch.Tensor = model(ids, **named).logits[0]
    return logits


class _WithPositions:
    """A model that is given other positions than the step has."""

    def __init__(self, model: Any) -> None:
        self.model, self.positions = model, torch.empty(0)
        self.logits = model.logits

    def __call__(self, ids_T: torch.Tensor, _: torch.Tensor, attention: Any) -> torch.Tensor:
        hidden_TD: torch.Tensor = self.model(ids_T, self.positions, attention)
        return hidden_TD


class MediaRun(PagedRun):
    """Prompts with images on their way through a model whose encoder memory holds the images.

    Slots are scattered. Prompts with the same images have slots of their own. is_whole: tokens of
    an image see each other in both directions.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        prompts: Sequence[Prompt],
        paging: Paging,
        *,
        is_whole: bool = False,
    ) -> None:
        ids = self._encoded(model, prompts)
        super().__init__(model, spec, ids, paging)
        self._given = _WithPositions(self._model)
        self._model = self._given
        self._positions = [prompt.positions(model.position_axes) for prompt in prompts]
        self._ends = [prompt.ends() for prompt in prompts] if is_whole else None

    @torch.inference_mode()
    def _encoded(self, model: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
        num_slots = sum(sum(prompt.lengths) for prompt in prompts) + 5
        memory = model.take_encoder_memory(num_slots)
        free = np.random.default_rng(2).permutation(num_slots).tolist()
        found = []
        for prompt in prompts:
            ids = list(prompt.tokens)
            for start, image in prompt.images:
                (rows,) = model.vision([image])
                assert ids[start : start + len(rows)] == [IMAGE_TOKEN] * len(rows)
                slots = [free.pop() for _ in rows]
                memory[slots] = rows.to(memory.dtype)
                ids[start : start + len(rows)] = [-1 - slot for slot in slots]
            found.append(ids)
        return found

    def step(self, lens: Sequence[int]) -> torch.Tensor:
        """See PagedRun."""
        ranges = [(done, done + length) for done, length in zip(self._done, lens, strict=True)]
        parts = [all_[..., a:b] for all_, (a, b) in zip(self._positions, ranges, strict=True)]
        self._given.positions = torch.cat(parts, -1)
        ends_T = None
        if self._ends is not None:
            own = [all_[a:b] for all_, (a, b) in zip(self._ends, ranges, strict=True)]
            ends_T = np.concatenate(own)
        return super().step(lens, ends_T)


def run_prompts(
    model: Any,
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    chunks: Sequence[Sequence[int]],
    *,
    is_whole: bool = False,
    **paging: Any,
) -> list[torch.Tensor]:
    """Return the logits of each prompt, [T, V]. chunks: for each step the tokens of each prompt."""
    run = MediaRun(model, spec, prompts, Paging(**paging), is_whole=is_whole)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for lens in chunks:
        for found, piece in zip(pieces, run.step(lens).split(list(lens)), strict=True):
            found.append(piece)
    return [torch.cat(each) for each in pieces]


def cut(prompts: Sequence[Prompt], num_steps: int) -> list[list[int]]:
    """Return chunks of all prompts, almost equal ones, one list for each step."""
    bounds = [np.linspace(0, len(each.tokens), num_steps + 1).astype(int) for each in prompts]
    return np.diff(bounds).T.tolist()
