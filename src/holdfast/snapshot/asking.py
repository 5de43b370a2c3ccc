"""From a save to the keeper's leave to copy it: this rank asks for a slot, on the worker.

A keeper that cannot be reached, or says nothing, costs the save, and no later one waits for it.
"""

from __future__ import annotations

from holdfast.errors import Fenced, HoldfastError, SnapshotSkipped
from holdfast.snapshot import messages as m
from holdfast.snapshot.client import KeeperClient
from holdfast.snapshot.heard import Heard
from holdfast.snapshot.line import Line
from holdfast.snapshot.underway import Capture, Patience


class Asking:
    """Asks for one capture after the other."""

    def __init__(self, line: Line, heard: Heard) -> None:
        self._line, self._heard = line, heard
        self.was_granted = False
        """Whether there was ever a slot: the first takes longest, as memory has to be made."""
        self._turns = 0

    def ask(self, capture: Capture, patience: Patience) -> m.Grant:
        """Ask for a slot; SnapshotSkipped when no rank gets one."""
        if self._heard.fenced:
            raise Fenced(self._heard.fenced)
        client = self._reach_keeper(capture)
        described = capture.description
        if described.table_hash != self._line.known_table:
            table = m.Table(hash=described.table_hash, data=described.table)
            # Not longer than the fence waits, or the next saves would wait for this one to end.
            wait_s = patience.grant_s if self.was_granted else patience.first_grant_s
            client.request(table, m.Done, timeout_s=wait_s)
            self._line.known_table = described.table_hash
        self._turns += 1
        capture.turn = self._turns
        client.send(m.Ask(
            step=capture.step, table=described.table_hash, durable=capture.durable,
            values_bytes=len(described.values), exact=capture.exact, turn=capture.turn,
        ))  # fmt: skip
        capture.answered.wait()  # the fence, the keeper or its loss ends it
        if capture.called_off and not isinstance(capture.answer, m.Grant):
            client.send(m.Withdraw(step=capture.step))
        capture.check()
        if not isinstance(capture.answer, m.Grant):
            reason = capture.answer.reason if capture.answer is not None else "no answer"
            raise SnapshotSkipped(f"step {capture.step} was skipped on all ranks: {reason}")
        self.was_granted = True
        return capture.answer

    def _reach_keeper(self, capture: Capture) -> KeeperClient:
        """The client to ask, of a keeper that was not silent on this line."""
        if self._line.is_open and self._heard.is_silent:
            capture.keeper_lost = True
            raise SnapshotSkipped(
                "the keeper has not answered since the last save (is it stopped?)"
            )
        if self._line.rests:
            capture.keeper_lost = True  # nobody was asked: what is to be durable still is
        try:
            return self._line.ensure_for_save()
        except HoldfastError:
            self._heard.is_silent = False  # that was said of a line there is no more
            raise
