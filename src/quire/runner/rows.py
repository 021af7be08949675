"""Rows: the state of running sequences on the device. The host writes only what changed.

Shape legend: R rows, M tokens a row can hold, S scheduled rows, T tokens of the step,
L logical blocks, P tokens per block.

    tokens_RM   known and sampled tokens, valid up to the row's length
    computed_R  tokens whose keys and values are in the row's blocks
    tables_RL   one block table per cache group; entries are valid up to the row's last block

Counters change last in a step (`advance`), so a step that failed leaves the rows as they were.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Plan
from quire.ops.attention.base import AttentionStep
from quire.ops.memory import lazy_zeros
from quire.ops.step_inputs import RowState, gather_step
from quire.runner.plan_parts import Forks

Int64 = npt.NDArray[np.int64]


class DeviceRows:
    """max_num_rows rows of up to max_model_len tokens, on one device."""

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.tokens_RM = lazy_zeros((max_num_rows, max_model_len), torch.int32, device)
        self.computed_R = lazy_zeros((max_num_rows,), torch.int64, device)
        num_blocks = -(-max_model_len // block_size) + 1
        self.tables_RL = tuple(
            lazy_zeros((max_num_rows, num_blocks), torch.int32, device) for _ in range(num_groups)
        )
        self.prompt_lens = np.zeros(max_num_rows, np.int64)  # host
        self._forks = Forks()

    def apply(self, plan: Plan) -> None:
        """Write a plan's deltas: rows started, forked, truncated, host tokens, block tables."""
        for start in plan.started:
            tokens = torch.from_numpy(start.token_ids).to(self.device)
            self.tokens_RM[start.row, : len(start.token_ids)] = tokens
            self.computed_R[start.row] = start.num_computed_tokens
            self.prompt_lens[start.row] = start.num_prompt_tokens
        for fork in self._forks.to_do(plan):
            self._copy_row(fork.parent, fork.child)
            self._forks.did(fork)
        for row, num_tokens in plan.truncated:
            self.computed_R[row] = num_tokens
        for host in plan.host_tokens:
            end = host.position + len(host.token_ids)
            tokens = torch.from_numpy(host.token_ids).to(self.device)
            self.tokens_RM[host.row, host.position : end] = tokens
            if host.is_prompt:
                self.prompt_lens[host.row] = end
        self._write_tables(plan)

    def step_inputs(self, plan: Plan) -> tuple[torch.Tensor, AttentionStep]:
        """Input ids [T] and what attention needs, gathered on the device."""
        context_host = plan.computed_bound + plan.num_tokens
        longest = -(-int(context_host.max()) // self.block_size)
        state = RowState(self.tokens_RM, self.computed_R, self.tables_RL, self.block_size)
        inputs = gather_step(state, plan.rows, plan.num_tokens, longest)
        step = AttentionStep(
            positions_T=inputs.positions_T,
            query_starts_S1=inputs.query_starts_S1,
            context_lens_S=inputs.context_lens_S,
            slots_T=inputs.slots_T,
            block_tables_SL=inputs.block_tables_SL,
            query_lens_host=plan.num_tokens,
            context_lens_host=context_host,
        )
        return inputs.ids_T, step

    def advance(self, plan: Plan, token_ids_N: torch.Tensor, lengths_N: Int64) -> None:
        """Store the sampled tokens behind their rows' last token, then move the counters.

        lengths_N: tokens that each sampling row had before.
        """
        if len(plan.sample_rows):
            rows_N, lengths = self._index(plan.sample_rows), self._index(lengths_N)
            self.tokens_RM[rows_N, lengths] = token_ids_N.int()
        rows, parents, num_tokens = plan.rows, plan.rows, plan.num_tokens
        if forks := plan.new_forks:  # they have computed what their parents have
            place = {row: i for i, row in enumerate(plan.rows.tolist())}
            places = [place[fork.parent] for fork in forks]
            rows = np.append(rows, [fork.child for fork in forks])
            parents = np.append(parents, parents[places])
            num_tokens = np.append(num_tokens, num_tokens[places])
        computed = self.computed_R[self._index(parents)] + self._index(num_tokens)
        self.computed_R[self._index(rows)] = computed  # all at once, or none

    def _copy_row(self, parent: int, child: int) -> None:
        self.tokens_RM[child] = self.tokens_RM[parent]
        self.computed_R[child] = self.computed_R[parent]
        self.prompt_lens[child] = self.prompt_lens[parent]
        for table_RL in self.tables_RL:
            table_RL[child] = table_RL[parent]

    def _write_tables(self, plan: Plan) -> None:
        writes = plan.block_writes
        if len(writes.row) == 0:
            return
        for g, table_RL in enumerate(self.tables_RL):
            mine = writes.group == g
            rows, indices = self._index(writes.row[mine]), self._index(writes.index[mine])
            table_RL[rows, indices] = torch.from_numpy(writes.block_id[mine]).to(self.device)

    def _index(self, values: npt.NDArray[np.signedinteger]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)
