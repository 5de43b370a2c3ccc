"""Finds out what is in a directory of checkpoints, without taking its lock."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.catalogue import (
    LAYOUTS,
    ROOT,
    is_root,
    layout_path,
    manifest_path,
    read_document,
    read_each,
)
from holdfast.cli.checkpoints import root_holder
from holdfast.cli.doctor.host import probe_place
from holdfast.cli.doctor.rules.probe_facts import PlaceFacts, ProtectedFacts, Rendezvous, RootFacts
from holdfast.cli.doctor.rules.run_rules import BUCKET
from holdfast.cli.doctor.user_arenas import root_keys
from holdfast.errors import HoldfastError, NotFound, StorageError
from holdfast.events import (
    ProtectionPlanned,
    RunStarted,
    SnapshotNotProtected,
    SnapshotProtected,
)
from holdfast.format import manifest as documents
from holdfast.leases import LeaseWatch
from holdfast.observe.log import read_events
from holdfast.overview import Overview, manifest_of, overview
from holdfast.persist.commit import unnamed_directories
from holdfast.persist.pins import read_pins
from holdfast.persist.removal import leftover
from holdfast.storage.base import Store, settle_s
from holdfast.storage.open import (
    is_bucket,
    normal_root,
    open_store,
    probe_bucket,
    race_in_bucket,
)

#: The files whose sizes are looked up, and those of a bucket, of which each is a request.
_MOST_FILES, _MOST_OF_BUCKET = 2000, 64


def probe_root(root: str, *, keeps: int = 0) -> RootFacts:
    """Reads the facts about ``root``; a ``fault`` when it cannot be read at all."""
    store, path = open_store(root), normal_root(root)
    try:
        if not is_root(store):
            return RootFacts(path, exists=False)
        found = overview(store)
        run_id = read_document(store, documents.Root, ROOT).run_id
        keys = root_keys(store)
    except HoldfastError as error:
        return RootFacts(path, fault=str(error))
    return replace(
        _describe(path, run_id, store, found),
        keys=keys,
        keeps=keeps,
        hosts=probe_hosts(path),
        protected=probe_protected(path),
    )


def probe_storage(root: str, *, deep: bool = False) -> PlaceFacts:
    """Reads the facts about the place of ``root``: a file system, or the server of a bucket, where
    a ``deep`` look has eight processes race.
    """
    if not is_bucket(root):
        return probe_place(root)
    try:
        kept = probe_bucket(root)
        raced = race_in_bucket(root).table if deep and not kept.lacks else ()
    except HoldfastError as error:
        return PlaceFacts(root, BUCKET, fault=str(error))
    fault = "; ".join(kept.lacks)
    if lost := [what for what, is_kept in raced if not is_kept]:
        fault = (
            f"{root} is no root for several writers: its server ({kept.server}) told more than one "
            f"of several processes that each alone had written an object. It lacks: "
            f"{'; '.join(lost)}. See to it that one run at a time writes there, or use another"
        )
    return PlaceFacts(root, BUCKET, kept.server, kept=(*kept.table, *raced), fault=fault)


def _describe(path: str, run_id: str, store: Store, found: Overview) -> RootFacts:
    newest = manifest_of(store, found, found.latest) if found.latest else None
    pins = read_pins(store)
    unnamed = [] if found.broken else unnamed_directories(store, found.manifests)
    held = LeaseWatch(store).paths() if unnamed else frozenset()
    unnamed = [path for path in unnamed if path not in held]
    there = {manifest.generation for manifest in found.manifests}
    damaged, unchecked = _damaged(store, found)
    holder = root_holder(path)
    return RootFacts(
        path=path,
        run_id=run_id,
        checkpoints=len(found.manifests),
        newest=str(newest.generation) if newest else "",
        newest_bytes=newest.size_bytes if newest else 0,
        newest_written_bytes=newest.image_bytes if newest else 0,
        newest_images=len(newest.images) if newest else 0,
        broken=found.broken,
        damaged=damaged,
        unchecked=unchecked,
        gap=found.gap,
        leftovers=len(unnamed),
        leftover_bytes=sum(leftover(store, one).size_bytes for one in unnamed),
        pins_gone=tuple(str(g) for g in pins if g not in there),
        pins_unreadable=tuple(str(g) for g, one in pins.items() if one.pin is None and g in there),
        holder_pid=0 if holder is None else holder.pid,
        holder="" if holder is None else holder.signed,
    )


def _damaged(store: Store, found: Overview) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], int]:
    """Returns the checkpoints that lack a file or have one of another size, with what is wrong, and
    how many older ones were not looked at. No content is read.
    """
    layouts = set(store.list(LAYOUTS))
    damaged, files, checked = [], 0, 0
    most = _MOST_OF_BUCKET if settle_s(store) else _MOST_FILES
    for one in reversed(found.manifests):
        files += one.images + len(one.parts)
        if checked and files > most:
            break
        try:
            if (manifest := manifest_of(store, found, one.generation)) is None:
                # Removed since; of what is there and was not read nothing is known.
                checked += not store.exists(manifest_path(one.generation))
                continue
            refs = (*manifest.images, *manifest.parts)
            layout = layout_path(manifest.layout)
            faults = [] if Path(layout).name in layouts else [f"{layout} is not there"]
            faults += filter(None, read_each(store, partial(_size_fault, store), refs))
        except StorageError:  # storage does not answer: that says nothing about the files
            break
        checked += 1
        if faults and store.exists(manifest_path(manifest.generation)):  # else it was just removed
            damaged.append((str(manifest.generation), tuple(faults)))
    return tuple(damaged), len(found.manifests) - checked


def _size_fault(store: Store, ref: documents.ImageRef) -> str:
    try:
        there = store.size_bytes(ref.path)
    except NotFound:
        return f"{ref.path} is not there"
    except HoldfastError as error:
        if isinstance(error, StorageError) and error.retryable:
            raise
        return str(error)
    if there == ref.size_bytes:
        return ""
    return f"{ref.path} has {there} bytes, the manifest says {ref.size_bytes}"


# Finds the hosts that a run recorded, and the rendezvous of launchers on this machine.
#
# Hosts and protection are in the run's own events. A launcher's endpoint is on its command line, or
# in the environment, torchrun's PET_ variables; nothing is sent to the endpoint.


ENDPOINT, NODES = "PET_RDZV_ENDPOINT", "PET_NNODES"
_ENDPOINT = ("--rdzv-endpoint", "--rdzv_endpoint")
_NODES = ("--nnodes",)
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


def probe_hosts(root: str) -> tuple[str, ...]:
    """Returns the hosts of the newest start, by name."""
    starts: dict[int, set[str]] = defaultdict(set)
    for event in read_events(root, RunStarted):
        starts[event.incarnation].add(event.host)
    return tuple(sorted(starts[max(starts)])) if starts else ()


def probe_protected(root: str) -> ProtectedFacts | None:
    """Returns the recorded protection of the newest start; None when it never kept any parity."""
    planned = max(read_events(root, ProtectionPlanned), key=lambda e: e.incarnation, default=None)
    if planned is None:
        return None
    n = planned.incarnation
    newest = max(
        (e.step for e in read_events(root, SnapshotProtected) if e.incarnation == n), default=-1
    )
    missed = max(
        (
            e
            for e in read_events(root, SnapshotNotProtected)
            if e.incarnation == n and e.step > newest
        ),
        key=lambda e: e.step,
        default=None,
    )
    return ProtectedFacts(
        n,
        planned.parity,
        planned.hosts,
        planned.survives,
        planned.missing,
        newest=f"{n}-{newest}" if newest >= 0 else "",
        reason="" if missed is None else missed.reason,
    )


def probe_meetings(hosts: Collection[str], proc: Path = Path("/proc")) -> tuple[Rendezvous, ...]:
    """Returns the endpoints of all visible launchers, and of this very environment."""
    found: dict[str, list[int]] = {}
    said = os.environ.get(ENDPOINT, "").strip()
    if said and _are_several(os.environ.get(NODES, "2")):
        found[said] = []
    for pid, endpoint in _launchers(proc):
        found.setdefault(endpoint, []).append(pid)
    return tuple(_meeting(one, tuple(pids), hosts) for one, pids in sorted(found.items()))


def _launchers(proc: Path) -> Iterator[tuple[int, str]]:
    """Yields processes that run torchrun for several hosts, with their rendezvous endpoint."""
    for name in sorted(filter(str.isdecimal, os.listdir(proc)), key=int):
        try:
            words = (proc / name / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        is_launcher = any(word in _LAUNCHERS or Path(word).name == "torchrun" for word in words[:4])
        endpoint = _option(words, _ENDPOINT) if is_launcher else ""
        if endpoint and _are_several(_option(words, _NODES)):
            yield int(name), endpoint


def _option(words: list[str], names: tuple[str, ...]) -> str:
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in names:
            return value if has_value else "".join(words[number + 1 : number + 2])
    return ""


def _are_several(nodes: str) -> bool:
    """True if the node count, "4" or "2:4", allows several; torchrun's default is one."""
    most = nodes.rpartition(":")[2].strip()
    return most.isdecimal() and int(most) > 1


def _meeting(endpoint: str, launchers: tuple[int, ...], hosts: Collection[str]) -> Rendezvous:
    name = endpoint.rsplit(":", 1)[0].strip("[]")
    addresses = _addresses(name)
    on = next((one for one in sorted(hosts) if one == name), "")
    if not on and addresses:
        on = next((one for one in sorted(hosts) if _addresses(one) & addresses), "")
    is_here = any(map(_is_of_this_machine, addresses)) if addresses else None
    return Rendezvous(endpoint, launchers, is_here, on)


def _addresses(name: str) -> set[str]:
    try:
        return {str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)}
    except (OSError, UnicodeError):
        return set()


def _is_of_this_machine(address: str) -> bool:
    """True if a process could listen there: only a machine's own addresses can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
