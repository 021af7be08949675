"""A pipeline stage at work: it receives rows from the previous stage and sends them to the next.

    first stage    plan -> embed, layers --rows-->                              (counters)
    last stage     plan                             layers, norm, head, sample -> result

All stages carry out all plans, each with its own layers' memory. Blocks have the same numbers
everywhere. Only the last stage samples. The others choose token 0 for all rows, so that rows are
started, forked, advanced and released there as in the last stage. The next plan corrects these
tokens (`Plan.last_ids`). It also reverts rejected draft tokens, since it states each row's
position.

For each plan with rows, one message goes from each stage to the next, even if the plan fails or is
skipped. Then the later stages fail on it as well. Work that earlier stages did for it is
discarded, as are later plans that they may have begun (`EngineCore._recover`).

A message of a `SocketLink` is a header and the rows. The header holds the number of rows (-1 for
a plan that failed), the numbers of each row, and their bytes, 4 or 8. Messages go one way only. So
an early stage waits while the socket is full, and no two stages wait for each other.

Shape legend: T tokens, R rows, D model dim, E numbers of each token in a message.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from quire.base.errors import ConfigError, RankLost
from quire.base.masks import MaskPromise
from quire.base.plan import HostTokens, Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import parse_speculation
from quire.ops.attention.base import AttentionBackend
from quire.ops.precision import accumulation_dtype
from quire.runner.native_model import expert_pairs_of, native_or_same
from quire.runner.steps import StepRunner
from quire.spec.model_spec import ModelSpec

GREEDY = SamplingParams(temperature=0.0)
HEAD = struct.Struct("<iii")
NONE = HEAD.pack(-1, 0, 0)
DTYPES = {4: torch.float32, 8: torch.float64}


class StageFailed(Exception):
    """Failure of another stage on the same plan."""


class StageLink(Protocol):
    """Channel from a stage to the next. Both methods raise RankLost if the connection is lost."""

    def send(self, rows_TE: torch.Tensor | None) -> None:
        """Send the rows of a plan, [T, E]; None if the plan failed."""
        ...

    def receive(self) -> torch.Tensor | None:
        """Wait for the rows of the next plan, [T, E]; None if the plan failed."""
        ...


class SocketLink:
    """One end of a socket between stages. Rows are sent in the dtype of their sums."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, rows_TE: torch.Tensor | None) -> None:
        """See StageLink."""
        if rows_TE is None:
            self._send(memoryview(NONE))
            return
        rows_TE = rows_TE.to("cpu", accumulation_dtype(rows_TE.dtype)).contiguous()
        self._send(memoryview(HEAD.pack(*rows_TE.shape, rows_TE.itemsize)))
        self._send(rows_TE.view(torch.uint8).numpy().reshape(-1).data)

    def receive(self) -> torch.Tensor | None:
        """See StageLink."""
        head = bytearray(HEAD.size)
        self._fill(memoryview(head))
        if head == NONE:
            return None
        num_rows, width, itemsize = HEAD.unpack(head)
        rows_TE = torch.empty(num_rows, width, dtype=DTYPES[itemsize])
        self._fill(rows_TE.view(torch.uint8).numpy().reshape(-1).data)
        return rows_TE

    def _send(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise RankLost(f"The next stage has ended ({error}).") from None

    def _fill(self, data: memoryview) -> None:
        while len(data):
            try:
                num = self._socket.recv_into(data)
            except OSError as error:
                raise RankLost(f"The previous stage has ended ({error}).") from None
            if num == 0:
                raise RankLost("The previous stage has ended.")
            data = data[num:]


@dataclass(frozen=True)
class StageLinks:
    """Channels of a stage to the previous and the next stage; None at the ends of the model."""

    before: StageLink | None = None
    next_link: StageLink | None = None


NO_LINKS = StageLinks()


class StageModel:
    """Stage of a model as the runner needs it, native or not. dtype: of its input rows."""

    def __init__(self, model: Any, dtype: torch.dtype, links: StageLinks) -> None:
        self._model, self._dtype = model, dtype
        self._before, self._next_link = links.before, links.next_link
        self._is_owed = self._owes = False  # message due from the previous stage; to the next stage

    @property
    def is_last(self) -> bool:
        return self._next_link is None

    @property
    def expert_pairs(self) -> int:
        """See expert_pairs_of."""
        return expert_pairs_of(self._model)

    def native(self, backend: AttentionBackend) -> "StageModel":
        """Return this stage with the model in its native form, if the core can run it."""
        links = StageLinks(self._before, self._next_link)
        return StageModel(native_or_same(self._model, backend), self._dtype, links)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Guard one run of the model. If the model did not run, receive the message that is due,
        and notify later stages of the failure."""
        self._is_owed, self._owes = self._before is not None, self._next_link is not None
        try:
            yield
        finally:
            if self._is_owed:
                self._receive()
            if self._owes:
                self._send(None)

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        given = {}
        if self._before is not None:
            rows_TE = self._receive()
            if rows_TE is None:
                raise StageFailed("a stage before this one failed")
            assert len(rows_TE) == len(input_ids_T), "stages carry out the same plans"
            given = {"intermediate_TE": rows_TE.to(self._dtype)}
        out_TD: torch.Tensor = self._model(input_ids_T, positions_T, attention, **given)
        if self._next_link is not None:
            self._send(out_TD)
        return out_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, V]; before the last stage, placeholders for one token, [R, 1]."""
        if not self.is_last:
            return hidden_RD.new_zeros(len(hidden_RD), 1, dtype=torch.float32)
        logits_RV: torch.Tensor = self._model.logits(hidden_RD)
        return logits_RV

    def _receive(self) -> torch.Tensor | None:
        assert self._before is not None
        self._is_owed = False
        return self._before.receive()

    def _send(self, rows_TE: torch.Tensor | None) -> None:
        assert self._next_link is not None
        self._owes = False
        self._next_link.send(rows_TE)


def check_stages(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raise ConfigError for features that a model in stages does not support, before it is loaded.
    device: its type."""
    setting = f"pipeline_parallel_size={config.parallel.pipeline_parallel_size}"
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and speculation.has_drafter:
        raise ConfigError(
            f"{setting} and speculative_config with the method {speculation.method}: a draft model"
            " needs data from several stages. Use the method ngram or suffix, or use"
            " tensor_parallel_size."
        )
    if speculation is not None and spec.linear_layers:
        raise ConfigError(
            f"{setting} and speculative_config for {spec.model_type}, whose layers have states:"
            " only"
            " the last stage knows which draft tokens were accepted. Remove one of them, or use"
            " tensor_parallel_size."
        )
    if device != "cpu":
        raise ConfigError(
            f"{setting} is for CPUs so far; on several GPUs of one machine use"
            " tensor_parallel_size."
        )


def run_stage(
    runner: StepRunner, model: StageModel, plan: Plan, masks: MaskPromise | None = None
) -> StepResult:
    """Run a stage's plan and wait for it. Raises StageFailed if an earlier stage failed."""
    if not model.is_last:
        plan, masks = plan_of_earlier_stage(plan), None
    if len(plan.rows) == 0:
        return runner.run(plan, masks)
    with model.step():
        return runner.run(plan, masks)


def skip_stage(model: StageModel, plan: Plan) -> None:
    """Notify the later stages of a plan that is skipped because an earlier plan failed."""
    if len(plan.rows):
        with model.step():
            pass


def plan_of_earlier_stage(plan: Plan) -> Plan:
    """Return the plan for the stages before the last one: the same without sampling. Draft tokens
    become ordinary tokens in it."""
    started = tuple(
        replace(start, params=GREEDY, stop_token_ids=(), bad_words_token_ids=())
        for start in plan.started
    )
    last_ids, draft_runs = plan.last_ids.copy(), list[HostTokens]()
    index_of_row = {row: i for i, row in enumerate(plan.rows.tolist())} if plan.drafts else {}
    for draft in plan.drafts:
        at = index_of_row[draft.row]
        tokens = np.concatenate([last_ids[at : at + 1], draft.token_ids])
        draft_runs.append(HostTokens(draft.row, int(plan.last_positions[at]), tokens))
        last_ids[at] = tokens[-1]
    return plan.replace(
        started=started,
        last_ids=last_ids,
        drafts=(),
        host_tokens=(*plan.host_tokens, *draft_runs),
        masked_rows=plan.masked_rows[:0],
        num_candidates=np.full_like(plan.num_candidates, -1),
    )
