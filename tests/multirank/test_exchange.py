"""What several ranks want is read once and passed on; what goes wrong then changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import events
from holdfast.catalogue import catalogue
from holdfast.restore import from_storage
from holdfast.restore import read_once as together
from holdfast.restore.exchange.block_exchange import BlockExchange
from holdfast.restore.planning.block_rounds import BlockRange
from holdfast.restore.reading.images import from_manifest
from holdfast.restore.reading.read import Array
from holdfast.restore.restore_clock import RestoreClock
from holdfast.storage.local import LocalStore
from holdfast.storage.open import open_store
from support.models.models import differences
from support.runs import launch
from support.runs.launch import run_ranks

MIB = 1 << 20
WHOLE: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "wide": (torch.float32, (1501, 701)),
    "tall": (torch.bfloat16, (3001, 333)),
    "cube": (torch.complex128, (31, 17, 211)),
    "row": (torch.float32, (3, 400_000)),  # longer than a block
    "bias": (torch.float64, (701,)),
    "none": (torch.float32, (0, 5)),
    "few": (torch.float32, (3,)),  # less than there are ranks
}


class Net(nn.Module):
    def __init__(self, layout: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        place = _place(layout)
        for name, (dtype, shape) in WHOLE.items():
            whole = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(place(name, whole)))
        frozen = torch.rand((900, 700), generator=generator)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        turned = torch.rand((300, 500), generator=generator).t()
        self.turned = nn.Parameter(turned)  # not contiguous
        self.seen = nn.Buffer(torch.randint(0, 1 << 40, (), generator=generator))
        self.mask = nn.Buffer(torch.rand((77, 1003), generator=generator) < 0.5)


def _place(layout: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    if layout == "ddp":
        return lambda _, whole: whole
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if layout == "hsdp":
        return lambda _, whole: distribute_tensor(whole, grid, [Replicate(), Shard(0)])
    if layout == "fsdp":
        return lambda _, whole: distribute_tensor(whole, grid._flatten("all"), [Shard(0)])
    assert layout == "tp_dp"

    def tensor_parallel(name: str, whole: torch.Tensor) -> torch.Tensor:
        if name in ("bias", "few"):
            return whole
        return distribute_tensor(whole, grid["tp"], [Shard(int(name in ("wide", "row")))])

    return tensor_parallel


def _locals(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach()
        found[name] = (data._local_tensor if isinstance(data, DTensor) else data).clone()
    return found


class Run:
    """One rank's loads from one root, and what is to be known of them."""

    def __init__(self, root: str, layout: str) -> None:
        self.root, self.layout = root, layout

    def save(self, step: int) -> dict[str, torch.Tensor]:
        model = Net(self.layout, seed=step)
        holdfast.save(self.root, {"model": model}, step=step)
        return _locals(model)

    def load(self, mode: str, **options: Any) -> tuple[int, list[str], events.Restored, list[Any]]:
        """(step, what differs from what was saved at it, the event, all events)."""
        heard: list[events.Event] = []
        stop = holdfast.subscribe(lambda event, _: heard.append(event))
        model = Net(self.layout, seed=99)
        with mock.patch.dict(os.environ, {together.SETTING: mode}):
            restored = holdfast.load(self.root, {"model": model}, **options)
        stop()
        wrong = differences(_locals(model), _locals(Net(self.layout, seed=restored.step)))
        [event] = [event for event in heard if isinstance(event, events.Restored)]
        return restored.step, wrong, event, heard


@contextmanager
def _noting_reads(reads: list[tuple[str, int, int]]) -> Iterator[None]:
    """Every read of a store's file while ranks exchange."""
    is_on = False
    real_read, real_step = LocalStore.read_into, BlockExchange.step

    def read_into(
        store: LocalStore, path: str, offset_bytes: int, buffer: memoryview, **how: bool
    ) -> None:
        if is_on:
            reads.append((path, offset_bytes, len(buffer)))
        real_read(store, path, offset_bytes, buffer, **how)

    def step(exchange: BlockExchange, clock: RestoreClock) -> None:
        nonlocal is_on
        is_on = True
        try:
            real_step(exchange, clock)
        finally:
            is_on = False

    with (
        mock.patch.object(LocalStore, "read_into", read_into),
        mock.patch.object(BlockExchange, "step", step),
    ):
        yield


def _reads_once(rank: int, world: int, root: str, hosts: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    os.environ["HOLDFAST_HOST_ID"] = f"host-{rank * hosts // world}"
    for layout in ("ddp", "hsdp", "tp_dp", "fsdp"):
        run = Run(f"{root}/{layout}", layout)
        run.save(1)
        reads: list[tuple[str, int, int]] = []
        with mock.patch.object(together, "BUDGET_BYTES", 5 * MIB), _noting_reads(reads):
            _, wrong, event, _ = run.load("always")
        _, wrong_alone, alone, _ = run.load("never")
        found[layout] = {
            "wrong": wrong + wrong_alone,
            "reads": reads,
            "read": event.read_bytes,
            "received": event.received_bytes,
            "alone": alone.read_bytes,
            "alone_received": alone.received_bytes,
        }
    # As another layout than was saved: columns of what was stored in rows.
    for saved, wanted in (("hsdp", "tp_dp"), ("tp_dp", "ddp"), ("ddp", "hsdp")):
        reads = []
        with _noting_reads(reads):
            _, wrong, event, _ = Run(f"{root}/{saved}", wanted).load("always")
        found[f"{saved} to {wanted}"] = {
            "wrong": wrong,
            "reads": reads,
            "read": event.read_bytes,
        }
    return found


def _stored_blocks(root: Path) -> dict[tuple[str, int], int]:
    """(file, offset) of every block of data in the only checkpoint -> its bytes."""
    store = open_store(root)
    checkpoint = from_manifest(store, catalogue(store).manifests[0])
    found = {}
    for rank, file in checkpoint.files.items():
        header = checkpoint.header(rank)
        for at in range(0, header.values.offset, MIB):
            size = min(MIB, header.table.offset - at)
            found[file.name, header.data_start + at] = size
    return found


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_every_block_is_read_by_one_rank_and_every_rank_has_it_bit_for_bit(
    hosts: int, tmp_path: Path
) -> None:
    ranks = run_ranks(4, _reads_once, str(tmp_path), hosts)
    for layout in ranks[0]:
        stored = _stored_blocks(tmp_path / layout.split()[0])
        read: dict[tuple[str, int], int] = {}
        for found in ranks:
            assert found[layout]["wrong"] == []
            for path, offset, size in found[layout]["reads"]:
                for at in range(0, size, MIB):
                    key = path, offset + at
                    assert key not in read, "a block was read twice"
                    read[key] = min(MIB, size - at)
        assert read == stored
        assert sum(found[layout]["read"] for found in ranks) == sum(stored.values())
    for found in ranks:
        ddp = found["ddp"]
        total = sum(_stored_blocks(tmp_path / "ddp").values())
        assert ddp["read"] + ddp["received"] == total == ddp["alone"]
        assert abs(ddp["read"] - total / 4) <= 2 * MIB
        assert ddp["alone_received"] == 0


# ── trouble ──────────────────────────────────────────────────────────────────────────────────


class Tampering:
    """The exchange of one rank, with something done in the middle of its ``nth`` step."""

    def __init__(self, nth: int, trouble: Callable[[], None]) -> None:
        self.left, self.trouble = nth, trouble

    def __enter__(self) -> None:
        real = BlockExchange._read

        def read(exchange: BlockExchange, *round_: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.trouble()
            return real(exchange, *round_)

        self.patch = mock.patch.object(BlockExchange, "_read", read)
        self.patch.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


@contextmanager
def _flipped_on_the_way() -> Iterator[None]:
    """One bit of what this rank finds is another than was read."""
    real, count = BlockExchange._verify, 0

    def verify(exchange: BlockExchange, run: BlockRange, data: Array, sender: str) -> None:
        nonlocal count
        count += 1
        if count == 5:
            data = data.copy()  # not for the other ranks, which share the memory
            data[MIB // 2] ^= 4
        real(exchange, run, data, sender)

    with mock.patch.object(BlockExchange, "_verify", verify):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _flip(root: str, step: int) -> None:
    store = open_store(root)
    [manifest] = [m for m in catalogue(store).manifests if m.step == step]
    path = Path(root) / manifest.images[1].path
    data = bytearray(path.read_bytes())
    data[3 * MIB // 2] ^= 1  # of the first block of data, or the second
    path.write_bytes(data)


def _kinds(heard: list[Any], kind: type) -> list[Any]:
    return [event for event in heard if isinstance(event, kind)]


def _goes_wrong(rank: int, world: int, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run = Run(root, "ddp")
    run.save(1)
    with mock.patch.object(together, "BUDGET_BYTES", 5 * MIB):
        with _flipped_on_the_way() if rank == 2 else _nothing():
            step, wrong, event, heard = run.load("always")
        found["flipped"] = step, wrong, event.received_bytes
        found["flipped warned"] = [e.message for e in _kinds(heard, events.Warned)]

        run.save(2)
        if rank == 0:
            _flip(root, 2)
        dist.barrier()
        step, wrong, event, heard = run.load("always")
        found["damaged"] = step, wrong, event.received_bytes > 0
        found["dropped"] = [e.reason for e in _kinds(heard, events.SourceDropped)]
        found["damaged warned"] = [e.message for e in _kinds(heard, events.Warned)]

        def stop() -> None:
            raise KeyboardInterrupt

        with Tampering(4, stop) if rank == 3 else _nothing():
            try:
                run.load("always", step=1)
            except (KeyboardInterrupt, holdfast.HoldfastError) as error:
                found["interrupted"] = type(error).__name__, str(error)
        dist.barrier()
        found["again"] = run.load("always", step=1)[1]
    return found


def test_what_goes_wrong_on_one_rank_is_known_to_all_and_the_next_try_is_good(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(4, _goes_wrong, str(tmp_path))
    for rank, found in enumerate(ranks):
        # Nothing speaks against what is stored: it is restored, without the exchange.
        assert found["flipped"] == (1, [], 0)
        assert len(found["flipped warned"]) == int(rank == 0)
        assert found["damaged"] == (1, [], True)
        assert len(found["dropped"]) == 1
        assert "block" in found["dropped"][0] and "changed after" in found["dropped"][0]
        assert found["damaged warned"] == []
        kind, text = found["interrupted"]
        assert kind == ("KeyboardInterrupt" if rank == 3 else "HoldfastError")
        assert rank == 3 or "rank 3: KeyboardInterrupt" in text
        assert found["again"] == []
    assert "was changed on its way from rank" in ranks[0]["flipped warned"][0]
    assert "to rank 2" in ranks[0]["flipped warned"][0]


def _dies(rank: int, world: int, root: str) -> str:
    run = Run(root, "ddp")
    run.save(1)
    trouble = Tampering(4, lambda: os.kill(os.getpid(), 9)) if rank == 3 else _nothing()
    with mock.patch.object(together, "BUDGET_BYTES", 5 * MIB), trouble:
        try:
            run.load("always", timeout_s=5)
        except holdfast.DeadlineExceeded as error:
            Path(root, f"told-{rank}").write_text(f"{error.fields['ranks']} {error}")
    return ""


def test_a_rank_killed_in_the_middle_is_named_by_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 60)
    with pytest.raises(AssertionError, match="rank 3 ended without a result: SIGKILL"):
        run_ranks(4, _dies, str(tmp_path))
    for rank in range(3):
        told = (tmp_path / f"told-{rank}").read_text()
        phase = "'restore 1-1 from storage: exchanged'"
        assert told.startswith(f"[3] ranks [3] ended before they reached {phase}")


def _stalls(rank: int, world: int, root: str) -> str:
    run = Run(root, "ddp")
    run.save(1)
    given_up = Path(root, "given-up")

    def hang() -> None:
        while not given_up.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    trouble = Tampering(1, hang) if rank == 1 else _nothing()
    with mock.patch.object(from_storage, "READ_PATIENCE", 1), trouble:
        try:
            run.load("always", timeout_s=8)
        except holdfast.DeadlineExceeded as error:
            return f"{error.fields['ranks']} {error}"
        except KeyboardInterrupt:
            return ""
        finally:
            given_up.touch()
    return "restored"


def test_a_rank_that_stalls_is_named_when_the_others_have_waited_long_enough(
    tmp_path: Path,
) -> None:
    first, _ = run_ranks(2, _stalls, str(tmp_path))
    assert first.startswith("[1] ranks [1] did not reach 'restore 1-1 from storage: exchanged'")


# ── when it is done ──────────────────────────────────────────────────────────────────────────


def _chooses(rank: int, world: int, root: str) -> dict[str, Any]:
    run = Run(root, "ddp")
    run.save(1)
    found: dict[str, Any] = {}
    found["one host"] = run.load("auto")[2].received_bytes
    found["rank 1 says never"] = run.load("never" if rank == 1 else "always")[2].received_bytes
    with mock.patch.dict(os.environ, {"HOLDFAST_HOST_ID": f"host-{rank}"}):
        found["too little"] = run.load("auto")[2].received_bytes
        with mock.patch.object(together, "WORTH_BYTES", MIB):
            found["two hosts"] = run.load("auto")[2].received_bytes > 0
            found["never"] = run.load("never")[2].received_bytes
            found["rows of rows"] = _read_and_received(f"{root}/rows", 0)
            found["columns of rows"] = _read_and_received(f"{root}/rows", 1)
    with pytest.raises(holdfast.UsageError, match="HOLDFAST_EXCHANGE is 'yes'"):
        run.load("yes" if rank == 1 else "auto")
    return found


def _read_and_received(root: str, cut: int) -> tuple[float, float, bool]:
    """Of what is saved in rows: read and received, over what this rank wants; whether it is so."""
    grid = init_device_mesh("cpu", (2,))
    whole = torch.arange(4 << 20, dtype=torch.float32).reshape(1 << 13, -1)
    if cut == 0:
        holdfast.save(root, {"whole": distribute_tensor(whole, grid, [Shard(0)])})
    heard: list[events.Event] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(event))
    state = {"whole": distribute_tensor(torch.zeros_like(whole), grid, [Shard(cut)])}
    holdfast.load(root, state)
    stop()
    [event] = [event for event in heard if isinstance(event, events.Restored)]
    expected = distribute_tensor(whole, grid, [Shard(cut)]).to_local()
    is_equal = torch.equal(state["whole"].to_local(), expected)
    size = expected.nbytes
    return round(event.read_bytes / size, 1), round(event.received_bytes / size, 1), is_equal


def test_ranks_read_for_each_other_on_several_hosts_where_much_is_wanted_twice(
    tmp_path: Path,
) -> None:
    for found in run_ranks(2, _chooses, str(tmp_path)):
        assert found == {
            "one host": 0,
            "rank 1 says never": 0,
            "too little": 0,
            "two hosts": True,
            "never": 0,
            # No byte is wanted twice; but by columns every block is.
            "rows of rows": (1.0, 0.0, True),
            "columns of rows": (1.0, 1.0, True),
        }
