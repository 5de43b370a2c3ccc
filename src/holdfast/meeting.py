"""Brings the ranks of a run together: they learn the addresses of each other, through one store.

The store of the process group carries addresses and the first handshake only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.protocol.arena import boot_id
from holdfast.transport.rank_channels import RankAddress, RankChannels
from holdfast.transport.wire.rank_tree import Place, places_of

MEETING = "the call of Holdfast"
ADDRESS = "HOLDFAST_HOST_ADDRESS"
LOOPBACK = "127.0.0.1"


class RankMeeting:
    """The meeting of one rank with the others, in the store of their process group."""

    def __init__(self, rank: int, size: int, channels: RankChannels, store: Any) -> None:
        self._rank, self._size, self._channels = rank, size, channels
        self._store = _StoreKeys(store)
        self.address = LOOPBACK
        """By which the other ranks reach this process."""

    def meet(self, timeout_s: float, fan_out: int) -> str:
        """Returns a name for this meeting of just these processes, chosen by rank 0, once this rank
        has its place in their tree.

        The store may be the launcher's and outlive a round of workers, with the keys of the dead
        round still in it. So rank 0 counts answers to its fresh call only. One that answers an
        older call is told, under that call, to read again. A broadcast would do it too, but hangs
        without a message where one rank does not come.
        """
        deadline = _Deadline(timeout_s)
        return self._call(deadline, fan_out) if self._rank == 0 else self._answer(deadline)

    def _listen(self, call: str) -> bytes:
        """Returns where this rank listens for those that know the call."""
        is_reached = not are_all_here(self._size)
        host = (is_reached and address_of_this_host(self._size, self._store.host)) or LOOPBACK
        self.address = host
        try:
            port = self._channels.listen(call.encode(), host)
        except OSError as error:
            raise UsageError(
                f"rank {self._rank} cannot listen at {host}, by which it would be reached: "
                f"{error.strerror}. Set {ADDRESS} on its host to an address of that host itself."
            ) from error
        return msgspec.msgpack.encode((host_id(), boot_id(), RankAddress(self._rank, host, port)))

    def _call(self, deadline: _Deadline, fan_out: int) -> str:
        """On rank 0: calls the others, waits for all their answers, and tells each its place."""
        call, others = uuid.uuid4().hex, range(1, self._size)
        own = self._listen(call)
        older = self._store.find("call")
        self._store.put({"call": call.encode()})
        if older:
            self._store.put({f"{older.decode()}/place/{rank}": b"" for rank in others})
        answers = [f"{call}/met/{rank}" for rank in others]
        told = self._store.wait_for(answers, deadline)
        if told is None:
            raise absent(self._rank, self._silent(call), MEETING, deadline.timeout_s)
        said = [
            msgspec.msgpack.decode(each, type=tuple[str, str, RankAddress]) for each in (own, *told)
        ]
        places = places_of([host for host, _, _ in said], fan_out)
        why = self._why_unreachable(places, [(machine, where) for _, machine, where in said])
        self._store.remove("call")
        given = [(place, [said[rank][2] for rank in place.above], why) for place in places]
        self._store.put({f"{call}/place/{n}": msgspec.msgpack.encode(given[n]) for n in others})
        self._enter(call, given[0])
        return call

    @staticmethod
    def _why_unreachable(places: Sequence[Place], said: Sequence[tuple[str, RankAddress]]) -> str:
        """Says which rank would have to be reached on another machine, and cannot; "" if none."""
        for rank, place in enumerate(places):
            machine, where = said[place.above[0]] if place.above else said[rank]
            if machine != said[rank][0] and is_loopback(where.host):
                return (
                    f"rank {where.rank} does not know by which address rank {rank} reaches it on "
                    f"another machine (it found {where.host}): set {ADDRESS} on its host to an "
                    "address of that host, or MASTER_ADDR to an address and no name of the host "
                    "itself"
                )
        return ""

    def _enter(self, call: str, told: tuple[Place, list[RankAddress], str]) -> None:
        place, above, why = told
        if why:
            raise UsageError(why)
        self._channels.enter(call.encode(), place, above)

    def _answer(self, deadline: _Deadline) -> str:
        """On the other ranks: answers a call, and every later one, until one gives it its place."""
        call, place = "", b""
        while not place:
            called = self._store.wait_for(["call"], deadline)
            if called is None:
                raise absent(self._rank, [0], MEETING, deadline.timeout_s)
            call = called[0].decode()
            mine = f"{call}/met/{self._rank}", f"{call}/place/{self._rank}"
            self._store.put({mine[0]: self._listen(call)})
            given = self._store.wait_for(mine[1:], deadline)
            if given is None:
                raise absent(self._rank, self._silent(call) or [0], MEETING, deadline.timeout_s)
            place = given[0]
            self._store.remove(*mine)
        self._enter(call, msgspec.msgpack.decode(place, type=tuple[Place, list[RankAddress], str]))
        return call

    def _silent(self, call: str) -> list[int]:
        """The ranks that have not answered this call."""
        answers = {f"{call}/met/{rank}": rank for rank in range(1, self._size)}
        return [answers[key] for key in self._store.missing(list(answers))]


def absent(
    rank: int, ranks: list[int], phase: str, timeout_s: float, seen: str = ""
) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"ranks {ranks} did not reach {phase!r} within {timeout_s:g} s{seen}; rank {rank} gave up "
        "waiting for them. See in their logs whether they ended, hang, or are only slower than "
        "timeout_s.",
        ranks=ranks,
        phase=phase,
    )


class _StoreKeys:
    """The keys of Holdfast in the store of the process group.

    A client of its own waits there: one that threads of torch share would keep them waiting. The
    ranks are many and the store is one: a rank calls it five times to meet the others.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._waiting = store, store.clone()

    @property
    def host(self) -> str:
        """The host that has the store; "" where no host has it."""
        store = self._store
        while (below := getattr(store, "underlying_store", None)) is not None:
            store = below
        return str(getattr(store, "host", ""))

    def put(self, values: Mapping[str, bytes]) -> None:
        with _reaching_the_store():
            self._store.multi_set([f"holdfast/{key}" for key in values], list(values.values()))

    def find(self, key: str) -> bytes | None:
        """Returns the value under ``key``, or None when there is none yet."""
        with _reaching_the_store():
            is_there = self._store.check([f"holdfast/{key}"])
            return bytes(self._store.get(f"holdfast/{key}")) if is_there else None

    def wait_for(self, keys: Sequence[str], deadline: _Deadline) -> list[bytes] | None:
        """Returns the values under all these keys once they are there; None if they are not by the
        deadline.

        On a thread that gets no signals: the store's own wait begins anew after each signal, and
        lets no handler run before its end.
        """
        names, ended = [f"holdfast/{key}" for key in keys], threading.Event()
        values: list[bytes] = []
        failed: list[Exception] = []

        def wait() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._waiting.set_timeout(timedelta(seconds=max(deadline.left_s, 0.001)))
                values.extend(map(bytes, self._waiting.multi_get(names) if names else ()))
            except Exception as error:
                failed.append(error)
            finally:
                ended.set()

        threading.Thread(target=wait, name="holdfast-meet", daemon=True).start()
        if not ended.wait(max(deadline.left_s, 0) + _STORE_S):
            raise _lost_store(RuntimeError("no answer"))
        if not failed:
            return values
        if not isinstance(failed[0], RuntimeError):
            raise failed[0]
        if deadline.left_s > _TIMING_S:
            raise _lost_store(failed[0]) from failed[0]
        with _reaching_the_store():
            return self._store.multi_get(names) if self._store.check(names) else None

    def missing(self, keys: list[str]) -> list[str]:
        """Returns the keys without a value; few requests if they are few."""
        with _reaching_the_store():
            if not keys or self._store.check([f"holdfast/{key}" for key in keys]):
                return []
        half = len(keys) // 2
        return keys if not half else [*self.missing(keys[:half]), *self.missing(keys[half:])]

    def remove(self, *keys: str) -> None:
        with _reaching_the_store():
            for key in keys:
                self._store.delete_key(f"holdfast/{key}")


#: A wait of the store may end so much before its time.
_TIMING_S = 0.1
#: The store answers in this time that a wait is over.
_STORE_S = 30.0


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost_store(error) from error


def _lost_store(error: RuntimeError) -> HoldfastError:
    return HoldfastError(
        f"the process group's store does not answer ({error}). The process or host that runs "
        "it has ended, and with it this round of training: start the ranks again."
    )


class _Deadline:
    """The end of a wait of ``timeout_s``."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end_s - time.monotonic()


def host_id() -> str:
    """Returns this host's name for arenas and messages; HOLDFAST_HOST_ID overrides it."""
    name = os.environ.get("HOLDFAST_HOST_ID") or socket.gethostname()
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)[:64] or "host"


def given_host_id() -> str:
    """Returns the name that HOLDFAST_HOST_ID gives this host; "" where it has its own."""
    return host_id() if os.environ.get("HOLDFAST_HOST_ID") else ""


def address_of_this_host(ranks: int, store: str = "") -> str:
    """Returns the address by which other hosts of this run reach this one; "" when unknown.

    HOLDFAST_HOST_ADDRESS, or the one that the host of the process group's store sees. No name is
    looked up, which may take long, where nobody else needs to reach this host.
    """
    if address := os.environ.get(ADDRESS, "").strip():
        return address
    if are_all_here(ranks):
        return ""
    store = os.environ.get("MASTER_ADDR", "") or store
    found = address_towards(store) if store else ""
    if is_loopback(found) and not is_loopback(store):
        # A host's own name may stand for itself alone: then the address of its way to others.
        found = address_towards(_ELSEWHERE) or found
    return found


def are_all_here(ranks: int) -> bool:
    """Returns True if all ranks are on this host: nobody else needs to reach it."""
    return ranks == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)


def is_loopback(address: str) -> bool:
    """Returns True for an address by which only the host itself is reached."""
    return address.startswith("127.") or address in ("::1", "localhost")


#: Of the addresses for documentation (RFC 5737): where the default route leads.
_ELSEWHERE = "192.0.2.1"


def address_towards(name: str) -> str:
    """Returns the address of this host that ``name`` sees; "" when it cannot be reached."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(there)  # of a datagram socket: nothing is sent
            return str(asking.getsockname()[0])
    except (OSError, UnicodeError):  # no such name, or none that could be one
        return ""
