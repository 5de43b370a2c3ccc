"""What was put into a ring is found, whoever was killed since; what was torn is never taken."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import events
from holdfast.observe import ring_drain
from holdfast.observe.event_files import EventFile
from holdfast.observe.event_ring import (
    LONG_AREA,
    RINGS,
    SHORT_AREA,
    EventRing,
    RingFile,
    _Cursor,
)
from holdfast.observe.records import RecordReader
from holdfast.observe.ring_drain import RingDrain, end_ring_alone
from holdfast.observe.ring_records import SCHEMA, Moment, pack_long, read_moment, unpack
from holdfast.protocol.arena import process_start

SOURCE = str(Path(holdfast.__file__).parents[1])


def fence(step: int) -> events.Event:
    return events.FenceWaited(incarnation=1, step=step, rank=0, held_s=0.25)


def make_ring(arena: Path) -> EventRing:
    return EventRing(arena / RINGS, "rank-00000", rank=0, host="a", boot="b")


def make_drain(tmp_path: Path, **options: Any) -> RingDrain:
    (tmp_path / "holdfast.json").touch()
    return RingDrain(tmp_path / "arena", EventFile(tmp_path / "events" / "host-a.jsonl"), **options)


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    (tmp_path / "arena").mkdir(mode=0o700)
    return tmp_path / "arena"


def records(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "events" / "host-a.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def steps(tmp_path: Path) -> list[int]:
    return [record["step"] for record in records(tmp_path) if record["event"] == "FenceWaited"]


def mapped(ring: EventRing) -> RingFile:
    assert ring.ring is not None
    return ring.ring


def test_what_is_put_is_written_in_order_with_who_put_it(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    before_s = time.monotonic()
    for step in range(3):
        ring(fence(step), 100.0 + step)
    assert drain.poll()
    first, *others = records(tmp_path)
    assert before_s - 1e-6 <= first.pop("mono_s") <= time.monotonic()
    assert first == {
        "event": "FenceWaited",
        "incarnation": 1,
        "step": 0,
        "rank": 0,
        "held_s": 0.25,
        "time_s": 100.0,
        "by_host": "a",
        "writer": ring.writer,
        "number": 0,
        "version": 1,
        "boot": "b",
    }
    assert [record["number"] for record in others] == [1, 2]
    drain.poll()
    assert len(records(tmp_path)) == 3, "written once"


text = st.text(max_size=40)
VALUES = {"d": st.floats(0, 1e9), "q": st.integers(0, 1 << 53), "?": st.booleans()}
TEXTS = {
    "text": text,
    "texts": st.lists(text, max_size=4).map(tuple),
    "integers": st.lists(st.integers(0, 1 << 53), max_size=4).map(tuple),
    "counts": st.dictionaries(text, st.integers(0, 1 << 53), max_size=4),
}


@pytest.mark.parametrize("kind", events.AnyEvent.__args__, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: type[events.Event], data: st.DataObject) -> None:
    fields = dict(SCHEMA)[kind.__name__]
    values: dict[str, Any] = {name: data.draw((VALUES | TEXTS)[code]) for name, code in fields}
    event = kind(**values)
    packed = pack_long(event, Moment(1, 2, 3.0, 4.0), LONG_AREA.slot_bytes)
    assert read_moment(packed) == Moment(1, 2, 3.0, 4.0)
    found = unpack(packed, SCHEMA)
    expected = events.to_record(event, 0.0)
    del expected["time_s"]
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(expected))


@given(message=st.text(max_size=3000), names=st.lists(st.text(max_size=30), max_size=300))
def test_what_does_not_fit_is_cut_and_nothing_else_is(message: str, names: list[str]) -> None:
    room = LONG_AREA.slot_bytes
    packed = pack_long(events.Warned(message=message * 9), Moment(0, 0, 0.0, 0.0), room)
    assert len(packed) <= room
    found = unpack(packed, SCHEMA)["message"]
    assert found == message * 9 or found.endswith(" ... (cut)")
    packed = pack_long(events.ValuesDiffer(names=tuple(names * 5)), Moment(0, 0, 0.0, 0.0), room)
    found = unpack(packed, SCHEMA)["names"]
    assert len(packed) <= room and found == (names * 5)[: len(found)]


@given(at=st.integers(8, 8 + 60), flip=st.integers(1, 255))
def test_a_record_with_any_byte_changed_is_no_record(at: int, flip: int) -> None:
    packed = bytearray(pack_long(fence(1), Moment(1, 2, 3.0, 4.0), 256))
    packed[at % len(packed)] ^= flip
    assert read_moment(bytes(packed) + bytes(64)) is None


def test_a_torn_record_is_passed_over_and_shows_as_a_gap(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    for step in range(5):
        ring(fence(step), 0.0)
    area = SHORT_AREA
    second = area.start + area.slot_bytes
    mapped(ring).map[second + 40 : second + 44] = b"torn"
    ring.close(deadline_s=0.0, drain=lambda _: False)
    drain.poll()
    assert steps(tmp_path) == [0, 2, 3, 4]
    reader = RecordReader(tmp_path)
    assert len(list(reader)) == 4 and reader.lost_records == 1


def test_an_interrupted_put_holds_the_others_for_a_moment_only(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    ring(fence(0), 0.0)
    next(ring._short.positions)  # claimed, and nothing put
    ring(fence(1), 0.0)
    drain.poll()
    assert steps(tmp_path) == [0]
    monkeypatch.setattr("holdfast.observe.ring_drain.STALL_S", 0.0)
    drain.poll()
    assert steps(tmp_path) == [0, 1]


def test_a_full_ring_drops_counts_and_goes_on(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    for step in range(SHORT_AREA.slots + 500):
        ring(fence(step), 0.0)
    drain.poll()
    kept = steps(tmp_path)
    assert kept == list(range(len(kept))), "the oldest are kept"
    dropped = SHORT_AREA.slots + 500 - len(kept)
    assert 500 <= dropped < 550
    ring(fence(9999), 0.0)
    drain.poll()
    assert steps(tmp_path)[-1] == 9999
    (warned,) = [one["message"] for one in records(tmp_path) if one["event"] == "Warned"]
    assert warned == f"{dropped} events of {ring.writer} were dropped: its ring was full"
    reader = RecordReader(tmp_path)
    list(reader)
    assert reader.lost_records == dropped


def test_rounds_of_the_ring_never_mix(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    for step in range(3 * SHORT_AREA.slots):
        ring(fence(step), 0.0)
        ring(events.Warned(message=str(step)), 0.0)
        if step % 40 == 0:
            drain.poll()
    drain.poll()
    assert steps(tmp_path) == list(range(3 * SHORT_AREA.slots))


def test_threads_put_at_once_and_nothing_is_lost(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)

    def put(first: int) -> None:
        for step in range(first, first + 700):
            ring(fence(step), 0.0)

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=put, args=(700 * n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drain.poll()
    sys.setswitchinterval(switch_s)
    drain.poll()
    assert sorted(steps(tmp_path)) == list(range(3500))
    assert sorted(one["number"] for one in records(tmp_path)) == list(range(3500))


def test_a_claim_that_races_past_the_room_gives_nothing() -> None:
    class Full:
        cells = [0] * 16

    cursor = _Cursor(SHORT_AREA)
    for _ in range(SHORT_AREA.slots):
        next(cursor.positions)
    assert cursor.claim(Full()) == -1  # type: ignore[arg-type]


def test_a_value_that_no_record_holds_is_dropped_and_counted(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    ring(events.FenceWaited(step=1 << 70, held_s=0.0), 0.0)
    ring(fence(1), 0.0)
    assert mapped(ring).undelivered_drops() == 1
    give_up_s = time.monotonic() + 5
    while steps(tmp_path) != [1] and time.monotonic() < give_up_s:
        drain.poll()
    assert steps(tmp_path) == [1]


PUT = (
    "import os, sys, time; from pathlib import Path; from holdfast import events\n"
    "from holdfast.observe.event_ring import EventRing\n"
    "ring = EventRing(Path(sys.argv[1], 'events'), 'rank-00000', rank=0, host='a', boot='b')\n"
    "told = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
    "for step in range(10**9):\n"
    "    ring(events.FenceWaited(incarnation=1, step=step, held_s=0.0), 0.0)\n"
    "    os.write(told, b'%d\\n' % step)\n"
    "    if step % 50 == 0: time.sleep(0.001)\n"
)
DRAIN = (
    "import sys; from pathlib import Path\n"
    "from holdfast.observe.event_files import EventFile\n"
    "from holdfast.observe.ring_drain import RingDrain\n"
    "drain = RingDrain(Path(sys.argv[1]), EventFile(Path(sys.argv[2])), batch=7)\n"
    "while True: drain.poll()\n"
)


def start(script: str, *args: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": SOURCE})


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_no_record_that_was_put_is_lost_when_trainer_and_keeper_are_killed(
    arena: Path, tmp_path: Path
) -> None:
    told, file = tmp_path / "told", tmp_path / "events" / "host-a.jsonl"
    trainer = start(PUT, arena, told)
    while not told.exists():
        time.sleep(0.01)
    for _ in range(3):
        keeper = start(DRAIN, arena, file)
        reached = told.stat().st_size
        while not file.exists() or told.stat().st_size < reached + 2000:
            time.sleep(0.01)
        time.sleep(0.15)
        kill(keeper)
    kill(trainer)
    newest = int(told.read_text().split()[-1])
    drain = make_drain(tmp_path)
    drain.poll()
    reader = RecordReader(tmp_path)
    found = [event.step for event, _ in reader if isinstance(event, events.FenceWaited)]
    assert len(found) == len(set(found)), "none is written twice"
    put = set(range(newest + 1))
    dropped = mapped_drops(tmp_path)
    assert len(put - set(found)) <= dropped
    assert reader.counts.torn_lines <= 3
    assert not list((arena / RINGS).glob("*.ring")), "a ring is removed when its writer is dead"


def mapped_drops(tmp_path: Path) -> int:
    return sum(
        int(record["message"].split()[0])
        for line in (tmp_path / "events" / "host-a.jsonl").read_bytes().splitlines()
        if b'"Warned"' in line and (record := json.loads(line))
    )


def test_what_was_written_and_not_taken_out_is_not_written_again(
    arena: Path, tmp_path: Path
) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    for step in range(5):
        ring(fence(step), 0.0)
    drain.poll()
    drain.close()
    mapped(ring).cells[SHORT_AREA.tail] = 2  # as if the drainer had been killed in between
    make_drain(tmp_path).poll()
    assert steps(tmp_path) == list(range(5))


def test_a_disk_that_takes_nothing_costs_only_what_the_ring_cannot_hold(
    arena: Path, tmp_path: Path
) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    blocker = tmp_path / "events"
    blocker.write_text("a file where the directory should be")
    for step in range(100):
        ring(fence(step), 0.0)
        drain.poll()
    blocker.unlink()
    drain.poll()
    assert steps(tmp_path) == list(range(100))


def test_one_drains_at_a_time_and_a_trainer_for_itself_if_nobody_else_does(
    arena: Path, tmp_path: Path
) -> None:
    ring, keeper, own = make_ring(arena), make_drain(tmp_path), make_drain(tmp_path)
    ring(fence(0), 0.0)
    keeper.poll()
    ring(fence(1), 0.0)
    assert not own.poll() and not own.drain(mapped(ring))
    keeper.close()
    ring.close(deadline_s=5.0, drain=end_ring_alone(own))
    assert steps(tmp_path) == [0, 1]
    assert not list((arena / RINGS).glob("*.ring"))


def test_a_child_of_a_fork_has_a_ring_of_its_own(arena: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from holdfast import events\n"
        "from holdfast.observe.event_ring import EventRing\n"
        "ring = EventRing(Path(sys.argv[1], 'events'), 'rank-0', rank=0, host='a', boot='b')\n"
        "ring(events.FenceWaited(step=0, held_s=0.0), 0.0)\n"
        "child = os.fork()\n"
        "step = 1 if child == 0 else 2\n"
        "ring(events.FenceWaited(step=step, held_s=0.0), 0.0)\n"
        "if child: os.waitpid(child, 0)\n"
    )
    assert start(script, arena).wait() == 0
    make_drain(tmp_path).poll()
    assert sorted(steps(tmp_path)) == [0, 1, 2]
    assert len({record["writer"] for record in records(tmp_path)}) == 2


def test_a_ring_takes_no_memory_as_it_goes_on(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)

    def put() -> None:
        for step in range(3000):
            ring(fence(step), 0.0)
        drain.poll()

    put()
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    put()
    only = [tracemalloc.Filter(inclusive=True, filename_pattern="*event_ring.py")]
    grown = (
        tracemalloc.take_snapshot()
        .filter_traces(only)
        .compare_to(before.filter_traces(only), "filename")
    )
    tracemalloc.stop()
    assert sum(one.size_diff for one in grown) < 2000


def test_a_ring_goes_on_in_another_file_when_its_arena_is_removed(
    arena: Path, tmp_path: Path
) -> None:
    ring = make_ring(arena)
    ring(fence(0), 0.0)
    shutil.rmtree(arena)
    ring(events.KeeperLost(reason="its arena was removed"), 0.0)
    ring(fence(1), 0.0)
    make_drain(tmp_path).poll()
    assert steps(tmp_path) == [0, 1]
    assert [record["number"] for record in records(tmp_path)] in ([0, 2, 1], [0, 1, 2])


def test_a_file_that_is_no_ring_is_let_be(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    (arena / RINGS / "short.ring").write_bytes(b"x" * 100)
    (arena / RINGS / "zeros.ring").write_bytes(bytes(mapped(ring).map.size()))
    ring(fence(0), 0.0)
    drain.poll()
    drain.poll()
    assert steps(tmp_path) == [0]
    assert (arena / RINGS / "short.ring").exists()


def test_a_storage_that_hangs_holds_nobody_at_the_end(arena: Path) -> None:
    ring, hang = make_ring(arena), threading.Event()
    ring(fence(0), 0.0)
    began_s = time.monotonic()
    threading.Timer(4.0, hang.set).start()
    ring.close(deadline_s=0.1, drain=lambda _: hang.wait())
    assert not hang.is_set() and time.monotonic() - began_s < 3.0
    hang.set()
    assert list((arena / RINGS).glob("*.ring")), "left to the next keeper"


def test_an_end_without_time_tries_nothing(arena: Path) -> None:
    ring, tried = make_ring(arena), itertools.count()
    ring(fence(0), 0.0)
    ring.close(deadline_s=0.0, drain=lambda _: next(tried) < 0)
    assert next(tried) == 0 and list((arena / RINGS).glob("*.ring"))


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_forked_child_does_not_keep_the_lock_of_a_drain(
    is_closed: bool, arena: Path, tmp_path: Path
) -> None:
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from holdfast.observe.event_files import EventFile\n"
        "from holdfast.observe.ring_drain import RingDrain\n"
        "drain = RingDrain(Path(sys.argv[1]), EventFile(Path(sys.argv[2])))\n"
        "Path(sys.argv[1], 'events').mkdir(exist_ok=True)\n"
        "assert drain.poll()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "print(child, flush=True)\n"
        f"if {is_closed}: drain.close()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    (arena / RINGS).mkdir(mode=0o700)
    command = [sys.executable, "-c", script, str(arena), str(tmp_path / "events" / "a.jsonl")]
    made = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": SOURCE}, stdout=subprocess.PIPE
    )
    assert made.stdout is not None
    child = int(made.stdout.readline())
    made.stdout.close()
    made.wait()
    try:  # the child lets go of the lock as soon as it runs
        until_s, other = time.monotonic() + 20, make_drain(tmp_path)
        while not other.poll():
            assert time.monotonic() < until_s
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_ring_that_cannot_be_opened_now_is_opened_later(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    ring(fence(0), 0.0)

    def refuse(path: Path) -> RingFile:
        raise OSError(24, "Too many open files", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(RingFile, "open", refuse)
        drain.poll()
    drain.poll()
    assert steps(tmp_path) == [0]


def test_drops_that_are_counted_out_of_order_are_told_once(arena: Path) -> None:
    file = mapped(make_ring(arena))
    file.count_dropped(7)
    file.count_dropped(5)
    assert file.undelivered_drops() == 7
    file.drops_reported(8)
    assert file.undelivered_drops() == 0


def test_a_forked_child_makes_no_arena_that_was_removed(arena: Path) -> None:
    ring = make_ring(arena)
    shutil.rmtree(arena)
    ring.forget()  # as in a child
    ring(fence(0), 0.0)
    assert not arena.exists()


def test_a_record_behind_a_head_that_went_back_is_waited_for(arena: Path, tmp_path: Path) -> None:
    ring, drain = make_ring(arena), make_drain(tmp_path)
    for step in range(3):
        ring(fence(step), 0.0)
        drain.poll()
    ring(fence(3), 0.0)
    mapped(ring).cells[SHORT_AREA.head] = 3  # noted late by a thread that was interrupted
    assert not mapped(ring).is_drained()
    drain.poll()
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_a_process_that_has_the_number_of_a_writer_is_not_taken_for_it(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring(arena)
    for start, is_known in ((process_start(os.getpid()), True), (5, False)):
        monkeypatch.setattr(ring_drain, "process_start", lambda pid, start=start: start)
        drain = make_drain(tmp_path)
        drain.poll()
        (one,) = drain._rings.values()
        assert (one.writer >= 0) == is_known
        drain.close()
    assert ring.writer
