"""A plan's changes of the rows, before they are sent."""

import numpy as np

from quire.runner.step_ops import RowUpdates


def test_last_of_several_deltas_to_one_entry_wins() -> None:
    first = np.array([(0, 3, 1, 10), (1, 3, 1, 20), (0, 3, 1, 30)], np.int32)
    updates = RowUpdates([first, np.array([(1, 3, 1, 40), (-1, 3, 1, 50)], np.int32)])
    expected = {(0, 3, 1, 30), (1, 3, 1, 40), (-1, 3, 1, 50)}
    assert set(map(tuple, updates.merged_deltas().tolist())) == expected
