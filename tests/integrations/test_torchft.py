"""Replica groups of torchft in real processes: what is killed comes back, from a living peer, from
memory or from storage. Without torchft, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import PeerError, UnsupportedState, UsageError
from integrations.real_runs import check_page_script, check_same, environment, needs, said
from support.project.code_blocks import PROJECT

needs_it = needs("torchft")
RUN = Path(__file__).with_name("torchft_run.py")


@contextmanager
def lighthouse(least: int) -> Iterator[str]:
    """Runs the server at which the groups meet; yields its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=least, join_timeout_ms=10_000, heartbeat_timeout_ms=2_000
    )
    try:
        yield f"http://localhost:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def run(root: Path, step: int = -1, place: str = "none", **options: Any) -> list[str]:
    """Runs two groups to their ends, each started again when it was killed; returns what they
    say.
    """
    given = {"victims": [0, 1], **options}
    env = environment()

    def start(group: int) -> subprocess.Popen[bytes]:
        said = json.dumps({**given, "lighthouse": address, "group": group})
        command = [sys.executable, str(RUN), str(root), str(step), place, said]
        with Path(f"{root}.err{group}").open("a") as file:
            return subprocess.Popen(command, env=env, stderr=file)

    with lighthouse(options.get("least", 2)) as address:
        groups = {group: start(group) for group in (0, 1)}
        until = time.monotonic() + 200
        while any(one.poll() is None for one in groups.values()):
            time.sleep(0.1)
            ended = (-9, 1 if "signal" in options else -9)
            dead = [group for group, one in groups.items() if one.poll() in ended]
            if dead and options.get("clear"):  # as on hosts that are started again
                dead = dead if len(dead) == len(groups) else []
                for left in Path(os.environ["HOLDFAST_ARENA_DIR"]).iterdir() if dead else ():
                    shutil.rmtree(left, ignore_errors=True)
            groups |= {group: start(group) for group in dead if time.monotonic() < until}
            if time.monotonic() > until:
                for one in groups.values():
                    one.kill()
        for group, one in groups.items():
            assert one.wait() == 0, Path(f"{root}.err{group}").read_text()[-3000:]
    return said(root)


def steps_of(lines: list[str]) -> list[str]:
    return [line for line in lines if ": step" in line or ": end" in line]


def restores_of(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if "restored" in line)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
        return run(root)


@needs_it
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("step", "place"),
    [(1, "update"), (9, "forward"), (9, "backward"), (9, "update"), (10, "save"), (20, "save")],
)
def test_groups_that_are_killed_together_go_on_from_memory(
    step: int, place: str, tmp_path: Path, unbroken: list[str]
) -> None:
    found = run(tmp_path / "run", step, place)
    check_same(steps_of(found), steps_of(unbroken))
    again = restores_of(found)
    last = step if place == "save" else step - 1
    assert again == ([f"{n}: restored {last} memory {2 * last}" for n in (0, 1)] if last else [])


@needs_it
@pytest.mark.timeout(300)
def test_only_the_leader_makes_checkpoints_durable(unbroken: list[str]) -> None:
    assert {line.split(":")[0] for line in unbroken if "durable" in line} == {"0"}
    assert [line for line in unbroken if "durable" in line] == [
        f"0: durable {step}" for step in (4, 9, 14, 19)
    ]


@needs_it
@pytest.mark.timeout(300)
def test_groups_whose_memory_is_gone_go_on_from_the_storage_of_the_leader(
    tmp_path: Path, unbroken: list[str]
) -> None:
    """The other group has nothing stored, and gets what the leader read: so the generators are its
    own from the start, and only the first group's state is that of an unbroken run.
    """
    found = run(tmp_path / "run", 13, "save", clear=True)
    assert restores_of(found) == ["0: restored 9 storage 18"]
    assert [line for line in steps_of(unbroken) if line.startswith("0: step 9 ")] != []
    second = found[found.index("0: restored 9 storage 18") :]
    for step in range(10, 21):
        alike = {line.split(": ", 1)[1] for line in second if f": step {step} " in line}
        assert len(alike) == 1, "the groups are the same"
    assert found[-1].endswith("end 20 40")


@needs_it
@pytest.mark.timeout(300)
def test_sigterm_ends_groups_of_torchft_in_their_grace_period(
    tmp_path: Path, unbroken: list[str]
) -> None:
    found = run(tmp_path / "run", 11, "forward", signal=15, grace_s=30.0)
    assert sorted(line for line in found if "preempted" in line) == [
        "0: preempted 11",
        "1: preempted 11",
    ]
    assert {line.split()[2] for line in restores_of(found)} == {"11"}
    check_same(steps_of(found), steps_of(unbroken))


@needs_it
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", [False, True], ids=["of torchft", "of Holdfast"])
def test_a_group_that_comes_back_is_its_living_peer_at_every_step(
    transport: bool, tmp_path: Path, arena_dir: Path
) -> None:
    options: dict[str, Any] = {"victims": [1], "least": 1, "waits": 8, "transport": transport}
    found = run(tmp_path / "run", 4, "save", steps=16, **options)
    (again,) = restores_of(found)  # of batches there are fewer where one group began later
    assert again.startswith("1: restored 4 memory "), "what it had, before the peer's"
    mine = {line.split()[2]: line[3:] for line in found if line.startswith("1: step")}
    peers = {line.split()[2]: line[3:] for line in found if line.startswith("0: step")}
    assert sorted(map(int, peers)) == list(range(1, 17)), "it never stopped"
    alone = set(peers) - set(mine)
    assert alone and all(int(step) > 4 for step in alone), "steps that it was not there for"
    assert max(map(int, alone)) < 16 and "16" in mine
    assert {step: peers[step] for step in mine} == mine
    healed = [int(line.split()[2]) for line in found if line.startswith("1: healed")]
    assert (max(healed, default=0) > 4) == transport, "with what it went on after its death"
    assert list(arena_dir.glob("holdfast-heal-*")) == []


@pytest.fixture
def manager() -> Iterator[Any]:
    from torchft import Manager, ProcessGroupGloo

    made: list[Any] = []

    def make(replica_id: str | None = "a") -> Any:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        made.append(
            Manager(
                pg=ProcessGroupGloo(),
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,
                replica_id=replica_id,
                store_addr="localhost",
                store_port=store.port,
                rank=0,
                world_size=1,
                lighthouse_addr=address,
                hostname="localhost",
                timeout=timedelta(seconds=20),
            )
        )
        return made[-1]

    with lighthouse(1) as address:
        yield make
        for one in made:
            one.shutdown(wait=False)


@needs_it
@pytest.mark.timeout(100)
def test_mistakes_with_torchft_are_named(
    manager: Any, tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.integrations import torchft as adapter

    state = {"model": nn.Linear(2, 2)}
    with pytest.raises(UsageError, match="takes a torchft Manager, got a Linear"):
        adapter.attach(state["model"], state, tmp_path)
    with pytest.raises(UsageError, match="names no root that its next start finds again"):
        adapter.attach(manager(None), state, tmp_path)
    one = manager()
    with pytest.raises(UsageError, match="keys manager, which are the adapter's own"):
        adapter.attach(one, {**state, "manager": 1}, tmp_path)
    with pytest.raises(UsageError, match="no step at which all groups know who the leader is"):
        adapter.attach(one, state, tmp_path, storage=holdfast.Every(minutes=1))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.ckpt").touch()
    with pytest.raises(UsageError, match="a file of Lightning, and is no root"):
        adapter.attach(one, state, tmp_path)
    holdfast.save(tmp_path / "b" / "a", state, step=3)
    with pytest.raises(UsageError, match=r"not written by holdfast\.integrations\.torchft"):
        adapter.attach(one, state, tmp_path / "b")
    assert one._load_state_dict_fns == {}, "a manager that was refused has no state functions"
    monkeypatch.setattr(adapter, "_version", lambda: "0.1.1")
    with pytest.raises(UsageError, match=r"needs torchft 0\.2 or later, got 0\.1\.1"):
        adapter.attach(one, state, tmp_path / "c")


@needs_it
@pytest.mark.timeout(100)
def test_a_manager_has_one_checkpointer_and_its_own_functions(
    manager: Any, tmp_path: Path, arena_dir: Path
) -> None:
    from holdfast.integrations.torchft import attach

    one, model = manager(), nn.Linear(2, 2)
    taken: list[Any] = []
    one.register_state_dict_fn("own", taken.append, lambda: 3)
    with attach(one, {"model": model, "seen": 5, "rng": holdfast.Rng()}, tmp_path) as ckpt:
        with pytest.raises(UsageError, match="attached to this Manager already"):
            attach(one, {"model": model}, tmp_path / "b")
        assert ckpt.step() is None and ckpt.restored is None, "nothing was committed"
        with pytest.raises(UsageError, match="the manager is at step 0"):
            ckpt.step(7)
        assert list(one._user_state_dicts) == ["own"], "the user's are enough"
        one._load_state_dict_fns["own"](9)
        assert taken == [9] and one._load_state_dict_fns["own"] != taken.append
    assert one._load_state_dict_fns["own"] == taken.append
    one.load_state_dict({"step": 4, "batches_committed": 4})
    with pytest.raises(UsageError, match="is at step 4 and has begun"):
        attach(one, {"model": model}, tmp_path)


@needs_it
@pytest.mark.timeout(100)
def test_a_peer_gives_the_state_but_for_generators(
    manager: Any, tmp_path: Path, arena_dir: Path
) -> None:
    from holdfast.integrations.torchft import attach

    made: list[Any] = []
    for name in ("a", "b"):
        model = nn.Linear(2, 2)
        state = {"model": model, "seen": len(made), "rng": holdfast.Rng()}
        made.append((attach(manager(name), state, tmp_path), model))
    (giver, given), (taker, mine) = made
    found = giver._give()
    assert sorted(found) == ["model", "seen"]
    taker._manager._load_state_dict_fns["holdfast"](found)
    assert torch.equal(mine.weight, given.weight) and taker.state["seen"] == 0
    for ckpt, _ in made:
        ckpt.close()
        assert ckpt._manager._load_state_dict_fns == {}


@needs_it
@pytest.mark.timeout(100)
@pytest.mark.parametrize("is_made_before", [True, False])
def test_diloco_which_has_parameters_of_its_own_is_refused(
    is_made_before: bool, manager: Any, tmp_path: Path, arena_dir: Path
) -> None:
    from torchft.local_sgd import DiLoCo

    from holdfast.integrations.torchft import attach

    one, model = manager(), nn.Linear(2, 2)
    one._use_async_quorum = False
    inner, outer = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.7))

    def make() -> None:
        DiLoCo(one, [model], inner, outer, sync_every=2)

    named = pytest.raises(UsageError, match="the manager is that of a DiLoCo, which has")
    if is_made_before:
        make()
        with named:
            attach(one, {"model": model}, tmp_path)
        return
    ckpt = attach(one, {"model": model}, tmp_path)
    make()
    one.load_state_dict({"step": 1, "batches_committed": 1})
    ckpt.has_committed = True
    with named:
        ckpt.step()
    ckpt.close()


def sharded() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


@needs_it
def test_groups_that_shard_their_state_are_refused_before_they_begin(
    manager: Any, tmp_path: Path, arena_dir: Path
) -> None:
    from holdfast.integrations.torchft import attach
    from holdfast.integrations.torchft_transport import HoldfastTransport

    one, model = manager(), nn.Linear(4, 4)
    own, one._checkpoint_transport = one._checkpoint_transport, HoldfastTransport("127.0.0.1")
    model.weight = nn.Parameter(sharded())
    with pytest.raises(UnsupportedState, match="leave the Manager of groups that shard"):
        attach(one, {"model": model}, tmp_path)
    one._checkpoint_transport.shutdown()
    one._checkpoint_transport = own


@needs_it
def test_what_is_sent_is_what_was_there_then_and_to_those_alone_who_know_the_key(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.integrations.torchft_transport import HoldfastTransport

    monkeypatch.setenv("HOLDFAST_ARENA_DIR", str(arena_dir))
    within = timedelta(seconds=20)
    left = arena_dir / "holdfast-heal-left"
    left.mkdir()
    os.utime(left, (1, 1))
    one, other = HoldfastTransport("127.0.0.1"), HoldfastTransport("127.0.0.1")
    assert not left.exists(), "of a process that was killed"
    weight = torch.randn(1000, 300)
    state = {"user": {"model": {"w": weight, 3: [1.5, None]}}, "torchft": {"step": 7}}
    one.send_checkpoint([1], 7, state, within)
    then = weight.clone()
    weight.zero_()  # the next step
    one.disallow_checkpoint()
    for _ in range(2):
        found = other.recv_checkpoint(0, one.metadata(), 7, within)
        assert torch.equal(found["user"]["model"]["w"], then)
        assert found["user"]["model"][3] == [1.5, None] and found["torchft"] == {"step": 7}
    shortly = timedelta(seconds=0.2)
    with pytest.raises(PeerError):
        other.recv_checkpoint(0, one.metadata(), 6, shortly)
    host, port, _ = json.loads(one.metadata())
    with pytest.raises(PeerError):
        other.recv_checkpoint(0, json.dumps([host, port, "0" * 64]), 7, shortly)
    with pytest.raises(UnsupportedState, match=r"checkpoint\.odd"):
        one.send_checkpoint([1], 8, {"odd": object()}, within)
    with pytest.raises(PeerError):
        other.recv_checkpoint(0, one.metadata(), 7, shortly)
    with ThreadPoolExecutor(1) as pool:  # it is asked for before it is there
        early = pool.submit(other.recv_checkpoint, 0, one.metadata(), 9, within)
        time.sleep(0.3)
        one.send_checkpoint([1], 9, state, within)
        assert torch.equal(early.result()["user"]["model"]["w"], weight)
    with pytest.raises(UnsupportedState, match="leave the Manager of groups that shard"):
        one.send_checkpoint([1], 10, {"user": {"model": [sharded()]}}, within)
    assert list(arena_dir.iterdir()) == []
    for each in (one, other):
        each.shutdown()
        each.shutdown()
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(UsageError, match="by which address other groups reach this host"):
        HoldfastTransport()


@needs_it
@pytest.mark.timeout(200)
def test_the_script_of_torchfts_page_goes_on_with_the_same_losses(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = PROJECT / "examples" / "integrations" / "torchft_loop.py"
    with lighthouse(1) as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        check_page_script([str(script)], tmp_path)
