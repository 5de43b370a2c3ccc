"""Runs of many hosts over real sockets: nothing is lost, and nobody waits for the coordinator."""

from __future__ import annotations

import asyncio
import importlib
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from holdfast.geometry.layout import merge, table_from_json
from holdfast.keeper import loop_watch
from holdfast.protocol.image_plan import plan_rank

#: A coordinator that plans the images of all ranks itself, on its loop.
PLANS_ALL = """
    import time
    from holdfast.coordinator.actions import PlanImages
    from holdfast.keeper.executor import Executor
    from holdfast.protocol.image_plan import plan_sizes
    carry_out = Executor.carry_out
    def plan_all(self, actions):
        carry_out(self, [each for each in actions if not isinstance(each, PlanImages)])
        for each in actions:
            if isinstance(each, PlanImages):
                sizes = plan_sizes(each.layout, each.ranks)
                now_s = time.monotonic()
                planned = self.coordinator.images_planned(each.layout.hash, sizes, now_s)
                self.carry_out(planned)
    Executor.carry_out = plan_all
"""
#: A coordinator that has no lost image decoded.
NOTHING_ANEW = """
    from holdfast.keeper.parity.rebuild import RebuildCoordinator
    RebuildCoordinator.begin = lambda *_: None
"""
#: What the loop of the coordinator may use of a processor for a first save, in the run below.
MOST_S = 0.3


@pytest.fixture
def fleet(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.fleet.fleet")


@pytest.fixture
def meter(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.fleet.meter")


def told(fleet: ModuleType, root: Path, *arguments: str) -> Any:
    """The whole story of such a run."""
    options = fleet.options_of(arguments)
    story = fleet.story_of(fleet.make(root, options), options)
    asyncio.run(fleet.told(story))
    assert not story.fleet.aborted
    assert not story.meter.over_memory(options.hosts)
    assert len(story.meter.keepers) == len(story.fleet.hosts) and min(story.meter.keepers) > 1 << 20
    return story


def first_save(fleet: ModuleType, root: Path, *arguments: str) -> Any:
    """The first save of such a run, under a layout that nobody knew."""
    options = fleet.options_of(arguments)
    story = fleet.story_of(fleet.make(root, options), options)

    async def tell() -> None:
        try:
            await story.start("the start")
        finally:
            story.fleet.end()

    asyncio.run(tell())
    return story


SMALL = ("--hosts", "4", "--real", "4", "--ranks", "2", "--leaves", "8", "--saves", "0")


@pytest.mark.promise
def test_real_keepers_lose_keepers_hosts_and_the_coordinator_and_nothing_of_the_state(
    fleet: ModuleType, tmp_path: Path
) -> None:
    """After each save and each loss, what all ranks captured is compared bit for bit."""
    told(fleet, tmp_path, *SMALL, "--parity", "1")


def test_a_lost_image_that_nobody_makes_anew_is_found_out(
    fleet: ModuleType, meter: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = meter.report_all_holds(tmp_path / "changes", NOTHING_ANEW)
    monkeypatch.setenv("PYTHONPATH", change)
    monkeypatch.setattr(importlib.import_module("benchmarks.fleet.losses"), "ANEW_S", 3)
    with pytest.raises(AssertionError, match="are lost of"):
        told(fleet, tmp_path / "root", *SMALL, "--parity", "1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [(), ("--delay", "0.03", "--loss", "0.01")], ids=["near", "far"])
def test_a_rack_of_real_keepers_is_lost_with_the_coordinator_and_nothing_of_the_state(
    fleet: ModuleType, tmp_path: Path, way: tuple[str, ...]
) -> None:
    few = ("--ranks", "1", "--saves", "1", "--parity", "2")
    told(fleet, tmp_path, "--hosts", "32", "--real", "32", *few, *way)


def test_players_plan_the_images_that_their_keepers_plan(importable: None) -> None:
    """Ranks of one digit and of two, of which each eighth is planned."""
    run, trainers = map(
        importlib.import_module, ("benchmarks.fleet.run", "benchmarks.fleet.trainers")
    )
    layout = merge([table_from_json(run.leaf_table(18, 5))] * 18)
    for rank in range(18):
        expected = msgspec.structs.replace(plan_rank(layout, rank), entries=())
        assert trainers.plan_of(layout.to_json(), rank) == expected


def use_of_first_save(fleet: ModuleType, root: Path) -> Any:
    """What the coordinator's keeper used, and when."""
    planned = ("--hosts", "4", "--real", "4", "--ranks", "16", "--leaves", "2000")
    story = first_save(fleet, root, *planned, "--saves", "0", "--parity", "0")
    assert story.fleet.save_now.is_complete
    (found,) = (each for each in story.meter.found if each.phase.endswith("first save"))
    return found


def longest_work(meter: ModuleType, changes: Path, usage: Any) -> float:
    """The longest time for which the loop of any keeper was held by work of this keeper."""
    since_s = usage.ended_s - usage.wall_s
    ticks = [t for t in meter.ticks_in(changes) if since_s < t.ended_s <= usage.ended_s]
    return float(max(min(tick.held_s, tick.used_s) for tick in ticks))


def test_the_first_save_under_a_new_layout_is_little_work_for_the_coordinator(
    fleet: ModuleType, meter: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = tmp_path / "changes"
    monkeypatch.setenv("PYTHONPATH", meter.report_all_holds(changes))
    usage = use_of_first_save(fleet, tmp_path / "root")
    assert usage.loop_s < MOST_S
    assert longest_work(meter, changes, usage) < loop_watch.MOST_S


def test_a_coordinator_that_plans_the_images_of_all_ranks_is_found_out(
    fleet: ModuleType, meter: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = tmp_path / "changes"
    monkeypatch.setenv("PYTHONPATH", meter.report_all_holds(changes, PLANS_ALL))
    usage = use_of_first_save(fleet, tmp_path / "root")
    assert usage.loop_s > MOST_S
    assert longest_work(meter, changes, usage) > 2 * loop_watch.MOST_S
    assert max(hold.held_s for hold in meter.holds_in(tmp_path / "root")) > MOST_S / 2


def test_a_coordinator_with_too_much_memory_is_found_out(
    fleet: ModuleType, meter: ModuleType
) -> None:
    measured = meter.Meter()
    most = 150_000_000 + 64 * 16_000
    measured.found = [
        meter.Usage("a start", memory_bytes=most),
        meter.Usage("a save", memory_bytes=most + 1_000_000),
    ]
    assert measured.over_memory(64) == ["a save: the coordinator has 152 MB, more than 151"]
    assert not measured.over_memory(128)
    measured.keepers = [120_000_000, 60_000_000, 80_000_000, 70_000_000]
    assert fleet.shown_memory(measured, 64) == (
        "Memory without the arena, MB: the coordinator at most 152, at the end 120 (allowed: 151); "
        "of 3 others the median 70, at most 80."
    )


def test_percentiles_are_of_the_nearest_rank(meter: ModuleType) -> None:
    values = [float(n) for n in range(1000, 0, -1)]
    found = [meter.percentile(values, share) for share in (0.5, 0.99, 0.999, 1.0)]
    assert found == [500, 990, 999, 1000]
    assert meter.percentile([], 0.5) == 0


def test_the_table_of_ticks_tells_a_busy_machine_from_a_busy_keeper(
    fleet: ModuleType, meter: ModuleType, tmp_path: Path
) -> None:
    ticks = [(10.0, 0.2, 0.01), (11.0, 0.001, 0.5), (30.0, 0.06, 0.07), (31.0, -0.002, 0.0)]
    whole = b"".join(struct.pack("ddd", *tick) for tick in ticks)
    (tmp_path / "1.ticks").write_bytes(whole + b"cut short")
    measured = meter.Meter()
    measured.found = [meter.Usage("a save", wall_s=5.0, ended_s=12.0)]
    shown = fleet.shown_ticks(measured, meter.ticks_in(tmp_path)).splitlines()
    assert [cell.strip() for cell in shown[-2].split("|")[1:-1]] == [
        *("a save", "2", "1.0", "200.0", "200.0", "200.0", "1"),
        *("1.0", "10.0", "10.0", "10.0", "0"),
    ]
    assert [cell.strip() for cell in shown[-1].split("|")[2:8:5]] == ["4", "2"]


LARGE = ("--hosts", "64", "--real", "64", "--leaves", "3000", "--saves", "0", "--parity", "0")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.promise
def test_the_first_save_of_64_hosts_with_3000_leaves_is_captured(
    fleet: ModuleType, tmp_path: Path
) -> None:
    """512 ranks; needs 8 GB of memory. Planned by the coordinator alone, all lines broke."""
    story = first_save(fleet, tmp_path, *LARGE)
    assert story.fleet.save_now.is_complete and not story.fleet.aborted


def test_played_hosts_attach_save_and_are_attached_again_and_images_of_lost_ones_are_made_anew(
    fleet: ModuleType, tmp_path: Path
) -> None:
    few = ("--ranks", "2", "--saves", "1", "--settled", "0.1")
    story = told(fleet, tmp_path, "--hosts", "64", *few)
    traffic = story.traffic["steady save"]
    for kind in ("HostRequests", "GrantSlots", "HostCaptured", "SlotsSealed", "ForwardMessage"):
        assert traffic[kind] == 64 - 8, "one of a host and phase"
    starts = "the first start", "coordinator killed", "a start with parity"
    sent = [story.traffic[f"{what}: first save"]["LayoutMissing"] for what in starts]
    assert sent == [64 - 8, 0, 0], "a host is sent the bytes of a layout once"
