"""Sessions of coding agents as the workload of a simulation: the sessions of `bench agents`.

A turn starts after the end of the turn before it and a pause. A subagent starts at the end of its
parent's turn, and the parent's next turn waits for all of them. A simulated answer has the tokens
of `VirtualExecutor`. The reuse is counted like in `bench agents`, from the hits of the scheduler.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.tools.bench import agents as bench
from quire.tools.bench.agent_sessions import Session, Turn
from quire.tools.bench.metrics import RequestResult
from quire.tools.simulate.arrivals import OTHER, STOP, Arrival, simulated_request
from quire.tools.simulate.run import Incoming, Run
from quire.tools.workloads import token_ids_of


@dataclass
class _Progress:
    """Progress of a session. turn: number of its current turn. job: session without parent to
    which it belongs. num_open: subagents that it waits for. answer: its last answer."""

    job: int
    turn: int = 0
    context: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    num_open: int = 0


@dataclass(frozen=True)
class _Sent:
    """Turn that was sent. context: its prompt and its answer."""

    session: int
    turn: int
    context: list[int]
    num_reusable: int


class AgentWork:
    """Workload of sessions, for `quire simulate`."""

    def __init__(self, name: str, sessions: list[Session], vocab_size: int) -> None:
        self.name, self.num = name, sum(len(each.turns) for each in sessions)
        last_s = max(each.at_s for each in sessions)
        num_roots = sum(each.parent is None for each in sessions)
        self.rate_per_s = num_roots / last_s if last_s else float("inf")
        self._sessions, self._vocab_size = sessions, vocab_size
        self._known = bench.Known()
        self._sent: dict[str, _Sent] = {}
        self._counts: dict[str, tuple[int, int, int]] = {}  # job, turn, reusable tokens
        self._progress: dict[int, _Progress] = {}
        self._job_s: dict[int, tuple[float, float]] = {}  # start and end of a job
        self._children: dict[tuple[int, int], list[int]] = {}
        for i, each in enumerate(sessions):
            if each.parent is not None:
                self._children.setdefault((each.parent, each.after), []).append(i)

    @property
    def num_jobs(self) -> int:
        """Number of sessions without a parent."""
        return sum(each.parent is None for each in self._sessions)

    @property
    def num_subagents(self) -> int:
        """Number of sessions with a parent."""
        return len(self._sessions) - self.num_jobs

    def arrivals(self) -> Iterator[Incoming]:
        """Yield the first turn of each session without a parent."""
        roots = [i for i, each in enumerate(self._sessions) if each.parent is None]
        for i in sorted(roots, key=lambda i: self._sessions[i].at_s):
            at_s = self._sessions[i].at_s
            self._job_s[i] = at_s, at_s
            yield self._begin(i, i, [], at_s)

    def then(self, request_id: str, now: float) -> list[Arrival]:
        """Return the turns that begin because of a turn's end."""
        sent = self._sent.pop(request_id)
        i, progress = sent.session, self._progress[sent.session]
        session = self._sessions[i]
        num_output = session.turns[sent.turn].num_output
        progress.answer = [OTHER] * (num_output - 1) + [STOP]
        progress.context = sent.context + progress.answer
        self._known.add(progress.context[:-1])
        job = progress.job
        self._job_s[job] = self._job_s[job][0], now
        children = self._children.get((i, sent.turn), [])
        progress.num_open, progress.turn = len(children), sent.turn + 1
        if children:
            return [self._begin(child, job, progress.context, now) for child in children]
        return self._continue(i, now)

    def refused(self, request_id: str, now: float) -> list[Arrival]:
        """Return the turns that begin because a turn was refused. Its session ends with an empty
        answer, as in `bench agents`."""
        i = self._sent.pop(request_id).session
        progress = self._progress[i]
        progress.answer, progress.turn = [], len(self._sessions[i].turns)
        self._job_s[progress.job] = self._job_s[progress.job][0], now
        return self._continue(i, now)

    def _begin(self, i: int, job: int, context: list[int], now: float) -> Arrival:
        """Return the first turn of a session, which continues this context."""
        self._progress[i] = _Progress(job, context=context)
        return self._send(i, now)

    def _continue(self, i: int, now: float) -> list[Arrival]:
        """Return the next turn of a session; after its last one, that of its parent if no other
        subagent is open."""
        session, progress = self._sessions[i], self._progress[i]
        if progress.turn < len(session.turns):
            return [self._send(i, now + session.turns[progress.turn].pause_s)]
        if session.parent is None:
            return []
        parent = self._progress[session.parent]
        parent.num_open -= 1
        if parent.num_open:
            return []
        for child in self._children[session.parent, session.after]:
            parent.context = parent.context + self._progress[child].answer
        return self._continue(session.parent, now)

    def _send(self, i: int, at_s: float) -> Arrival:
        """Return the current turn of a session."""
        progress = self._progress[i]
        turn: Turn = self._sessions[i].turns[progress.turn]
        assert not isinstance(turn.new, str), "texts are encoded before"
        new = token_ids_of(turn.new, self._vocab_size)
        prompt = new if turn.is_whole else progress.context + new
        num_reusable = max(0, min(self._known.num_common(prompt), len(prompt) - 1))
        request_id = f"{i}-{progress.turn}"
        self._known.add(prompt)
        self._sent[request_id] = _Sent(i, progress.turn, prompt, num_reusable)
        self._counts[request_id] = progress.job, progress.turn, num_reusable
        return Arrival(at_s, simulated_request(request_id, prompt, None), turn.num_output)

    def outcome(self, run: Run) -> bench.Run:
        """Return the outcomes of a finished run, as `bench agents` has them."""
        found = bench.Run(duration_s=run.duration_s)
        for request_id, served in run.by_id.items():
            job, turn, num_reusable = self._counts[request_id]
            result = RequestResult(
                served.arrived_s, served.num_prompt,
                0.0 if served.error else served.latency_s, served.wait_s,
                output_len=served.num_output, error=served.error,
                cached_len=max(0, served.num_cached_tokens),
            )  # fmt: skip
            found.turns.append(bench.TurnResult(job, turn, result, num_reusable))
        found.job_s = {i: end_s - start_s for i, (start_s, end_s) in self._job_s.items()}
        return found
