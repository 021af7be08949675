"""What several models need of the memory, before any of them is loaded."""

import msgspec


class ModelNeeds(msgspec.Struct, frozen=True):
    """Bytes. one_sequence: of a KV pool that holds the longest sequence, 0 if whatever fits will
    do. most: of the pool that the model would take alone, 0 of an encoder; None if that is not
    known before."""

    weights: int
    workspace: int
    one_sequence: int
    most: int | None


class Needs(msgspec.Struct, frozen=True):
    """models: in their order. device: its type, cpu or cuda. free, total: bytes of its memory."""

    models: list[ModelNeeds]
    device: str
    free: int
    total: int
