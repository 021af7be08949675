"""Which experts the tokens of a forward pass use: copies of the routers' logits.

The experts follow from the logits by `moe_route`, whose choice has no rounding. So a copy of the
logits shows the experts of the forward pass itself, also if the C++ core has run it.

Shape legend: T tokens, L mixtures of the model in order, E experts, C experts of a token.
"""

from functools import partial

import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.models.model import LayerInputs, Model
from quire.models.parts.experts import SparseMLP
from quire.ops.moe import moe_route
from quire.spec.model_options import ExpertOptions


def mixtures_of(model: nn.Module) -> list[SparseMLP]:
    """Return a model's mixtures in the order of its layers. Raises ConfigError if there are none,
    or if one chooses its experts by more than the largest logits."""
    found = [each for each in model.modules() if isinstance(each, SparseMLP)]
    if not isinstance(model, Model) or not found:
        raise ConfigError(
            "enable_return_routed_experts: this model has no mixtures of experts that run by a"
            " class of quire's; remove it."
        )
    if any(type(each) is not SparseMLP or each.options.routing is not None for each in found):
        raise ConfigError(
            "enable_return_routed_experts: this model does not choose experts by their largest"
            " logits alone (it has groups of experts, or scales their inputs); remove it."
        )
    return found


def record_routes(model: nn.Module) -> None:
    """Copy the routers' logits in each later forward pass. Raises ConfigError as `mixtures_of`.

    Call this before the model is traced."""
    mixtures = mixtures_of(model)
    assert isinstance(model, Model)
    model.routes = LayerInputs(range(len(mixtures)))
    for number, mixture in enumerate(mixtures):
        mixture.on_logits = partial(_copied, model.routes, number)


def chosen_experts(logits_TM: torch.Tensor, options: ExpertOptions) -> torch.Tensor:
    """Return the experts of each token in each mixture, int16 [T, L, C], from the logits of all
    mixtures [T, L E]. The experts of a token are in order of falling logits."""
    logits_NE = logits_TM.reshape(-1, options.num_experts)
    ids_NC, _ = moe_route(logits_NE, options.num_chosen, False)
    return ids_NC.to(torch.int16).view(len(logits_TM), -1, options.num_chosen)


def _copied(routes: LayerInputs, number: int, logits_TE: torch.Tensor) -> torch.Tensor:
    routes.keep(number, logits_TE, None)
    return logits_TE
