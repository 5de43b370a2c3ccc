"""PURE. What losses a run survives: of its hosts, and of the place where its launchers meet."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.cli.doctor.facts import Facts, Meeting, Protected, Root
from holdfast.cli.doctor.finding import Finding
from holdfast.observe.units import count_text

_GUIDE = "docs/guides/several-hosts.md"


def judge_run(facts: Facts) -> Iterator[Finding]:
    """Of a root whose run has begun, and of launchers that are seen here."""
    root = facts.root
    if root is not None and root.exists and not root.fault:
        yield from _protection(root)
    for meeting in facts.meetings:
        yield _meeting(meeting)


def _protection(root: Root) -> Iterator[Finding]:
    about, protected = "protection", root.protected
    if protected is None:
        if len(root.hosts) > 1:
            yield Finding(
                "warn", about, f"snapshots survive the processes of {len(root.hosts)} hosts, and "
                "the loss of none of them: the run keeps no parity",
                "Checkpointer(..., parity=1), for the loss of any one host",
            )  # fmt: skip
        elif root.hosts:
            yield Finding("ok", about, "snapshots survive the run's processes; storage, its host")
        return
    text = _survival(protected)
    if protected.missing:
        yield Finding("warn", about, f"{text}; {'; '.join(protected.missing)}", f"See {_GUIDE}.")
    elif protected.reason:
        yield Finding(
            "warn", about, f"{text}; newer ones are not protected: {protected.reason}",
            "What was protected stays so. Look at the host that is named.",
        )  # fmt: skip
    else:
        yield Finding("ok", about, text)


def _survival(protected: Protected) -> str:
    asked = f"parity={protected.parity}, start {protected.incarnation}"
    if not protected.newest:
        hosts = count_text(protected.hosts, "host")
        return f"no snapshot of {hosts} was protected yet ({asked})"
    return f"snapshot {protected.newest} survives the loss of {protected.survives} ({asked})"


def _meeting(meeting: Meeting) -> Finding:
    about, where = "rendezvous", meeting.endpoint
    who = ""
    if meeting.launchers:
        pids = ", ".join(map(str, meeting.launchers))
        who = f" (torchrun: {pids})"
    if meeting.on or meeting.is_here:
        host = meeting.on or "this machine"
        return Finding(
            "warn", about, f"launchers meet at {where}{who}, on {host}, where the run trains: with "
            "that host all launchers end, and their workers, on every other host too",
            "Run the store on a machine that outlives the training hosts, and start launchers with "
            f"--rdzv-conf=is_host=0 ({_GUIDE}). What is in memory stays for the next launch.",
        )  # fmt: skip
    known = (
        "on none of the hosts known here" if meeting.is_here is False else "which has no address"
    )
    if meeting.is_here is None:
        return Finding(
            "warn", about, f"launchers meet at {where}{who}, {known} here",
            "Correct the name, or give its address: --rdzv-endpoint=HOST:PORT",
        )  # fmt: skip
    return Finding(
        "ok", about, f"launchers meet at {where}{who}, on none of the hosts known here; when that "
        "is lost they end with their workers, and a new launch goes on from memory",
    )  # fmt: skip
