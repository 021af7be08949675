"""Names of checkpoint tensors that fill a transformers model.

transformers renames tensors when it loads them, by rules for each class (its weight conversions).
The renamings are applied here unchanged. Two conversions are supported. One merges the experts of a
layer into one tensor, of which each expert fills a slice. The other exchanges the dimensions of
such a tensor. Other conversions are refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.base.errors import ModelError
from quire.models.checkpoint.sources import Source
from quire.models.hf.configs import PLAIN_HEADS

# Name prefixes of the text part in larger models, and the prefixes without the larger model.
PARTS = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


@dataclass(frozen=True)
class Slice:
    """Location of a checkpoint tensor in a parameter: expert `index` of the first dimension, and
    chunk `chunk` of `num_chunks` of the expert's rows."""

    target: str
    index: int
    chunk: int
    num_chunks: int

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this slice of the parameter, [rows, ...]."""
        expert = parameter[self.index]
        return expert.chunk(self.num_chunks)[self.chunk] if self.num_chunks > 1 else expert


class CheckpointNames:
    """Translation of tensor names. Until `adopt` is called, checkpoint names equal the model's
    parameter names."""

    def __init__(self, model: Any, is_part: bool) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        conversions = get_model_conversion_mapping(model) + _of_whole(model)
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if not isinstance(each, WeightRenaming)]
        self._known = dict(model.state_dict())
        self._prefix = model.base_model_prefix
        self._is_part = is_part
        self._stored: dict[str, str] = {}  # what is called otherwise in the checkpoint, by target
        self._slices: dict[str, Slice] = {}  # by the checkpoint's name
        self._filled: dict[str, list[str]] = {}  # names of slices, by target
        self._turned: set[str] = set()  # targets whose last two dimensions may be exchanged

    def adopt(self, names: Iterable[str]) -> None:
        """Learn the names in a checkpoint. Raise ModelError for an unsupported conversion."""
        groups: dict[str, dict[str, list[str]]] = {}
        for name in sorted(names, key=_natural):
            target, pattern = self._renamed(name)
            if pattern is not None and target in self._known:
                groups.setdefault(target, {}).setdefault(pattern, []).append(name)
        for target, by_pattern in groups.items():
            self._convert(target, by_pattern)

    def canonical(self, name: str) -> str:
        """Return the name of a checkpoint tensor in the layers' sources."""
        return name if name in self._slices else self._renamed(name)[0]

    def is_foreign(self, name: str) -> bool:
        """Return whether a tensor does not belong to the text part of a larger model."""
        return self._is_part and self._of_part(name) is None

    def expand(self, sources: Iterable[Source]) -> list[Source]:
        """Replace converted sources by the sources of the checkpoint tensors that fill them."""
        found = []
        for source in sources:
            source = self.sliced_source(source.name, source)
            names = self._filled.get(source.name)
            found += (
                [source] if names is None else [self.sliced_source(name, source) for name in names]
            )
        return found

    def target(self, name: str) -> str:
        """Return the parameter that a source of this name fills."""
        return self._slices[name].target if name in self._slices else name

    def sliced_source(self, name: str, source: Source) -> Source:
        """Return the source of this name, which fills its slice of the parameter of `source`."""
        if name in self._turned:
            return replace(source, is_either_way=True)
        if name not in self._slices:
            return source
        return replace(source, name=name, destination=self._slices[name].of(source.destination))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return the name after transformers' renaming, and the pattern of the conversion, if
        any."""
        from transformers.core_model_loading import rename_source_key

        name = self._of_part(name) or name
        known = self._prefix, self._known
        target, pattern = rename_source_key(name, self._renamings, self._converters, *known)
        if target not in self._known and name in self._known:
            return name, None
        return target, pattern

    def _of_part(self, name: str) -> str | None:
        """Return the name within the text part; None for other parts."""
        if not self._is_part:
            return name
        for before, after in PARTS:
            if name.startswith(before):
                return after + name.removeprefix(before)
        return name if name.startswith("lm_head.") or name in self._known else None

    def _convert(self, target: str, by_pattern: dict[str, list[str]]) -> None:
        """Assign a slice of the target to each tensor that fills it."""
        patterns = self._obeyed(next(iter(by_pattern)), target)
        if not patterns:
            self._turned.add(target)
            return
        names = []
        for chunk, pattern in enumerate(patterns):
            for index, name in enumerate(by_pattern.get(pattern, [])):
                self._slices[name] = Slice(target, index, chunk, len(patterns))
                names.append(name)
        counts = {len(by_pattern.get(pattern, [])) for pattern in patterns}
        if counts != {self._known[target].shape[0]}:
            raise ModelError(
                f"the weight files hold {sorted(counts)} experts for {target}, which has"
                f" {self._known[target].shape[0]}: its download may be incomplete."
            )
        self._filled[target] = names

    def _obeyed(self, pattern: str, target: str) -> Sequence[str]:
        """Return the patterns of the conversion with this pattern, in order. Return none if the
        conversion only exchanges the last two dimensions of a tensor where needed."""
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        done = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
        merged, joined = ("MergeModulelist", 0), ("Concatenate", 1)
        num = len(converter.source_patterns)
        if num == 1 and done == [("Transpose", None)] and _turns_if_needed(converter.operations[0]):
            return ()
        if len(converter.target_patterns) == 1 and (
            (done == [merged] and num == 1) or done == [merged, joined]
        ):
            patterns: Sequence[str] = converter.source_patterns
            return patterns
        names = " and ".join(name for name, _ in done)
        raise ModelError(
            f"transformers makes {target} of a checkpoint's tensors by {names}, which is not"
            " supported."
        )


def _of_whole(model: Any) -> list[Any]:
    """Return the conversions, except renamings, of the full model of a text part in PLAIN_HEADS,
    since transformers has none for the part."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    whole = PLAIN_HEADS.get(model.config.model_type)
    found = get_checkpoint_conversion_mapping(whole) or []
    return [each for each in found if not isinstance(each, WeightRenaming)]


def _turns_if_needed(transpose: Any) -> bool:
    is_last_two = (transpose.dim0, transpose.dim1) == (1, 2)  # dimensions of a layer's experts
    return is_last_two and bool(transpose.check_dims)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers in a name as numbers."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")]
