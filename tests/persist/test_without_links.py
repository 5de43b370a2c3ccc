"""A root whose file system takes no hard links: nobody publishes, nothing is lost, and it is told.

A manifest gets its name by a link, which fails where the name is taken: so of two keepers that
both coordinate, as where locks do not hold, one publishes. Without links neither can.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.cli import main
from holdfast.errors import StorageError
from holdfast.events import PersistBroke, subscribe
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.storage.local import LocalStore
from support.checkpoints.roots import save, whole
from support.runs.keeper_jobs import job_of

ONE = Incarnation(run_id="r", n=1, nonce="n")
FIRST, NEXT = Generation(1, 10), Generation(1, 20)
Told = queue.SimpleQueue[tuple[str, str | None]]


class Links:
    """Hard links of the file system: they work, or fail with ``code``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.asked = 0, 0
        plainly = os.link

        def link(source: str, target: str) -> None:
            if self.code:
                self.asked += 1
                raise OSError(self.code, os.strerror(self.code), target)
            plainly(source, target)

        monkeypatch.setattr(os, "link", link)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    return Links(monkeypatch)


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def together(ready: threading.Barrier) -> None:
    ready.wait(30)


def publish_at_once(root: Path, attempts: tuple[str, str]) -> dict[str, str | None]:
    """What each of two keepers is told that make another attempt at one generation durable now."""
    told, ready = Told(), threading.Barrier(len(attempts))
    keepers = [
        Persister(LocalStore(root), Keep(), lambda *result: told.put(result)) for _ in attempts
    ]
    for keeper, attempt in zip(keepers, attempts, strict=True):
        keeper.submit(lambda: together(ready))
        keeper.submit(job_of(NEXT, ONE, attempt))
    found = dict(told.get(timeout=30) for _ in attempts)
    for keeper in keepers:
        keeper.stop()
    return found


@pytest.mark.promise
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_neither_of_two_coordinators_publishes_and_nothing_is_lost(
    tmp_path: Path, links: Links, code: int
) -> None:
    store = LocalStore(tmp_path)
    commit.open_root(store, "r")
    commit.record_incarnation(store, ONE)
    save(store, FIRST)
    before, events = files(tmp_path), list[PersistBroke]()
    links.code = code
    stop = subscribe(
        lambda event, _: events.append(event) if isinstance(event, PersistBroke) else None
    )
    found = publish_at_once(tmp_path, ("a", "b"))
    stop()

    assert links.asked >= 2
    for reason in found.values():
        assert reason is not None
        assert "publish of manifests/1-20.json" in reason
        assert os.strerror(code) in reason and "another root" in reason
    assert sorted(event.reason for event in events) == sorted(map(str, found.values()))
    left = catalogue(store)
    assert [one.generation for one in left.manifests] == [FIRST] and not left.broken
    assert whole(store) == ["1-10"]
    there = files(tmp_path)
    assert {path: there[path] for path in before} == before
    assert not [path for path in there if "/.publish-" in path]

    links.code = 0
    found = publish_at_once(tmp_path, ("c", "d"))
    (lost,) = (attempt for attempt, reason in found.items() if reason is not None)
    assert "another attempt" in str(found[lost]) or "exists already" in str(found[lost])
    (won,) = found.keys() - {lost}
    assert {one.generation: one.attempt for one in catalogue(store).manifests}[NEXT] == won
    assert whole(store) == ["1-10", "1-20"]


def test_without_hard_links_no_root_is_begun(tmp_path: Path, links: Links) -> None:
    links.code = errno.EOPNOTSUPP
    root = tmp_path / "root"
    with pytest.raises(StorageError, match=r"publish of holdfast\.json .* another root"):
        commit.open_root(LocalStore(root), "r")
    assert not files(root)


def test_doctor_names_hard_links_as_what_a_root_lacks(
    tmp_path: Path, links: Links, capsys: pytest.CaptureFixture[str]
) -> None:
    commit.open_root(LocalStore(tmp_path), "r")
    links.code = errno.EOPNOTSUPP
    main(["doctor", str(tmp_path), "--quick"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"{tmp_path} takes no hard links, by which a manifest is published" in out
    assert "Choose a root on a file system that has them" in out
