"""Which of several models are loaded: who comes, who stays, who has to make room.

Pure: no process, no clock of its own. It is told what happened, and `decide` says what to do.

- A model is loaded when a lease on it is asked for, and stays while there are leases on it.
- At most `max_loaded` are loaded at once, those that come or go included. Where there is no place,
  the one that nobody uses and that was used longest ago makes room; if all are used, the one that
  was used longest ago gives way: it gets no new leases, and goes when the last one is back.
- Those that wait are served in the order in which they asked. Who was loaded keeps its place for as
  long as that took, TURN_S at most, so that two models that take turns do some work in between.
- A model that nobody has used for `idle_s` is unloaded (0: never).
- One that cannot be loaded is tried again when it is asked for RETRY_S later; one that is dead is
  not. What went wrong is told until the model is loaded.
"""

from dataclasses import dataclass, field

from quire.serve.several.messages import DEAD, FAILED, LOADED, LOADING, UNLOADED, UNLOADING

TURN_S = 5.0
RETRY_S = 10.0
NEVER = float("inf")

Lease = tuple[int, int]  # whose, and its number


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
class MakeWay:
    """Told to holder, who has leases on the model."""

    model: str
    holder: int


Order = Start | Stop | Granted | Denied | MakeWay


@dataclass
class Resident:
    """One model. leases: that are out; asked: that wait, oldest first. told: holders who know that
    it gives way. used_s: when it was last in use; since_s: when its state changed."""

    name: str
    state: str = UNLOADED
    why: str = ""
    leases: set[Lease] = field(default_factory=set)
    asked: dict[Lease, float] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    since_s: float = 0.0
    used_s: float = 0.0
    load_s: float = 0.0
    num_loads: int = 0

    @property
    def has_place(self) -> bool:
        return self.state in (LOADING, LOADED, UNLOADING)

    def turn_ends_s(self) -> float:
        return self.since_s + min(self.load_s, TURN_S)

    def enter(self, state: str, now_s: float, why: str = "") -> None:
        self.state, self.since_s, self.why = state, now_s, why


class Residency:
    """names: of the models. max_loaded: None is all of them."""

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

    # ---- what happened -----------------------------------------------------------------------

    def ask(self, model: str, lease: Lease, now_s: float) -> None:
        """Note that a lease is asked for."""
        self.models[model].asked[lease] = now_s

    def give_back(self, model: str, lease: Lease, now_s: float) -> None:
        """Note that a lease is back, or is asked for no more. One that is unknown is ignored."""
        resident = self.models[model]
        resident.asked.pop(lease, None)
        if lease in resident.leases:
            resident.leases.remove(lease)
            resident.used_s = now_s

    def forget(self, holder: int, now_s: float) -> None:
        """Take back all that somebody had who is no more."""
        for model, resident in self.models.items():
            for lease in [*resident.leases, *resident.asked]:
                if lease[0] == holder:
                    self.give_back(model, lease, now_s)

    def begin(self, model: str, now_s: float, why: str = "") -> None:
        """Note that a model is being loaded without anybody who asks: at the start, or after its
        process has died. why: how it died."""
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
        """Note that a model could not be loaded."""
        self.models[model].enter(FAILED, now_s, why)

    def died(self, model: str, why: str, now_s: float) -> None:
        """Note that a model's process has ended by itself, and comes no more."""
        self.models[model].enter(DEAD, now_s, why)

    # ---- what to do --------------------------------------------------------------------------

    def decide(self, now_s: float) -> list[Order]:
        """Return what is to be done now, and take it as done."""
        orders: list[Order] = []
        for resident in self.models.values():
            orders += self._denied(resident, now_s)
        waiting = self._waiting()
        giving_way = self._make_room(waiting, now_s, orders)
        for resident in self.models.values():
            if resident.state != LOADED:
                continue
            if resident in giving_way:
                orders += self._told(resident)
                continue
            resident.told.clear()
            orders += [Granted(resident.name, lease) for lease in resident.asked]
            resident.leases |= resident.asked.keys()
            if resident.asked:
                resident.used_s = now_s
                resident.asked.clear()
            if self._idle_s and not resident.leases and now_s >= resident.used_s + self._idle_s:
                orders.append(self._stop(resident, now_s))
        return orders

    def due_s(self) -> float:
        """Return when `decide` may have something new to say though nothing happens."""
        dues = [NEVER]
        loaded = [each for each in self.models.values() if each.state == LOADED]
        if self._waiting():
            dues += [resident.turn_ends_s() for resident in loaded]
        if self._idle_s:
            dues += [each.used_s + self._idle_s for each in loaded if not each.leases]
        return min(dues)

    def _denied(self, resident: Resident, now_s: float) -> list[Order]:
        """Answer those who asked for what will not come."""
        again_s = resident.since_s + RETRY_S
        if resident.state == FAILED and any(at >= again_s for at in resident.asked.values()):
            resident.enter(UNLOADED, now_s, resident.why)
        if resident.state not in (FAILED, DEAD):
            return []
        denied: list[Order] = [Denied(resident.name, each, resident.why) for each in resident.asked]
        resident.asked.clear()
        return denied

    def _waiting(self) -> list[Resident]:
        """Return the models that are to be loaded, in the order in which they were asked for."""
        found = [each for each in self.models.values() if each.asked and each.state == UNLOADED]
        return sorted(found, key=lambda each: min(each.asked.values()))

    def _make_room(
        self, waiting: list[Resident], now_s: float, orders: list[Order]
    ) -> list[Resident]:
        """Start those that have a place, and stop others for those that have none; return those
        that give way as soon as their leases are back."""
        num_free = self.max_loaded - sum(each.has_place for each in self.models.values())
        for resident in waiting[: max(0, num_free)]:
            resident.enter(LOADING, now_s, resident.why)
            orders.append(Start(resident.name))
        num_going = sum(each.state == UNLOADING for each in self.models.values())
        num_lacking = len(waiting) - max(0, num_free) - num_going
        loaded = (each for each in self.models.values() if each.state == LOADED)
        may_go = [each for each in loaded if now_s >= each.turn_ends_s()]
        # Whoever gives way already goes on doing so: its leases are fewer with each that ends.
        may_go.sort(key=lambda each: (bool(each.leases), not each.told, each.used_s))
        victims = may_go[: max(0, num_lacking)]
        orders += [self._stop(each, now_s) for each in victims if not each.leases]
        return [each for each in victims if each.leases]

    def _told(self, resident: Resident) -> list[Order]:
        """Tell those who hold leases that they begin nothing more under them."""
        new = {holder for holder, _ in resident.leases} - resident.told
        resident.told |= new
        return [MakeWay(resident.name, holder) for holder in sorted(new)]

    def _stop(self, resident: Resident, now_s: float) -> Stop:
        resident.told.clear()
        resident.enter(UNLOADING, now_s)
        return Stop(resident.name)
