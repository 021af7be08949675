"""Read a model's rotary embedding from its config, with transformers' rules."""

import math
from dataclasses import dataclass, replace

from quire.spec.config_fields import MAX_COUNT, Fields


@dataclass(frozen=True)
class RopeOptions:
    """A rotary embedding."""

    kind: str  # one of ROPES
    theta: float
    rotated: int  # rotated dimensions of a head
    factor: float = 1.0  # divisor of slow frequencies
    trained: int = 0  # context length of the training
    low_turns: float = 1.0  # frequencies with fewer turns within `trained` are divided
    high_turns: float = 1.0  # frequencies with more turns within `trained` are not divided
    scale: float = 1.0  # factor on sines and cosines
    truncates: bool = True  # whether yarn rounds the limits of the blending
    divisors: tuple[float, ...] = ()  # one per frequency, in GGUF files
    axes: tuple[int, ...] = ()  # M-RoPE's axis of each frequency; empty with one axis


MIN_FACTOR = 1e-3  # smaller ones would give frequencies outside of float32
ROPES = ("default", "linear", "llama3", "yarn", "divisors")


def rope_options(
    fields: Fields, head_dim: int, max_position: int, default_part: float | None = None
) -> RopeOptions:
    """Read the rotary embedding that all layers share. Raises ModelError.

    The parameters are `rope_scaling` or else `rope_parameters`. Their `rope_theta` takes precedence
    over the config's; the config's `original_max_position_embeddings` takes precedence over theirs.

    default_part: rotated share of each head by default; None for models that rotate whole heads and
    support no other share."""
    own = own_fields(fields)
    holder = own if own.has("partial_rotary_factor") else fields
    if default_part is None and holder.number("partial_rotary_factor", 1.0) != 1.0:
        raise holder.error(
            "partial_rotary_factor", "rotary embedding of a part of each head is not supported"
        )
    rotated = rotated_dims(holder, "partial_rotary_factor", head_dim, default_part or 1.0)
    return rope_of(own, fields, rotated, max_position)


def rotated_dims(fields: Fields, name: str, head_dim: int, default: float = 1.0) -> int:
    """Return the number of rotated dimensions of a head; the field `name` holds their share.

    Raises ModelError."""
    part = fields.number(name, default)
    rotated = int(head_dim * part)
    if part != 1.0 and (head_dim % 2 or rotated % 2 or not 2 <= rotated <= head_dim):
        raise fields.error(
            name,
            f"that rotates {rotated} of the {head_dim} dimensions of a head (head_dim); both must"
            " be even numbers",
        )
    return rotated


def own_fields(fields: Fields) -> Fields:
    """Return the parameters of the only rotary embedding. Raises ModelError if layers differ."""
    own = fields.inner("rope_scaling") or fields.inner("rope_parameters") or Fields({})
    for name in own.names():
        if isinstance(own.value(name), dict):
            raise own.error(name, "rotary embeddings that differ by layer are not supported")
    return own


def rope_of(
    own: Fields, fields: Fields, rotated: int, max_position: int, theta_name: str = "rope_theta"
) -> RopeOptions:
    """Read one rotary embedding. Raises ModelError.

    own: its parameters. fields: the config, which may hold some of them. rotated: rotated
    dimensions of a head. theta_name: the config's name for theta."""
    kind = rope_kind(own)
    if kind not in ROPES:
        raise own.error(
            "rope_type" if own.has("rope_type") else "type",
            f"the rotary embedding {kind!r} is not supported; supported are {', '.join(ROPES)}",
        )
    if rotated % 2 or rotated < 2:
        raise fields.error(
            "head_dim", f"heads of {rotated} dimensions cannot be rotated: it must be even"
        )
    theta = own.number("rope_theta", fields.number(theta_name, 10000.0, MIN_FACTOR), MIN_FACTOR)
    if kind == "linear":
        return RopeOptions(kind, theta, rotated, own.number("factor", minimum=MIN_FACTOR))
    if kind == "divisors":
        return RopeOptions(kind, theta, rotated, divisors=_divisors(own, "divisors", rotated))
    if kind == "default":
        return RopeOptions(kind, theta, rotated)
    plain = RopeOptions(kind, theta, rotated, trained=_trained(own, fields, max_position))
    return _llama3(own, plain) if kind == "llama3" else _yarn(own, plain, max_position)


def rope_kind(own: Fields) -> str:
    """Return the type of a rotary embedding. `type` is the field's old name."""
    return own.text("rope_type", own.text("type", "default"))


def longrope_options(
    own: Fields, fields: Fields, rotated: int, max_position: int, *, is_long: bool
) -> RopeOptions:
    """Read a rotary embedding of type longrope, which has two sets of divisors.

    is_long: whether to use the divisors for lengths beyond the training's."""
    theta_alone = Fields({"rope_theta": own.value("rope_theta")})
    plain = rope_of(theta_alone, fields, rotated, max_position)
    trained = _trained(own, fields, max_position)
    factor = own.number("factor", max_position / trained, MIN_FACTOR)
    scale = 1.0
    if factor > 1.0 and not own.has("attention_factor"):
        if trained < 2:
            name = "original_max_position_embeddings"
            raise (fields if fields.has(name) else own).error(name, "longrope needs one above 1")
        scale = math.sqrt(1 + math.log(factor) / math.log(trained))
    divisors = _divisors(own, "long_factor" if is_long else "short_factor", rotated)
    scale = own.number("attention_factor", scale)
    return replace(plain, kind="divisors", trained=trained, scale=scale, divisors=divisors)


def longest_short(fields: Fields, max_position: int) -> int | None:
    """Return the length up to which longrope uses its divisors for short lengths; None for other
    types."""
    own = fields.inner("rope_scaling") or fields.inner("rope_parameters")
    if own is None or not (own.has("long_factor") or own.has("short_factor")):
        return None
    return _trained(own, fields, max_position)


def _trained(own: Fields, fields: Fields, max_position: int) -> int:
    name = "original_max_position_embeddings"
    holder = fields if fields.has(name) else own
    return holder.integer(name, default=max_position, maximum=MAX_COUNT)


def _llama3(own: Fields, plain: RopeOptions) -> RopeOptions:
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if low >= high:
        raise own.error("low_freq_factor", f"it must be below high_freq_factor, {high:g}")
    factor = own.number("factor", minimum=MIN_FACTOR)
    return replace(plain, factor=factor, low_turns=low, high_turns=high)


def _yarn(own: Fields, plain: RopeOptions, max_position: int) -> RopeOptions:
    if plain.theta <= 1:
        raise own.error("rope_theta", f"yarn needs one above 1, not {plain.theta:g}")
    factor = own.number("factor", max_position / plain.trained, MIN_FACTOR)
    # As in transformers, 0 means absent.
    fast = own.number("beta_fast", 32.0, above=False) or 32.0
    slow = own.number("beta_slow", 1.0, above=False) or 1.0
    if fast < slow:
        raise own.error("beta_fast", f"it must not be below beta_slow, {slow:g}")
    return replace(
        plain,
        factor=factor,
        low_turns=slow,
        high_turns=fast,
        scale=_yarn_scale(own, factor),
        truncates=own.flag("truncate", True),
    )


def _yarn_scale(own: Fields, factor: float) -> float:
    """Return the factor on sines and cosines, which sharpens attention for long contexts."""

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator = own.number("mscale", 0.0, above=False)
    denominator = own.number("mscale_all_dim", 0.0, above=False)
    scale = sharpness(1.0)
    if numerator and denominator:
        scale = sharpness(numerator) / sharpness(denominator)
    return own.number("attention_factor", scale)


def _divisors(own: Fields, name: str, rotated: int) -> tuple[float, ...]:
    found = own.value(name)
    found = found if isinstance(found, list) else []
    each = Fields({str(index): divisor for index, divisor in enumerate(found)}, name)
    if len(found) != rotated // 2:
        raise own.error(
            name,
            f"it must be a list of {rotated // 2} numbers: half of the rotated dimensions of a"
            " head (head_dim, partial_rotary_factor)",
        )
    return tuple(each.number(str(index), minimum=MIN_FACTOR) for index in range(len(found)))
