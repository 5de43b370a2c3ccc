"""What earlier versions wrote is read as what they saved: golden checkpoints, never made again.

What must come out is written down here, by formula and as literals; nothing of it comes from the
generator. A test that fails here is mended in the code that reads, never in the files.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from enum import Enum, Flag
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
import support.checkpoints.specification as spec
from holdfast.catalogue import catalogue
from holdfast.format.manifest import Generation
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.persist.pins import read_pins
from holdfast.restore.reading.verify import verify
from holdfast.storage.open import open_store
from support.checkpoints.conformance import check_root
from support.runs.launch import run_ranks

HERE = Path(__file__).parent
V1 = HERE / "v1"

LEAVES: dict[str, tuple[int, ...]] = {
    "model.embed.weight": (5, 4),
    "model.up.weight": (6, 4),
    "model.up.bias": (6,),
    "model.down.weight": (4, 6),
    "model.down.bias": (4,),
    "model.norm.weight": (4,),
    "model.norm.bias": (4,),
    "model.norm.running_mean": (4,),
    "model.norm.running_var": (4,),
    "model.norm.num_batches_tracked": (),
}
PARAMETERS = [
    name.removeprefix("model.")
    for name in LEAVES
    if "running" not in name and "tracked" not in name
]
for _name in PARAMETERS:
    for _kind in ("exp_avg", "exp_avg_sq"):
        LEAVES[f"optimizer.{_name}.{_kind}"] = LEAVES[f"model.{_name}"]
    LEAVES[f"optimizer.{_name}.step"] = ()
ALIASES = {"model.head.weight": "model.embed.weight"}


def golden_roots() -> list[Path]:
    return sorted(path for path in HERE.glob("v*/*") if path.is_dir())


def name_of(root: Path) -> str:
    return f"{root.parent.name}/{root.name}"


def expected(name: str) -> np.ndarray[Any, Any]:
    """The elements of a leaf, by the formula: bytes of the name, and the place."""
    shape = LEAVES[name]
    start = sum(ord(letter) for letter in name)
    eighths = [(start + 3 * place) % 256 for place in range(math.prod(shape))]
    if name.endswith("tracked"):
        return np.array([value // 8 for value in eighths], np.int64).reshape(shape)
    return np.array([value / 8 for value in eighths], np.float32).reshape(shape)


# ── the files ────────────────────────────────────────────────────────────────────────────────


def test_not_a_byte_of_a_golden_checkpoint_has_changed() -> None:
    sums = {}
    for line in (HERE / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        sums[name] = digest
    files = [path for root in golden_roots() for path in root.rglob("*") if path.is_file()]
    there = {str(path.relative_to(HERE)) for path in files if not path.name.startswith(".")}
    assert there == set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((HERE / name).read_bytes()).hexdigest() == digest, name


def test_git_never_changes_a_byte_of_them() -> None:
    attributes = (HERE.parents[1] / ".gitattributes").read_text().splitlines()
    assert "tests/golden/v*/** binary" in attributes


def test_the_generator_refuses_to_make_one_again() -> None:
    assert V1.is_dir()
    before = (HERE / "SHA256SUMS").read_bytes()
    command = [sys.executable, str(HERE / "generate.py"), V1.name]
    place = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(command, env=place, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "never made again" in done.stderr
    assert (HERE / "SHA256SUMS").read_bytes() == before


# ── what is in them ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: a golden checkpoint is not even opened for writing."""
    return Path(shutil.copytree(V1 / request.param, tmp_path / "root"))


def with_root(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("root", names, indirect=True)


@pytest.mark.parametrize(
    "golden", golden_roots(), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_a_golden_checkpoint_is_what_the_document_says_and_is_found_good(golden: Path) -> None:
    manifests = check_root(golden)
    store = open_store(golden)
    found = catalogue(store)
    assert not found.broken
    assert {str(m.generation) for m in found.manifests} == set(manifests)
    for manifest in found.manifests:
        assert verify(store, manifest, deep=True).faults == ()


SAVED = with_root("one-rank", "fsdp-uneven", "fsdp-tensor-parallel")


@SAVED
def test_every_leaf_has_the_elements_that_were_saved(root: Path) -> None:
    with holdfast.open(root) as opened:
        assert (opened.step, set(opened.leaves)) == (7, set(LEAVES))
        assert dict(opened.aliases) == ALIASES
        assert opened.values["tokens"] == 1234
        for name in LEAVES:
            found = np.asarray(opened.read(name))
            assert found.dtype == expected(name).dtype
            assert found.shape == LEAVES[name]
            assert found.tobytes() == expected(name).tobytes(), name


class Tied(torch.nn.Module):
    """The model that was saved, written down once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@SAVED
def test_a_model_and_its_optimizer_are_restored_as_they_were(root: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "tokens": 0,
        "rng": holdfast.Rng(),
    }
    holdfast.load(root, state)
    assert state["tokens"] == 1234
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (
        0.5,
        0.25,
    )
    assert model.head.weight is model.embed.weight
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{kind}"] = tensor
    assert found.keys() - set(LEAVES) == {"model.head.weight"}
    for name in LEAVES:
        assert found[name].detach().numpy().tobytes() == expected(name).tobytes(), name


@with_root("element-types")
def test_every_element_type_has_the_bytes_that_were_saved(root: Path) -> None:
    raw = np.array([(7 * place + 3) % 251 for place in range(96)], np.uint8)
    with holdfast.open(root) as opened:
        assert opened.leaves.keys() == {
            *(f"tensors.{name}" for name in spec.dtypes()),
            "tensors.empty",
            "tensors.scalar",
        }
        for dtype, (size, _) in spec.dtypes().items():
            leaf = opened.leaves[f"tensors.{dtype}"]
            assert (leaf.dtype, leaf.shape) == (dtype, (2, 48 // size))
            found = opened.read(f"tensors.{dtype}").reshape(-1).view(torch.uint8)
            assert found.numpy().tobytes() == (raw % 2 if dtype == "BOOL" else raw).tobytes()
        assert opened.read("tensors.empty").shape == (0, 3)
        assert float(opened.read("tensors.scalar")) == 1.5


class Phase(Enum):
    WARMUP = 1
    STEADY = "two"


class Parts(Flag):
    HEAD = 1
    BODY = 2


VALUES: dict[str, Any] = {
    "plain": [None, True, -5, 0.1, 1e300, "text \u00e9 \u540d", [], {}],
    "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324],
    "ints": [9007199254740992, -1180591620717411303424, 2**9000],
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "tuple": (1, (2, "x")),
    "set": {1, 2, 3},
    "frozenset": frozenset({"a", "b"}),
    "dict": {1: "one", (2, 3): None, "$x": 0},
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "counter": Counter({"a": 2, "b": 1, "c": 1}),
    "default": defaultdict(list, {"k": [1]}),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "array": np.array([[0, 1, 2], [3, 4, 5]], ">i2"),
    "scalar": np.float32(0.25),
    "strings": np.array(["a", "bcd"]),
    "enum": Phase.STEADY,
    "flag": Parts.HEAD | Parts.BODY,
    "tensor": torch.tensor([0, 1, 2], dtype=torch.int16),
}


def assert_same(found: Any, wanted: Any) -> None:
    """The same type and the same value, bit for bit, all the way down."""
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, float):
        assert np.float64(found).tobytes() == np.float64(wanted).tobytes()
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, dict):
        assert_same(list(found), list(wanted))
        for key in wanted:
            assert_same(found[key], wanted[key])
        assert getattr(found, "default_factory", None) is getattr(wanted, "default_factory", None)
    else:
        assert found == wanted


@pytest.fixture
def _enums() -> None:
    holdfast.register_enum(Phase, name="golden.Phase")
    holdfast.register_enum(Parts, name="golden.Parts")


@with_root("value-tags")
@pytest.mark.usefixtures("_enums")
def test_every_kind_of_value_comes_back_as_it_was(root: Path) -> None:
    state: dict[str, Any] = {"values": None}
    holdfast.load(root, state)
    assert set(state["values"]) == set(VALUES)
    for name, wanted in VALUES.items():
        assert_same(state["values"][name], wanted)


class Projector:
    def __init__(self, rank: int, matrix: torch.Tensor) -> None:
        self.rank, self.matrix = rank, matrix


def test_an_object_of_a_registered_class_is_made_of_its_data() -> None:
    holdfast.register_value(
        Projector, vars, lambda data: Projector(**data), name="golden.Projector"
    )
    state: dict[str, Any] = {"values": None}
    holdfast.load(HERE / "v1-objects" / "objects", state)
    found = state["values"]["projector"]
    assert type(found) is Projector
    assert found.rank == 2
    assert found.matrix.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_the_golden_values_have_every_tag_of_the_document() -> None:
    text = "".join(path.read_text() for path in HERE.glob("v*/*/manifests/*.json"))
    assert [tag for tag in spec.tags() if f'"{tag}":' not in text] == []


def test_each_rank_gets_the_small_tensors_that_it_had(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(HERE / "v1-small-tensors" / "own-tensors", root)
    for rank, found in enumerate(run_ranks(2, _load_own, str(root))):
        assert found == ([10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3], True, 0, rank)


def _load_own(rank: int, world: int, root: str) -> tuple[list[float], bool, int, int]:
    state: dict[str, Any] = {"own": None, "again": None, "counts": None, "rank": None}
    holdfast.load(root, state)
    own, counts = state["own"], state["counts"]
    assert (own.dtype, counts.dtype) == (torch.bfloat16, torch.int64)
    return own.tolist(), state["again"][0] is own, counts.numel(), state["rank"]


FROZEN = HERE / "v1-frozen-parts" / "frozen"


def frozen_base() -> np.ndarray[Any, Any]:
    start = sum(b"model.base")
    places = np.arange(510 * 515, dtype=np.int64)
    return ((start + 3 * places) % 256 / 8).astype(np.float32).reshape(510, 515)


def test_a_frozen_weight_lies_in_one_file_that_both_checkpoints_name() -> None:
    one, other = catalogue(open_store(FROZEN)).manifests
    (part,) = one.parts
    assert other.parts == (part,)
    assert one.requires == other.requires == ("parts",)
    assert [path.stat().st_size for path in (FROZEN / "parts").rglob("*.safetensors")] == [
        part.size_bytes
    ]
    for step in (0, 1):
        with holdfast.open(FROZEN, step) as opened:
            assert np.asarray(opened.read("model.base")).tobytes() == frozen_base().tobytes()
            assert opened.read("model.adapter").tolist() == [[step + 1.0] * 5] * 3
            assert opened.values["tokens"] == 1234 * (step + 1)


def test_a_model_with_a_frozen_weight_is_restored_as_it_was() -> None:
    model = torch.nn.Module()
    model.base, model.adapter = (
        torch.nn.Parameter(torch.zeros(shape)) for shape in ((510, 515), (3, 5))
    )
    state: dict[str, Any] = {"model": model, "tokens": 0}
    assert holdfast.load(FROZEN, state).step == 1
    assert model.base.detach().numpy().tobytes() == frozen_base().tobytes()
    assert model.adapter.tolist() == [[2.0] * 5] * 3


LISTED = HERE / "v1-listings" / "listed"
LISTED_SHAPES: dict[str, tuple[int, ...]] = {
    "columns": (6, 8),
    "copies": (5, 7),
    "flat": (5, 7),
    "half": (6, 8),
    "rows": (6, 8),
    "scalar": (),
    "stack": (4, 3, 5),
    "stack.rest": (4, 3, 5),
}


def test_leaves_that_no_mesh_describes_have_the_elements_that_were_saved() -> None:
    (manifest,) = catalogue(open_store(LISTED)).manifests
    assert manifest.requires == ("listings",)
    with holdfast.open(LISTED) as opened:
        assert {name: leaf.shape for name, leaf in opened.leaves.items()} == LISTED_SHAPES
        for name, shape in LISTED_SHAPES.items():
            start = sum(name.encode())
            eighths = [(start + 3 * place) % 256 for place in range(math.prod(shape))]
            wanted = np.array([value / 8 for value in eighths], np.float32).reshape(shape)
            assert np.asarray(opened.read(name)).tobytes() == wanted.tobytes(), name
            box = Box(tuple(n // 2 for n in shape), shape)
            part = np.asarray(opened.read(name, box))
            assert part.tobytes() == wanted[box.slices()].tobytes(), name


def test_what_each_rank_held_of_them_is_what_it_declared() -> None:
    (path,) = (LISTED / "layouts").iterdir()
    layout = Layout.from_json(path.read_bytes())
    numbers = {leaf.name: number for number, leaf in enumerate(layout.leaves)}

    def held(name: str, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(box.start, box.stop) for box, _ in layout.held(numbers[name], rank)]

    assert held("columns", 3) == [((0, 6), (6, 8))]
    assert held("flat", 0) == [((0, 0), (1, 7)), ((1, 0), (2, 2))]
    assert held("flat", 1) == [((1, 2), (2, 3))]
    assert held("flat", 2) == [((1, 3), (2, 7)), ((2, 0), (4, 7)), ((4, 0), (5, 5))]
    assert held("half", 2) == [] and held("half", 3) == [((0, 0), (6, 8))]
    assert held("rows", 1) == [((1, 0), (2, 8)), ((5, 0), (6, 8))]
    assert held("scalar", 0) == [((), ())] and held("scalar", 1) == []
    assert held("stack", 2) == [((0, 0, 0), (2, 3, 3))] == held("stack", 0)
    assert held("stack", 4) == [((0, 0, 3), (4, 3, 5))]
    assert layout.leaves[numbers["flat"]].listing is not None


def test_a_layout_of_any_version_is_written_as_it_was_read() -> None:
    layouts = [path for root in golden_roots() for path in (root / "layouts").iterdir()]
    assert len(layouts) > 8
    for path in layouts:
        assert Layout.from_json(path.read_bytes()).to_json() == path.read_bytes()


@with_root("history")
def test_abandoned_generations_are_told_from_the_lineage(root: Path) -> None:
    found = catalogue(open_store(root))
    assert [str(g) for g in found.lineage] == ["1-10", "4-15", "5-25"]
    assert [str(g) for g in found.abandoned] == ["2-20", "3-30"]
    ((generation, pinned),) = read_pins(open_store(root)).items()
    assert (generation, pinned.note) == (Generation(2, 20), "before the fall")
    for name, step in ((None, 25), (15, 15), ("2-20", 20), ("3-30", 30)):
        with holdfast.open(root, name) as opened:
            assert opened.read("w").tolist() == [float(step)] * 3
            assert opened.values["step"] == step


@with_root("kept")
def test_what_a_keeper_wrote_in_two_lives_is_read(root: Path) -> None:
    found = catalogue(open_store(root))
    assert [str(g) for g in found.lineage] == ["1-0", "2-1"]
    assert [str(g) for g in found.abandoned] == ["1-1"]
    for name, number in (("1-0", 100.0), ("1-1", 101.0), ("2-1", 201.0)):
        with holdfast.open(root, name) as opened:
            assert opened.read("w").tolist() == [[number] * 3] * 2
            assert opened.values["life"] == number // 100
