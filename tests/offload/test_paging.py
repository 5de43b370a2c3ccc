"""Memory in parts that come and go: whoever reads or writes sees one and the same."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from holdfast.errors import StorageError
from holdfast.offload.mapped_memory import PAGE_ELEMENTS, PagedMemory
from holdfast.storage.direct import Scratch

PARTS = 6
ELEMENTS = PARTS * PAGE_ELEMENTS - 100


def made(tmp_path: Path) -> PagedMemory:
    return PagedMemory(str(tmp_path), ELEMENTS)


def part(number: int) -> tuple[int, int]:
    return number * PAGE_ELEMENTS, min((number + 1) * PAGE_ELEMENTS, ELEMENTS)


def test_it_begins_as_zeros_and_no_file_is_seen(tmp_path: Path) -> None:
    paged = made(tmp_path)
    assert paged.tensor.shape == (ELEMENTS,) and not paged.tensor.any()
    assert not list(tmp_path.iterdir())


def test_what_is_written_anywhere_is_read_everywhere(tmp_path: Path) -> None:
    paged = made(tmp_path)
    truth = torch.zeros(ELEMENTS)
    generator = torch.Generator().manual_seed(0)
    view = paged.tensor[100:-100]
    for turn in range(60):
        number = int(torch.randint(PARTS, (), generator=generator))
        start, stop = part(number)
        action = turn % 4
        if action == 0:
            paged.bring(start, stop)
        elif action == 1:
            paged.put(start, stop)
        else:
            at = int(torch.randint(ELEMENTS - 3000, (), generator=generator))
            paged.tensor[at : at + 3000] += turn
            truth[at : at + 3000] += turn
        assert torch.equal(paged.tensor, truth)
        assert torch.equal(view, truth[100:-100])


def test_a_reader_sees_no_difference_while_parts_come_and_go(tmp_path: Path) -> None:
    paged = made(tmp_path)
    paged.tensor.copy_(torch.arange(ELEMENTS))
    truth, stop, wrong = paged.tensor.clone(), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if not torch.equal(paged.tensor, truth):
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(300):
        paged.bring(*part(turn % PARTS))
        paged.put(*part((turn + 3) % PARTS))
    stop.set()
    reader.join()
    assert not wrong


def test_a_part_that_cannot_be_read_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = made(tmp_path)
    paged.tensor.fill_(3)

    def failing(*_: object) -> None:
        raise StorageError("no")

    monkeypatch.setattr(Scratch, "read", failing)
    with pytest.raises(StorageError):
        paged.bring(*part(2))
    monkeypatch.undo()
    assert not paged.is_here(part(2)[0]) and (paged.tensor == 3).all()
    monkeypatch.setattr(Scratch, "write", failing)
    paged.bring(*part(2))
    paged.tensor.fill_(4)
    with pytest.raises(StorageError):
        paged.put(*part(2))
    assert paged.is_here(part(2)[0]) and (paged.tensor == 4).all()


def test_views_outlive_it_and_its_descriptors_do_not(tmp_path: Path) -> None:
    gc.collect()  # what other tests left goes now, not in the midst of this
    before = len(os.listdir("/proc/self/fd"))
    paged = made(tmp_path)
    paged.bring(*part(1))
    view = paged.tensor[PAGE_ELEMENTS : PAGE_ELEMENTS + 8]
    view.fill_(7)
    del paged
    gc.collect()
    assert (view == 7).all()
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
