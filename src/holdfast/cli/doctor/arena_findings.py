"""PURE. What the arenas on a host say of their runs and keepers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from holdfast.cli.doctor.facts import Arena, Facts
from holdfast.cli.doctor.finding import Finding
from holdfast.observe.units import count_text, size_text

_STATES = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "waiting for a disk",
           "Z": "dead and not yet reaped"}  # fmt: skip


def judge_arenas(facts: Facts) -> Iterator[Finding]:
    """One finding for each arena."""
    if not facts.arenas:
        yield Finding("ok", "arenas", "none")
    for arena in facts.arenas:
        yield _judge(arena)


def _judge(arena: Arena) -> Finding:
    name = f"run {arena.run_id} on {arena.host_id}, {size_text(arena.size_bytes)}"
    if arena.fault:
        return Finding("bad", "arena", f"{arena.path}: {arena.fault}", f"ls -la {_quoted(arena)}")
    if arena.is_grave:
        return Finding(
            "warn", "arena", f"{arena.path} is half removed, {size_text(arena.size_bytes)}",
            f"holdfast doctor --clean, or rm -r {_quoted(arena)}",
        )  # fmt: skip
    if arena.is_stale:
        return _stale(arena, name)
    if arena.answers is None and not arena.keeper_pid:
        pids = ", ".join(map(str, arena.users))
        return Finding(
            "warn", "arena", f"{name}: no keeper, but in use by {pids}",
            "A training process starts another keeper at its next save; if it hangs, end it: "
            f"kill {pids.replace(', ', ' ')}",
        )  # fmt: skip
    return _kept(arena, name)


def _kept(arena: Arena, name: str) -> Finding:
    pid = arena.keeper_pid
    if not arena.answers:
        return _silent(arena, name)
    keeper = f"process {pid}" if pid else "which cannot be seen from this container"
    if arena.root_exists is False:
        return Finding(
            "warn",
            "arena",
            f"{name}: its keeper, {keeper}, lives, but its root {arena.root} is gone",
            "Put the root back, or end the keeper" + (f": kill {pid}" if pid else " where it runs"),
        )
    newest = f", newest snapshot {arena.newest}" if arena.newest else ""
    if arena.part and arena.part != arena.newest:
        newest += f", part of {arena.part}"
    if arena.parity_bytes:
        newest += f", {size_text(arena.parity_bytes)} of it parity"
    used = f", {count_text(len(arena.users), 'trainer')}" if arena.users else ""
    return Finding("ok", "arena", f"{name}: its keeper, {keeper}, answers{newest}{used}")


def _silent(arena: Arena, name: str) -> Finding:
    """A keeper that lives and says nothing. Never a remedy for process 0: that is everybody."""
    pid, state = arena.keeper_pid, arena.keeper_state
    end = f"kill -KILL {pid}; the next save starts another, which finds what is in memory"
    if not pid:
        text = f"{name}: its keeper, which cannot be seen from this container, does not answer"
        return Finding("bad", "arena", text, "Look for it where it runs: pgrep -af holdfast.keeper")
    if arena.answers is None:
        text = f"{name}: its keeper, process {pid}, does not listen: it is starting or ending"
        return Finding("warn", "arena", text, f"Look again in a few seconds. If it stays: {end}")
    return Finding(
        "bad",
        "arena",
        f"{name}: its keeper, process {pid}, is {_STATES.get(state, 'running')}, and does not "
        "answer: saves are skipped",
        f"kill -CONT {pid}" if state == "T" else end,
    )


def _stale(arena: Arena, name: str) -> Finding:
    lose = "" if arena.may_go else " --lose-snapshots"
    clear = f"holdfast doctor --clean{lose}, or rm -r {_quoted(arena)}"
    dead = f"{name}: its run and keeper are dead"
    if arena.part and arena.part != arena.newest and arena.root_exists is not False:
        return _part(arena, dead, clear)
    if not (arena.newest or arena.part):
        return Finding("warn", "arena", f"{dead}, and it holds no whole snapshot", clear)
    if arena.root_exists is False:  # and with it the name under which a run looks for its arena
        held = arena.newest or arena.part
        text = f"{dead}, its root {arena.root} is gone, and no run restores {held} from it"
        return Finding("warn", "arena", text, clear)
    where = {True: ", which is in storage too", False: ", which is nowhere else", None: ""}
    of = f" of {arena.root}" if arena.root else ""
    return Finding(
        "warn",
        "arena",
        f"{dead}; it holds snapshot {arena.newest}{of}{where[arena.newest_is_durable]}",
        f"Start the run again to restore from it; or give the memory back: {clear}",
    )


def _part(arena: Arena, dead: str, clear: str) -> Finding:
    """One host's share of what several hosts hold."""
    of = f" of {arena.root}" if arena.root else ""
    where = {True: ", newer than storage", False: ", which storage has, or newer ones", None: ""}
    return Finding(
        "warn",
        "arena",
        f"{dead}; it holds this host's part of snapshot {arena.part}{of}{where[arena.has_news]}",
        f"Start the run again on its hosts to restore from it; or give the memory back: {clear}",
    )


def _quoted(arena: Arena) -> str:
    return shlex.quote(arena.path)
