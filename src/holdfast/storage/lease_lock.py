"""Locks a root in a bucket for one run: an object with owner and nonce, which is renewed.

A lease is taken over only when it did not change for ``take_over_s`` on the taker's own clock, or
when its process is known to be dead; its owner stops by its own clock well before. These clocks go
on while a machine is suspended; none of another machine is compared. What a server says of its own
times is compared with what it says of its own. See docs/design/0017-buckets.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from types import TracebackType

from msgspec import Struct
from msgspec.structs import asdict, replace

from holdfast.errors import RootBusy, StorageError
from holdfast.events import warn
from holdfast.storage.base import root_busy
from holdfast.storage.bucket import Bucket, Outcome

ONE_WRITER = "HOLDFAST_BUCKET_ONE_WRITER"
_MAX_BYTES = 8192
#: Of more holders whose removals are not completed a lease does not tell who they were: what is
#: longer than ``_MAX_BYTES`` could not be read.
_MOST_HOLDERS = 64
#: What stands for the process in a lease that was freed by hand: its holder may not have ended.
_BY_HAND = "freed by hand"


class LeaseTimes(Struct, frozen=True):
    """Seconds. A holder changes nothing ``stop_s`` after it last began a renewal that succeeded;
    what is left of ``take_over_s`` is for a request that it had begun.
    """

    renew_s: float = 10.0
    stop_s: float = 30.0
    take_over_s: float = 60.0

    def __post_init__(self) -> None:
        assert self.renew_s < self.stop_s < self.take_over_s


class _Written(Struct, frozen=True):
    """What a lease object says. An empty nonce: it is free.

    ``pending_s``: for how long, from when it was written, a request of an earlier holder may land.
    ``is_alone``: every holder of these is known to have ended. ``announced``: the nonces of the
    holders whose announced removals may not be completed, and the names of single announcements
    that are not; None where that is not known.
    """

    owner: str = ""
    nonce: str = ""
    process: str = ""
    beat: int = 0
    pending_s: float = 0.0
    is_alone: bool = True
    announced: tuple[str, ...] | None = None

    def data(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_by_hand(self) -> bool:
        """True if a person freed it, while its holder may have been about to change something."""
        return not self.nonce and self.process == _BY_HAND

    @property
    def has_ended(self) -> bool:
        """True if its holder released it, or is known to have ended."""
        return not self.is_by_hand and (not self.nonce or is_dead(self.process))

    def left_s(self, quiet_s: float, settle_s: float) -> float:
        """Returns for how long requests may still land, ``quiet_s`` after it was written; one that
        nobody answered may for ``settle_s``.
        """
        is_released = not self.nonce and not self.is_by_hand
        return max(0.0, (self.pending_s if is_released else settle_s) - quiet_s)


def _parsed(data: bytes, settle_s: float) -> _Written:
    try:
        found = json.loads(data[:_MAX_BYTES])
        owner, nonce, process = (str(found.get(key, "")) for key in ("owner", "nonce", "process"))
        pending_s = min(settle_s, max(0.0, float(found.get("pending_s", 0.0))))
        is_alone = found.get("is_alone", True) is True
        announced = found.get("announced")
        announced = None if announced is None else tuple(map(str, announced))
        beat = int(found.get("beat", 0))
        return _Written(owner, nonce, process, beat, pending_s, is_alone, announced)
    except (ValueError, AttributeError, TypeError, OverflowError):
        return _Written("somebody whose lease cannot be read", "?")


def _tag(found: Outcome) -> str:
    """Returns what a condition names an object by; what none has where the server does not say it:
    nothing is written to a lease without a condition.
    """
    return found.header("etag") or '"none"'


def quiet_s(found: Outcome) -> float:
    """Returns for how long an object did not change, all by the server's clock; 0 where it does not
    say so.
    """
    try:
        now = parsedate_to_datetime(found.header("date"))
        return max(
            0.0, (now - parsedate_to_datetime(found.header("last-modified"))).total_seconds()
        )
    except (ValueError, TypeError):
        return 0.0


class ObjectLease:
    """A lease that is held until ``release``, or lost. A forked child does not have it."""

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        name: str,
        said: _Written,
        etag: str,
        begun_s: float,
        times: LeaseTimes,
    ) -> None:
        self._bucket, self.key, self.name = bucket, key, name
        self._said, self._etag, self._renewed_s = said, etag, begun_s
        self._times = times
        self._process = os.getpid()
        self._ended = threading.Event()
        self._turn = threading.Lock()
        self._taken_by: str | None = None
        self._settled_s = _now_s() + said.pending_s
        self.began: str | None = None
        """When it was taken, as the server says, where there was no lease object before; None where
        there was one.
        """
        self.unanswered_s: Callable[[], float] = lambda: 0.0
        """Returns for how long a request of this holder may land that nobody answered."""
        arguments = weakref.ref(self), self._ended, times.renew_s
        self._thread = threading.Thread(
            target=_keep_renewing, args=arguments, name="holdfast-root-lease", daemon=True
        )
        self._thread.start()

    @property
    def nonce(self) -> str:
        """Tells this holding from every other."""
        return self._said.nonce

    def may_have_announced(self, name: str) -> bool:
        """False for an announcement that was not there when all of its holder were completed, under
        a holding since: nobody answered it, and it may be there all the same.
        """
        holder = name.rpartition("-")[0]
        return self._said.announced is None or not {name, holder}.isdisjoint(self._said.announced)

    def note_completed(self, left: Iterable[str]) -> None:
        """Called when what earlier holders announced is completed, but for what is ``left`` of
        these. RootBusy or StorageError where a request of theirs may land and that cannot be noted:
        who is next would complete it.
        """
        left = sorted(left)
        with self._turn:
            announced = (*left, self._said.nonce) if len(left) < _MOST_HOLDERS else None
            self._said = replace(self._said, announced=announced)
        if self.unsettled_s:
            self.require_renewed()

    def distrust(self) -> None:
        """Called where there was one to be found: who held it may go on until it looks for it."""
        with self._turn:
            self._said = replace(self._said, is_alone=False)
            self._settled_s = _now_s() + self._bucket.settle_s
        minutes = math.ceil(self._bucket.settle_s / 60)
        warn(
            f"{self._bucket.url} had no lock {self.name!r} and is older: if somebody removed it, a "
            "run that held it may go on until it looks for it. "
            f"For {minutes} minutes no upload that was broken off there is gone on with, and "
            "`holdfast prune` leaves directories and layouts that nothing names."
        )
        self.require_renewed()

    @property
    def is_alone(self) -> bool:
        """True if every holder before is known to have ended: none goes on with what it began."""
        return self._said.is_alone or not self.unsettled_s

    @property
    def unsettled_s(self) -> float:
        """For how long a request of an earlier holder may still land."""
        return max(0.0, self._settled_s - _now_s())

    @property
    def is_held(self) -> bool:
        """False once it was released, and in a forked child."""
        return not self._ended.is_set() and self._process == os.getpid()

    @property
    def is_lost(self) -> bool:
        """True once another has it: it is not regained, and has to be taken anew."""
        return self._taken_by is not None

    def require_held(self) -> None:
        """Raises RootBusy when another has the lease, StorageError when it could not be renewed."""
        if not self.is_held:
            return
        if self._taken_by is not None:
            raise root_busy(self.name, self._bucket.url, self._taken_by)
        quiet_s = _now_s() - self._renewed_s
        if quiet_s > self._times.stop_s:
            raise StorageError(
                f"the lease {self.name!r} of {self._bucket.url} could not be renewed for "
                f"{quiet_s:.0f} s, so nothing is changed there: another may take it over. It is "
                "tried again; look whether this process was stopped, or its server is out of "
                "reach.",
                operation="lease",
                path=self.name,
                url=self._bucket.url,
                errno=0,
            )

    def require_renewed(self) -> None:
        """Renews the lease now; RootBusy or StorageError unless the server takes that."""
        begun_s = _now_s()
        self.renew()
        self.require_held()
        if self._renewed_s < begun_s:
            raise StorageError(
                f"the lease {self.name!r} of {self._bucket.url} could not be renewed just now, so "
                "nothing is removed there",
                operation="lease",
                path=self.name,
                url=self._bucket.url,
                errno=0,
            )

    def renew(self) -> None:
        """Renews the lease by compare-and-swap; never raises."""
        with self._turn:
            if not self.is_held or self._taken_by is not None:
                return
            try:
                if not self._swap() and self._is_mine():
                    self._swap()
            except StorageError:  # tried again; require_held tells when it was too long
                return

    def _swap(self) -> bool:
        """Writes the lease in the place of what was known of it; False where that is not there.

        Only this renews it: others count from when the object changed.
        """
        begun_s = _now_s()
        said = replace(self._said, beat=self._said.beat + 1, pending_s=self.unsettled_s)
        outcome = self._bucket.put(self.key, [said.data()], if_match=self._etag)
        if outcome.is_done:
            self._said, self._etag = said, _tag(outcome)
            self._renewed_s = begun_s
        return outcome.status not in (404, 412)

    def _is_mine(self) -> bool:
        """Finds out whether a renewal whose answer was lost had its effect, or another took it."""
        found = self._bucket.get(self.key)
        if not found.is_done and found.status != 404:
            return False
        there = _parsed(found.body, self._bucket.settle_s) if found.is_done else _Written()
        if there.nonce == self._said.nonce:
            there = replace(there, announced=self._said.announced)  # may not be written yet
            self._said, self._etag = there, _tag(found)
            return True
        self._taken_by = there.owner or "nobody any more"
        warn(
            f"the lease {self.name!r} of {self._bucket.url} was taken over by "
            f"{self._taken_by}: this process writes nothing there any more"
        )
        return False

    def release(self) -> None:
        if self._ended.is_set():
            return
        if self._process != os.getpid():
            self._ended = threading.Event()
            self._ended.set()
            return
        self._ended.set()
        with self._turn:
            if self._taken_by is None:
                pending_s = max(self.unsettled_s, self.unanswered_s())
                free = _Written(
                    pending_s=pending_s, is_alone=self.is_alone, announced=self._said.announced
                )
                with contextlib.suppress(StorageError):  # it ends by itself
                    self._bucket.put(self.key, [free.data()], if_match=self._etag)
        if self._thread is not threading.current_thread():
            self._thread.join(self._times.renew_s)

    def __enter__(self) -> ObjectLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _now_s() -> float:
    """Returns the seconds since boot, those that the machine was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _keep_renewing(
    to_lease: weakref.ref[ObjectLease], ended: threading.Event, renew_s: float
) -> None:
    while not ended.wait(renew_s):
        lease = to_lease()
        if lease is None:
            return
        try:
            lease.renew()
        except Exception as error:  # without this thread the lease would be over for good
            warn(f"the lease {lease.name!r} was not renewed: {error!r}")
        del lease


def take_lease(bucket: Bucket, key: str, name: str, owner: str, times: LeaseTimes) -> ObjectLease:
    """Takes the lease; RootBusy when another renews it.

    ``bucket`` is used for renewals too: its patience must end well before ``stop_s``. Where another
    has the lease, that is watched for as long as a take-over needs. StorageError where its object
    has no ETag, or for so long none that the server takes.
    """
    said = _Written(owner, secrets.token_hex(16), process_name())
    watched, was_there, since_s, first_s = "", False, _now_s(), _now_s()
    begun_s, refused = first_s, ""
    outcome = bucket.put(key, [said.data()], if_none=True)
    while True:
        if outcome.is_done:
            lease = ObjectLease(bucket, key, name, said, _tag(outcome), begun_s, times)
            lease.began = None if was_there else outcome.header("date")
            return lease
        if outcome.status not in (0, 412):
            bucket.require(outcome, "lock", name)
        found = bucket.get(key)
        bucket.require(found, "lock", name)
        there, etag = _parsed(found.body, bucket.settle_s), found.header("etag")
        if not etag or (etag == refused and _now_s() - first_s >= times.take_over_s):
            raise _no_tag(bucket, key, etag)
        if there.nonce == said.nonce:  # the answer to one of our own requests was lost
            lease = ObjectLease(bucket, key, name, there, etag, first_s, times)
            if begun_s > first_s:  # which of them is not known
                lease.renew()
            lease.began = None if was_there else found.header("date")
            return lease
        if watched and there.nonce and etag != watched:
            raise _busy(name, bucket.url, there.owner)
        if not watched:
            watched, since_s = etag, _now_s()
        is_over = _now_s() - since_s >= times.take_over_s
        if there.has_ended or there.is_by_hand or is_over:
            watched, begun_s, was_there = "", _now_s(), True
            silent_s = quiet_s(found)
            # One that was killed after others that were, too: none goes on with what they began.
            are_killed = there.is_alone and bool(there.nonce)
            is_alone = there.has_ended and (are_killed or there.pending_s <= silent_s)
            known = there.announced is not None and len(there.announced) < _MOST_HOLDERS
            announced = (*(there.announced or ()), said.nonce) if known else None
            pending_s = there.left_s(silent_s, bucket.settle_s)
            said = replace(said, pending_s=pending_s, is_alone=is_alone, announced=announced)
            outcome, refused = bucket.put(key, [said.data()], if_match=etag), etag
            if outcome.status != 412:
                continue
        time.sleep(min(1.0, times.renew_s / 4))


def _no_tag(bucket: Bucket, key: str, etag: str) -> StorageError:
    shown = f"refuses the one that it shows ({etag}) as a condition" if etag else "shows none"
    error = StorageError(
        f"{bucket.url} cannot be locked: a lock is replaced by its ETag, and the server "
        f"({bucket.server}) {shown} for {key}. Look whether a proxy before it drops or changes "
        "ETags; or use another server.",
        operation="lock",
        path=key,
        url=bucket.url,
        errno=0,
    )
    error.retryable = False
    return error


class LeaseHolder(Struct, frozen=True):
    """Who has a lease. ``pid``: its process, where that is one of this machine and lives, else 0.
    ``renewed``: when the object was last written, as its server says.
    """

    owner: str
    pid: int
    renewed: str


class LeaseView:
    """A lease as others see it."""

    def __init__(self, bucket: Bucket, key: str, name: str, times: LeaseTimes) -> None:
        self._bucket, self._key, self._name, self._times = bucket, key, name, times
        self._etag = ""

    def holder(self) -> LeaseHolder | None:
        """Returns who has it now; None when it is free."""
        found = self._bucket.get(self._key)
        if found.status == 404:
            return None
        self._bucket.require(found, "look-up", self._name)
        self._etag, there = _tag(found), _parsed(found.body, self._bucket.settle_s)
        if not there.nonce:
            return None
        parts = there.process.split("/", 4)
        pid = int(parts[2]) if _is_here(parts) and not is_dead(there.process) else 0
        return LeaseHolder(there.owner, pid, found.header("last-modified"))

    def require_silent(self) -> LeaseHolder | None:
        """Waits for as long as a take-over needs; RootBusy when it was renewed meanwhile."""
        before = self._etag
        time.sleep(self._times.take_over_s)
        there = self.holder()
        if there is not None and self._etag != before:
            raise _busy(self._name, self._bucket.url, there.owner)
        return there

    def free(self) -> None:
        """Frees it, unless it was renewed since ``holder`` was called: RootBusy. What its holder
        has under way may still land, so who takes it next is not alone.
        """
        said = _Written(process=_BY_HAND)
        outcome = self._bucket.put(self._key, [said.data()], if_match=self._etag)
        if outcome.status == 412:
            raise _busy(self._name, self._bucket.url, "somebody who renewed it just now")
        self._bucket.require(outcome, "unlock", self._name)


def _busy(name: str, url: str, owner: str) -> RootBusy:
    error = root_busy(name, url, owner)
    return RootBusy(f"{error} Its lease was renewed a moment ago.", **error.fields)


def process_name() -> str:
    """Returns a name of this process that no other has: boot, process namespace, number, start,
    host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        pid, host = os.getpid(), os.uname().nodename
        return f"{boot}/{namespace}/{pid}/{_started(pid)}/{host}"
    except OSError:
        return ""


def is_dead(process: str) -> bool:
    """True if this process is known to have ended: it was of this machine, and is not there."""
    parts = process.split("/", 4)
    if not _is_here(parts):
        return False
    try:
        return _started(int(parts[2])) != parts[3]
    except FileNotFoundError:  # another user's process may be hidden there
        return _is_gone(int(parts[2]))
    except OSError:
        return False


def _is_here(parts: list[str]) -> bool:
    """True for a process of this boot, namespace and host; earlier versions named no host."""
    mine = process_name().split("/", 4)
    is_same = parts[:2] == mine[:2] and parts[4:] in ([], mine[4:])
    return len(parts) >= 4 and is_same and parts[2].isdecimal()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _started(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
