"""Find out what lies in a directory of checkpoints, without taking its lock."""

from __future__ import annotations

from dataclasses import replace

from holdfast.catalogue import ROOT, Catalogue, catalogue, is_root, read_document
from holdfast.cli.doctor.facts import Root
from holdfast.cli.doctor.run_facts import probe_hosts, probe_protected
from holdfast.cli.held import root_holder
from holdfast.errors import HoldfastError
from holdfast.format import manifest as documents
from holdfast.persist.commit import unnamed_directories
from holdfast.persist.pins import read_pins
from holdfast.persist.removal import leftover
from holdfast.storage.base import Store
from holdfast.storage.open import normal_root, open_store


def probe_root(root: str, *, keeps: int = 0) -> Root:
    """What is in ``root``; a ``fault`` when it cannot be read at all."""
    store, path = open_store(root), normal_root(root)
    try:
        if not is_root(store):
            return Root(path, exists=False)
        found = catalogue(store)
        run_id = read_document(store, documents.Root, ROOT).run_id
    except HoldfastError as error:
        return Root(path, fault=str(error))
    return replace(
        _describe(path, run_id, store, found), keeps=keeps, hosts=probe_hosts(path),
        protected=probe_protected(path),
    )  # fmt: skip


def _describe(path: str, run_id: str, store: Store, found: Catalogue) -> Root:
    newest = found.latest and found.find(found.latest)
    pins = read_pins(store)
    unnamed = () if found.broken else unnamed_directories(store, found.manifests)
    there = {manifest.generation for manifest in found.manifests}
    holder = root_holder(path)
    return Root(
        path=path,
        run_id=run_id,
        checkpoints=len(found.manifests),
        newest=str(newest.generation) if newest else "",
        newest_bytes=newest.size_bytes if newest else 0,
        newest_written_bytes=newest.image_bytes if newest else 0,
        newest_images=len(newest.images) if newest else 0,
        broken=found.broken,
        leftovers=len(unnamed),
        leftover_bytes=sum(leftover(store, one).size_bytes for one in unnamed),
        pins_gone=tuple(str(g) for g in pins if g not in there),
        pins_unreadable=tuple(str(g) for g, one in pins.items() if one.pin is None and g in there),
        holder_pid=0 if holder is None else holder.pid,
        holder="" if holder is None else holder.signed,
    )
