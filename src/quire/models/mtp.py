"""Layers for multi-token prediction (MTP) as draft heads (DeepSeek-V3, arXiv 2412.19437, section
2.2).

Shape legend: T tokens, R rows, D model dim, V vocabulary.

The layer computes a state from the token at p + 1 and the model's state at p, both normalised. For
further draft tokens, its own normalised state replaces the model's:

    model's state at p (after its last norm) -> norm --.
    token at p + 1 -> the model's embedding -> norm ----+-> project -> layer -> norm -> state
                                                        state -> the model's head -> logits

So one layer, trained for the token after the next, is applied repeatedly. Checkpoints may hold
copies of the model's embedding and head with the layer; these are not loaded.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from quire.models.deepseek.deepseek import DeepseekLayer, SharedExpertsLayer, deepseek_options
from quire.models.deepseek.glm4_moe import glm4_moe_options
from quire.models.draft_head import DraftHead
from quire.models.model import Model
from quire.models.parts.decoder import DecoderLayerKind, LayerPlace, LayerStep, layer_rope
from quire.models.parts.experts import ExpertList, StackedExperts
from quire.models.parts.layers import Linear, ParamFactory, RMSNorm
from quire.models.parts.options import DecoderOptions
from quire.models.parts.rope import Rotary
from quire.models.qwen.qwen3_5 import Qwen3_5Layer
from quire.models.qwen.qwen3_next import Qwen3NextLayer, hybrid_options
from quire.ops.attention.base import AttentionBackend
from quire.ops.elementwise import concatenate
from quire.spec.model_spec import ModelSpec


class Family(NamedTuple):
    """The layer of a type of models, and its options."""

    layer: DecoderLayerKind
    options: Callable[[ModelSpec], DecoderOptions]


DEEPSEEK = Family(DeepseekLayer, deepseek_options)
QWEN3_5 = Family(Qwen3_5Layer, hybrid_options)
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": Family(SharedExpertsLayer, glm4_moe_options),
    "glm4_moe_lite": DEEPSEEK,
    "qwen3_next": Family(Qwen3NextLayer, hybrid_options),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
}


class MultiTokenHead(DraftHead):
    """The MTP layer of a model, with the model's embedding and head. spec: see `multi_token_spec`
    in draft_model.py."""

    title = "MTP layer"

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        family, names, size = FAMILIES[spec.model_type], spec.multi_token, spec.hidden_size
        assert names is not None, "the spec is of an MTP layer"
        self.target_layers = (names.num_before + 1,)  # the output of the model's last norm
        options, eps = family.options(spec), spec.layers.norm_eps
        rope = layer_rope(spec, options, 0)
        assert rope is not None, "these layers turn queries and keys"
        self._names, self.dtype = names, factory.dtype
        self.num_read = self.num_out = self._size = size

        def norm(name: str) -> RMSNorm:
            return RMSNorm(name, size, eps, factory, options.norm_offset)

        self.token_norm, self.state_norm = norm(names.token_norm), norm(names.state_norm)
        self.project = Linear([names.project], 2 * size, [size], factory)
        self.layer = family.layer(LayerPlace(spec, options, 0, names.layer, factory))
        self.norm = norm(names.norm)
        self._rotary = Rotary(rope, spec.rotary_dim, factory)
        self.elsewhere = tuple(name for each in self._experts() for name in each.elsewhere)
        self._target: list[Model] = []  # a list, so that torch registers no submodule

    def adopt(self, names: Iterable[str]) -> None:
        """See Model. Detect whether files store experts one by one or in one tensor."""
        stored = set(names)
        for each in self._experts():
            each.adopt(stored)

    def _experts(self) -> list[ExpertList | StackedExperts]:
        return [each for each in self.modules() if isinstance(each, ExpertList | StackedExperts)]

    def ignores(self, name: str) -> bool:
        """See Model. Ignore all other layers, and copies of the embedding and the head."""
        is_copy = name.rpartition(".")[0] in self._names.copies
        return is_copy or not name.startswith(self._names.prefix) or super().ignores(name)

    def attach(self, target: Model) -> None:
        """Share the target's embedding and head."""
        self.share_embedding(target, self._size)
        self._target = [target]

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See DraftHead. Return the normalised state of each known token, [T, D]."""
        assert read_TF is not None, "the layer reads states of its model"
        state_TD = self.state_norm(read_TF.to(self.dtype))[0]
        x_TD = self.project(concatenate(self.token_norm(self.embed(ids_T))[0], state_TD))
        step = LayerStep(self._rotary(positions_T), attention, positions_T)
        out_TD: torch.Tensor = self.norm(*self.layer(x_TD, None, step))[0]
        return out_TD

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RE: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See DraftHead. Return the normalised state of each draft token, [R, D]."""
        return self.first(ids_R, positions_R, out_RE, attention)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """See Model. Compute logits by the target's head."""
        return self._target[0].logits(hidden_RD)
