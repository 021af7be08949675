"""The engine's forward pass for a trainer: the same packed weights, program and log-probabilities.

Shape legend: T tokens, R rows with logits, V vocabulary, D model dim, L mixtures of experts,
E experts of a mixture, C experts of a token, M = L E.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from quire.models.checkpoint.formats import IN_THE_DTYPE
from quire.models.load.assembly import Assembly, empty_model
from quire.models.model import Model
from quire.models.parts.experts import SparseMLP
from quire.models.parts.routes import chosen_experts, mixtures_of, record_routes
from quire.ops.attention.base import KVLayout
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.elementwise import add
from quire.ops.embedding import select_rows
from quire.ops.host.threads import torch_threads
from quire.ops.sampling.logprobs import token_logprobs
from quire.ops.trace.program import ProgramDraft
from quire.runner.native_model import NativePass
from quire.runner.native_program import TRACED_TOKENS, traced
from quire.spec.model_spec import ModelSpec
from quire.training.packing import BLOCK_SIZE, PackedStep

CPU = torch.device("cpu")
NUM_RESULTS = 2  # buffers of each program: hidden states, inputs of layers


@dataclass(frozen=True, eq=False)
class PassValues:
    """The engine's values of a step. inputs: float32 [T, D] of each layer and, last, of the
    final norm. hidden_TD: float32, after the final norm. experts_TLC: the chosen experts of each
    mixture, in order of the layers; None without mixtures."""

    inputs: tuple[torch.Tensor, ...]
    hidden_TD: torch.Tensor
    experts_TLC: torch.Tensor | None


class EnginePass:
    """A model that the C++ core runs in one call, as the engine does. Its weights are replaced as
    a whole. dtype: of weights, keys and values."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        self._num_blocks = 0
        self._backend: CpuBackend | None = None
        self._model: Model | None = None
        self._native: NativePass | None = None

    def __reduce__(self) -> tuple[type["EnginePass"], tuple[ModelSpec, torch.dtype]]:
        """Copy and pickle the pass without weights, which each forward pass loads."""
        return EnginePass, (self._spec, self._dtype)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pack weights, given by their names in the checkpoint and in any float dtype."""
        self._model = self._native = None  # frees the memory of the old weights
        assembly = Assembly(empty_model(self._spec, self._dtype, CPU), CPU, IN_THE_DTYPE)
        for name, tensor in tensors.items():
            assembly.put(name, tensor)
        self._model = assembly.finish()
        self._model.record_layer_inputs(range(self._spec.num_layers + 1))

    def run(self, step: PackedStep, routes_TLC: torch.Tensor | None = None) -> PassValues:
        """Compute all tokens of a step. routes_TLC: experts that tokens must use, [T, L, C]; -1 in
        tokens that choose their own. None: all choose."""
        native, num = self._native_for(step.num_blocks), len(step.ids_T)
        assert self._backend is not None
        self._backend.prepare(step.attention(len(self._spec.cache_groups)))
        outside = [torch.empty(num, width) for width in native.draft.widths[:NUM_RESULTS]]
        if (experts := self._spec.experts) is not None:
            width = native.draft.widths[NUM_RESULTS]
            bias_TM = torch.zeros(num, width)
            if routes_TLC is not None:
                bias_TM = only_routes(routes_TLC, experts.num_experts)
            outside += [torch.empty(num, width), bias_TM]
        with torch_threads(1):
            native.run(step.ids_T, step.positions_T, outside)
        chosen = None if experts is None else chosen_experts(outside[NUM_RESULTS], experts)
        inputs = outside[1].split(self._spec.hidden_size, dim=1)
        return PassValues(inputs, outside[0], chosen)

    def logprobs(
        self, hidden_TD: torch.Tensor, rows_R: torch.Tensor, ids_R: torch.Tensor
    ) -> torch.Tensor:
        """Return the log-probabilities of tokens after some rows, float32 [R]."""
        assert self._model is not None, "run comes first"
        with torch_threads(1):
            logits_RV = self._model.logits(select_rows(hidden_TD, rows_R))
            return token_logprobs(logits_RV, ids_R, 0).logprobs[:, 0]

    def _native_for(self, num_blocks: int) -> NativePass:
        """Return the forward pass over at least so many blocks of KV memory."""
        assert self._model is not None, "load comes first"
        if self._backend is None or num_blocks > self._num_blocks:
            groups, self._num_blocks = self._spec.cache_groups, num_blocks
            sizes = (num_blocks,) * len(groups)
            layout = KVLayout(groups, sizes, BLOCK_SIZE, self._dtype, CPU)
            self._backend, self._native = CpuBackend(layout), None
        if self._native is None:
            self._native = NativePass(trace_with_bias(self._model), self._backend)
        return self._native


def trace_with_bias(model: Model) -> ProgramDraft:
    """Trace a model whose program adds a bias [T, M] to the logits of its routers. The buffers of
    the caller are the hidden states and the layers' inputs and, with mixtures, the sums and the
    bias."""
    has_mixtures = any(isinstance(each, SparseMLP) for each in model.modules())
    bias_TM = record_biased_routes(model, TRACED_TOKENS) if has_mixtures else None

    def run(ids_T: torch.Tensor, positions_T: torch.Tensor) -> list[torch.Tensor]:
        hidden_TD = model(ids_T, positions_T, TracedAttention())
        copies = [each.last(TRACED_TOKENS) for each in model.records]
        return [hidden_TD, *copies, *([] if bias_TM is None else [bias_TM])]

    return traced(run)


def record_biased_routes(model: Model, num_tokens: int) -> torch.Tensor:
    """Let a model add a bias to its routers' logits before it copies them; return the bias."""
    record_routes(model)
    mixtures = mixtures_of(model)
    count = mixtures[0].options.num_experts
    bias_TM = torch.zeros(num_tokens, len(mixtures) * count)
    for number, mixture in enumerate(mixtures):
        own, copy = slice(number * count, (number + 1) * count), mixture.on_logits
        assert copy is not None
        mixture.on_logits = partial(_biased, bias_TM[:, own], copy)
    return bias_TM


def _biased(
    bias_TE: torch.Tensor,
    copy: Callable[[torch.Tensor], torch.Tensor],
    logits_TE: torch.Tensor,
) -> torch.Tensor:
    return copy(add(logits_TE, bias_TE))


def only_routes(routes_TLC: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return a bias of the routers' logits, float32 [T, M], from routes [T, L, C]. It leaves tokens
    only the experts of their routes, and all experts where the route is -1."""
    is_given_TL1 = (routes_TLC >= 0).all(dim=-1, keepdim=True)
    bias_TLE = torch.zeros(*routes_TLC.shape[:2], num_experts)
    bias_TLE = bias_TLE.masked_fill(is_given_TL1, -torch.inf)
    return bias_TLE.scatter(-1, routes_TLC.long().clamp(min=0), 0.0).flatten(1)
