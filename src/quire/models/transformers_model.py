"""Run a model by its class in transformers, over quire's paged KV memory.

Shape legend: T tokens, R rows, D model dim, V vocabulary.

Quire's layers replace linear layers, norms, the token table and the head (hf/build.py), and
attention (hf/attention.py). The class computes the rest. If all of the rest can be expressed as
quire's operations (hf/lower.py), the model runs without the class.
"""

from collections.abc import Iterable

import torch
from torch import nn

from quire.models.checkpoint.kv_scales import NAME_ENDS
from quire.models.hf.build import Rebuilt, empty
from quire.models.hf.configs import architecture
from quire.models.model import Model
from quire.models.parts.layers import ParamFactory
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.host.threads import num_threads, torch_threads
from quire.ops.trace.program import Untraceable
from quire.spec.model_spec import COMPILED, ModelSpec

MANY_TOKENS, MANY_CORES = 64, 8


class TransformersModel(Model):
    """A model that runs by its class in the transformers package."""

    ignored_tensors = ("rotary_emb.inv_freq", *NAME_ENDS)

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        found = architecture(spec.raw)
        nowhere = ParamFactory(factory.dtype, torch.device("meta"))
        made = empty(found, factory.dtype)
        windows = tuple(made.seen.attention[layer].window for layer in range(spec.num_layers))
        if windows != spec.layer_windows:
            raise made.seen.error(f"its layers' windows are {windows}, not {spec.layer_windows}")
        is_compiled = spec.implementation == COMPILED
        rebuild_options = {"is_part": found.is_part, "is_compiled": is_compiled}
        rebuilt = Rebuilt(made, nowhere, factory.device, **rebuild_options)
        self._steps = rebuilt.steps
        self._run = rebuilt.compiled() if is_compiled else rebuilt.run
        self._paged, self._names = rebuilt.paged, rebuilt.names
        self.base, self.rest, self.held = rebuilt.base, rebuilt.rest, rebuilt.held
        self.head, self.runs_by = rebuilt.head, rebuilt.runs_by
        self.only_operations = self._steps is not None
        self._has_products = any(p.dim() > 1 for p in self.held.parameters())
        _give_memory(self, factory)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        inputs_embeds_TD: torch.Tensor | None = None,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Model. There are no stages, because the class does not expose its layers' bounds."""
        assert intermediate_TE is None
        if self._steps is not None:
            inputs = input_ids_T, positions_T, attention, inputs_embeds_TD
            found: torch.Tensor = self._steps(*inputs)
            return found
        if isinstance(attention, TracedAttention):
            raise Untraceable("transformers' code computes outside quire's operations")
        self._paged.backend = attention
        with torch_threads(self._torch_threads(positions_T)):
            if inputs_embeds_TD is not None:
                return self._run(None, positions_T[None], inputs_embeds=inputs_embeds_TD[None])[0]
            return self._run(input_ids_T[None], positions_T[None])[0]

    def _torch_threads(self, positions_T: torch.Tensor) -> int | None:
        """Return the number of threads for torch; None keeps its setting.

        Torch's threads run in addition to the core's. Several pay off only for torch's own large
        products (experts) on many cores.
        """
        is_large = self._has_products and len(positions_T) >= MANY_TOKENS
        if positions_T.device.type != "cpu" or (is_large and num_threads() >= MANY_CORES):
            return None
        return 1

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.rest(inputs_embeds=hidden_RD[None], use_cache=False).logits
        return logits[0]

    def adopt(self, names: Iterable[str]) -> None:
        self._names.adopt(names)

    def names_of(self, name: str) -> tuple[str, ...]:
        return (self._names.canonical(name),)

    def ignores(self, name: str) -> bool:
        return self._names.is_foreign(name) or super().ignores(self._names.canonical(name))


def _give_memory(model: nn.Module, factory: ParamFactory) -> None:
    """Replace meta parameters by parameters of the factory; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:
                made[id(old)] = factory.parameter(*old.shape, dtype=old.dtype)
            setattr(module, name, made[id(old)])
