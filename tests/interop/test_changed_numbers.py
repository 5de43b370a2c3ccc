"""A number that is another in one file of a checkpoint is never read differently without a word."""

from __future__ import annotations

import io
import pickletools
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast.errors import ForeignFormatError, HoldfastError
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.opening import open_source

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
DEEPSPEED = GOLDEN / "deepspeed-0.19.8"
CASES = [
    one.parent
    for one in sorted(GOLDEN.glob("*/*/checkpoint"))
    if one.parent.parent.name.startswith(("deepspeed-", "megatron-core-0.16"))
    # Of the others one file alone says how many there are of anything.
    and not re.match("zero0|pipeline-fp32|experts-fp32|ranks-buckets|dp2|ep2|tp2", one.parent.name)
]
#: Of buffers, and before ZeRO-2 of frozen parameters, the shape is said once.
SAID_ONCE = re.compile(r"model\.(mean|count|frozen\..*|.*num_batches_tracked|.*running_.*)")
TUPLES = ("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
WIDTHS = {"BININT1": 1, "BININT2": 2, "BININT": 4}


class Number(NamedTuple):
    """An integer in a pickle: where its bytes are, what stands before it, its part of a tensor."""

    at: int
    size: int
    value: int
    names: tuple[str, ...]
    part: str


def numbers_in(pickled: bytes) -> Iterator[Number]:
    names, part = [""], ""
    for op, value, at in pickletools.genops(pickled):
        if op.name in ("BINUNICODE", "SHORT_BINUNICODE"):
            names.append(str(value))
        if op.name == "BINPERSID":
            part = "offset"
        elif op.name in TUPLES:
            part = {"size": "stride", "offset": "stride"}.get(part, "")
        if size := WIDTHS.get(op.name):
            assert isinstance(value, int) and at is not None
            is_size = pickled[at + 1 + size : at + 3 + size].find(b"t") >= 0
            yield Number(at + 1, size, value, tuple(names[-2:]), part or ("elements" * is_size))
            part = "size" if part == "offset" else part


def replaced(file: bytes, name: str, new: bytes) -> bytes:
    """The zip file with as many other bytes in an entry, as its writer would have written it."""
    archive, data = zipfile.ZipFile(io.BytesIO(file)), bytearray(file)
    at = archive.start_dir
    for entry in archive.infolist():
        begin = entry.header_offset
        if entry.filename == name:
            crc = zlib.crc32(new).to_bytes(4, "little")
            start = begin + 30 + sum(data[begin + k] | data[begin + k + 1] << 8 for k in (26, 28))
            data[start : start + len(new)] = new
            data[at + 16 : at + 20] = crc
            if any(data[begin + 14 : begin + 18]):
                data[begin + 14 : begin + 18] = crc
            if data[start + len(new) :][:4] == b"PK\x07\x08":
                data[start + len(new) + 4 : start + len(new) + 8] = crc
        at += 46 + sum(data[at + k] | data[at + k + 1] << 8 for k in (28, 30, 32))
    return bytes(data)


def pickle_of(file: Path) -> tuple[str, bytes]:
    archive = zipfile.ZipFile(file)
    (name,) = (one for one in archive.namelist() if one.endswith("data.pkl"))
    return name, archive.read(name)


def change(file: Path, number: Number, value: int) -> None:
    name, pickled = pickle_of(file)
    new = bytearray(pickled)
    new[number.at : number.at + number.size] = value.to_bytes(number.size, "little")
    file.write_bytes(replaced(file.read_bytes(), name, bytes(new)))


def change_named(file: Path, name: str, value: int, part: str = "") -> None:
    """Change the first number behind a name in a file."""
    numbers = numbers_in(pickle_of(file)[1])
    found = next(one for one in numbers if name in one.names and one.part == part)
    assert found.value != value
    change(file, found, value)


def read(path: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    store = open_source(path)
    assert isinstance(store, ForeignStore)
    with holdfast.open(path) as opened:
        leaves = {n: opened.read(n) for n in opened.leaves if not SAID_ONCE.fullmatch(n)}
    return leaves, {note.replace(str(path), "") for note in store.notes}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def copied(case: Path, to: Path) -> Path:
    """The folder of the one tag or step."""
    copy = Path(shutil.copytree(case / "checkpoint", to))
    (inner,) = (one for one in copy.iterdir() if one.is_dir())
    return inner


@pytest.mark.promise
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)
def test_a_number_of_one_rank_is_refused_or_noted_or_changes_nothing(
    case: Path, tmp_path: Path
) -> None:
    inner, chance = copied(case, tmp_path / "copy"), random.Random(case.name)
    (whole, notes), said = read(inner), list[str]()
    files = sorted(inner.rglob("*.pt"))
    for _ in range(15):
        file = chance.choice(files)
        numbers = [
            one
            for one in numbers_in(pickle_of(file)[1])
            if one.part in ("", "size") and "rng_state" not in one.names
        ]
        if not numbers:
            continue
        number, before = chance.choice(numbers), file.read_bytes()
        other = chance.choice([number.value + 1, max(0, number.value - 1), 0, 1, 2])
        if other in (number.value, 1 << 8 * number.size):
            continue
        change(file, number, other)
        try:
            found, noted = read(inner)
        except HoldfastError as error:
            said.append(str(error))
        else:
            assert is_same(found, whole) or noted - notes, (file.name, number, other)
        file.write_bytes(before)
    assert all(str(inner) in one for one in said), said


ADDRESSES = "zero1-fp32-2", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
SHAPES = "zero3-bf16-2", "zero_pp_rank_1_mp_rank_00_model_states.pt"
FROZEN = "zero2-fp16-2", "mp_rank_00_model_states.pt"
STEPS = "universal-zero1-bf16-2", "zero/up.bias/step.pt"


def _address(tag: Path) -> None:
    change_named(tag / ADDRESSES[1], "start", 2)


def _shape(tag: Path) -> None:
    change_named(tag / SHAPES[1], "norm.bias", 10)


def _frozen(tag: Path) -> None:
    change_named(tag / FROZEN[1], "frozen.weight", 4, "size")


def _step(tag: Path) -> None:
    name, at = "step/data/0", tag / STEPS[1]
    old = zipfile.ZipFile(at).read(name)
    at.write_bytes(replaced(at.read_bytes(), name, b"\0\0\x80\x40" if len(old) == 4 else old))


def _missing(tag: Path) -> None:
    (tag / "zero" / "up.bias" / "exp_avg.pt").unlink()


def _other_kind(tag: Path) -> None:
    shutil.copy(tag / "zero" / "up.bias" / "exp_avg.pt", tag / "zero" / "up.bias" / "fp32.pt")


REFUSED: dict[str, tuple[str, Any, str]] = {
    "an address": (ADDRESSES[0], _address, rf"{ADDRESSES[1]}: .* begins at element 2 of its flat"),
    "a shape of one rank": (
        SHAPES[0],
        _shape,
        rf"{SHAPES[1]}: its shapes of parameters are not",
    ),
    "a frozen parameter": (FROZEN[0], _frozen, rf"{FROZEN[1]}: 'frozen\.weight' has the shape"),
    "a step of an atom": (STEPS[0], _step, r"step\.pt: it has taken .* steps, and .* of its group"),
    "a moment of one": (STEPS[0], _missing, r"up\.bias/exp_avg\.pt: it is not there, of the 3"),
    "an atom of another kind": (STEPS[0], _other_kind, r"fp32\.pt: it was written as exp_avg\.pt"),
}


@pytest.mark.promise
@pytest.mark.parametrize("kind", REFUSED)
def test_what_two_files_say_otherwise_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    case, spoil, words = REFUSED[kind]
    tag = copied(DEEPSPEED / case, tmp_path / "copy")
    spoil(tag)
    with pytest.raises(ForeignFormatError, match=rf"^{re.escape(str(tag))}/.*{words}"):
        holdfast.open(tag)


def atom_of(tag: Path, parameter: str, kind: str) -> Path:
    return tag / "zero" / parameter / f"{kind}.pt"


@pytest.mark.promise
def test_masters_that_are_not_those_of_their_copies_are_noted(tmp_path: Path) -> None:
    """Nothing in an atom, or in a rank's file of the optimizer, says which step it is of."""
    tag = copied(DEEPSPEED / "universal-zero1-bf16-2", tmp_path / "copy")
    first, second = (atom_of(tag, name, "fp32") for name in ("norm.weight", "up.bias"))
    one, other = first.read_bytes(), second.read_bytes()
    assert not any("that of its copy" in note for note in read(tag)[1])
    first.write_bytes(other)
    second.write_bytes(one)
    (note,) = (note for note in read(tag)[1] if "that of its copy" in note)
    assert "mp_rank_00_model_states.pt, nor are 1 others of" in note
    tag = copied(DEEPSPEED / "zero2-fp16-2", tmp_path / "ranks")
    file = tag / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["module"] = {name: one + 1 for name, one in state["module"].items()}
    torch.save(state, file)
    assert any("that of its copy in /mp_rank_00_model_states.pt" in n for n in read(tag)[1])


@pytest.mark.promise
def test_an_atom_with_the_elements_of_another_parameter_is_noted(tmp_path: Path) -> None:
    tag = copied(DEEPSPEED / "universal-zero3-bf16-2", tmp_path / "copy")
    assert not any("has the elements of" in note for note in read(tag)[1])
    shutil.copy(atom_of(tag, "up.bias", "exp_avg"), atom_of(tag, "norm.bias", "exp_avg"))
    (note,) = (note for note in read(tag)[1] if "has the elements of" in note)
    assert "bias/exp_avg.pt has the elements of zero/" in note
