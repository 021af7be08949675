"""Adapters of tensors that hold all experts of a mixture, as PEFT writes them for parameters
(`target_parameters`).

Shape legend: E experts, R rank of one expert, K inputs, N outputs.

    A [E R, inputs]     rank r of expert e is row e R + r
    B [outputs, R E]    rank r of expert e is column r E + e

Some versions of PEFT take the parameter's second dimension as inputs and the third one as outputs.
Then a parameter [E, N, K] has A over the outputs N: its change of an expert is (B A)^T = A^T B^T.
Other versions have A over the inputs K, so the shapes of A and B decide. Square experts are
refused, unless the parameter is [E, K, N]: for that, all versions have A over the inputs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint.adapter_files import AdaptedModule
from quire.models.parts.experts import ExpertLinear, ExpertList, TensorOfAll, linears


@dataclass(frozen=True)
class JointTensor:
    """A tensor of all experts, and this rank's layers that it fills, by expert from the first."""

    of_all: TensorOfAll
    layers: Sequence[ExpertLinear]

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs of one expert."""
        columns = self.layers[0].columns
        inputs = self.layers[0].weight.shape[1] if columns is None else columns.whole
        return sum(cut.whole for cut in self.of_all.rows.cuts), inputs

    def turns(self, module: AdaptedModule) -> bool | None:
        """Return whether a module has A over the outputs; None if it is for another tensor."""
        outputs, inputs = self.shape
        found = module.outputs, module.inputs
        if outputs == inputs and not self.of_all.is_turned and found == self.shape:
            raise ModelError(
                f"{module.name}: the experts' {self.of_all.name} is square, so its A and B do not"
                " say which one has the inputs; merge the adapter into the model."
            )
        if found == (outputs, inputs):
            return False
        return True if found == (inputs, outputs) else None


class JointExperts:
    """The mixtures of a model, by the name of the module that holds the experts' tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, tuple[JointTensor, ...]] = {}
        self.names_elsewhere: set[str] = set()  # modules of experts that other ranks have
        for experts in model.modules():
            if isinstance(experts, ExpertList):
                self._add(experts)

    def _add(self, experts: ExpertList) -> None:
        for layers in (linears(experts.gate_up), linears(experts.down)):
            tensor = JointTensor(layers[0].of_all, layers)
            name = tensor.of_all.name.rpartition(".")[0]
            self._tensors[name] = *self._tensors.get(name, ()), tensor
        self.names_elsewhere |= {
            f"{prefix}{part}" for prefix in experts.elsewhere for part in experts.form.parts
        }

    def names(self) -> Collection[str]:
        """Return the modules that hold tensors of all experts."""
        return self._tensors.keys()

    def find(self, module: AdaptedModule, name: str, path: Path) -> tuple[JointTensor, bool]:
        """Return the tensor that a module changes, and whether A is over its outputs. name: of the
        model's own module. Raises ModelError if it fits none."""
        tensors = self._tensors[name]
        for tensor in tensors:
            is_turned = tensor.turns(module)
            if is_turned is None:
                continue
            if (count := tensor.of_all.experts.whole) != module.num_experts:
                raise ModelError(
                    f"{path}: {module.name} is for {module.num_experts} experts, and the model has"
                    f" {count}; it was trained on another model."
                )
            return tensor, is_turned
        shapes = ", ".join(f"{each.of_all.name} {list(each.shape)}" for each in tensors)
        raise ModelError(
            f"{path}: {module.name} changes {[module.outputs, module.inputs]} of each expert, but"
            f" the model has {shapes}; the adapter was trained on another model."
        )


def expert_matrices(
    module: AdaptedModule, down: torch.Tensor, up: torch.Tensor, expert: int, *, is_turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [R, K] and B [N, R] of one expert. down: A [E R, inputs]. up: B [outputs, R E].
    is_turned: whether A is over the outputs."""
    count, rank = module.num_experts, module.rank
    down_R = down.view(count, rank, -1)[expert]
    up_R = up.view(-1, rank, count)[:, :, expert]
    return (up_R.T, down_R.T) if is_turned else (down_R, up_R)
