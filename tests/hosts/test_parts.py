"""What a keeper does as one of several: as a hand, as a coordinator, and left alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import Fenced, KeeperError, PeerError, UsageError
from holdfast.format.manifest import Generation
from holdfast.keeper.hosts.network import Network
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile, arena_dir, boot_id
from holdfast.restore.sources import slots_of
from holdfast.transport.channel import SealedChannel
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import INVENTORY, generation_name, image_path
from support.peers.peering import wait_for
from support.runs.evidence import read_events
from support.runs.host_pairs import NONCE, SECRET, Rank, Run
from support.runs.keepers import RUN, hear
from support.runs.leftovers import keeper_pids


def attempts_of(puller: Puller, peer: Peer) -> list[str]:
    """What a keeper says that it holds."""
    holding = msgspec.msgpack.decode(puller.document(peer, INVENTORY), type=m.Inventory)
    assert holding.host == peer.name
    return attempts_in(holding)


def attempts_in(holding: m.Inventory) -> list[str]:
    return [part.attempt_id.attempt for part in holding.parts]


def is_gone(host: str) -> bool:
    return not arena_dir(RUN, host).exists()


def test_a_save_on_two_hosts_is_kept_by_both_and_offered_by_each(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    attempt = run.capture(1)
    held = run.ranks[1].line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    (part,) = held.parts
    assert (part.attempt_id.attempt, part.attempt_id.world) == (attempt, 2)
    puller = Puller(SECRET, incarnation=run.n)
    for place, image_id in zip(run.table, part.images, strict=True):
        (arena,) = arena_dir.glob(f"*/*@{place.id}")
        slot = slots_of(arena)[attempt, image_id.rank]
        assert slot.image == image_id
        peer = Peer(place.id, place.address, place.port)
        wait_for(lambda p=peer: attempt in attempts_of(puller, p), "the inventory")  # type: ignore[misc]
        image = memoryview(bytearray(image_id.image_bytes))
        path = image_path(attempt, image_id.rank)
        generation_1 = generation_name(Generation(run.n, 1))
        puller.pull([WantedRange(peer, path, generation_1, 0, image)])
        file = SlotFile.open(Path(slot.path), writable=False)
        assert image == file.image[: image_id.image_bytes]
        file.close()
    # Written over, it is offered no longer.
    for step in range(2, 6):
        run.capture(step)
    with pytest.raises(PeerError):
        puller.pull([WantedRange(peer, path, generation_1, 0, memoryview(bytearray(8)))])
    puller.close()
    run.end()
    wait_for(lambda: is_gone("a") and is_gone("b"), "the end of both keepers", 20)


def test_a_process_that_takes_a_rank_of_another_host_is_refused(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    for place, found, rank in (("a", "b", 0), ("b", "a", 1)):
        mistaken = Rank(tmp_path, found, rank, 2)
        with pytest.raises(
            UsageError, match=f"rank {rank} .* is on host {place}, .* on host {found}"
        ):
            mistaken.join(run.n)
        mistaken.line.close()
    run.capture(1)  # the ranks that have these places keep them
    run.end()


def test_a_follower_measures_how_its_clock_stands_to_the_coordinators(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    wait_for(lambda: bool(read_events(tmp_path, "keeper", "ClocksCompared")), "a comparison", 20)
    run.end()
    (one, *_) = read_events(tmp_path, "keeper", "ClocksCompared")
    assert (one["host"], one["other"], one["by_host"]) == ("b", "a", "b")
    assert one["other_boot"] == one["boot"] == boot_id()[:8]
    # Both keepers are on this machine, and have one clock.
    assert abs(one["ahead_s"]) <= one["error_s"] <= one["round_trip_s"] / 2 < 1.0


def _refused(run: Run, step: int) -> str:
    """Why a step is skipped for now. A hand's trainers may be missed a moment before itself."""
    run.ranks[0].ask(step)
    skip = hear(run.ranks[0].heard, m.Skip)
    assert skip.step == step and skip.is_passing
    return skip.reason


def test_a_hand_told_to_stop_is_named_and_the_next_one_brings_back_what_it_held(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    attempt = run.capture(2)
    (hand,) = [pid for pid in keeper_pids(arena_dir) if _is_of(pid, "b")]
    os.kill(hand, signal.SIGTERM)
    wait_for(lambda: _is_dead(hand), "the end of the hand", 20)
    taken = socket.create_server(("127.0.0.1", run.table[1].port))  # the next one has another
    wait_for(lambda: "the keeper of b" in _refused(run, 3), "the loss of the hand", 20)
    inventory = run.ranks[0].line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    assert inventory.parts == ()
    run.ranks[1].connect()
    run.ranks[1].take_part(run.n, run.table)
    run.ranks[1].join(run.n)
    inventory = run.ranks[0].line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    (part,) = (one for one in inventory.parts if one.attempt_id.attempt == attempt)
    assert [image.rank for image in part.images] == [0, 1]
    (hand,) = [pid for pid in keeper_pids(arena_dir) if _is_of(pid, "b")]
    (port,) = _listening_ports(hand)
    assert port != run.table[1].port
    puller = Puller(SECRET, incarnation=run.n)
    assert attempt in attempts_of(puller, Peer("b", "127.0.0.1", port))
    puller.close()
    taken.close()
    run.capture(4)
    run.end()
    wait_for(lambda: is_gone("a") and is_gone("b"), "the end of both keepers", 20)


def test_all_ranks_leave_in_order_however_long_the_coordinator_takes_to_free_its_memory(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    (arena,) = arena_dir.glob("*/*@a")
    many = arena / "many"
    many.mkdir()
    for n in range(20_000):  # some tenths of a second, and so several looks around
        (many / str(n)).touch()
    run.ranks[0].line.send(m.Goodbye(), 1 << 40)
    run.ranks[1].line.request(m.Goodbye(), m.Done, timeout_s=30)
    for rank in run.ranks:
        rank.line.close()
    wait_for(lambda: is_gone("a") and is_gone("b"), "the end of both keepers", 20)


def _listening_ports(pid: int) -> list[int]:
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    links = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()}
    listening = (row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links)
    return [int(row[1].rpartition(":")[2], 16) for row in listening]


def _is_dead(pid: int) -> bool:
    """Its sockets are closed, too: its command line and its first thread go before them."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return True
    return state in "ZX" and threads <= 1


def _is_of(pid: int, host: str) -> bool:
    return f"@{host}\0" in Path(f"/proc/{pid}/cmdline").read_text()


def test_a_coordinator_killed_is_replaced_and_its_hand_comes_back_to_it(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    attempt = run.capture(1)
    (mind,) = [pid for pid in keeper_pids(arena_dir) if _is_of(pid, "a")]
    os.kill(mind, signal.SIGKILL)
    wait_for(lambda: not run.ranks[1].line.is_open, "what a rank hears when its keeper goes")
    run.ranks[1].connect()  # its own is there, and can do nothing for it
    with pytest.raises(KeeperError, match="keeper of a, which coordinates this run"):
        run.ranks[1].take_part(run.n, run.table, within_s=0.1)
    run.ranks[0].connect()
    run.ranks[0].take_part(run.n, run.table)
    run.ranks[0].join(run.n)
    run.ranks[1].take_part(run.n, run.table)
    run.ranks[1].join(run.n)
    inventory = run.ranks[1].line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    assert attempts_in(inventory) == [attempt]
    run.capture(2)
    run.end()


def test_another_coordinator_has_the_root_and_the_older_one_decides_nothing_any_more(
    tmp_path: Path, arena_dir: Path
) -> None:
    old = Run(tmp_path, "a", "b")
    old.begin()
    attempt = old.capture(1)
    new = Run(tmp_path, "b", "a")
    new.begin()
    assert new.n == old.n + 1
    inventory = new.ranks[1].line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    assert attempts_in(inventory) == [attempt]
    for rank in old.ranks:
        assert hear(rank.heard, m.FencedOff).incarnation == new.n
        rank.line.close()
        rank.connect()
        with pytest.raises(Fenced):
            rank.take_part(old.n, old.table)
        with pytest.raises(Fenced):
            rank.join(old.n)
        rank.line.close()
    new.capture(2)
    new.end()
    wait_for(lambda: is_gone("a") and is_gone("b"), "the end of both keepers", 20)


def test_the_next_start_may_be_on_one_host_which_was_not_the_coordinators(
    tmp_path: Path, arena_dir: Path
) -> None:
    old = Run(tmp_path, "a", "b")
    old.begin()
    old.capture(1)
    new = Rank(tmp_path, "b", 0, 1)
    begin = m.Begin(nonce=NONCE[::-1], world=1)
    begun = new.line.request(begin, m.Begun, timeout_s=30)
    assert begun.incarnation == old.n + 1
    for rank in old.ranks:
        assert hear(rank.heard, m.FencedOff).incarnation == begun.incarnation
        rank.line.close()
    new.join(begun.incarnation, nonce=begin.nonce)
    new.line.request(m.Adopt(parent=None), m.Done, timeout_s=30)
    new.ask(2)
    new.seal()
    hear(new.heard, m.Complete)
    new.line.request(m.Goodbye(), m.Done, timeout_s=30)
    new.line.close()
    for keeper in keeper_pids(arena_dir):  # what they have of step 1 is not theirs to throw away
        os.kill(keeper, signal.SIGTERM)


def test_a_coordinator_that_was_not_there_learns_what_only_its_hands_know(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Run(tmp_path, "a", "b")
    old.begin()
    attempt = old.capture(1)
    shutil.rmtree(tmp_path / "incarnations")  # storage may be out of reach, or was then
    monkeypatch.setattr("support.runs.host_pairs.NONCE", NONCE[::-1])
    new = Run(tmp_path, "c", "a", "b")
    new.begin()
    for host in "cab":
        wait_for(lambda h=host: incarnations_of(h) == {old.n, new.n}, f"what {host} knows")  # type: ignore[misc]
    inventory = new.ranks[0].line.request(m.ListInventory(), m.Inventory, timeout_s=10)
    (held,) = (part.attempt_id for part in inventory.parts)
    assert held.attempt == attempt
    layout = layout_in("b", held.layout)
    assert layout.read_bytes() == layout_in("c", held.layout).read_bytes()
    # Told again when it comes again, were it not there before.
    _forget_incarnation("b", new.n)
    (hand,) = [pid for pid in keeper_pids(arena_dir) if _is_of(pid, "b")]
    os.kill(hand, signal.SIGKILL)
    wait_for(lambda: _is_dead(hand), "the end of the hand", 20)
    new.ranks[2].connect()
    new.ranks[2].take_part(new.n, new.table)
    wait_for(lambda: new.n in incarnations_of("b"), "what its coordinator knows")
    for rank in (*old.ranks, *new.ranks):
        rank.line.close()
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def incarnations_of(host: str) -> set[int]:
    """Those that this host's keeper remembers."""
    return {int(path.stem) for path in (arena_dir(RUN, host) / "incarnations").glob("*.json")}


def layout_in(host: str, hash_: str) -> Path:
    return arena_dir(RUN, host) / "layouts" / f"{hash_}.json"


def _forget_incarnation(host: str, n: int) -> None:
    (arena_dir(RUN, host) / "incarnations" / f"{n}.json").unlink()


def test_a_keeper_nobody_comes_back_to_ends_and_leaves_what_only_it_has(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_KEEPER_IDLE_S", "1")
    run = Run(tmp_path, "a", "b")
    run.begin()
    run.capture(1)
    (mind,) = [pid for pid in keeper_pids(arena_dir) if _is_of(pid, "a")]
    os.kill(mind, signal.SIGKILL)
    for rank in run.ranks:
        rank.line.close()
    wait_for(lambda: not keeper_pids(arena_dir), "the end of the hand", 30)
    assert list(arena_dir.glob("*/*@b/*.slot"))


def test_a_coordinator_whose_port_is_taken_says_so() -> None:
    async def welcome(_: SealedChannel) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        network = Network(SECRET, "a", "127.0.0.1")
        with pytest.raises(KeeperError, match=f"port {port}, where they look for it"):
            asyncio.run(network.listen_for_followers(welcome, port))


def test_who_calls_a_keeper_by_a_wrong_name_or_secret_has_no_part(
    tmp_path: Path, arena_dir: Path
) -> None:
    run = Run(tmp_path, "a", "b")
    run.begin()
    other = Rank(tmp_path, "c", 1, 2)
    with pytest.raises(UsageError, match="this keeper is that of c"):
        other.take_part(run.n, run.table)
    with pytest.raises(UsageError, match="host 7 is none of 2"):
        other.take_part(run.n, run.table, host=7)
    table = (run.table[0], m.HostEntry(id="c", ranks=(1,), address="127.0.0.1"))
    with pytest.raises(KeeperError, match="out of reach of c"):
        other.take_part(run.n, table, secret=b"another secret of this run", within_s=1.0)
    # Nor has one that knows the secret, and is none of the hosts that were agreed on.
    with pytest.raises(KeeperError, match="out of reach of c"):
        other.take_part(run.n, table, nonce=NONCE[::-1], within_s=1.0)
    other.line.close()
    run.capture(1)
    run.end()
    wait_for(lambda: is_gone("a") and is_gone("b"), "the end of both keepers", 20)
