"""Residency: which of several models are loaded, and which are unloaded to make room.

Pure: starts no process and has no clock of its own. Its methods record events, and `decide` returns
orders.

- A model is loaded when a lease on it is requested, and stays loaded while leases on it exist.
- At most `max_loaded` models are loaded at once, including models that load or unload. To make
  room, the least recently used model without leases is unloaded. If all models have leases, the
  least recently used one gets no new leases, and is unloaded when its last lease is returned.
- Waiting models are loaded in the order of their requests. A loaded model stays for at least as
  long as loading it took, but for at most TURN_S. So two models that alternate do some work in
  between.
- A model that was unused for `idle_s` is unloaded (0: never).
- A model that failed to load is loaded again when it is requested at least RETRY_S later. A dead
  model is not. The error is shown until the model is loaded.
"""

from dataclasses import dataclass, field

from quire.serve.several.messages import DEAD, FAILED, LOADED, LOADING, UNLOADED, UNLOADING

TURN_S = 5.0
RETRY_S = 10.0
NEVER = float("inf")

Lease = tuple[int, int]  # holder, number of the lease


@dataclass(frozen=True)
class Start:
    model: str


@dataclass(frozen=True)
class Stop:
    model: str


@dataclass(frozen=True)
class Granted:
    model: str
    lease: Lease


@dataclass(frozen=True)
class Denied:
    model: str
    lease: Lease
    why: str


@dataclass(frozen=True)
class NotifyHolder:
    """Order to notify a holder of leases that the model will be unloaded."""

    model: str
    holder: int


Order = Start | Stop | Granted | Denied | NotifyHolder


@dataclass
class Resident:
    """The state of one model."""

    name: str
    state: str = UNLOADED
    why: str = ""
    leases: set[Lease] = field(default_factory=set)  # granted leases
    requested: dict[Lease, float] = field(default_factory=dict)  # waiting leases and their times
    notified: set[int] = field(
        default_factory=set
    )  # holders that know that the model will be unloaded
    since_s: float = 0.0  # time of the last change of state
    used_s: float = 0.0  # time of the last use
    load_s: float = 0.0
    num_loads: int = 0

    @property
    def occupies_slot(self) -> bool:
        return self.state in (LOADING, LOADED, UNLOADING)

    def turn_ends_s(self) -> float:
        return self.since_s + min(self.load_s, TURN_S)

    def enter(self, state: str, now_s: float, why: str = "") -> None:
        self.state, self.since_s, self.why = state, now_s, why


class Residency:
    """Decisions on which models are loaded. max_loaded: None for all models."""

    def __init__(
        self,
        names: list[str],
        max_loaded: int | None = None,
        idle_s: float = 0.0,
        now_s: float = 0.0,
    ) -> None:
        self.models = {name: Resident(name, since_s=now_s) for name in names}
        self.max_loaded = max_loaded or len(names)
        self._idle_s = idle_s

    # ---- events ------------------------------------------------------------------------------

    def request(self, model: str, lease: Lease, now_s: float) -> None:
        """Record a request for a lease."""
        self.models[model].requested[lease] = now_s

    def give_back(self, model: str, lease: Lease, now_s: float) -> None:
        """Record that a lease was returned or withdrawn. Unknown leases are ignored."""
        resident = self.models[model]
        resident.requested.pop(lease, None)
        if lease in resident.leases:
            resident.leases.remove(lease)
            resident.used_s = now_s

    def forget(self, holder: int, now_s: float) -> None:
        """Take back all leases and requests of a holder that has ended."""
        for model, resident in self.models.items():
            for lease in [*resident.leases, *resident.requested]:
                if lease[0] == holder:
                    self.give_back(model, lease, now_s)

    def begin(self, model: str, now_s: float, why: str = "") -> None:
        """Record that a model is being loaded without a request: at the start, or after its process
        died. why: reason of the death."""
        self.models[model].enter(LOADING, now_s, why)

    def loaded(self, model: str, now_s: float) -> None:
        resident = self.models[model]
        resident.load_s = now_s - resident.since_s
        resident.num_loads += 1
        resident.used_s = now_s
        resident.enter(LOADED, now_s)

    def unloaded(self, model: str, now_s: float) -> None:
        self.models[model].enter(UNLOADED, now_s)

    def failed(self, model: str, why: str, now_s: float) -> None:
        """Record that a model failed to load."""
        self.models[model].enter(FAILED, now_s, why)

    def died(self, model: str, why: str, now_s: float) -> None:
        """Record that a model's process has ended unexpectedly and is not restarted."""
        self.models[model].enter(DEAD, now_s, why)

    # ---- decisions ---------------------------------------------------------------------------

    def decide(self, now_s: float) -> list[Order]:
        """Return the orders that are due, and record them as carried out."""
        orders: list[Order] = []
        for resident in self.models.values():
            orders += self._denied(resident, now_s)
        waiting = self._waiting()
        unloading = self._make_room(waiting, now_s, orders)
        for resident in self.models.values():
            if resident.state != LOADED:
                continue
            if resident in unloading:
                orders += self._notifications(resident)
                continue
            resident.notified.clear()
            orders += [Granted(resident.name, lease) for lease in resident.requested]
            resident.leases |= resident.requested.keys()
            if resident.requested:
                resident.used_s = now_s
                resident.requested.clear()
            if self._idle_s and not resident.leases and now_s >= resident.used_s + self._idle_s:
                orders.append(self._stop(resident, now_s))
        return orders

    def due_s(self) -> float:
        """Return the time at which `decide` may have new orders even without an event."""
        dues = [NEVER]
        loaded = [each for each in self.models.values() if each.state == LOADED]
        if self._waiting():
            dues += [resident.turn_ends_s() for resident in loaded]
        if self._idle_s:
            dues += [each.used_s + self._idle_s for each in loaded if not each.leases]
        return min(dues)

    def _denied(self, resident: Resident, now_s: float) -> list[Order]:
        """Reject the waiting leases of a model that cannot be loaded."""
        again_s = resident.since_s + RETRY_S
        if resident.state == FAILED and any(at >= again_s for at in resident.requested.values()):
            resident.enter(UNLOADED, now_s, resident.why)
        if resident.state not in (FAILED, DEAD):
            return []
        denied: list[Order] = [
            Denied(resident.name, each, resident.why) for each in resident.requested
        ]
        resident.requested.clear()
        return denied

    def _waiting(self) -> list[Resident]:
        """Return the models to load, in the order of their oldest requests."""
        found = [each for each in self.models.values() if each.requested and each.state == UNLOADED]
        return sorted(found, key=lambda each: min(each.requested.values()))

    def _make_room(
        self, waiting: list[Resident], now_s: float, orders: list[Order]
    ) -> list[Resident]:
        """Start models for which there is room, and stop unused ones if others wait. Return the
        models to unload when their leases are returned."""
        num_free = self.max_loaded - sum(each.occupies_slot for each in self.models.values())
        for resident in waiting[: max(0, num_free)]:
            resident.enter(LOADING, now_s, resident.why)
            orders.append(Start(resident.name))
        num_going = sum(each.state == UNLOADING for each in self.models.values())
        num_lacking = len(waiting) - max(0, num_free) - num_going
        loaded = (each for each in self.models.values() if each.state == LOADED)
        may_go = [each for each in loaded if now_s >= each.turn_ends_s()]
        # Prefer models that were chosen before, because their leases become fewer with each that
        # ends.
        may_go.sort(key=lambda each: (bool(each.leases), not each.notified, each.used_s))
        victims = may_go[: max(0, num_lacking)]
        orders += [self._stop(each, now_s) for each in victims if not each.leases]
        return [each for each in victims if each.leases]

    def _notifications(self, resident: Resident) -> list[Order]:
        """Return orders to notify holders of leases, who then begin no more requests."""
        new = {holder for holder, _ in resident.leases} - resident.notified
        resident.notified |= new
        return [NotifyHolder(resident.name, holder) for holder in sorted(new)]

    def _stop(self, resident: Resident, now_s: float) -> Stop:
        resident.notified.clear()
        resident.enter(UNLOADING, now_s)
        return Stop(resident.name)
