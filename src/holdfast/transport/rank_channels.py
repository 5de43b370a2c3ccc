"""Sealed channels of a rank to the ranks above and below it in the tree, on a thread of their own.

The thread serves ranks that lost their parent also while this rank trains. It sleeps unless words
come.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.errors import HoldfastError, PeerError
from holdfast.transport.channel import ChannelBounds, ChannelServer, SealedChannel, call
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.rank_tree import Join, Place, RankPhases, Word

#: A rank computes for as long as it likes: silence is no sign of its end, its deadline is.
_BOUNDS = ChannelBounds(
    frame_bytes=1 << 31, unsent_bytes=1 << 32, alive_s=60.0, silence_s=float("inf"), strangers=64
)
#: Seconds in which a rank whose line broke may come back, before it counts as ended, and before a
#: rank turns to the one above its parent.
_RETURN_S = 2.0
#: Seconds between two calls to a rank that does not answer.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0
_CLOSE_S = 15.0
#: The phases have deadlines of their own. Beyond them by so much there is a fault.
_FAULT_S = 120.0
_LOOK_S = 5.0
T = TypeVar("T")


class RankAddress(NamedTuple):
    """Where a rank listens."""

    rank: int
    host: str
    port: int


class RankChannels:
    """The channels of one rank. ``secret``: bytes that only the ranks of this meeting know."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._why = ""
        """Why no line to a rank above could be opened lately."""
        self._process = os.getpid()
        self._is_ending = False
        self._loop = asyncio.new_event_loop()
        self._server: ChannelServer | None = None
        self._phases: RankPhases | None = None
        self._lines: dict[int, SealedChannel] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, concurrent.futures.Future[Word]] = {}
        self._has_place = asyncio.Event()
        self._refused_s: dict[int, float] = {}
        """Ranks above that have ended, and since when calls to them are refused."""
        self._is_owed = asyncio.Event()
        """Set while this rank has spoken and the verdict has not come."""
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-ranks", daemon=True)
        self._thread.start()
        _OPEN.add(self)

    # ── what the rank's own thread calls ─────────────────────────────────────────────────────

    def listen(self, secret: bytes, host: str) -> int:
        """Listen at an address of this host; return the port. Raises OSError."""
        return self._result(self._listen(secret, host))

    def enter(self, secret: bytes, place: Place, above: Sequence[RankAddress]) -> None:
        """Take the place in the tree; the lines to the ranks above are opened meanwhile."""
        self._result(self._enter(secret, place, above))

    def reduce(
        self,
        count: int,
        word: Word,
        join: Join,
        timeout_s: float,
        conclude: Callable[[bytes], bytes] | None = None,
    ) -> Word:
        """Return what all ranks say in the phase ``count``; a signal's handler may interrupt it.

        ``conclude``: makes the verdict of it, on the root's own thread.
        """
        is_held = conclude is not None and self.rank == 0
        most_s = 3 * timeout_s + _FAULT_S
        speak = partial(self._speak, count, word, join, timeout_s, is_held)
        found = self._verdict(count, speak, most_s)
        if conclude is None or not is_held or not found.is_well:
            return found
        verdict = msgspec.structs.replace(found, payload=conclude(found.payload))
        return self._verdict(count, partial(self._settle, count, verdict), most_s)

    def _verdict(self, count: int, begin: Callable[[], None], most_s: float) -> Word:
        """Call ``begin`` on the thread of the channels; return what follows for this phase."""
        verdict: concurrent.futures.Future[Word] = concurrent.futures.Future()

        def act() -> None:
            self._waiting = {count: verdict}
            begin()
            self._go_on()

        self._loop.call_soon_threadsafe(act)
        return self._wait(verdict, most_s)

    def leave(self, count: int, word: Word) -> None:
        """Say the last word of this rank in the phase ``count``, and wait for nobody."""
        self._result(self._leave(count, word))

    def ended(self) -> list[int]:
        """Return the ranks below that did not come back, and those above where nobody listens."""
        least_s = self._loop.time() - _RETURN_S
        above = [rank for rank, since_s in self._refused_s.copy().items() if since_s <= least_s]
        return sorted({*above, *(self._phases.ended if self._phases is not None else ())})

    def end(self) -> None:
        """Have the thread send what is still to be sent, close all lines, and end. Waits for
        nothing: the garbage collector may call it on any thread, this one too.
        """
        if os.getpid() == self._process and not self._is_ending:
            self._is_ending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._begin_end)

    def close(self) -> None:
        """End the exchange, and wait for it."""
        self.end()
        if os.getpid() == self._process and self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        return self._wait(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _wait(self, answer: concurrent.futures.Future[T], most_s: float = float("inf")) -> T:
        end_s = time.monotonic() + most_s
        while not concurrent.futures.wait([answer], _LOOK_S).done:
            if not self._thread.is_alive() or time.monotonic() > end_s:
                raise HoldfastError(
                    "the thread that speaks with the other ranks has ended: start the ranks again"
                )
        return answer.result()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._fail)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    # ── on the thread of the channels ────────────────────────────────────────────────────────

    def _check_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(self._loop, {"message": "a line to a rank above", "exception": error})

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Hand a fault of this thread to the rank's own thread, which would wait for ever."""
        loop.default_exception_handler(context)
        error = context.get("exception") or HoldfastError(str(context.get("message")))
        for waiting in self._waiting.values():
            waiting.set_exception(error)
        self._waiting.clear()

    async def _listen(self, secret: bytes, host: str) -> int:
        if self._server is not None:  # it answered an older call
            await self._server.close()
        self._server = ChannelServer(
            secret, name=_name(self.rank), incarnation=0, welcome=self._serve, bounds=_BOUNDS
        )
        return await self._server.start(host)

    async def _enter(self, secret: bytes, place: Place, above: Sequence[RankAddress]) -> None:
        self._phases = RankPhases(self.rank, place)
        self._has_place.set()
        if not place.children and self._server is not None:
            await self._server.close()
        for distance, address in enumerate(above):
            task = asyncio.create_task(self._keep_line(secret, address, distance))
            task.add_done_callback(self._check_task)
            self._tasks.append(task)

    async def _leave(self, count: int, word: Word) -> None:
        assert self._phases is not None
        self._phases.leave(count, word)
        self._go_on()

    def _speak(self, count: int, word: Word, join: Join, timeout_s: float, is_held: bool) -> None:
        assert self._phases is not None
        now_s = self._loop.time()
        self._phases.speak(count, word, join, timeout_s, now_s, is_held=is_held)

    def _settle(self, count: int, verdict: Word) -> None:
        assert self._phases is not None
        self._phases.settle(count, verdict)

    def _tick(self) -> None:
        assert self._phases is not None
        self._phases.tick(self._loop.time())
        self._go_on()

    def _go_on(self) -> None:
        """Send what is to be sent, hand out verdicts, and set the clock to the next deadline."""
        phases = self._phases
        assert phases is not None
        sent, phases.sent = phases.sent, []
        for rank, frame in sent:
            if line := self._lines.get(rank):
                line.send(frame)
        if phases.has_unheard:
            self._is_owed.set()
        else:
            self._is_owed.clear()
        for count, waiting in list(self._waiting.items()):
            verdict = phases.verdict_of(count) or phases.held_of(count)
            if verdict is not None:
                del self._waiting[count]
                if verdict.missing and not self._lines:
                    verdict = msgspec.structs.replace(verdict, why=verdict.why or self._why)
                waiting.set_result(verdict)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (next_s := phases.next_s()) < float("inf"):
            self._timer = self._loop.call_at(next_s, self._tick)

    async def _serve(self, line: SealedChannel) -> None:
        """Serve the line of a rank below."""
        rank = int(line.peer.removeprefix(_name("")))
        await self._talk(rank, line)
        self._loop.call_later(_RETURN_S, self._end, rank)

    def _end(self, rank: int) -> None:
        if rank not in self._lines and self._phases is not None:
            self._phases.end(rank)
            self._go_on()

    async def _talk(self, rank: int, line: SealedChannel) -> None:
        """Hear what comes on a line until it breaks."""
        await self._has_place.wait()
        phases = self._phases
        assert phases is not None
        if (older := self._lines.pop(rank, None)) is not None:
            older.close("another line of this rank is open")
        self._lines[rank] = line
        phases.attach(rank)
        self._go_on()
        try:
            while True:
                phases.hear(rank, await line.receive(), self._loop.time())
                self._go_on()
        except (PeerError, msgspec.MsgspecError) as error:
            line.close(str(error))
        finally:
            if self._lines.get(rank) is line:
                del self._lines[rank]
                phases.detach(rank)

    async def _keep_line(self, secret: bytes, address: RankAddress, distance: int) -> None:
        """Keep a line open to a rank above; to another one than the parent only after a loss."""
        peer, pause_s = Peer(_name(address.rank), address.host, address.port), _LEAST_PAUSE_S
        while True:
            if distance:
                await self._wait_for_loss(distance)
            try:
                line = await call(
                    secret, peer, name=_name(self.rank), incarnation=0, bounds=_BOUNDS
                )
            except HoldfastError as error:
                self._why = str(error)
                self._note_refusal(address.rank, error)
            else:
                pause_s = _LEAST_PAUSE_S
                self._refused_s.pop(address.rank, None)
                await self._talk(address.rank, line)
                line.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _note_refusal(self, rank: int, error: HoldfastError) -> None:
        """Note a rank above whose host says that nobody listens there: its process has ended."""
        assert self._phases is not None
        if not isinstance(error.__cause__, ConnectionRefusedError):
            self._refused_s.pop(rank, None)
            return
        now_s = self._loop.time()
        self._refused_s.setdefault(rank, now_s)
        since = [self._refused_s.get(each, now_s) for each in self._phases.place.above]
        if not self._lines.keys() & set(self._phases.place.above) and (
            now_s - max(since) >= _RETURN_S
        ):
            self._phases.end_above()
            self._go_on()

    async def _wait_for_loss(self, distance: int) -> None:
        """Wait until a verdict is owed, and no line to a nearer rank was there for some time."""
        assert self._phases is not None
        nearer = self._phases.place.above[:distance]
        while True:
            await self._is_owed.wait()
            await asyncio.sleep(_RETURN_S * distance)
            if self._is_owed.is_set() and not any(rank in self._lines for rank in nearer):
                return

    def _begin_end(self) -> None:
        ending = asyncio.create_task(self._close())
        ending.add_done_callback(lambda _: self._loop.stop())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        lines = list(self._lines.values())
        await asyncio.gather(*(line.finish() for line in lines), return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


_OPEN: weakref.WeakSet[RankChannels] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for channels in list(_OPEN):
        channels.close()


def _name(rank: int | str) -> str:
    return f"rank-{rank}"
