"""Construction of a transformers model without memory, and replacement of its layers by quire's."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.hf import attention, buffers
from quire.models.hf.arrange import Arrangement
from quire.models.hf.configs import Architecture
from quire.models.hf.lower import Lowering
from quire.models.hf.modules import (
    NamedEmbedding,
    NamedHead,
    NamedLayerNorm,
    NamedLinear,
    NamedRMSNorm,
    OwnParameters,
    Product,
    SharedInput,
    is_linear,
    stored_buffers,
)
from quire.models.hf.names import CheckpointNames
from quire.models.hf.recognise import is_gelu_by_tanh, norm_of
from quire.models.hf.steps import Steps
from quire.models.hf.watch import Watch, watch
from quire.models.parts.layers import Layer, ParamFactory
from quire.ops.attention.traced import TracedAttention
from quire.ops.host.torch_import import import_rest

logger = logging.getLogger(__name__)

# Name suffixes of linear layers that choose experts, or weigh an expert.
ROUTERS = ("gate", "router", "shared_expert_gate", "router.layer")
META = torch.device("meta")
MERGED_FIRST = "gate"  # goes first of two layers merged into one
EXPERTS = {"cuda": "grouped_mm"}  # reads no values; other devices loop over experts


Run = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Empty:
    """Model without memory, and the facts of its forward pass."""

    model: Any
    seen: Watch


def empty(found: Architecture, dtype: torch.dtype) -> Empty:
    """Create a model without memory and watch it. Raise ModelError if it cannot run over paged
    memory."""
    import_rest()
    config = found.config
    config._experts_implementation = "batched_mm"  # for the pass, since it reads no values
    try:
        with META:
            model = found.model_class._from_config(config, dtype=dtype).eval()
    except Exception as error:  # any error of its code
        raise ModelError(
            f"transformers cannot create {found.model_class.__name__}: {error}"
        ) from error
    return Empty(model, watch(model))


class Rebuilt:
    """Parts of a model whose layers were replaced.

    base: the model up to the head. rest: the model without base; its `inputs_embeds` is the result
    of base. paged: state shared by the attention modules. steps: base as quire's operations, or
    None if it cannot be translated. runs_by: as in models.model.Model.
    """

    def __init__(
        self,
        made: Empty,
        factory: ParamFactory,
        device: torch.device,
        *,
        is_part: bool,
        is_compiled: bool,
    ) -> None:
        model, seen = made.model, made.seen
        self._keeps_rows = is_compiled or factory.dtype == torch.float64
        self._model, self._seen, self._factory = model, seen, factory
        self.names = CheckpointNames(model, is_part)
        self._wide = _wide_modules(model, factory.dtype)
        self.paged = attention.Paged()
        for facts in seen.attention.values():
            paged_layer = attention.PagedLayer(self.paged, facts.layer)
            setattr(facts.module, attention.LAYER_ATTRIBUTE, paged_layer)
        self._replace_ends()
        self._replace_linear()
        self.base = model.get_submodule(seen.direct[0])
        _put(model, seen.direct[0], Passed(seen.output))
        self.rest = model
        attention.register()
        for module in (self.base, self.rest, *self.base.modules(), *self.rest.modules()):
            if (config := getattr(module, "config", None)) is not None:
                config._attn_implementation = attention.NAME
        self._check_run()
        for owner, name, module in self._owned():
            buffers.make_real(owner, name, module)
        self._replace_rows()
        self.runs_by = f"{type(model).__name__} of transformers"
        if is_compiled:
            self.runs_by += ", compiled by torch"
        self.steps = self._lowered(device)
        for module in (*self.base.modules(), *self.rest.modules()):
            buffers.move(module, device)
        self.held = nn.ModuleList(self._hold())
        model.config._experts_implementation = EXPERTS.get(device.type, "eager")

    def _replace_ends(self) -> None:
        """Replace the token table and the head, which may be tied."""
        model = self._model
        paths = {id(module): name for name, module in model.named_modules()}
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(table, nn.Embedding) or type(head) is not nn.Linear:
            raise self._seen.error(
                f"its tokens are looked up by {type(table).__name__}, its head is"
                f" {type(head).__name__}"
            )
        name = paths[id(table)]
        factor = _factor_of(model, name, table)
        if factor is None:
            raise self._seen.error(f"its {type(table).__name__} does more than look up and scale")
        self.table = NamedEmbedding(name, table, self.names, self._factory, factor)
        head_name = paths[id(head)]
        is_tied = f"{head_name}.weight" in model.all_tied_weights_keys
        tied = self.table if is_tied else None
        self.head = NamedHead(head_name, head, self.names, self._factory, tied)
        _put(model, name, self.table)
        _put(model, head_name, self.head)

    def _replace_linear(self) -> None:
        """Replace linear layers. Layers with one parent and the same input tensor become one."""
        linear = {
            name: module
            for name, module in self._model.named_modules()
            if is_linear(module) and name not in self._wide
        }
        groups: dict[Any, list[str]] = {}
        order = list(self._seen.inputs)
        for name, module in linear.items():
            given = self._seen.inputs.get(name, [])
            parent = name.rpartition(".")[0]
            kind = type(module), getattr(module, "bias", None) is None
            is_single = len(given) != 1 or _is_router(name)
            key = name if is_single else (parent, id(given[0]), *kind)
            groups.setdefault(key, []).append(name)
        for names in groups.values():
            names.sort(key=lambda n: order.index(n) if n in order else -1)
            self._merge(names, linear)

    def _merge(self, names: list[str], linear: dict[str, nn.Module]) -> None:
        last = names[-1]
        if len(names) == 2:
            names = sorted(names, key=lambda n: MERGED_FIRST not in n.rpartition(".")[2])
        modules = [(name, linear[name]) for name in names]
        layer = NamedLinear(modules, self.names, self._factory, _is_router(names[0]))
        if len(names) == 1:
            _put(self._model, names[0], layer)
            return
        product = Product(layer, names.index(last))
        for index, name in enumerate(names):
            _put(self._model, name, SharedInput(product, index))

    def _replace_rows(self) -> None:
        """Replace norms and activations by quire's equivalents. They are kept if torch compiles the
        model, and in float64, since transformers' own compute in float32 at most."""
        if self._keeps_rows:
            return
        for name, module in list(self._modules()):
            if is_gelu_by_tanh(module):
                self._put(name, nn.GELU("tanh"))
            found = None if isinstance(module, Layer) or name in self._wide else norm_of(module)
            if found is not None and found.is_rms:
                sizes = found.size, found.eps, found.offset
                self._put(name, NamedRMSNorm(name, *sizes, self.names, self._factory))
            elif found is not None:
                own = found.size, found.eps, found.parts
                self._put(name, NamedLayerNorm(name, *own, self.names, self._factory))

    def _lowered(self, device: torch.device) -> Steps | None:
        """Return the base as quire's operations, or None if it cannot be translated."""
        if self._keeps_rows:
            return None
        lowering = Lowering()
        layers = NamedEmbedding, NamedLinear, NamedRMSNorm, NamedLayerNorm
        traced = [each for each in self.base.modules() if isinstance(each, layers)]
        for layer in traced:
            layer.tracer = lowering
        self.paged.tracer = lowering
        try:
            last = lowering.follow(self.run)
            steps = Arrangement(lowering.calls, lowering.buffers, last).steps(device)
            self.runs_by += ", as quire's operations"
            return steps
        except Exception as reason:  # also any error of its code without memory
            why = str(reason).strip().splitlines() or [repr(reason)]
            self.runs_by = f"{type(self._model).__name__} of transformers, its own code: {why[0]}"
            logger.info("the model runs by %s", self.runs_by)
            return None
        finally:
            self.paged.tracer = None
            for layer in traced:
                layer.tracer = None

    def compiled(self) -> Run:
        """Return `run` with the base compiled by torch, except quire's operators. The token table
        is looked up before, outside the compiled graph."""
        for module in self.base.modules():
            if isinstance(module, NamedLinear):
                self.paged.make_opaque(module)
        base: Any = torch.compile(self.base, dynamic=True)
        table = self.table

        def run(ids: torch.Tensor | None, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
            if ids is not None:
                inputs["inputs_embeds"] = table(ids)
            found: torch.Tensor = base(position_ids=positions, use_cache=False, **inputs)[0]
            return found

        return run

    def _put(self, name: str, module: nn.Module) -> None:
        """Replace the module of this name in the whole model."""
        at = f"{self._seen.direct[0]}."
        if name.startswith(at):
            _put(self.base, name.removeprefix(at), module)
        else:
            _put(self.rest, name, module)

    @torch.no_grad()
    def _check_run(self) -> None:
        """Run base and rest without memory. Raise ModelError if this fails."""
        seen, tokens = self._seen, 3
        self.paged.backend = TracedAttention()
        ids, positions = (
            torch.zeros(1, tokens, dtype=torch.int64, device=META),
            torch.arange(tokens),
        )
        try:
            hidden = self.run(ids, positions.to(META)[None])
            logits = self.rest(inputs_embeds=hidden, use_cache=False).logits
        except Exception as error:  # any error of its code
            raise seen.error(f"it does not run with layers replaced: {error}") from error
        finally:
            self.paged.backend = None
        if logits.shape != (1, tokens, seen.vocab_size):
            raise seen.error(f"its logits have the shape {list(logits.shape)}")

    def run(self, ids: torch.Tensor | None, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return hidden states [1, T, D] of ids [1, T]."""
        if ids is not None:
            inputs["input_ids"] = ids
        found = self.base(position_ids=positions, use_cache=False, **inputs)
        hidden: torch.Tensor = found[0]
        return hidden

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names in the whole model."""
        at = self._seen.direct[0]
        for name, module in self.base.named_modules():
            yield f"{at}.{name}".rstrip("."), module
        for name, module in self.rest.named_modules():
            yield name, module

    def _owned(self) -> Iterator[tuple[Any, str, nn.Module]]:
        """Yield all modules, each with its innermost transformers model, which may be the module
        itself."""
        from transformers import PreTrainedModel

        owners: dict[str, Any] = {}
        for name, module in self._modules():
            around = owners.get(name.rpartition(".")[0], self._model)
            owners[name] = module if isinstance(module, PreTrainedModel) else around
            yield owners[name], name, module

    def _hold(self) -> Iterator[OwnParameters]:
        for name, module in self._modules():
            own = next(module.named_parameters(recurse=False), None)
            if not isinstance(module, Layer) and (own is not None or stored_buffers(module)):
                wide = name in self._wide
                yield OwnParameters(name, module, self.names, self._factory, wide)


class Passed(nn.Module):
    """Replacement of the base in `rest`, which returns its input."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return self._output(inputs_embeds)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of this name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _is_router(name: str) -> bool:
    return name.endswith(ROUTERS)


def _wide_modules(model: Any, dtype: torch.dtype) -> set[str]:
    """Return the names of the modules that transformers keeps in float32 although the model's dtype
    is narrower."""
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if not patterns:
        return set()
    found = re.compile("|".join(patterns))
    return {name.rpartition(".")[0] for name, _ in model.named_parameters() if found.search(name)}


def _factor_of(model: Any, name: str, table: nn.Embedding) -> float | None:
    """Return the factor that a table's rows are scaled by, or None if the table does something
    else."""
    if type(table) is nn.Embedding:
        return 1.0
    buffers.make_real(model, name, table)
    ids = torch.arange(3)[None]
    rows = torch.rand(3, table.embedding_dim, dtype=table.weight.dtype) + 0.5
    ones = torch.ones_like(rows)
    got, of_ones = (
        torch.func.functional_call(table, {"weight": each}, (ids,)) for each in (rows, ones)
    )
    factor = float(of_ones.flatten()[0])
    return factor if torch.equal(got[0], rows * factor) else None
