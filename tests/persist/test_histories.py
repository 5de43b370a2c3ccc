"""One order of what a run saved, whoever asks: starts that fall back, save, prune and start again.

The model is a line of work: what was saved, in the order of time, by the starts that the newest
one descends from.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from holdfast.catalogue import Catalogue, catalogue
from holdfast.cli.checkpoints import OpenedRoot
from holdfast.cli.ls import records
from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.errors import UsageError
from holdfast.format.manifest import Generation, ImageId, Incarnation
from holdfast.overview import overview
from holdfast.persist import commit
from holdfast.persist.removal import plan, removable, remove
from holdfast.policy.arguments import require_beyond
from holdfast.policy.when import Keep
from holdfast.protocol.messages import HoldingPart, Inventory
from holdfast.restore.planning.candidates import Candidate, choose
from holdfast.restore.planning.selection import Inventories
from holdfast.restore.reading.stored import stored
from holdfast.storage.memory import MemoryStore
from support.checkpoints.roots import save


class Start(NamedTuple):
    """What one start restores, the steps it tries to save (and which durably), what is pruned."""

    restores: str  # "newest" | "step" | "name"
    which: int
    saves: list[tuple[int, bool]]
    keep: Keep
    abandoned: bool
    loses_memory: bool


STARTS = st.builds(
    Start,
    st.sampled_from(["newest", "newest", "step", "name"]),
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=4),
    st.builds(Keep, last=st.none() | st.integers(1, 3), every=st.none() | st.just(4)),
    st.booleans(),
    st.booleans(),
)


class History:
    """A root and a memory that are written to as the rules say, and the line of work."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        commit.open_root(self.store, "r")
        self.memory = Attempts()
        self.parents: dict[int, tuple[int, int] | None] = {}
        self.work: dict[Generation, list[Generation]] = {}
        """What each generation came after, and itself last."""
        self.line: list[Generation] = []
        self.n = 0

    def start(self, one: Start) -> None:
        if one.loses_memory:
            self.memory = Attempts()
        parent = self.choice(one)
        self.n += 1
        self.parents[self.n] = parent
        self.line = [] if parent is None else list(self.work[parent])
        commit.record_incarnation(
            self.store, Incarnation(run_id="r", n=self.n, nonce="n", parent=parent)
        )
        self.check()
        last = -1
        for step, durable in one.saves:
            if step <= last:  # steps only grow in a run
                continue
            with suppress(UsageError):
                require_beyond(None if parent is None else parent.step, step)
                self.save(Generation(self.n, step), parent, durable=durable)
                last = step
                self.check()
        with_pruned = plan(self.store, one.keep, abandoned=one.abandoned)
        remove(self.store, with_pruned)
        self.check()

    def choice(self, one: Start) -> Generation | None:
        candidates = self.candidates()
        if one.restores != "newest" and candidates:
            chosen = candidates[one.which % len(candidates)].generation
            wanted: int | str = chosen.step if one.restores == "step" else str(chosen)
            fit = choose(candidates, self.parents, wanted)
            if fit:
                return fit[0].generation
        fit = choose(candidates, self.parents, None)
        return fit[0].generation if fit else None

    def save(self, one: Generation, parent: tuple[int, int] | None, *, durable: bool) -> None:
        self.line.append(one)
        self.work[one] = list(self.line)
        held = Attempt(str(one), *one, 1, "l", slots={0: len(self.work)}, phase="complete")
        newest = self.memory.newest_complete()
        self.memory.clear()
        self.memory.add_discovered([held] if newest is None else [newest, held])
        self.memory.captured(held.id)
        if durable:
            save(self.store, one, parent)

    def candidates(self) -> list[Candidate]:
        held = [Candidate(a.incarnation, a.step, "memory", a.id) for a in self.memory.complete()]
        return [*held, *stored(overview(self.store))]

    def check(self) -> None:
        found = catalogue(self.store)
        durable = [one for one in self.line if found.find(one) is not None]
        assert list(found.lineage) == durable, "the lineage is the line of work, oldest first"
        assert found.latest == (durable[-1] if durable else None)
        self.check_chosen(found, durable)
        self.check_removed(found, durable)

    def check_chosen(self, found: Catalogue, durable: list[Generation]) -> None:
        in_storage = choose(stored(overview(self.store)), found.parents, None)
        assert [one.generation for one in in_storage] == durable[::-1]
        held = [a.generation for a in self.memory.complete()]
        there = [one for one in self.line if one in durable or one in held]
        chosen = choose(self.candidates(), found.parents, None)
        assert list(dict.fromkeys(one.generation for one in chosen)) == there[::-1]
        several = Inventories(
            (self.holding(),), tuple(stored(overview(self.store))), found.parents
        ).find(None)
        told = [one.candidate.generation for one in several.recoveries]
        assert list(dict.fromkeys(told)) == there[::-1], "several hosts say the same"
        if held and held[-1] in self.line:
            newest = self.memory.newest_complete()
            assert newest is not None
            assert newest.generation == [one for one in self.line if one in held][-1]

    def holding(self) -> Inventory:
        parts = tuple(
            HoldingPart(a.attempt_id, (ImageId(0, 1, a.id, a.id),)) for a in self.memory.complete()
        )
        return Inventory("h", parts, parents=self.parents)

    def check_removed(self, found: Catalogue, durable: list[Generation]) -> None:
        for last in (1, 2, 3):
            gone = {m.generation for m in removable(found, (), Keep(last=last), abandoned=False)}
            assert gone == set(durable[:-last])
        rows: list[dict[str, Any]] = records(
            OpenedRoot(
                "r", self.store, overview(self.store), frozenset(found.lineage), found.latest
            )
        )
        assert [r["checkpoint"] for r in rows if r["state"] == "newest"] == [
            str(one) for one in durable[-1:]
        ]
        kept = {r["checkpoint"] for r in rows if r["state"] in ("newest", "kept")}
        assert kept == {str(one) for one in durable}


@given(st.lists(STARTS, max_size=5))
def test_everybody_agrees_on_one_order_and_the_newest_work_is_first_in_every_history(
    starts: list[Start],
) -> None:
    history = History()
    for one in starts:
        history.start(one)
