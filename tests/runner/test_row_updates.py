"""A plan's changes of the rows, before it is sent."""

import numpy as np

from quire.runner.step_ops import RowUpdates


def test_of_several_deltas_for_one_place_the_last_counts() -> None:
    first = np.array([(0, 3, 1, 10), (1, 3, 1, 20), (0, 3, 1, 30)], np.int32)
    updates = RowUpdates([first, np.array([(1, 3, 1, 40), (-1, 3, 1, 50)], np.int32)])
    wanted = {(0, 3, 1, 30), (1, 3, 1, 40), (-1, 3, 1, 50)}
    assert set(map(tuple, updates.merged_deltas().tolist())) == wanted
