"""Ask a peer in the run's name, and believe only what it signed.

An answer that is not signed, or not to this request, or by a peer of an incarnation that is over,
makes the peer one that is not asked again. Bytes are in ``line``, what they are for in ``pull``.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

from holdfast.errors import Fenced, PeerError
from holdfast.peers import refusals
from holdfast.peers.line import Busy, Line, Patience
from holdfast.peers.signing import Answer, Request, Signer, is_same
from holdfast.peers.wire import check_peer, parse_answer, render_request

_MOST_TRIES = 5
_REASONS = {
    refusals.UNKNOWN.status: "it has nothing of that name",
    refusals.WITHDRAWN.status: "it has withdrawn that, or has another generation under that name",
    refusals.BAD_RANGE.status: "it has fewer bytes there",
    refusals.MISDIRECTED.status: "it goes by another name",
    refusals.REPLAYED.status: "it has seen this request before",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A keeper on another host: the name it answers to, and where it listens."""

    name: str
    host: str
    port: int

    def __post_init__(self) -> None:
        check_peer(self.name)

    def __str__(self) -> str:
        return f"{self.name} at {self.host} port {self.port}"


@dataclass(eq=False, slots=True)
class Task:
    """One request, until it is answered."""

    method: str
    path: str
    generation: str
    span: str = ""
    into: memoryview | None = None
    """Where the bytes of the range go; exactly so many must come."""
    size_bytes: int = 0
    """How many must come, where it is decided later where they go."""
    tag: str = ""
    tries: int = 0

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.span.replace('=', ' ') or 'all'} of {self.path}"


def failed(peer: Peer, task: Task | None, phase: str, reason: str, *, status: int = 0) -> PeerError:
    """The error that says who did not give what, and why."""
    what = task.what if task else "anything"
    return PeerError(
        f"keeper {peer} does not give {what} ({phase}): {reason}. Nothing of it is used: take "
        "another source, and look at that host.",
        peer=peer.name,
        address=f"{peer.host}:{peer.port}",
        path=task.path if task else "",
        range=task.span if task else "",
        phase=phase,
        status=status,
    )


class Caller:
    """Signs the requests of one client. For any number of threads."""

    def __init__(self, secret: bytes, *, incarnation: int, patience: Patience) -> None:
        self.incarnation, self.patience = incarnation, patience
        self._signer = Signer(secret)
        self._nonce = secrets.token_hex(16)
        self._counters = itertools.count(1)
        self._challenges: dict[Peer, str] = {}

    def ask(self, line: Line, peer: Peer, task: Task) -> str:
        """Send the request; its signature."""
        request = Request(
            method=task.method,
            peer=peer.name,
            path=task.path,
            generation=task.generation,
            incarnation=self.incarnation,
            nonce=self._nonce,
            counter=next(self._counters),
            challenge=self._challenges.get(peer, ""),
            span=task.span,
            tag=task.tag,
        )
        signature = self._signer.of_request(request)
        line.send(render_request(request, signature, f"{peer.host}:{peer.port}"))
        return signature

    def hear(
        self, line: Line, peer: Peer, task: Task, signature: str, until_s: float
    ) -> Answer | None:
        """The head of the answer, when it promises what was asked for; None: ask once more.

        PeerError when it does not, Fenced when this run goes on elsewhere; Busy when it has no
        place for this connection, which it says before it knows who asks, and so without a
        signature: somebody in between can make us wait with that, and no more.
        """
        parsed = parse_answer(line.head(until_s))
        if parsed is None:
            raise failed(peer, task, "answer", "what answers there is no keeper")
        answer, given = parsed
        if not given and answer.status == refusals.CROWDED.status:
            raise Busy("answer", "it has no place for another connection")
        if not is_same(given, self._signer.of_answer(answer, signature)):
            raise failed(
                peer, task, "answer", f"its answer {answer.status} is not signed with this run's "
                "secret: another secret, another run, or somebody in between",
            )  # fmt: skip
        self._check_incarnation(peer, task, answer)
        if answer.status == refusals.CHALLENGED.status:
            self._learn(peer, task, answer)
            return None
        expected = 206 if task.span else 200
        if answer.status != expected:
            reason = _REASONS.get(answer.status, "that is no answer to it")
            raise failed(
                peer, task, "answer", f"{reason} (answer {answer.status})", status=answer.status
            )
        self._check_length(peer, task, answer)
        return answer

    def _check_incarnation(self, peer: Peer, task: Task, answer: Answer) -> None:
        if answer.incarnation > self.incarnation:
            raise Fenced(
                f"incarnation {self.incarnation} is over, {answer.incarnation} has begun, says "
                f"keeper {peer}: this process belongs to an older start and must end"
            )
        if answer.incarnation < self.incarnation:
            raise failed(
                peer, task, "answer", f"it is still in incarnation {answer.incarnation}, which is "
                f"over: {self.incarnation} has begun",
            )  # fmt: skip

    def _learn(self, peer: Peer, task: Task, answer: Answer) -> None:
        task.tries += 1
        if task.tries >= _MOST_TRIES:
            raise failed(peer, task, "answer", "it gives out challenge after challenge")
        self._challenges[peer] = answer.challenge

    def _check_length(self, peer: Peer, task: Task, answer: Answer) -> None:
        size = task.size_bytes if task.into is None else len(task.into)
        if not size:
            return
        span = answer.span.partition("/")[0]
        if (f"bytes={span}", answer.length_bytes) != (task.span, size):
            raise failed(
                peer, task, "answer",
                f"it answers with {answer.length_bytes} bytes, {span or 'no range'}",
            )  # fmt: skip
