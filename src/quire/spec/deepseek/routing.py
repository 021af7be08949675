"""Read how DeepSeek's mixtures choose a token's experts: a few groups first, then experts in them.

The ideas are in DeepSeek-V2 (arXiv 2405.04434), section 2.2.2, and DeepSeek-V3 (arXiv 2412.19437),
section 2.1.2.
"""

from dataclasses import dataclass

from quire.spec.config_fields import Fields

# Types that choose so, and whether scores are sigmoids with a bias (DeepSeek-V3) or a softmax.
ROUTED_TYPES = {
    "deepseek_v2": False,
    "deepseek_v3": True,
    "glm4_moe": True,
    "glm4_moe_lite": True,
}
GREEDY, IN_GROUPS, WITH_BIAS = "greedy", "group_limited_greedy", "noaux_tc"
INNER, CHOSEN = "moe_intermediate_size", "num_experts_per_tok"


@dataclass(frozen=True)
class Routing:
    """The choice of a token's experts.

    Consecutive experts form `num_groups` groups of equal size. The best groups are chosen first,
    then the best experts in them. A group's score is its largest score; with sigmoids it is the sum
    of its two largest ones. With sigmoids a bias per expert is added to scores for the choice, and
    not to weights.
    """

    is_sigmoid: bool
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0  # factor of the chosen experts' weights


def read_routing(
    fields: Fields, model_type: str, num_experts: int, num_chosen: int
) -> tuple[Routing, bool]:
    """Return the choice of experts, and whether the weights of chosen experts add up to 1 before
    they are scaled. Raises ModelError."""
    is_sigmoid = ROUTED_TYPES[model_type]
    _refuse_other_methods(fields, model_type, is_sigmoid=is_sigmoid)
    scale = fields.number("routed_scaling_factor", 1.0, above=False)
    in_groups = is_sigmoid or fields.text("topk_method", GREEDY) == IN_GROUPS
    if not in_groups:
        return Routing(is_sigmoid, scale=scale), False
    groups = fields.integer("n_group")
    if num_experts % groups:
        raise fields.error("n_group", f"it must divide n_routed_experts, {num_experts}")
    chosen = fields.integer("topk_group")
    if chosen > groups:
        raise fields.error("topk_group", f"it must be at most n_group, {groups}")
    size = num_experts // groups
    if is_sigmoid and size < 2:
        raise fields.error(
            "n_group", f"each group needs two of n_routed_experts, {num_experts}, or more"
        )
    if num_chosen > chosen * size:
        raise fields.error(
            CHOSEN if fields.has(CHOSEN) else "topk_group",
            f"{chosen} of {groups} groups (topk_group, n_group) have only {chosen * size} of"
            f" {num_experts} experts (n_routed_experts)",
        )
    normalises = is_sigmoid and fields.flag("norm_topk_prob")
    return Routing(is_sigmoid, groups, chosen, scale), normalises


def dense_layers(fields: Fields, model_type: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers without experts. Raises ModelError."""
    if model_type != "glm4_moe_lite":
        first = fields.integer("first_k_dense_replace", minimum=0)
        return tuple(range(min(first, num_layers)))
    kinds = fields.texts("mlp_layer_types")
    if kinds is None:
        return (0,)
    if len(kinds) < num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise fields.error(
            "mlp_layer_types",
            f"it must name dense or sparse for each of num_hidden_layers, {num_layers}",
        )
    return tuple(layer for layer in range(num_layers) if kinds[layer] == "dense")


def _refuse_other_methods(fields: Fields, model_type: str, *, is_sigmoid: bool) -> None:
    """Raise ModelError for fields of these models' own code that contradict the type."""
    scores = "sigmoid" if is_sigmoid else "softmax"
    if fields.text("scoring_func", scores) != scores:
        raise fields.error("scoring_func", f"{model_type} has {scores}")
    methods = (WITH_BIAS,) if is_sigmoid else (GREEDY, IN_GROUPS)
    if fields.text("topk_method", methods[0]) not in methods:
        raise fields.error("topk_method", f"{model_type} has {' and '.join(methods)}")
    if not is_sigmoid and fields.flag("norm_topk_prob"):
        raise fields.error("norm_topk_prob", f"weights of {model_type} are not normalised")
    fields.integer("moe_layer_freq", default=1, maximum=1)
