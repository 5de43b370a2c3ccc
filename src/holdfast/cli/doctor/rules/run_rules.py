"""PURE. What a root, its file system and its measured speed mean for a run."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.cli.doctor.facts import Facts, Place, Root, Speeds
from holdfast.cli.doctor.finding import Finding
from holdfast.cli.doctor.host_findings import IN_MEMORY
from holdfast.observe.units import count_text, rate_text, seconds_text, size_text

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "glusterfs")
#: The next checkpoint, beside two that were pruned: images go at the second publication after.
SPARE = 3
_FILES = 1000


def judge_storage(facts: Facts) -> Iterator[Finding]:
    """The directory of checkpoints, or where one would be made."""
    place, root = facts.storage, facts.root
    yield from _kind(place)
    yield from _abilities(place)
    if not place.fault:
        yield _room(place, root)
    yield from _speeds(facts.speeds, root)
    if root is not None:
        yield from _root(root)


def _kind(place: Place) -> Iterator[Finding]:
    about, where = "storage", f"{place.path} is on {place.kind or 'an unknown file system'}"
    if place.fault:
        yield Finding(
            "bad", about, f"{place.path}: {place.fault}",
            "Give this user the right to write there, mount it writable, or choose another root.",
        )  # fmt: skip
    elif place.kind in IN_MEMORY:
        yield Finding(
            "bad", about, f"{where}: what is called durable is gone after a reboot",
            "Choose a root on a disk or on network storage.",
        )  # fmt: skip
    elif place.kind == "overlay":
        yield Finding(
            "warn", about, f"{where}: it goes with its container",
            "Mount a volume and put the root there (docker run -v).",
        )  # fmt: skip
    elif place.kind in NETWORK:
        yield Finding(
            "warn", about, f"{where}: a lock may hold on one host only, and a file that was just "
            "published may be seen late on others",
            "Train one run a root at a time, and mount it with lookups and locks from the server "
            "(NFS 4, lookupcache=positive, no nolock).",
        )  # fmt: skip
    elif place.kind.startswith("fuse"):
        yield Finding(
            "warn", about, f"{where}: whether it keeps what it calls synced is up to its program",
            "Ask its maker about fsync, hard links and locks, or choose another root.",
        )  # fmt: skip
    else:
        yield Finding("ok", about, where)


def _abilities(place: Place) -> Iterator[Finding]:
    if place.links is False:
        yield Finding(
            "bad", "storage", f"{place.path} takes no hard links, by which a manifest is published",
            "Choose a root on a file system that has them (ext4, xfs, NFS).",
        )  # fmt: skip
    if place.locks is False:
        yield Finding(
            "bad", "storage", f"{place.path} takes no locks, so two runs could write to one root",
            "Mount it with locks (Lustre: -o flock), or choose another root.",
        )  # fmt: skip
    if place.is_direct is False:
        yield Finding(
            "warn", "direct I/O", f"{place.path} does not take it: writes go through the page "
            "cache, slower and at the cost of memory",
            "Choose a file system with O_DIRECT (ext4, xfs, NFS) where speed matters.",
        )  # fmt: skip
    elif place.is_direct:
        yield Finding("ok", "direct I/O", "taken")


def _room(place: Place, root: Root | None) -> Finding:
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
            "warn", about, f"{text}; {needed} are needed, since pruned images go two publications "
            "later", remedy,
        )  # fmt: skip
    return Finding("ok", about, text)


def _speeds(speeds: Speeds, root: Root | None) -> Iterator[Finding]:
    if speeds.write is not None and speeds.read is not None:
        text = f"writes {rate_text(speeds.write)}, reads {rate_text(speeds.read)}"
        yield Finding("ok", "disk speed", text + _times(speeds, root))
    if speeds.copy is not None and speeds.checksum is not None:
        text = f"copies {rate_text(speeds.copy)}, checksums {rate_text(speeds.checksum)}"
        yield Finding("ok", "memory speed", f"{text}, one thread")


def _times(speeds: Speeds, root: Root | None) -> str:
    """How long the newest checkpoint takes at these speeds."""
    if root is None or not root.newest_bytes or not speeds.write or not speeds.read:
        return ""
    durable_s, restored_s = root.newest_bytes / speeds.write, root.newest_bytes / speeds.read
    return (
        f": {root.newest} ({size_text(root.newest_bytes)}) is durable after "
        f"{seconds_text(durable_s)}, read in {seconds_text(restored_s)}"
    )


def _root(root: Root) -> Iterator[Finding]:
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
            "bad", "root", f"{path} cannot be read: {reason}",
            f"Put back a good copy of {root.path}/{path}, or delete it if it can go. Nothing is "
            "swept before.",
        )  # fmt: skip
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


def _pins(root: Root) -> Iterator[Finding]:
    for name in root.pins_gone:
        yield Finding(
            "warn", "pins", f"{name} is pinned, but there is no such checkpoint any more",
            f"holdfast pin {root.path} {name} --remove",
        )  # fmt: skip
    for name in root.pins_unreadable:
        yield Finding(
            "warn", "pins", f"the pin of {name} cannot be read; it still pins",
            f"holdfast pin {root.path} {name}",
        )  # fmt: skip


def _lock(root: Root) -> Iterator[Finding]:
    if root.holder_pid:
        yield Finding("ok", "root", f"in use by {root.holder}, process {root.holder_pid}")
    elif root.holder:
        yield Finding(
            "ok", "root", f"its lock was last signed by {root.holder}; no process of this machine "
            "holds it: killed, or on another host"
        )  # fmt: skip
