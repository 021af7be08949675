"""Muon for the weight matrices: momentum, then the update made orthogonal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Return stacked matrices [n, rows, columns] with all singular values near one.

    Newton-Schulz iteration of fifth order, in bf16.
    """
    x = update.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Orthogonal-momentum optimizer; one parameter group per matrix shape."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": params} for params in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all matrices from their gradients."""
        for group in self.param_groups:
            updates = []
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                updates.append(weight.grad.lerp(state["momentum"], group["momentum"]))
            rows, columns = group["params"][0].shape
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            for weight, update in zip(
                group["params"], orthogonal(torch.stack(updates)), strict=True
            ):
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-scale)
