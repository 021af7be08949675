"""How many sequences batches run at once, shared among them in turn."""

import asyncio
from collections import deque


class Slots:
    """As a semaphore, with weights: whoever asks first gets first, also if others ask for less."""

    def __init__(self, number: int) -> None:
        self._number = self._free = max(1, number)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, wanted: int) -> int:
        """Wait for slots; how many were taken, which is at most all."""
        number = min(wanted, self._number)
        if self._waiting or self._free < number:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((number, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(number)
                self._waiting = deque(each for each in self._waiting if each[1] is not turn)
                self._wake()
                raise
        else:
            self._free -= number
        return number

    def give(self, number: int) -> None:
        """Give slots back."""
        self._free += number
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            number, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= number
                turn.set_result(None)
