"""What a model that guesses is to do between two steps, and what it found; shape legend as in
`plan.py`, and k the most guesses of a row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """The drafter computes some tokens of rows of the last step, and guesses for some of them.

    rows: [S]. first, num_tokens: [S] the position of the first token and how many there are, one
    at least. num_known: [S] tokens that the row has; guesses are what follows them. num_guesses:
    [S] where it is not 0, the tokens are all up to the last that the drafter can compute. capacity:
    [S] tokens that the row's own blocks hold. read_from: [S] which token of the last step the first
    one was.
    """

    rows: Int32
    first: Int32
    num_tokens: Int32
    num_known: Int32
    num_guesses: Int32
    capacity: Int32
    read_from: Int32


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """token_ids: [S, k], -1 where nothing was guessed."""

    token_ids: Int32
    duration_s: float
