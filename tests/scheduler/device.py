"""A plain device for scheduler tests: rows and blocks that hold tokens instead of keys and values.

Every scheduled token is written, as a checksum of its prefix, into the slot that the block table
names; the first and the last token of each row then read their whole visible context back through
the table. So a block that was freed, shared or overwritten wrongly is noticed, and
`expected_tokens`, which knows no blocks, says what the text must be.
"""

import zlib

import numpy as np

from quire.base.messages import Request
from quire.base.model_spec import CacheGroup
from quire.base.plan import Plan, StepResult
from quire.base.sampling_params import SamplingParams

VOCAB = 50


def next_token(context: list[int]) -> int:
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """What the request must generate, whatever else the engine does."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    params = request.params
    most = min(params.max_tokens or max_model_len, max_model_len - len(tokens))
    while len(output) < most:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in request.stop_token_ids and len(output) >= params.min_tokens:
            break
    return output


class FakeDevice:
    """Carries out plans in order. Nothing is checked that a real device would not need."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...], size: int):
        self.groups, self.size = groups, size
        self.slots = [np.full(n * size, -1, np.int64) for n in num_blocks]
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.num_computed = 0

    def run(self, plan: Plan) -> StepResult:
        self._apply(plan)
        starts = {int(row): self.computed[int(row)] for row in plan.rows}
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            for position in range(starts[row], starts[row] + count):
                for g in range(len(self.groups)):
                    self.slots[g][self._slot(g, row, position)] = self._content(row, position)
            self.computed[row] = starts[row] + count
            self.num_computed += count
        for row, start in starts.items():
            self._read(row, start)
            self._read(row, self.computed[row] - 1)
        sampled = [self._sample(row) for row in plan.sample_rows.tolist()]
        token_ids = np.asarray(sampled, np.int32).reshape(-1, 1)
        return StepResult(plan.step_id, token_ids, np.ones(len(sampled), np.int32))

    def _apply(self, plan: Plan) -> None:
        for start in plan.started:
            self.tokens[start.row] = start.token_ids.tolist()
            self.computed[start.row] = start.num_computed_tokens
        writes = plan.block_writes
        columns = (writes.group, writes.row, writes.index, writes.block_id)
        for group, row, index, block_id in zip(*(c.tolist() for c in columns), strict=True):
            self.tables[group][row, index] = block_id
        for move in plan.moves:
            for source, destination in zip(move.source, move.destination, strict=True):
                slots = self.slots[move.group].reshape(-1, self.size)
                slots[destination] = slots[source]

    def _slot(self, group: int, row: int, position: int) -> int:
        block_id = self.tables[group][row, position // self.size]
        return block_id * self.size + position % self.size

    def _content(self, row: int, position: int) -> int:
        return zlib.crc32(np.asarray(self.tokens[row][: position + 1], np.int32).tobytes())

    def _read(self, row: int, position: int) -> None:
        """What the token at `position` sees in each group must be its own prefix."""
        for g, group in enumerate(self.groups):
            first = max(0, position - group.window + 1) if group.window else 0
            for p in range(first, position + 1):
                found = self.slots[g][self._slot(g, row, p)]
                assert found == self._content(row, p), f"group {g}, row {row}, position {p}"

    def _sample(self, row: int) -> int:
        token = next_token(self.tokens[row][: self.computed[row]])
        self.tokens[row].append(token)
        return token


def make_request(name: str, prompt: list[int], **params: object) -> Request:
    stops = tuple(params.pop("stops", ()))  # type: ignore[arg-type]
    salt = str(params.pop("salt", ""))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        stop_token_ids=stops,
        cache_salt=salt,
    )
