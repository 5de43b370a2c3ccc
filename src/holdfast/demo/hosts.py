"""The demo on simulated hosts: one is lost, then two at once.

Each host is a ``torchrun`` of its own with one trainer, a keeper and memory of its own; a lost host
loses all of them in one moment. The launchers of the others start their trainers again, on as many
ranks as there are hosts. Where they meet is a store in this process, on none of the hosts.
"""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.demo.phases import Phases
from holdfast.demo.records import Incarnation
from holdfast.demo.runs import DURABLE_EVERY, STEPS, PhaseFailed, Run
from holdfast.demo.verdict import (
    Interruption,
    judge_host_lost,
    judge_hosts_lost,
    judge_reference,
)
from holdfast.events import ProtectionPlanned, SnapshotProtected, SourceDropped
from holdfast.observe.told import told

HOSTS = ("a", "b", "c", "d", "e")
#: After which step hosts are lost: so that memory has what no checkpoint has, and the next
#: checkpoint is some steps away.
LOSE_ONE, LOSE_TWO = range(24, 34), range(44, 55)
#: So many steps may have been made since the newest protected one when hosts are lost.
BEHIND = 4
#: And so many more until they are gone.
AHEAD = 6
PROTECTED_WITHIN_S = 60.0


class HostsDemo(Phases):
    """Hosts that are lost, as many as parity replaces and more."""

    def do_all(self) -> None:
        """All phases, in order."""
        count = self.result.hosts or 0
        lose_one, lose_two = self.chance.choice(LOSE_ONE), self.chance.choice(LOSE_TWO)
        with self.phase(f"1/3  The reference: FSDP2 on {count} ranks of one host, nothing fails"):
            reference = self._run_reference(count, lose_one)
        run, hosts = self.new_run("hosts"), list(HOSTS[:count])
        endpoint = _Meeting()
        with self.phase(f"2/3  The same on {count} hosts with parity=1, and one host is lost"):
            for host in hosts:
                run.launch_host(host, count, endpoint.name, "--parity", "1")
            first, least = self._lose(run, hosts, 1, lose_one)
            resumed = run.wait_for_next(first.killed)
            self.say_resumed(first, resumed)
            if run.wait_for_step(lose_two) is not resumed:
                raise PhaseFailed("training was restarted once more, without a loss", run.log)
        with self.phase("3/3  Two hosts are lost at once: more than parity=1 replaces"):
            second, _ = self._lose(run, hosts, 2, lose_two)
            row = judge_host_lost(first, resumed, least, reference)
            self.add(f"{count} hosts, until one is lost", None, first.killed)
            self.add("from memory of the others, until two are lost", row, resumed, first)
            stored = max(run.published(), default=None)
            again = run.wait_for_next(resumed)
            self.screen.say(why_not(run.root, resumed.n))
            self.say_resumed(second, again)
            run.wait_for_end()
            row = judge_hosts_lost(second, again, stored, (first.killed, resumed), reference)
            self.add("from storage", row, again, second)

    def _run_reference(self, ranks: int, lose_after: int) -> Incarnation:
        run = self.new_run("reference")
        around = range(lose_after - BEHIND, lose_after + AHEAD)
        run.launch(ranks, "--checksum-after", *map(str, around))
        reference = run.wait_for_end()
        row = judge_reference(reference, STEPS, run.published(), DURABLE_EVERY)
        self.add(f"reference: FSDP2 {ranks} ranks", row, reference)
        return reference

    def _lose(self, run: Run, hosts: list[str], many: int, after: int) -> tuple[Interruption, int]:
        """Lose so many hosts after a step; the newest step that was said to be protected."""
        running = run.wait_for_step(after)
        least = self._wait_protected(run, running, after - BEHIND)
        part = self.let_pass_part_of_a_step(running)
        lost = sorted(self.chance.sample(hosts, many))
        kill = Interruption(_hosts_text(many), running, time.monotonic())
        run.lose_hosts(lost)
        hosts[:] = [host for host in hosts if host not in lost]
        self.screen.say(f"{survival(run.root, running.n)}; the newest protected is step {least}")
        self.screen.say(
            f"step {running.last_updated} made, {part:.0%} into the next: lost "
            f"{'host' if many == 1 else 'hosts'} {' and '.join(lost)}, with all memory; "
            f"left {', '.join(hosts)}"
        )
        return kill, least

    def _wait_protected(self, run: Run, running: Incarnation, least: int) -> int:
        """Wait until a step from ``least`` on is protected; the newest that is."""
        deadline_s = time.monotonic() + PROTECTED_WITHIN_S
        while (found := newest_protected(run.root, running.n)) is None or found < least:
            if time.monotonic() > deadline_s:
                raise PhaseFailed(f"the newest protected step is {found}", run.log)
            time.sleep(0.05)
        return found


class _Meeting:
    """Where launchers meet: it lives as long as this."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # takes seconds, and is for this demo alone

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.name = f"127.0.0.1:{self._store.port}"


def _hosts_text(many: int) -> str:
    return "one host" if many == 1 else "two hosts at once"


# ── what the run's own events say ────────────────────────────────────────────────────────────


def newest_protected(root: Path, incarnation: int) -> int | None:
    """The newest step of this start that somebody said is protected."""
    steps = (e.step for e in told(root, SnapshotProtected) if e.incarnation == incarnation)
    return max(steps, default=None)


def survival(root: Path, incarnation: int) -> str:
    """What the protected snapshots of this start survive, in words."""
    found = [e.survives for e in told(root, ProtectionPlanned) if e.incarnation == incarnation]
    return (
        f"a protected snapshot survives the loss of {found[-1]}" if found else "no parity is kept"
    )


def why_not(root: Path, incarnation: int) -> str:
    """Which step of that start memory cannot give, and why: one that was protected if there is."""
    found = [
        e for e in told(root, SourceDropped) if e.source.startswith(f"memory {incarnation}-")
    ]  # fmt: skip
    # Of a protected step it is known on which hosts its images were.
    one = max(found, key=lambda e: ("of its group" in e.reason, e.step), default=None)
    return "memory has nothing" if one is None else f"memory cannot give {one.step}: {one.reason}"
