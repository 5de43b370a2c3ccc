"""A save under way: what the training thread, the worker and the listener know of it together."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from holdfast.snapshot import messages as m
from holdfast.snapshot.capture import Overtaking, Stopped
from holdfast.snapshot.flag import Flag
from holdfast.snapshot.handle import SaveHandle
from holdfast.snapshot.room import Room
from holdfast.snapshot.segments import Sharing
from holdfast.snapshot.stillness import UNTRAINED, Trained
from holdfast.state.describe import Description


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the training thread may be held, in seconds, before a snapshot is given up."""

    first_grant_s: float = 300.0
    grant_s: float = 5.0
    durable_grant_s: float = 60.0
    copy_s: float = 600.0
    keeper_s: float = 30.0
    room_s: float = 60.0
    """How long storage may take nothing out of a ring that a copy waits for."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands in the run."""

    run_id: str
    incarnation: int
    nonce: str
    rank: int
    world: int


@dataclass(slots=True)
class Capture:
    """One save under way. Its fields are written under ``lock``."""

    step: int
    durable: bool
    exact: bool
    description: Description
    overtaking: Overtaking
    handle: SaveHandle
    started_s: float
    trained: Trained = UNTRAINED
    parameters: str = ""
    """The checksum of the trained parameters in the sealed image; "": there are none."""
    ready: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: Flag = field(default_factory=Flag)
    released: Flag = field(default_factory=Flag)
    resolved: Flag = field(default_factory=Flag)
    answer: m.Grant | m.Skip | m.Aborted | None = None
    turn: int = 0
    """Number of the request for its slot."""
    called_off: str = ""
    keeper_lost: bool = False
    """Whether a keeper was missing before this rank knew what came of it."""
    durable_lost: bool = False
    """Whether a keeper, or another rank, was lost before it was durable, as it was to be."""
    copied: bool = False
    events: list[torch.cuda.Event] = field(default_factory=list)
    _sharing: Sharing | None = None
    _is_helped: bool = False
    _shared_or_released: Flag = field(default_factory=Flag)
    room: Room = field(default_factory=Room)

    def call_off(self, reason: str) -> bool:
        """Give it up unless its copy is made already; whether it was given up."""
        self.room.give_up(reason)  # what was copied may still wait for it
        with self.lock:
            if self.copied:
                return False
            self.called_off = self.called_off or reason
        self.answered.set()
        self.release()
        return True

    def release(self) -> None:
        """Updates may go on."""
        self.released.set()
        self._shared_or_released.set()

    def share(self, sharing: Sharing) -> None:
        """Let its copying be taken part in while somebody is held by it."""
        self._sharing = sharing
        self._shared_or_released.set()

    def wait_released(self, timeout_s: float) -> bool:
        """Wait until updates may go on, a second thread copying meanwhile; whether they may."""
        started_s = time.monotonic()
        self._shared_or_released.wait(timeout_s)
        if self._sharing is not None and not self._is_helped:
            self._is_helped = True
            threading.Thread(target=self._sharing.work, name="holdfast-help", daemon=True).start()
        return self.released.wait(max(0.0, timeout_s - (time.monotonic() - started_s)))

    @property
    def is_carried(self) -> bool:
        """Whether a durable save that was not taken is due again at the next step."""
        answer = self.answer
        passing = self.keeper_lost or (isinstance(answer, m.Skip) and answer.is_passing)
        return self.durable and passing

    @property
    def is_kept_nowhere(self) -> bool:
        """Whether it went through a ring, and storage is not known to have all of it."""
        went_through = isinstance(self.answer, m.Grant) and self.answer.ring_bytes > 0
        return went_through and self.handle.state == "pending"

    def is_copied(self, events: list[torch.cuda.Event]) -> None:
        """Its bytes are final (behind ``events``): from now on it is not given up. Or Stopped."""
        with self.lock:
            self.check()
            self.copied, self.events = True, events

    def check(self) -> None:
        """Stopped when it was given up."""
        if self.called_off:
            raise Stopped(self.called_off)
