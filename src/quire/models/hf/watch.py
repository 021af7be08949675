"""Watched forward pass of a transformers model without memory, which shows what its layers do.

The pass shows the model's true sizes (heads, windows, scales as its code uses them, whatever the
names in its config). It also shows which linear layers share one input, and which module's output
the head reads. A model that cannot be computed exactly over paged memory is refused here, with the
reason.

For the pass, an attention function and a mask function are registered under another name. The mask
function receives transformers' mask rule and evaluates it at positions around every edge. Only
causal attention, in full or within a window, fits the cache.

Shape legend: T tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.hf.modules import is_linear

WATCHED = "quire-watched"
NUM_TOKENS = 5  # tokens of the pass
MARGIN = 8  # positions beyond the model's maximum, to test masks
# Arguments that attention functions may ignore, since they do not change the result.
HARMLESS = {
    "dropout", "scaling", "position_ids", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
}  # fmt: skip
NO_ATTENTION = "no layer attends through transformers' AttentionInterface"
OBEYED = {"sliding_window", "softcap", "s_aux"}


@dataclass(frozen=True)
class AttentionFacts:
    """Attention of one module. window: number of visible tokens; None for all earlier ones."""

    module: nn.Module
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass
class Watch:
    """Facts found by the pass.

    attention: by layer. inputs: the tensors that linear layers were called with, by name. direct:
    names of the modules that the model itself called, in order. hidden_size: width of the result of
    the first of these. vocab_size: width of the logits. output: class of the first one's result.
    running: modules being called, the innermost one last.
    """

    name: str
    reach: int
    attention: dict[int, AttentionFacts] = field(default_factory=dict)
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    direct: list[str] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)
    hidden_size: int = 0
    vocab_size: int = 0
    output: Any = None
    running: list[str] = field(default_factory=list)

    def error(self, why: str) -> ModelError:
        return ModelError(f"{self.name} cannot run on paged memory: {why}.")


_watch: ContextVar[Watch | None] = ContextVar("quire_watch", default=None)


def watch(model: Any) -> Watch:
    """Run a model whose tensors are all on the meta device, and return the facts. Raise ModelError
    if it cannot be computed exactly."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(WATCHED, _watched_attention)
    AttentionMaskInterface.register(WATCHED, _watched_mask)
    config = model.config
    found = Watch(type(model).__name__, _reach(config))
    config._attn_implementation = WATCHED
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(NUM_TOKENS, device="meta")[None]
    sees_all = torch.ones(1, NUM_TOKENS, dtype=torch.int64)  # in memory, since its values are read
    token = _watch.set(found)
    try:
        with torch.no_grad(), _hooks(model, found):
            result = model(
                input_ids=ids, position_ids=positions, attention_mask=sees_all, use_cache=False
            )
    except ModelError:
        raise
    except Exception as error:  # any error of its code
        raise found.error(_why_it_fails(model, found, error)) from error
    finally:
        _watch.reset(token)
    found.vocab_size = result.logits.shape[-1]
    _check(found, getattr(config, "num_hidden_layers", None))
    return found


def _why_it_fails(model: Any, found: Watch, error: Exception) -> str:
    if not model._supports_attention_backend:
        return NO_ATTENTION
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    where = found.running[-1] if found.running else found.name
    if isinstance(error, NotImplementedError) or "meta tensor" in reason:
        return f"{where} computes by the values of its inputs, whose sizes cannot be known before"
    return f"its forward pass, run without memory, fails in {where}: {reason}"


def _check(found: Watch, num_layers: int | None) -> None:
    layers = sorted(found.attention)
    if not layers:
        raise found.error(NO_ATTENTION)
    if layers != list(range(len(layers))) or len(layers) != (num_layers or len(layers)):
        raise found.error(
            f"only the layers {layers} of {num_layers} attend through transformers'"
            " AttentionInterface; states of other kinds are not kept"
        )
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        sizes = sorted({getattr(each, name) for each in found.attention.values()})
        if len(sizes) > 1:
            raise found.error(f"its layers differ in {name}: {sizes}")
    if found.direct.count(found.direct[0]) != 1:
        raise found.error(f"it runs {found.direct[0]} more than once")


def _watched_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    found = _watch.get()
    assert found is not None
    layer = getattr(module, "layer_idx", None)
    where = f"layer {layer} ({type(module).__name__})"
    if layer is None:
        raise found.error(f"{type(module).__name__} does not have its layer number (layer_idx)")
    if layer in found.attention:
        raise found.error(f"{where} attends more than once in a step")
    sizes = [each.shape[-1] for each in (query, key, value)]
    if sizes[0] != sizes[1] or sizes[1] < sizes[2] or key.shape[1] != value.shape[1]:
        raise found.error(f"{where} has queries, keys and values of {sizes} dimensions")
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise found.error(
            f"{where} has {query.dtype} queries, {key.dtype} keys, {value.dtype} values"
        )
    if query.shape[2] != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
        raise found.error(f"{where} attends to {key.shape[2]} keys of {NUM_TOKENS} tokens")
    for name, argument in kwargs.items():
        is_set = argument is not None and argument is not False
        if is_set and name not in HARMLESS | OBEYED and not (name == "is_causal" and argument):
            raise found.error(f"{where} passes {name} to its attention, which is not supported")
    if kwargs.get("is_causal") is False:
        raise found.error(f"{where} looks ahead (is_causal is false)")
    if kwargs.get("softcap") == 0:  # kernels treat 0 as no cap, its own code divides by it
        raise found.error(f"{where} caps its scores at 0")
    window = _window_of(found, where, attention_mask)
    given_window = kwargs.get("sliding_window")
    if given_window is not None and given_window != window and given_window <= found.reach:
        raise found.error(f"{where} asks for a window of {given_window}, but its mask has {window}")
    shapes = query.shape[1], key.shape[1], query.shape[3]
    found.attention[layer] = AttentionFacts(module, layer, *shapes, window)
    return query.new_empty(1, NUM_TOKENS, query.shape[1], value.shape[3]), None


def _window_of(found: Watch, where: str, mask: torch.Tensor | None) -> int | None:
    for known, window in found.masks:
        if known is mask:
            return window
    raise found.error(f"{where} attends by a mask that its own code makes")


def _watched_mask(*_: Any, mask_function: Any, q_length: int, kv_length: int, **__: Any) -> Any:
    found = _watch.get()
    assert found is not None
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    found.masks.append((mask, _window(found, mask_function)))
    return mask


def _window(found: Watch, mask_function: Any) -> int | None:
    """Return the window of a mask rule, or None for full causal attention. Raise ModelError for any
    other rule."""
    keys = torch.arange(found.reach)

    def seen_from(query: int) -> torch.Tensor:
        zero, at = torch.tensor(0), torch.tensor(query)
        with torch.device("cpu"):
            seen = mask_function(zero, zero, at, keys)
        return torch.as_tensor(seen).expand(len(keys))

    last = found.reach - 1
    window = int(seen_from(last).sum())
    for query in {0, 1, 2, window - 1, window, window + 1, last // 2, last - 1, last}:
        if 0 <= query <= last:
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(seen_from(query), expected):
                raise found.error(
                    "its attention is neither causal nor causal within a window: position"
                    f" {query} sees other positions"
                )
    return None if window > last else window


def _reach(config: Any) -> int:
    """Return the number of positions to test masks on: more than the longest sequence and widest
    window."""
    names = ("max_position_embeddings", "n_positions", "sliding_window", "attention_chunk_size")
    found = [getattr(config, name, None) for name in names]
    return max((each for each in found if isinstance(each, int)), default=4096) + MARGIN


@contextmanager
def _hooks(model: nn.Module, found: Watch) -> Iterator[None]:
    """Record the calls of modules, and the inputs of linear modules, within the context."""

    def begin(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if len(found.running) == 1:
                found.direct.append(name)
            found.running.append(f"{name} ({type(module).__name__})".lstrip())
            if is_linear(module) and args and isinstance(args[0], torch.Tensor):
                found.inputs.setdefault(name, []).append(args[0])

        return note

    def end(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.running.pop()
            if len(found.running) == 1 and name == found.direct[0]:
                found.output = type(output)
                found.hidden_size = output[0].shape[-1]

        return note

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
        handles.append(module.register_forward_hook(end(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
