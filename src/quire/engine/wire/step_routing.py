"""Which client of a core gets what of a step's outputs."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.base.step_outputs import StepOutputs

NOBODY = -1


class StepRouter:
    """Splits the outputs of each step by client.

    owner_of: the client of a request id; None if nobody wants its tokens any more.
    """

    def __init__(self, num_rows: int, owner_of: Callable[[str], int | None]) -> None:
        self._owner_of = owner_of
        self._owner_of_row = np.full(num_rows, NOBODY, np.int64)

    def split(self, outputs: StepOutputs) -> dict[int, StepOutputs]:
        """Return the outputs by client; clients that get nothing are left out."""
        named = [self._owner(name.request_id) for name in outputs.names]
        for name, owner in zip(outputs.names, named, strict=True):
            self._owner_of_row[name.row] = owner
        detailed = [self._owner(update.request_id) for update in outputs.details]
        owners = self._owner_of_row[outputs.rows]
        clients = _distinct(owners) | {*named, *detailed}
        if len(clients) == 1:
            return dict.fromkeys(clients - {NOBODY}, outputs)
        return {
            client: StepOutputs(
                outputs.rows[owners == client],
                outputs.token_ids[owners == client],
                [n for n, owner in zip(outputs.names, named, strict=True) if owner == client],
                [u for u, owner in zip(outputs.details, detailed, strict=True) if owner == client],
            )
            for client in clients - {NOBODY}
        }

    def _owner(self, request_id: str) -> int:
        owner = self._owner_of(request_id)
        return NOBODY if owner is None else owner


def _distinct(owners: npt.NDArray[np.int64]) -> set[int]:
    if len(owners) and (owners == owners[0]).all():
        return {int(owners[0])}
    return set(np.unique(owners).tolist())
