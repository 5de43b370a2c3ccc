"""``holdfast dump``: elements, what they are like, values, and files with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

import holdfast
from holdfast.cli import dump
from holdfast.cli import leaf_reader as portions
from holdfast.cli.checkpoints import open_checkpoint, open_root
from holdfast.cli.pictures import parse_box
from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import Array
from support.checkpoints.commands import (
    Out,
    damage,
    error_of,
    image_of,
    json_of,
    run_alone,
    text_of,
)


def save(root: Path, **state: Any) -> Path:
    holdfast.save(str(root), state, step=3)
    return root


# ── elements ────────────────────────────────────────────────────────────────────────────────────


def test_dump_says_what_the_elements_are_like(root: Path, capsys: Out) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Linear(2000, 300).weight.detach()
    document = json_of(capsys, "dump", root, "model.weight")
    found = document["statistics"]
    assert (found["elements"], found["finite"], found["nan"]) == (600_000, 600_000, 0)
    assert (found["min"], found["max"]) == (weight.min().item(), weight.max().item())
    assert found["mean"] == pytest.approx(weight.double().mean().item(), rel=1e-12)
    assert found["std"] == pytest.approx(weight.double().std(correction=0).item(), rel=1e-12)
    assert document["checksum_xxh3"] == xxhash.xxh3_64_hexdigest(weight.numpy().tobytes())
    assert document["first"][1] == {"index": [0, 1], "value": weight[0, 1].item()}
    text = text_of(capsys, "dump", root, "model.weight", "--step", "10")
    assert text.startswith("model.weight F32 300 x 2000, 1-10 of ")
    assert document["checksum_xxh3"] in text
    assert "of 600000 elements" in text


def test_a_mean_far_from_zero_hides_no_deviation(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.leaf_reader.CHUNK_ELEMENTS", 7)
    values = 1e8 + torch.arange(100, dtype=torch.float64) / 100
    found = json_of(capsys, "dump", save(tmp_path, x=values), "x")["statistics"]
    assert found["mean"] == pytest.approx(values.mean().item(), rel=1e-15)
    assert found["std"] == pytest.approx(values.std(correction=0).item(), rel=1e-7)


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path, capsys: Out) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -math.inf, 0.0, -0.0, 4.0]).bfloat16()
    document = json_of(capsys, "dump", save(tmp_path, x=x), "x")
    found = document["statistics"]
    counts = [found[name] for name in ("nan", "inf", "negative_inf", "zeros", "finite")]
    assert counts == [1, 1, 2, 2, 3]
    assert (found["min"], found["max"], found["mean"]) == (0.0, 4.0, pytest.approx(4 / 3))
    assert [each["value"] for each in document["first"][:3]] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("x", "low", "high", "first"),
    [
        (torch.tensor([-(2**63), 2**63 - 1]), -(2**63), 2**63 - 1, -(2**63)),
        (torch.tensor([True, False]), False, True, True),
        (torch.tensor([3 + 4j, 1j]), 1.0, 5.0, [3.0, 4.0]),
        (torch.tensor([448.0, -0.5]).to(torch.float8_e4m3fn), -0.5, 448.0, 448.0),
        (torch.tensor(2.5), 2.5, 2.5, 2.5),
    ],
    ids=["int64", "bool", "complex64", "float8", "scalar"],
)
def test_every_kind_of_element_is_shown(
    x: torch.Tensor, low: Any, high: Any, first: Any, tmp_path: Path, capsys: Out
) -> None:
    document = json_of(capsys, "dump", save(tmp_path, x=x), "x")
    assert (document["statistics"]["min"], document["statistics"]["max"]) == (low, high)
    assert document["first"][0]["value"] == first
    assert text_of(capsys, "dump", tmp_path, "x")


def test_a_leaf_without_elements_has_no_statistics(tmp_path: Path, capsys: Out) -> None:
    document = json_of(capsys, "dump", save(tmp_path, x=torch.zeros(3, 0)), "x")
    assert document["statistics"]["min"] is document["statistics"]["std"] is None
    assert document["first"] == []
    assert "[]" in text_of(capsys, "dump", tmp_path, "x")


def test_the_checksum_does_not_depend_on_the_layout(by_ranks: Path, capsys: Out) -> None:
    layouts = ("plain", "ddp", "fsdp", "tp", "fsdp_tp")
    found = {
        json_of(capsys, "dump", by_ranks / layout, "model.blocks.1.down.weight")["checksum_xxh3"]
        for layout in layouts
    }
    assert len(found) == 1


def test_a_box_is_dumped_as_python_would_index_it(tmp_path: Path, capsys: Out) -> None:
    x = torch.arange(60.0).reshape(3, 4, 5)
    save(tmp_path, x=x)
    document = json_of(capsys, "dump", tmp_path, "x", "--box", "1:, -1, 2:4")
    assert document["box"] == {"start": [1, 3, 2], "stop": [3, 4, 4]}
    values = [each["value"] for each in document["first"]]
    assert values == x[1:, -1, 2:4].reshape(-1).tolist()
    text = text_of(capsys, "dump", tmp_path, "x", "--box", "[0,:2,:]")
    assert "[0:1, 0:2, 0:5]" in text
    assert "[5. 6. 7. 8. 9.]" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0:4", "2 dimensions"),
        ("0:5,:", "not within 0:4"),
        ("3:1,:", "not within 0:4"),
        ("4,:", "not within 0:4"),
        ("-5:,:", "not within 0:4"),
        ("a,:", "no range"),
        ("::2,:", "no range"),
        (",:", "no range"),
        ("-,:", "no range"),
    ],
)
def test_a_box_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_box(text, (4, 4))


def test_boxes_of_no_dimensions_and_of_no_elements_are_boxes() -> None:
    assert parse_box("", ()) == parse_box("[]", ()) == Box((), ())
    assert parse_box("2:2", (4,)) == Box((2,), (2,))


def test_head_shows_the_first_elements_and_reads_no_others(
    root: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def recording(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Array]:
        read.extend(want.box.volume for want in wants)
        return portions.read(checkpoint, wants)

    chosen = open_checkpoint(open_root(str(root)), None)
    leaf = chosen.checkpoint.layout.leaves[chosen.leaves["model.weight"]]
    source = dump.DumpSource(chosen, leaf, Box.whole(leaf.shape), recording)
    found = dump.first_elements(source, 2003)
    assert found[-1]["index"] == [1, 2]
    assert sum(read) < 3 * 2003
    document = json_of(capsys, "dump", root, "model.weight", "--head", "3")
    assert len(document["first"]) == 3
    assert "statistics" not in document
    lines = text_of(capsys, "dump", root, "model.bias", "--head", "2").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["[0]", "[1]", "..."]


def test_no_more_is_read_at_once_than_the_limit_however_large_a_leaf_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "BATCH_BYTES", 10_000)
    asked: list[int] = []

    def recording(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Array]:
        found = portions.read(checkpoint, wants)
        asked.append(sum(array.nbytes for array in found))
        return found

    chosen = open_checkpoint(open_root(str(root)), None)
    leaf = chosen.checkpoint.layout.leaves[chosen.leaves["model.weight"]]
    whole = dump.facts(dump.DumpSource(chosen, leaf, Box.whole(leaf.shape)))
    assert dump.facts(dump.DumpSource(chosen, leaf, Box.whole(leaf.shape), recording)) == whole
    assert sum(asked) == leaf.size_bytes
    assert max(asked) <= 10_000


def test_dump_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path, x=torch.tensor([1.5, 2.0]).bfloat16())
    done = run_alone("dump", tmp_path, "x")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[1.5 2. ]" in done.stdout


# ── files ───────────────────────────────────────────────────────────────────────────────────────

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for dtype in DTYPES:
        size = torch.empty(0, dtype=dtype).element_size()
        top = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, top, (3, 4 * size), generator=generator, dtype=torch.uint8)
        state[str(dtype).removeprefix("torch.")] = raw.view(dtype)
    return save(tmp_path_factory.mktemp("every-dtype"), **state), state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_written_leaf_is_read_back_bit_for_bit_by_others(
    dtype: torch.dtype,
    every_dtype: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: Out,
) -> None:
    root, state = every_dtype
    name = str(dtype).removeprefix("torch.")
    expected = state[name].contiguous().view(torch.uint8).numpy().tobytes()
    out = tmp_path / "x.safetensors"
    document = json_of(capsys, "dump", root, name, "--out", out)
    assert (document["out"], document["size_bytes"]) == (str(out), out.stat().st_size)
    with safe_open(out, "pt") as file:
        found = file.get_tensor(name)
        assert found.contiguous().view(torch.uint8).numpy().tobytes() == expected
        if dtype is torch.complex128:
            assert file.metadata() == {"dtype": "C128", "shape": "3,4"}
        else:
            assert (found.dtype, found.shape) == (dtype, (3, 4))
    numpy_file = tmp_path / "x.npy"
    if name.startswith(("bfloat", "float8")):
        said = error_of(capsys, "dump", root, name, "--out", numpy_file, code=2)
        assert "write a .safetensors file" in said
        assert not numpy_file.exists()
    else:
        text_of(capsys, "dump", root, name, "--out", numpy_file)
        array = np.load(numpy_file)
        assert (array.dtype.name, array.shape) == (name, (3, 4))
        assert array.tobytes() == expected


def test_only_the_box_is_written(root: Path, tmp_path: Path, capsys: Out) -> None:
    out = tmp_path / "part.npy"
    text = text_of(capsys, "dump", root, "model.weight", "--box", "10:20,5", "--out", out)
    assert text.startswith(f"{out}: ")
    torch.manual_seed(0)
    weight = torch.nn.Linear(2000, 300).weight.detach()
    assert np.array_equal(np.load(out), weight[10:20, 5:6].numpy())


def test_a_file_is_never_written_over_without_force(
    root: Path, tmp_path: Path, capsys: Out
) -> None:
    out = tmp_path / "bias.npy"
    out.write_text("mine")
    said = error_of(capsys, "dump", root, "model.bias", "--out", out, code=2)
    assert "--force writes over it" in said
    assert out.read_text() == "mine"
    text_of(capsys, "dump", root, "model.bias", "--out", out, "--force")
    assert np.load(out).shape == (300,)


def test_a_file_that_somebody_makes_meanwhile_is_kept(
    root: Path, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bias.npy"
    portions_of = dump.DumpSource.portions

    def meanwhile(self: dump.DumpSource) -> Iterator[Array]:
        yield from portions_of(self)
        out.write_text("mine")

    monkeypatch.setattr(dump.DumpSource, "portions", meanwhile)
    error_of(capsys, "dump", root, "model.bias", "--out", out, code=2)
    assert out.read_text() == "mine"
    assert list(tmp_path.glob(".*")) == []


def test_a_dump_that_fails_leaves_no_file(root: Path, tmp_path: Path, capsys: Out) -> None:
    damage(image_of(root, 20), 2_000_000)
    out = tmp_path / "weight.npy"
    said = error_of(capsys, "dump", root, "model.weight", "--out", out, code=4)
    assert "stored" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("out", ["x.pt", "no/such/directory/x.npy"])
def test_a_place_that_cannot_be_written_is_refused(
    out: str, root: Path, tmp_path: Path, capsys: Out
) -> None:
    code = 2 if out.endswith(".pt") else 5
    assert "--out" in error_of(
        capsys, "dump", root, "model.bias", "--out", tmp_path / out, code=code
    )


# ── values ──────────────────────────────────────────────────────────────────────────────────────


def test_a_value_is_printed_as_json(tmp_path: Path, capsys: Out) -> None:
    notes = {"lr": [{"x": 0.5}], 3: math.nan, "name": "ü"}
    save(tmp_path, notes=notes, plain={"a": {"b": [1, 2]}})
    assert json.loads(text_of(capsys, "dump", tmp_path, "plain")) == {"a": {"b": [1, 2]}}
    assert text_of(capsys, "dump", tmp_path, "plain.a.b").split() == ["[", "1,", "2", "]"]
    assert text_of(capsys, "dump", tmp_path, "notes['lr'][0].x") == "0.5\n"
    assert json.loads(text_of(capsys, "dump", tmp_path, "notes[3]")) == {"$float": "nan"}
    document = json_of(capsys, "dump", tmp_path, "notes['name']")
    assert (document["value"], document["rank"]) == ("ü", 0)


def test_every_place_that_diff_names_can_be_dumped(tmp_path: Path, capsys: Out) -> None:
    for step, lr in ((1, 0.5), (2, 0.25)):
        model = torch.nn.Linear(1, 1)
        state = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=lr), "n": {(1,): [{}, lr]}}
        holdfast.save(str(tmp_path), state, step=step)
    changes = json_of(capsys, "diff", tmp_path, "--step", "1", "--values-only", code=1)["values"]
    assert len(changes) == 2
    for change in changes:
        document = json_of(capsys, "dump", tmp_path, change["path"], "--step", "2")
        assert document["value"] == change["b"] == 0.25


def test_a_value_of_its_own_is_that_of_the_rank(by_ranks: Path, capsys: Out) -> None:
    first, second = (
        json_of(capsys, "dump", by_ranks / "hsdp", "rng.torch", "--rank", rank)["value"]
        for rank in ("0", "1")
    )
    assert first != second
    said = error_of(capsys, "dump", by_ranks / "hsdp", "rng.torch", "--rank", "4", code=2)
    assert "ranks 0 to 3" in said


def test_a_value_is_written_as_json_only(root: Path, tmp_path: Path, capsys: Out) -> None:
    out = tmp_path / "tokens.json"
    text_of(capsys, "dump", root, "tokens", "--out", out)
    assert out.read_text() == "7\n"
    assert "exists" in error_of(capsys, "dump", root, "tokens", "--out", out, code=2)
    wrong = error_of(capsys, "dump", root, "tokens", "--out", tmp_path / "x.npy", code=2)
    assert "write a .json file" in wrong
    assert "are for leaves" in error_of(capsys, "dump", root, "tokens", "--head", "3", code=2)


def test_what_is_neither_leaf_nor_value_is_answered_with_its_likes(root: Path, capsys: Out) -> None:
    assert "did you mean tokens?" in error_of(capsys, "dump", root, "toekns", code=3)
    assert "did you mean model.bias" in error_of(capsys, "dump", root, "model.bia", code=3)
    assert "--head" in error_of(capsys, "dump", root, "model.bias", "--head", "-1", code=2)
