"""PURE. Judges arenas, keepers, protection, rendezvous, storage and root: ok, warn or bad."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from holdfast.cli.doctor.rules.host_rules import IN_MEMORY
from holdfast.cli.doctor.rules.probe_facts import (
    Arena,
    Facts,
    Finding,
    PlaceFacts,
    ProtectedFacts,
    Rendezvous,
    RootFacts,
    Speeds,
)
from holdfast.observe.text import count_text, rate_text, seconds_text, size_text

_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waiting for a disk",
    "Z": "dead and not yet reaped",
}


def judge_arenas(facts: Facts) -> Iterator[Finding]:
    """Yields one finding for each arena."""
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
            "warn",
            "arena",
            f"{arena.path} is half removed, {size_text(arena.size_bytes)}",
            f"holdfast doctor --clean, or rm -r {_quoted(arena)}",
        )
    if arena.is_stale:
        return _stale(arena, name)
    if arena.answers is None and not arena.keeper_pid:
        pids = ", ".join(map(str, arena.users))
        return Finding(
            "warn",
            "arena",
            f"{name}: no keeper, but in use by {pids}",
            "A training process starts another keeper at its next save; if it hangs, end it: "
            f"kill {pids.replace(', ', ' ')}",
        )
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
    """Judges a keeper that lives and does not answer. Never a remedy for process 0: that is
    everybody.
    """
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
    held = arena.newest or arena.part
    if not held:
        return Finding("warn", "arena", f"{dead}, and it holds no whole snapshot", clear)
    if not arena.root_key:
        text = f"{dead}; an older version of Holdfast left it, and no run restores {held} from it"
        return Finding("warn", "arena", text, clear)
    if arena.is_its_root is False:
        text = f"{dead}; it holds snapshot {held}, and {arena.root} is another root by now"
        remedy = "If its own root was moved, start the run there to restore from it; or give"
        return Finding("warn", "arena", text, f"{remedy} the memory back: {clear}")
    if arena.part and arena.part != arena.newest and arena.root_exists is not False:
        return _part(arena, dead, clear)
    if arena.root_exists is False:  # and with it the name under which a run looks for its arena
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
    """Judges one host's share of a run on several hosts."""
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


# PURE. Judges which losses a run survives: of its hosts, and of the endpoint where its launchers
# meet.


_GUIDE = "docs/guides/several-hosts.md"


def judge_run(facts: Facts) -> Iterator[Finding]:
    """Yields findings about a root whose run has begun, and about launchers on this machine."""
    root = facts.root
    if root is not None and root.exists and not root.fault:
        yield from _protection(root)
    for meeting in facts.meetings:
        yield _meeting(meeting)


def _protection(root: RootFacts) -> Iterator[Finding]:
    about, protected = "protection", root.protected
    if protected is None:
        if len(root.hosts) > 1:
            yield Finding(
                "warn",
                about,
                f"snapshots survive the processes of {len(root.hosts)} hosts, and "
                "the loss of none of them: the run keeps no parity",
                "Checkpointer(..., parity=1), for the loss of any one host",
            )
        elif root.hosts:
            yield Finding("ok", about, "snapshots survive the run's processes; storage, its host")
        return
    text = _survival(protected)
    if protected.missing:
        yield Finding("warn", about, f"{text}; {'; '.join(protected.missing)}", f"See {_GUIDE}.")
    elif protected.reason:
        yield Finding(
            "warn",
            about,
            f"{text}; newer ones are not protected: {protected.reason}",
            "What was protected stays so. Look at the host that is named.",
        )
    else:
        yield Finding("ok", about, text)


def _survival(protected: ProtectedFacts) -> str:
    asked = f"parity={protected.parity}, start {protected.incarnation}"
    if not protected.newest:
        hosts = count_text(protected.hosts, "host")
        return f"no snapshot of {hosts} was protected yet ({asked})"
    return f"snapshot {protected.newest} survives the loss of {protected.survives} ({asked})"


def _meeting(meeting: Rendezvous) -> Finding:
    about, where = "rendezvous", meeting.endpoint
    who = ""
    if meeting.launchers:
        pids = ", ".join(map(str, meeting.launchers))
        who = f" (torchrun: {pids})"
    if meeting.on or meeting.is_here:
        host = meeting.on or "this machine"
        return Finding(
            "warn",
            about,
            f"launchers meet at {where}{who}, on {host}, where the run trains: with "
            "that host all launchers end, and their workers, on every other host too",
            "Run the store on a machine that outlives the training hosts, and start launchers with "
            f"--rdzv-conf=is_host=0 ({_GUIDE}). What is in memory stays for the next launch.",
        )
    known = (
        "on none of the hosts known here" if meeting.is_here is False else "which has no address"
    )
    if meeting.is_here is None:
        return Finding(
            "warn",
            about,
            f"launchers meet at {where}{who}, {known} here",
            "Correct the name, or give its address: --rdzv-endpoint=HOST:PORT",
        )
    return Finding(
        "ok",
        about,
        f"launchers meet at {where}{who}, on none of the hosts known here; when that "
        "is lost they end with their workers, and a new launch goes on from memory",
    )


# PURE. Judges a root, its file system and its measured speed for a run.


NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "glusterfs")
#: The next checkpoint, beside two that were pruned: images are removed at the second publication
#: after.
SPARE = 3
_FILES = 1000
#: The damaged checkpoints that are named.
_SHOWN = 8
BUCKET = "bucket"


def judge_storage(facts: Facts) -> Iterator[Finding]:
    """Yields findings about the directory of checkpoints, or the place where one would be made."""
    place, root = facts.storage, facts.root
    if place.kind == BUCKET:
        yield _bucket(place)
    else:
        yield from _kind(place)
        yield from _abilities(place)
        if not place.fault:
            yield _room(place, root)
    yield from _speeds(facts.speeds, root)
    if root is not None:
        yield from _root(root)


def _bucket(place: PlaceFacts) -> Finding:
    if place.fault:
        return Finding("bad", "storage", place.fault, "Do what the message says.")
    table = ", ".join(f"{what}: {'yes' if is_kept else 'no'}" for what, is_kept in place.kept)
    lacks_all = not all(is_kept for _, is_kept in place.kept)
    return Finding(
        "warn" if lacks_all else "ok",
        "storage",
        f"{place.path} is a bucket of {place.mount}: {table}",
        "docs/operations/object-stores.md says what each server lacks and what that costs."
        if lacks_all
        else "",
    )


def _kind(place: PlaceFacts) -> Iterator[Finding]:
    about, where = "storage", f"{place.path} is on {place.kind or 'an unknown file system'}"
    if place.fault:
        yield Finding(
            "bad",
            about,
            f"{place.path}: {place.fault}",
            "Give this user the right to write there, mount it writable, or choose another root.",
        )
    elif place.kind in IN_MEMORY:
        yield Finding(
            "bad",
            about,
            f"{where}: what is called durable is gone after a reboot",
            "Choose a root on a disk or on network storage.",
        )
    elif place.kind == "overlay":
        yield Finding(
            "warn",
            about,
            f"{where}: it goes with its container",
            "Mount a volume and put the root there (docker run -v).",
        )
    elif place.kind in NETWORK:
        yield Finding(
            "warn",
            about,
            f"{where}: a lock may hold on one host only, and a file that was just "
            "published may be seen late on others",
            "Train one run a root at a time, and mount it with lookups and locks from the server "
            "(NFS 4, lookupcache=positive, no nolock).",
        )
    elif place.kind.startswith("fuse"):
        yield Finding(
            "warn",
            about,
            f"{where}: whether it keeps what it calls synced is up to its program",
            "Ask its maker about fsync, hard links and locks, or choose another root.",
        )
    else:
        yield Finding("ok", about, where)


def _abilities(place: PlaceFacts) -> Iterator[Finding]:
    if place.links is False:
        yield Finding(
            "bad",
            "storage",
            f"{place.path} takes no hard links, by which a manifest is published",
            "Choose a root on a file system that has them (ext4, xfs, NFS).",
        )
    if place.locks is False:
        yield Finding(
            "bad",
            "storage",
            f"{place.path} takes no locks, so two runs could write to one root",
            "Mount it with locks (Lustre: -o flock), or choose another root.",
        )
    if place.is_direct is False:
        yield Finding(
            "warn",
            "direct I/O",
            f"{place.path} does not take it: writes go through the page "
            "cache, slower and at the cost of memory",
            "Choose a file system with O_DIRECT (ext4, xfs, NFS) where speed matters.",
        )
    elif place.is_direct:
        yield Finding("ok", "direct I/O", "taken")


def _room(place: PlaceFacts, root: RootFacts | None) -> Finding:
    about, text = "free space", f"{size_text(place.free_bytes)} on {place.mount or place.path}"
    size = 0 if root is None else root.newest_written_bytes or root.newest_bytes
    remedy = "Free some, or keep fewer: keep=holdfast.Keep(last=N), `holdfast prune`."
    if place.free_files is not None and place.free_files < _FILES:
        left = count_text(place.free_files, "more file")
        return Finding("bad", about, f"{text}, but room for {left} only (inodes)", remedy)
    if not size:
        return Finding("ok", about, text)
    fits = place.free_bytes // size
    needed = SPARE if root is None else SPARE + max(0, root.keeps - root.checkpoints)
    text += f": {count_text(fits, 'more checkpoint')} of {size_text(size)}"
    if not fits:
        return Finding("bad", about, text, remedy)
    if fits < needed:
        return Finding(
            "warn",
            about,
            f"{text}; {needed} are needed, since pruned images go two publications later",
            remedy,
        )
    return Finding("ok", about, text)


def _speeds(speeds: Speeds, root: RootFacts | None) -> Iterator[Finding]:
    if speeds.write is not None and speeds.read is not None:
        text = f"writes {rate_text(speeds.write)}, reads {rate_text(speeds.read)}"
        yield Finding("ok", "disk speed", text + _times(speeds, root))
    if speeds.copy is not None and speeds.checksum is not None:
        text = f"copies {rate_text(speeds.copy)}, checksums {rate_text(speeds.checksum)}"
        yield Finding("ok", "memory speed", f"{text}, one thread")


def _times(speeds: Speeds, root: RootFacts | None) -> str:
    """Returns how long the newest checkpoint takes at these speeds."""
    if root is None or not root.newest_bytes or not speeds.write or not speeds.read:
        return ""
    durable_s, restored_s = root.newest_bytes / speeds.write, root.newest_bytes / speeds.read
    return (
        f": {root.newest} ({size_text(root.newest_bytes)}) is durable after "
        f"{seconds_text(durable_s)}, read in {seconds_text(restored_s)}"
    )


def _root(root: RootFacts) -> Iterator[Finding]:
    if root.fault:
        yield Finding(
            "bad",
            "root",
            f"{root.path}: {root.fault}",
            "Use a Holdfast that reads it, or put back a good copy of what is damaged.",
        )
        return
    if not root.exists:
        yield Finding("ok", "root", f"{root.path} holds no checkpoints yet")
        return
    newest = f", the newest is {root.newest}" if root.newest else ""
    yield Finding("ok", "root", f"{count_text(root.checkpoints, 'checkpoint')}{newest}")
    for path, reason in root.broken:
        yield Finding(
            "bad",
            "root",
            f"{path} cannot be read: {reason}",
            f"Put back a good copy of {root.path}/{path}, or delete it if it can go. Nothing is "
            "swept before.",
        )
    yield from _damaged(root)
    if root.gap:
        yield Finding(
            "warn" if root.newest else "bad",
            "root",
            root.gap,
            "Put that record back. A start takes none of these by itself; one that restores one of "
            "them by its name, as in restore('1-100'), settles it.",
        )
    yield from _pins(root)
    yield from _lock(root)
    if root.leftovers and not root.holder_pid:
        yield Finding(
            "warn",
            "root",
            f"{count_text(root.leftovers, 'attempt')} left behind that no checkpoint names, "
            f"{size_text(root.leftover_bytes)}",
            f"The next run removes them; by hand: holdfast prune {root.path}",
        )


def _damaged(root: RootFacts) -> Iterator[Finding]:
    where = shlex.quote(root.path)
    for name, faults in root.damaged[:_SHOWN]:
        more = f", and {count_text(len(faults) - 1, 'file')} more" if len(faults) > 1 else ""
        yield Finding(
            "bad",
            "root",
            f"checkpoint {name} is damaged: {faults[0]}{more}",
            f"holdfast repair {where} --from COPY; holdfast verify {where} says all that is wrong",
        )
    if len(root.damaged) > _SHOWN:
        more = count_text(len(root.damaged) - _SHOWN, "more checkpoint")
        yield Finding("bad", "root", f"{more} are damaged, too", f"holdfast verify {where}")
    if root.unchecked:
        text = f"the files of {count_text(root.unchecked, 'older checkpoint')} were not looked up"
        yield Finding("ok", "root", text)


def _pins(root: RootFacts) -> Iterator[Finding]:
    for name in root.pins_gone:
        yield Finding(
            "warn",
            "pins",
            f"{name} is pinned, but there is no such checkpoint any more",
            f"holdfast pin {root.path} {name} --remove",
        )
    for name in root.pins_unreadable:
        yield Finding(
            "warn",
            "pins",
            f"the pin of {name} cannot be read; it still pins",
            f"holdfast pin {root.path} {name}",
        )


def _lock(root: RootFacts) -> Iterator[Finding]:
    if root.holder_pid:
        yield Finding("ok", "root", f"in use by {root.holder}, process {root.holder_pid}")
    elif root.holder:
        yield Finding(
            "ok",
            "root",
            f"its lock was last signed by {root.holder}; no process of this machine "
            "holds it: killed, or on another host",
        )
