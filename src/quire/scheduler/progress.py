"""What policies may know of the scheduler (`policy.Progress`)."""

from quire.scheduler.memory import Memory
from quire.scheduler.rows import Rows
from quire.scheduler.sequence import Sequence


class SchedulerProgress:
    """num_planned_tokens: so far; the scheduler's own clock."""

    def __init__(self, rows: Rows, memory: Memory) -> None:
        self.num_planned_tokens = 0
        self._rows, self._memory = rows, memory

    def remaining(self, sequence: Sequence) -> int:
        """Count the tokens that a sequence lacks until it samples; prefix hits left out, as of
        now."""
        if sequence.row >= 0:
            table = self._rows.table
            return int(table.total[sequence.row] - table.computed[sequence.row])
        return sequence.num_known_tokens - self._memory.num_found_tokens(sequence)

    def num_tokens_under_way(self) -> int:
        """Count the tokens that those that run lack until they sample."""
        return int(self._rows.needs(self._rows.running).sum())
