"""Whatever goes wrong ends the exchange of one generation, and no wrong byte ever gets a seal."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import Fenced, NotProtected, UsageError
from holdfast.format.checksum import Buffer
from holdfast.format.manifest import Generation
from holdfast.keeper.hosts.network import LIMITS
from holdfast.parity.exchange.shard_exchange import SealedShard, ShardExchange
from holdfast.parity.exchange.windows import PATIENCE_S, RateBudget
from holdfast.parity.planning.record import RecordTerms
from holdfast.transport.server import ThreadSafeServer
from support.peers.exchanging import BEFORE, MIB, POISON, Group, Host
from support.peers.peering import close_pullers, wait_for

ONE = ([[3 * MIB], [5 * MIB + 9, MIB], [4 * MIB]], 1)
TWO = ([[9 * MIB], [17 * MIB, 3 * MIB], [16 * MIB], [0, 8 * MIB]], 2)
SHAPES = pytest.mark.parametrize("shape", [ONE, TWO], ids=["one", "two"])
SLOW_BYTES_S = 30 * MIB


@pytest.fixture(autouse=True)
def closed_pullers() -> Iterator[None]:
    yield
    close_pullers()


def flip(path: Path, at: int) -> None:
    """One bit in a file, after its checksums were made."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def in_the_middle(act: Callable[[Group], None], least: int = 1) -> Callable[[Group], None]:
    """Do something as soon as so many bytes were asked for, of those that come slowly."""

    def meanwhile(group: Group) -> None:
        def is_begun() -> bool:
            return sum(one.pulled_bytes for one in group.exchanges.values()) >= least

        wait_for(is_begun, f"{least} bytes")
        act(group)
        group.budget.set_rate(None)

    return meanwhile


def end(host: Host) -> None:
    """Its keeper is gone."""
    host.served.wait(host.served.server.close())


def failures(group: Group) -> list[NotProtected]:
    return [error for error in group.errors.values() if isinstance(error, NotProtected)]


def check_failed(group: Group, *, because: str, host: str = "") -> None:
    """Somebody says why, in time; what has a seal is right, and not everything has one."""
    group.check_sealed()
    assert any(because in str(error) for error in group.errors.values()), group.errors
    for error in group.errors.values():
        assert isinstance(error, NotProtected), error
        assert str(error).startswith("generation 3-1200 is captured but not protected, for host-")
        assert error.fields["generation"] == "3-1200"
    assert not host or host in {one.fields["host"] for one in failures(group)}


@SHAPES
@pytest.mark.parametrize("where", ["first", "last", "table"])
def test_a_flipped_byte_never_gets_into_parity(shape: Any, where: str, arena_dir: Path) -> None:
    with Group(arena_dir, *shape) as group:
        host = group.hosts[1]
        fact = host.fact.images[0]
        at = {
            "first": fact.data_start,
            "last": fact.data_start + 5 * MIB - 1,
            "table": fact.image_bytes - 4000,
        }[where]
        flip(host.slot(fact.rank), BEFORE + at)
        group.run()
        because = "the block table of" if where == "table" else "block "
        check_failed(group, because=because, host="host-1")


def test_a_block_that_changed_in_memory_spoils_only_the_stripe_it_is_in(arena_dir: Path) -> None:
    with Group(arena_dir, *ONE) as group:
        fact = group.hosts[1].fact.images[0]
        flip(group.hosts[1].slot(fact.rank), BEFORE + fact.data_start)
        group.run()
        check_failed(group, because="block 0 of the image of rank 1: stored", host="host-1")
        assert set(group.errors) == {"host-2"}, "segment 0 of member 1 is in stripe 2"
        assert set(group.sealed) == {"host-0", "host-1"}


@SHAPES
def test_a_host_that_is_gone_before_is_named_at_once(shape: Any, arena_dir: Path) -> None:
    with Group(arena_dir, *shape) as group:
        end(group.hosts[2])
        began_s = time.monotonic()
        group.run()
        assert time.monotonic() - began_s < 20
        check_failed(group, because="keeper host-2 at 127.0.0.1", host="host-2")


@SHAPES
@pytest.mark.parametrize("least", [1, 3 * MIB])
def test_a_host_that_goes_in_the_middle_ends_it(shape: Any, least: int, arena_dir: Path) -> None:
    with Group(arena_dir, *shape) as group:
        group.budget.set_rate(SLOW_BYTES_S)
        group.run(in_the_middle(lambda group: end(group.hosts[2]), least))
        check_failed(group, because="keeper host-2 at 127.0.0.1", host="host-2")


@SHAPES
def test_a_generation_that_is_withdrawn_in_the_middle_ends_it(shape: Any, arena_dir: Path) -> None:
    with Group(arena_dir, *shape) as group:
        group.budget.set_rate(SLOW_BYTES_S)
        group.run(in_the_middle(lambda group: group.hosts[1].withdraw_images(), 2 * MIB))
        check_failed(group, because="keeper host-1 at", host="host-1")


@SHAPES
def test_a_slot_that_is_given_away_in_the_middle_spoils_nothing(
    shape: Any, arena_dir: Path
) -> None:
    """Withdrawn, written, and offered again under the same name, as no keeper may."""

    def change(group: Group) -> None:
        host = group.hosts[1]
        host.withdraw_images()
        host.images = {rank: bytes(len(image)) for rank, image in host.images.items()}
        host.offer_images()

    with Group(arena_dir, *shape) as group:
        images = dict(group.hosts[1].images)
        group.budget.set_rate(SLOW_BYTES_S)
        group.run(in_the_middle(change, 2 * MIB))
        group.hosts[1].images = images
        check_failed(group, because="host-1", host="host-1")


def test_another_generation_is_not_taken_for_this_one(arena_dir: Path) -> None:
    with Group(arena_dir, *ONE) as group:
        group.terms = RecordTerms(
            "run", Generation(3, 1201), "a0", 4, "0" * 32, 1, group.terms.members, 1
        )
        group.run()
        assert not group.sealed
        for error in group.errors.values():
            assert isinstance(error, NotProtected)
            assert "3-1201" in str(error) and "has another generation" in str(error)


def test_another_attempt_is_not_taken_for_this_one(arena_dir: Path) -> None:
    with Group(arena_dir, *ONE) as group:
        group.terms = RecordTerms(
            "run", Generation(3, 1200), "a1", 4, "0" * 32, 1, group.terms.members, 1
        )
        group.run()
        assert not group.sealed and len(group.errors) == 3
        check_failed(group, because="it has nothing of that name")


def test_a_member_of_an_incarnation_that_is_over_is_told_so(arena_dir: Path) -> None:
    with Group(arena_dir, *ONE) as group:
        for host in group.hosts[1:]:
            host.served.do(host.served.server.begin, 5)
        group.run()
        assert not group.sealed
        assert all(isinstance(error, Fenced) for error in group.errors.values())


@SHAPES
def test_it_can_be_called_off_at_any_time(shape: Any, arena_dir: Path) -> None:
    with Group(arena_dir, *shape) as group:
        group.budget.set_rate(MIB)
        began_s = time.monotonic()

        def cancel(group: Group) -> None:
            for one in group.exchanges.values():
                one.cancel("the next one is captured")

        group.run(in_the_middle(cancel))
        assert time.monotonic() - began_s < 5
        assert set(group.errors) == {host.name for host in group.hosts}
        check_failed(group, because="cannot make its parity: the next one is captured")


def test_a_wait_for_a_peer_that_says_nothing_is_called_off_at_once(arena_dir: Path) -> None:
    with Group(arena_dir, [[], [30 * MIB]], 1) as group:
        exchange, silent = group.exchange_of(group.hosts[0]), threading.Event()
        loop = group.hosts[1].served.loop
        with ThreadPoolExecutor(1) as threads:
            group.budget.set_rate(4 * MIB)
            running = threads.submit(exchange.run)
            wait_for(lambda: exchange.pulled_bytes > 3 * MIB, "some bytes")
            loop.call_soon_threadsafe(silent.wait, 60)
            group.budget.set_rate(None)
            time.sleep(0.3)
            began_s = time.monotonic()
            exchange.cancel("enough")
            with pytest.raises(NotProtected, match="enough"):
                running.result()
            assert time.monotonic() - began_s < 30
            silent.set()


def test_what_is_called_off_before_it_begins_does_nothing(arena_dir: Path) -> None:
    with Group(arena_dir, *TWO) as group:
        exchange = group.exchange_of(group.hosts[0])
        exchange.cancel("no more")
        with pytest.raises(NotProtected, match="no more"):
            exchange.run()
        assert exchange.pulled_bytes == 0
        assert all(set(row) <= {POISON} for row in group.hosts[0].rows.values())


def test_without_another_thread_it_ends_and_nothing_goes_on(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Group(arena_dir, [[0], [5], [MIB], []], 3) as group:
        exchange = group.exchange_of(group.hosts[1])
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.endswith("-2"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            exchange.run()
        assert not [one for one in threading.enumerate() if "-row-" in one.name]


def test_a_row_that_nobody_makes_is_not_waited_for_without_end(arena_dir: Path) -> None:
    sizes = [[], [], [20 * MIB]]
    with Group(arena_dir, sizes, 2) as group:
        exchange = group.exchange_of(group.hosts[1], patience_s=0.5)
        with pytest.raises(NotProtected, match=r"host-0 at .* made nothing of row 1 of stripe 0"):
            exchange.run()


def test_a_window_that_nobody_takes_is_not_waited_for_without_end(arena_dir: Path) -> None:
    with Group(arena_dir, [[20 * MIB], [0]], 1) as mirror:
        assert mirror.exchange_of(mirror.hosts[1], patience_s=0.5).run(), "nothing is handed on"
    with Group(arena_dir / "2", [[], [], [70 * MIB]], 2) as group:
        exchange = group.exchange_of(group.hosts[0], patience_s=0.5)
        with pytest.raises(NotProtected, match="host-1 did not take window 0 of row 1 of stripe 0"):
            exchange.run()
        assert not [path for path in offered(group.hosts[0]) if path.startswith("/windows")]


def test_a_keeper_of_rows_that_is_late_is_waited_for_and_costs_no_healthy_host(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = 10.0  # all times but those of the late one's
    limits = msgspec.structs.replace(LIMITS, progress_s=LIMITS.progress_s / shorter)
    group = Group(arena_dir, [[72 * MIB], [], [], []], 2)
    for host in group.hosts:
        host.served.options["limits"] = limits
    with group:
        made = {
            one.name: group.exchange_of(one, patience_s=PATIENCE_S / shorter) for one in group.hosts
        }
        late = made["host-3"]  # has row 1 of a stripe with half of the image

        def run() -> tuple[SealedShard, ...]:
            time.sleep(20 / shorter)
            return ShardExchange.run(late)

        monkeypatch.setattr(late, "run", run)
        group.run_these(made)
        assert not group.errors
        group.check_sealed()


def offered(host: Host) -> list[str]:
    return list(host.served.server._service.resources._offered)


@SHAPES
def test_the_next_turn_of_the_same_attempt_begins_as_if_nothing_had_been(
    shape: Any, arena_dir: Path
) -> None:
    with Group(arena_dir, *shape) as group:
        group.budget.set_rate(MIB)

        def cancel(group: Group) -> None:
            group.exchanges["host-1"].cancel("try again")

        group.run(in_the_middle(cancel))
        assert group.errors
        group.errors.clear()
        group.sealed.clear()
        group.terms = dataclasses.replace(group.terms, round_id=2)
        group.run().check_all()


@SHAPES
def test_nothing_stays_offered_but_what_was(shape: Any, arena_dir: Path) -> None:
    with Group(arena_dir, *shape) as group:
        group.run().check_all()
        for host in group.hosts:
            assert offered(host) == [f"/images/a0/{rank}" for rank in host.images]
        for host in group.hosts:
            end(host)
        group.sealed.clear()
        group.run(patience_s=0.5)
        assert not group.sealed and all(not offered(host) for host in group.hosts)


class Mangled(ThreadSafeServer):
    """Offers something else than it was told."""

    def __init__(self, host: Host, mangle: Callable[[bytes], bytes] | None) -> None:
        super().__init__(host.served.server, host.served.loop)
        self.host, self.mangle = host, mangle

    def offer_file(self, path: str, file: Any, *, offset_bytes: int, **named: Any) -> None:
        if self.mangle is None:
            flip(file, offset_bytes + 4321)
        super().offer_file(path, file, offset_bytes=offset_bytes, **named)

    def offer_document(self, path: str, data: Buffer, **named: Any) -> None:
        super().offer_document(path, self.mangle(bytes(data)) if self.mangle else data, **named)


def test_a_row_that_changes_on_its_way_gets_no_seal(arena_dir: Path) -> None:
    with Group(arena_dir, *TWO) as group:
        mangled = group.hosts[1]
        made = {h.name: group.exchange_of(h) for h in group.hosts if h is not mangled}
        made[mangled.name] = group.exchange_of(mangled, offers=Mangled(mangled, None))
        group.run_these(made)
        check_failed(group, because="changed after they were made, or on their way", host="host-1")
        assert "host-2" in group.errors, "it keeps row 1 of stripe 1"


def noted(**fields: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    def mangle(data: bytes) -> bytes:
        window_bytes, first, sums = msgspec.msgpack.decode(data)
        said = {"window_bytes": window_bytes, "first": first, "sums": sums}
        return msgspec.msgpack.encode(
            [change(said[name]) if (change := fields.get(name)) else said[name] for name in said]
        )

    return mangle


@pytest.mark.parametrize(
    "mangle",
    [
        noted(window_bytes=lambda n: n + 1),
        noted(window_bytes=lambda n: 0),
        noted(window_bytes=lambda n: 16 * MIB),
        noted(window_bytes=lambda n: -n),
        noted(first=lambda n: n + 1),
        noted(first=lambda n: -1),
        noted(first=lambda n: "0"),
        noted(sums=lambda n: [one[:-1] for one in n]),
        noted(sums=lambda n: [*n, *n]),
        noted(sums=lambda n: [b"", *n]),
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: b"\x90",
    ],
)
def test_a_note_that_makes_no_sense_is_not_followed(
    mangle: Callable[[bytes], bytes], arena_dir: Path
) -> None:
    with Group(arena_dir, [[3 * MIB], [], [2 * MIB]], 2) as group:
        one = group.hosts[1]
        made = {h.name: group.exchange_of(h, patience_s=1.0) for h in group.hosts if h is not one}
        made[one.name] = group.exchange_of(one, offers=Mangled(one, mangle), patience_s=1.0)
        group.run_these(made)
        check_failed(group, because="its note makes no sense", host="host-1")


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_at_whatever_moment_no_wrong_byte_gets_a_seal(
    seed: int, arena_dir: Path
) -> None:
    draw = random.Random(seed)
    shape = draw.choice([ONE, TWO])

    def act(group: Group) -> None:
        host = draw.choice([host for host in group.hosts if host.images])
        rank = draw.choice(list(host.images))
        choices: list[Callable[[], Any]] = [
            lambda: end(host),
            host.withdraw_images,
            lambda: flip(host.slot(rank), draw.randrange(BEFORE, BEFORE + len(host.images[rank]))),
            lambda: group.exchanges[host.name].cancel("why not"),
        ]
        draw.choice(choices)()

    with Group(arena_dir, *shape) as group:
        group.budget.set_rate(SLOW_BYTES_S)
        group.run(in_the_middle(act, draw.randrange(12 * MIB)))
        group.check_sealed()
        for error in group.errors.values():
            assert isinstance(error, NotProtected)


def test_the_budget_is_kept_and_can_be_changed_while_it_runs(arena_dir: Path) -> None:
    with Group(arena_dir, [[24 * MIB], [24 * MIB]], 1) as group:
        group.budget.set_rate(40 * MIB)
        began_s = time.monotonic()
        group.run()
        assert time.monotonic() - began_s > (48 - 2) / 40, "less the burst"
        group.check_all()
        group.budget.set_rate(MIB)
        began_s = time.monotonic()
        group.run(in_the_middle(lambda _: None)).check_all()
        assert time.monotonic() - began_s < 30, "it would have taken 48 s"


def test_a_budget_of_nothing_is_refused() -> None:
    for rate in (0, -1):
        with pytest.raises(UsageError, match=f"parity cannot be made from {rate} bytes a second"):
            RateBudget(rate)
    assert RateBudget(7).seconds(21) == 3 and RateBudget().seconds(1 << 60) == 0


def test_memory_that_does_not_fit_and_unknown_hosts_are_refused(arena_dir: Path) -> None:
    with Group(arena_dir, *TWO) as group:
        host = group.hosts[0]
        rows, room = host.room.rows, host.room
        small = {**rows, (0, 0): rows[0, 0][:-1]}
        for changed, match in (
            ({"rows": small}, r"row 0 of stripe 0 takes \d+ bytes of memory, there are \d+"),
            ({"rows": {(0, 0): rows[0, 0]}}, "row 1 of stripe 3 takes .* there are 0"),
            ({"staging": room.staging[:-1]}, "what is pulled takes"),
            ({"passing": room.passing[:-1]}, "what is handed on of other rows takes"),
        ):
            with pytest.raises(UsageError, match=match):
                group.exchange_of(host, room=changed_room(room, **changed))
        with pytest.raises(UsageError, match=r"where the keepers of \['host-3'\] are"):
            group.exchange_of(host, peers={n: p for n, p in group.peers.items() if n != "host-3"})
        host.name = "nobody"
        with pytest.raises(UsageError, match="nobody is not in the group"):
            group.exchange_of(host)


def changed_room(room: Any, **fields: Any) -> Any:
    made = {name: getattr(room, name) for name in room.__slots__}
    return type(room)(**{**made, **fields})
