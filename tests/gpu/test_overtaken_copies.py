"""Updates beside copies from a device: those that are fenced are never reported, others always."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.accelerator import devices
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.errors import CaptureOvertaken
from holdfast.events import ImagePassed, Warned
from holdfast.state.describe import Describer
from support.project.devices import count_of_delays
from support.runs.device_updates import AROUND, FENCED, UpdatedRun, captured, outcomes
from support.runs.mishaps import listening

pytestmark = pytest.mark.gpu

#: Over all profiles and seeds of delays of a run, where there are more.
ALL_SAVES = 1000
SAVES = [4, pytest.param(ALL_SAVES, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
#: The arena has room for no whole image of this width: it is passed through a ring.
RING_WIDTH, RING_ARENA_BYTES = 1024, 14 << 20


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("way", FENCED)
def test_a_fenced_update_neither_tears_a_save_nor_costs_one(
    way: str, saves: int, tmp_path: Path, device: str, request: pytest.FixtureRequest
) -> None:
    saves = share_of(saves, request.config)
    assert outcomes(UpdatedRun(device, way), tmp_path, saves) == {"right": saves}


@pytest.mark.promise
@pytest.mark.unordered(".")
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("way", AROUND)
def test_a_save_torn_by_an_update_around_the_fence_is_reported_and_never_loaded(
    way: str, saves: int, tmp_path: Path, device: str, request: pytest.FixtureRequest
) -> None:
    found = outcomes(UpdatedRun(device, way), tmp_path, share_of(saves, request.config))
    assert found["torn"] == 0


def share_of(saves: int, config: pytest.Config) -> int:
    """The saves of one profile and seed."""
    return saves if saves < ALL_SAVES else -(-saves // count_of_delays(config))


class Beside:
    """Updates that begin when the copies of a save are enqueued and the last has not landed yet."""

    def __init__(self, root: Path, device: str, width: int) -> None:
        self.run = UpdatedRun(device, "loop", width)
        self.device = self.run.parameters[0].device
        self.checkpointer = holdfast.Checkpointer(root, self.run.state, storage=None)

    def save(self, step: int, update: Callable[[], object]) -> holdfast.SaveHandle:
        enqueue = OvertakeDetector.enqueue

        def enqueue_late(detector: OvertakeDetector, device: torch.device) -> None:
            devices.delay(device, 0.5)
            enqueue(detector, device)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OvertakeDetector, "enqueue", enqueue_late)
            handle = self.checkpointer.save(step, durable=True)
            capture = self.checkpointer._saver._current
            assert capture is not None and capture.released.wait(30)
        update()
        return handle

    def update_by_data(self) -> None:
        self.run.parameters[0].data.add_(1.0)

    def close(self) -> None:
        with pytest.raises(CaptureOvertaken):  # it was promised to be durable
            self.checkpointer.close()


@pytest.fixture(params=["slot", "ring"])
def beside(
    request: pytest.FixtureRequest, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> Beside:
    if request.param == "slot":
        return Beside(tmp_path, device, 64)
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(RING_ARENA_BYTES))
    return Beside(tmp_path, device, RING_WIDTH)


@pytest.mark.promise
@pytest.mark.unordered(".")
def test_an_update_in_place_behind_the_last_check_before_the_copies_land_is_reported(
    beside: Beside,
) -> None:
    handle = beside.save(1, beside.run.loop)
    with pytest.raises(CaptureOvertaken, match=r"model\.0\.weight changed"):
        handle.wait_durable(60)
    beside.close()


@pytest.mark.promise
@pytest.mark.unordered(".")
def test_an_update_that_moves_no_version_is_found_out_by_the_samples(beside: Beside) -> None:
    handle = beside.save(1, beside.update_by_data)
    with pytest.raises(CaptureOvertaken, match=r"model\.0\.weight changed"):
        handle.wait_durable(60)
    beside.close()


@pytest.mark.promise
def test_updates_that_the_fence_let_pass_are_right_however_often_it_does(beside: Beside) -> None:
    truth = beside.run.content()

    def update() -> None:
        for _ in range(2):
            beside.checkpointer.before_update()
            beside.run.loop()
        beside.run.step()

    with listening() as events:
        beside.save(1, update).wait_durable(60)
        beside.checkpointer.close()
    is_ring = beside.run.parameters[0].shape[0] == RING_WIDTH
    assert any(isinstance(event, ImagePassed) for event in events) == is_ring
    again = UpdatedRun("cpu", "loop", beside.run.parameters[0].shape[0])
    holdfast.load(beside.checkpointer.root, again.state, 1)
    assert all(torch.equal(again.content()[name], truth[name]) for name in truth)


@pytest.mark.promise
@pytest.mark.unordered(".")
def test_a_snapshot_before_an_overtaken_one_is_what_is_restored(
    tmp_path: Path, device: str
) -> None:
    beside = Beside(tmp_path, device, 64)
    truth = beside.run.content()
    beside.checkpointer.save(0).wait_captured(60)
    handle = beside.save(1, beside.run.loop)
    with pytest.raises(CaptureOvertaken):
        handle.wait_captured(60)
    assert handle.state == "failed"
    again = UpdatedRun(device, "loop")
    with holdfast.Checkpointer(tmp_path, again.state, storage=None) as newer:
        restored = newer.restore()
    assert restored is not None
    assert (restored.step, restored.source) == (0, "memory")
    assert all(torch.equal(again.content()[name], truth[name]) for name in truth)
    with pytest.raises(holdfast.HoldfastError):
        beside.checkpointer.close()


def detector_of(run: UpdatedRun) -> OvertakeDetector:
    return OvertakeDetector(Describer(run.state, 0).describe().bindings)


def check_landed(detector: OvertakeDetector, device: torch.device) -> None:
    detector.enqueue(device)
    torch.accelerator.synchronize(device)
    detector.check_landed()


def test_what_moved_before_the_fence_opened_is_reported_although_the_fence_let_it_pass(
    device: str,
) -> None:
    run = UpdatedRun(device, "loop")
    detector = detector_of(run)
    run.loop()
    detector.pass_fence()
    with pytest.raises(CaptureOvertaken):
        check_landed(detector, run.parameters[0].device)


def test_what_moves_when_the_fence_has_opened_is_right_and_a_second_opening_changes_nothing(
    device: str,
) -> None:
    run = UpdatedRun(device, "loop")
    detector, where = detector_of(run), run.parameters[0].device
    detector.pass_fence()
    detector.enqueue(where)
    torch.accelerator.synchronize(where)
    run.loop()
    detector.pass_fence()
    detector.check_landed()


def test_a_sample_has_every_kind_of_tensor_whose_elements_fill_its_memory(device: str) -> None:
    run = UpdatedRun(device, "loop")
    run.parameters[0].data = run.parameters[0].data.t()
    detector, where = detector_of(run), run.parameters[0].device
    check_landed(detector, where)
    detector = detector_of(run)
    run.parameters[0].data.add_(1.0)
    with pytest.raises(CaptureOvertaken, match=r"model\.0\.weight"):
        check_landed(detector, where)


# ── graphs ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
def test_a_step_is_captured_while_a_save_copies_and_neither_harms_the_other(
    tmp_path: Path, device: str
) -> None:
    run = UpdatedRun(device, "loop")
    truth = run.content()
    with holdfast.Checkpointer(tmp_path, run.state, storage=None) as checkpointer:
        devices.delay(run.parameters[0].device, 0.1)
        handle = checkpointer.save(0, durable=True)

        def work() -> None:
            run.step()
            time.sleep(0.3)  # the worker copies meanwhile

        replay = captured(work, device)
        handle.wait_durable(60)
        checkpointer.before_update()
        replay()
    again = UpdatedRun("cpu", "loop")
    holdfast.load(tmp_path, again.state, 0)
    assert all(torch.equal(again.content()[name], truth[name]) for name in truth)


@pytest.mark.promise
def test_what_a_graph_updates_is_copied_at_once_until_its_replays_are_fenced(
    tmp_path: Path, device: str
) -> None:
    run = UpdatedRun(device, "loop")
    with listening() as events, holdfast.Checkpointer(tmp_path, run.state, storage=None) as ours:
        describer = ours._saver.describer
        run.step()
        assert describer.describe().bindings.lazy

        def work() -> None:
            ours.before_update()  # in a graph it fences nothing
            run.step()

        replay = captured(work, device)
        assert not describer.describe().bindings.lazy
        assert not describer.describe().bindings.lazy
        ours.before_update()
        replay()
        assert describer.describe().bindings.lazy
    said = [event.message for event in events if isinstance(event, Warned)]
    assert len([one for one in said if "before each replay" in one]) == 1
