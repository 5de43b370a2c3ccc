"""Reads DeepSpeed checkpoints of ZeRO 0 to 3, and their universal form.

The fp32 masters are the parameters; 16-bit copies beside them are not read. A rank's file has flat
runs of elements, each a range of a parameter in row-major order: padding belongs to none of them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import ForeignFormatError, HoldfastError, UsageError
from holdfast.geometry.box import ITEMSIZE, Box, flat_boxes
from holdfast.interop.arrange import MODEL
from holdfast.interop.foreign import ForeignLeaf, StoredBox
from holdfast.interop.pickle_records import Record, TensorRef
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.torch_files import TorchFile, Tree, open_torch_file

_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt"
)
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{1,6})_model_states\.pt")
_ATOM = re.compile(r"zero/(.+)/fp32\.pt")
_EXPERT = re.compile(r"(?:layer_[0-9]+_)?expert_[0-9]+_mp_rank_[0-9]+_model_states\.pt")
_LAYER = re.compile(r"layer_[0-9]+-model_[0-9]+-model_states\.pt")
_LATEST = ("latest", "latest_universal")
#: The masters of fp16 without ZeRO, in the dictionary of its optimizer.
_MASTERS = frozenset(("fp32_groups", "fp32_groups_flat"))
#: Of the element types that a count of steps has.
_CODES = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
#: What describes the files of a checkpoint and is no state.
_INNER = frozenset(
    (
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "buffer_names", "dp_world_size", "mp_world_size", "ds_config"),
        *("checkpoint_parallel_dimensions", "ds_version", "universal_checkpoint_info"),
        *("num_experts", "ds_autoep_layers"),
    )
)


def find_tag(files: SourceFiles) -> str | None:
    """The folder of the checkpoint to read, "" or with "/" at its end; None if there is none.

    That is the folder itself, the one that ``latest`` names, or the only one directly below it:
    those deeper are of the steps of another writer.
    """
    found = _tags(files)
    if files.path.is_file() and found:
        raise UsageError(f"{files.path} is one file of a DeepSpeed checkpoint: give its directory")
    if not found or "" in found:
        return "" if found else None
    names = set(files.names())
    for pointer in _LATEST:
        if pointer in names:
            tag = files.read(pointer).decode("utf-8", "replace").strip()
            if f"{tag}/" not in found:
                raise UsageError(
                    f"{files.where(pointer)} names {tag!r:.100}, which is not there. There are "
                    f"{_shown(found)}: give the path of one"
                )
            return f"{tag}/"
    found = [tag for tag in found if tag.count("/") == 1]
    if len(found) > 1:
        raise UsageError(
            f"{files.path} has DeepSpeed checkpoints below it, and no file 'latest' that names "
            f"one. There are {_shown(found)}: give the path of one"
        )
    return found[0] if found else None


def other_tags(files: SourceFiles, tag: str) -> list[str]:
    """The folders of checkpoints that are not in the one to read, without "/" at their ends."""
    return [one.rstrip("/") for one in _tags(files) if not one.startswith(tag)]


def _tags(files: SourceFiles) -> list[str]:
    return sorted({tag for name in files.names() if (tag := _tag_of(name)) is not None})


def _shown(tags: list[str]) -> str:
    return ", ".join(tag.rstrip("/") for tag in tags[:5]) + (", ..." if len(tags) > 5 else "")


def _tag_of(name: str) -> str | None:
    folder, _, last = name.rpartition("/")
    if any(one.fullmatch(last) for one in (_OPTIMIZER, _MODEL, _EXPERT, _LAYER)):
        return f"{folder}/" if folder else ""
    if last == "fp32.pt":
        at = f"/{name}".rfind("/zero/")
        return name[:at] if at >= 0 else None
    return None


@dataclass(frozen=True, slots=True)
class DeepSpeedState:
    """What a checkpoint holds, as a state; ``world``: the number of images."""

    tree: dict[str, Any]
    step: int | None
    world: int
    notes: tuple[str, ...]


def read_deepspeed(files: SourceFiles, tag: str) -> DeepSpeedState:
    """Read the checkpoint in the folder ``tag``."""
    try:
        return _Checkpoint(files, tag).read()
    except HoldfastError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        where = files.where(tag.rstrip("/"))
        raise ForeignFormatError(
            f"{where} is not in the form of DeepSpeed: {error!s:.200}", path=where, offset=0
        ) from None


def step_in(files: SourceFiles, tag: str) -> int | None:
    """The step that the checkpoint in the folder ``tag`` says it is of."""
    checkpoint = _Checkpoint(files, tag)
    return None if checkpoint.main is None else _step(checkpoint.main)


def _step(main: Mapping[str, Any]) -> int | None:
    step = main.get("global_steps")
    return step if type(step) is int and step >= 0 else None


class _Checkpoint:
    def __init__(self, files: SourceFiles, tag: str) -> None:
        self._files, self._tag = files, tag
        names = [name.removeprefix(tag) for name in files.names() if name.startswith(tag)]
        self._names = set(names)
        self._refuse_parallel(names)
        self._optimizers = {int(m[1]): m[0] for n in names if (m := _OPTIMIZER.fullmatch(n))}
        models = [m for name in names if (m := _MODEL.fullmatch(name))]
        self._partitioned = {int(m[1]): m[0] for m in models if m[1] is not None}
        self._main = next((m[0] for m in models if m[1] is None), self._partitioned.get(0))
        self._notes: list[str] = []
        #: Why the optimizer cannot be taken: without a part of its state it is another.
        self._unfit: list[str] = []
        self._opened: dict[str, TorchFile] = {}

    def _refuse_parallel(self, names: list[str]) -> None:
        if any(_EXPERT.fullmatch(name) for name in names):
            raise UsageError("DeepSpeed checkpoints with expert files can't be read yet")
        if any(_LAYER.fullmatch(name) for name in names):
            raise UsageError("DeepSpeed checkpoints of pipelines (layer files) can't be read yet")
        grids = [m for name in names for one in (_OPTIMIZER, _MODEL) if (m := one.fullmatch(name))]
        if any(int(m[2]) for m in grids):
            raise UsageError(
                "DeepSpeed checkpoints of several model-parallel ranks (mp_rank_01) can't be read "
                "yet: nothing here says along which dimension each weight is joined"
            )

    def _error(self, name: str, why: str) -> ForeignFormatError:
        where = self._files.where(self._tag + name)
        return ForeignFormatError(f"{where}: {why}", path=where, offset=0)

    def _open(self, name: str) -> TorchFile:
        if name not in self._opened:
            self._opened[name] = open_torch_file(self._files, self._tag + name)
        return self._opened[name]

    def _value(self, name: str) -> dict[str, Any]:
        value = self._open(name).value
        if not isinstance(value, dict):
            raise self._error(name, "it holds no dictionary of a state")
        return value

    @property
    def main(self) -> dict[str, Any] | None:
        """What the file of the model says; None where there is none."""
        return None if self._main is None else self._value(self._main)

    def read(self) -> DeepSpeedState:
        if self._main is None:
            raise self._error("mp_rank_00_model_states.pt", "it is not there")
        main = self._value(self._main)
        tree = Tree(self._open(self._main)).value()
        model: dict[str, Any] = dict(tree.get("module") or {})
        rest = {k: v for k, v in tree.items() if k not in _INNER and v is not None}
        shapes = self._shapes(main)
        atoms = sorted(m[1] for name in self._names if (m := _ATOM.fullmatch(name)))
        optimizer: dict[str, Any] | None = tree.get("optimizer")
        if atoms:
            optimizer = self._universal(model, shapes, rest, atoms)
        elif self._optimizers:
            optimizer = self._zero(model, shapes, rest, main)
        elif shapes:
            raise self._error(
                self._main, "it is of a ZeRO checkpoint, and no rank's optimizer file is there"
            )
        elif optimizer is not None and (masters := optimizer.keys() & _MASTERS):
            self._unfit.append(
                f"{masters.pop()} of {self._main}, as fp16 without ZeRO has them, are masters in "
                "F32 without names, so parameters are the copies of 16 bits. Save with ZeRO-1 for "
                "both"
            )
        if self._partitioned:
            self._frozen(model, main)
        for name, source in (main.get("shared_params") or {}).items():
            if source in model:
                model[name] = model[source]
        ours: dict[str, Any] = {MODEL: model}
        if self._unfit:
            self._notes.append(f"the optimizer is left out: {self._unfit[0]}")
        elif optimizer is not None:
            ours["optimizer"] = optimizer
        self._notes += [
            f"{key} of the client state is left out: what DeepSpeed keeps is called so"
            for key in sorted(rest.keys() & ours.keys())
        ]
        result = rest | ours
        return DeepSpeedState(
            result, _step(main), max(1, len(self._optimizers)), tuple(self._notes)
        )

    def _shapes(self, main: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
        shapes = main.get("param_shapes") or []
        if not isinstance(shapes, list) or not all(isinstance(one, dict) for one in shapes):
            raise self._error(self._main or "", "its param_shapes are no list of groups")
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            if type(name) is not str or type(shape) is not tuple:
                raise self._error(self._main or "", f"no shape of {name!r:.100}")
        return shapes

    # ── ZeRO ─────────────────────────────────────────────────────────────────────────────

    def _ranks(self, count: int) -> list[str]:
        """The optimizer files of all ranks; an error that names the first that is missing."""
        for rank in range(max(count, *self._optimizers, 0) if self._optimizers else count):
            if rank not in self._optimizers:
                like = self._optimizers[min(self._optimizers)]
                name = re.sub(r"pp_rank_[0-9]+", f"pp_rank_{rank}", like)
                raise self._error(name, f"it is not there, of {count} ranks' files")
        extra = [rank for rank in self._optimizers if rank >= count]
        if extra:
            raise self._error(
                self._optimizers[min(extra)],
                f"{count} ranks wrote this checkpoint; the file is of another one",
            )
        return [self._optimizers[rank] for rank in range(count)]

    def _zero(
        self,
        model: dict[str, Any],
        shapes: list[dict[str, tuple[int, ...]]],
        rest: dict[str, Any],
        main: Mapping[str, Any],
    ) -> dict[str, Any]:
        first = self._optimizers[min(self._optimizers)]
        state = self._zero_state(first)
        counts = state.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if not counts or any(type(one) is not int or one < 1 for one in counts):
            raise self._error(first, "it does not say over how many ranks it is cut")
        if len(set(counts)) > 1:
            raise UsageError("DeepSpeed checkpoints with groups of experts can't be read yet")
        names = self._ranks(counts[0])
        states = [self._zero_state(name) for name in names]
        is_third = "fp32_flat_groups" in state
        key = "optimizer_state_dict" if is_third else "base_optimizer_state"
        self._refuse_mixed(names, states, key)
        inner = state[key]
        parts: dict[tuple[str, str], list[StoredBox]] = {}
        dtypes: dict[tuple[str, str], str] = {}
        all_shapes = {name: shape for group in shapes for name, shape in group.items()}
        for rank, (file, one) in enumerate(zip(names, states, strict=True)):
            flats = one["fp32_flat_groups" if is_third else "single_partition_of_fp32_groups"]
            if is_third and len(flats) != len(shapes):
                raise UsageError(
                    f"{self._files.where(file)}: ZeRO-3 has cut its {len(shapes)} groups into "
                    f"{len(flats)} (sub_group_size), which can't be read yet: give its universal "
                    "form, which DeepSpeed's ds_to_universal makes of it"
                )
            for number, flat in enumerate(flats):
                kinds = {"": flat, **self._moments(file, one, one[key], number, flat)}
                cuts = (
                    _third_cuts(shapes[number], rank, len(names))
                    if is_third
                    else self._mapped_cuts(file, one, number)
                )
                for name, begin, start, count in cuts:
                    if name not in all_shapes:
                        raise self._error(file, f"{name!r:.200} has no shape in {self._main}")
                    for kind, ref in kinds.items():
                        have = parts.setdefault((name, kind), [])
                        at = start if is_third else sum(box.box.volume for box in have)
                        have += self._run(file, ref, begin, at, count, all_shapes[name], rank)
                        dtypes[name, kind] = ref.dtype
        self._require_held(first, all_shapes, {name for name, kind in parts if not kind})
        found: dict[str, dict[str, Any]] = {}
        for (name, kind), boxes in parts.items():
            leaf = ForeignLeaf(dtypes[name, kind], all_shapes[name], tuple(boxes))
            if sum(part.box.volume for part in boxes) != math.prod(all_shapes[name]):
                raise self._error(first, f"{name!r:.200} is not covered by the ranks' files")
            if kind:
                found.setdefault(name, {})[kind] = leaf
            else:
                model[name] = leaf
        self._add_scaler(rest, state)
        self._compare_steps(names[0], inner, main)
        groups = [
            [n for index in group["params"] for n in shapes[index]]
            for group in inner["param_groups"]
        ]
        self._add_steps(found, names[0], inner, shapes)
        return {"state": found, "param_groups": _options(inner["param_groups"], groups)}

    def _require_held(
        self, file: str, shapes: Mapping[str, tuple[int, ...]], held: set[str]
    ) -> None:
        """The copy of 16 bits that the model has of a parameter is never taken for it."""
        for name, shape in shapes.items():
            if math.prod(shape) and name not in held:
                raise self._error(file, f"{name!r:.200} is in no flat group of the ranks' files")

    def _zero_state(self, name: str) -> dict[str, Any]:
        state = self._value(name).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise self._error(name, "it holds no state of an optimizer of ZeRO")
        key = "optimizer_state_dict" if "fp32_flat_groups" in state else "base_optimizer_state"
        inner = state.get(key)
        if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
            raise self._error(
                name, "its optimizer has no state and groups, as with elastic_checkpoint"
            )
        return state

    def _moments(
        self, file: str, state: Mapping[str, Any], inner: Mapping[str, Any], number: int, flat: Any
    ) -> dict[str, TensorRef]:
        """The state of a flat group that has one number for each element, padded as it was."""
        have = flat.shape[0] if isinstance(flat, TensorRef) and len(flat.shape) == 1 else 0
        paddings = state.get("group_paddings") or ()
        padding = paddings[number] if number < len(paddings) else 0
        found: dict[str, TensorRef] = {}
        for kind, ref in (inner["state"].get(number) or {}).items():
            if not isinstance(ref, TensorRef) or ref.shape == ():
                continue
            if ref.shape in ((have,), (have + padding,)):
                found[kind] = ref
            else:
                self._unfit.append(
                    f"{kind!r:.100} of group {number} in {file} has the shape {ref.shape}, its "
                    f"parameters {have} elements: what it has of which is not stored"
                )
        return found

    def _mapped_cuts(
        self, file: str, state: Mapping[str, Any], number: int
    ) -> Iterator[tuple[str, int, int, int]]:
        """(parameter, begin in the flat, 0, elements), by the addresses that the file has."""
        mappings = state.get("param_slice_mappings")
        if not isinstance(mappings, list) or number >= len(mappings):
            raise self._error(file, "it has no param_slice_mappings: DeepSpeed before 0.7 wrote it")
        for name, address in mappings[number].items():
            fields = address.fields if isinstance(address, Record) else {}
            begin, count = fields.get("start"), fields.get("numel")
            if type(begin) is not int or type(count) is not int or begin < 0 or count < 0:
                raise self._error(file, f"{name!r:.200} has no address")
            yield name, begin, 0, count

    def _run(
        self,
        file: str,
        ref: Any,
        begin: int,
        start: int,
        count: int,
        shape: tuple[int, ...],
        rank: int,
    ) -> list[StoredBox]:
        """Elements ``start`` on of a parameter, which lie from ``begin`` on in a flat tensor."""
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or ref.strides != (1,):
            raise self._error(file, "a flat group that is no row of elements")
        if begin + count > ref.shape[0] or start + count > math.prod(shape):
            raise self._error(file, f"{count} elements from {begin} on are not in its flat group")
        extent = replace(self._open(file).place(ref), strides=None)
        at, found = extent.offset + begin * ITEMSIZE[ref.dtype], []
        for box in flat_boxes(shape, start, start + count):
            found.append(StoredBox(box, replace(extent, offset=at), rank))
            at += box.volume * ITEMSIZE[ref.dtype]
        return found

    def _refuse_mixed(self, names: list[str], states: list[dict[str, Any]], key: str) -> None:
        """Ranks of one save are at one step, with the same hyperparameters."""
        marks = []
        for name, state in zip(names, states, strict=True):
            inner = state[key]
            steps = {
                number: self._single(name, some["step"])
                for number, some in inner["state"].items()
                if isinstance(some, dict) and "step" in some
            }
            options = [
                {k: v for k, v in group.items() if type(v) in (int, float, bool, str, tuple)}
                for group in inner["param_groups"]
            ]
            marks.append((steps, options))
        for name, mark in zip(names, marks, strict=True):
            if mark != marks[0]:
                raise self._error(
                    name,
                    f"its steps are {[*mark[0].values()]!s:.60}, those of {names[0]} "
                    f"{[*marks[0][0].values()]!s:.60}, or hyperparameters differ: files of two "
                    "saves are mixed",
                )

    def _compare_steps(self, name: str, inner: Mapping[str, Any], main: Mapping[str, Any]) -> None:
        """Note an optimizer that has not taken the steps of the model: it may be of another save,
        or was new when a run went on.
        """
        steps, skipped = main.get("global_steps"), main.get("skipped_steps") or 0
        if type(steps) is not int or type(skipped) is not int:
            return
        for some in inner["state"].values():
            taken = self._number(name, some.get("step")) if isinstance(some, dict) else None
            if taken is not None and taken != steps - skipped:
                self._notes.append(
                    f"the optimizer in {name} has taken {taken:g} steps, {self._main} says "
                    f"{steps - skipped}: files of two saves may be mixed"
                )
                return

    def _number(self, name: str, value: Any) -> float | None:
        if isinstance(value, TensorRef) and value.shape == () and value.dtype in _CODES:
            raw = bytes.fromhex(self._single(name, value))
            return float(struct.unpack(_CODES[value.dtype], raw)[0])
        return value if type(value) in (int, float) else None

    def _single(self, name: str, value: Any) -> Any:
        """The bytes of a tensor with one element, or a plain value."""
        if not isinstance(value, TensorRef) or value.shape != ():
            return value
        extent = self._open(name).place(value)
        return self._files.read(extent.file, extent.offset, ITEMSIZE[value.dtype]).hex()

    def _add_steps(
        self,
        found: dict[str, dict[str, Any]],
        file: str,
        inner: Mapping[str, Any],
        shapes: list[dict[str, tuple[int, ...]]],
    ) -> None:
        """Give each parameter the step, and other single values, of the flat group it is in."""
        for number, group in enumerate(shapes):
            for kind, value in (inner["state"].get(number) or {}).items():
                for name in group:
                    if isinstance(value, TensorRef) and value.shape == ():
                        extent = replace(self._open(file).place(value), strides=None)
                        part = StoredBox(Box((), ()), extent)
                        found.setdefault(name, {})[kind] = ForeignLeaf(value.dtype, (), (part,))
                    elif not isinstance(value, TensorRef):
                        found.setdefault(name, {})[kind] = value

    def _add_scaler(self, rest: dict[str, Any], state: Mapping[str, Any]) -> None:
        if isinstance(state.get("loss_scaler"), Record):
            rest.setdefault("loss_scaler", state["loss_scaler"])

    def _frozen(self, model: dict[str, Any], main: Mapping[str, Any]) -> None:
        """Parameters without a gradient after ZeRO-3: every rank's model file has a run of each."""
        frozen = main.get("frozen_param_shapes") or {}
        count = 1 + max(self._partitioned)
        if missing := sorted(set(range(count)) - self._partitioned.keys()):
            raise self._error(
                f"zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt", "it is not there"
            )
        if self._optimizers and count != len(self._optimizers):
            name = f"zero_pp_rank_{count}_mp_rank_00_model_states.pt"
            raise self._error(name, f"it is not there, of {len(self._optimizers)} ranks' files")
        for name, shape in frozen.items():
            boxes, dtype = [], ""
            for rank in range(count):
                file = self._partitioned[rank]
                state = self._value(file)
                if state.get("global_steps") != main.get("global_steps"):
                    raise self._error(file, "its global_steps are of another save")
                ref = (state.get("frozen_param_fragments") or {}).get(name)
                for _, begin, start, some in _third_cuts({name: shape}, rank, count):
                    boxes += self._run(file, ref, begin, start, some, shape, 0)
                    dtype = getattr(ref, "dtype", "")
            model[name] = ForeignLeaf(dtype, shape, tuple(boxes))
        buffers = set(main.get("buffer_names") or ())
        for name in [n for n, leaf in model.items() if n not in buffers and _is_hollow(leaf)]:
            del model[name]  # a placeholder: its elements are elsewhere, or it is tied

    # ── the universal form ───────────────────────────────────────────────────────────────

    def _universal(
        self,
        model: dict[str, Any],
        shapes: list[dict[str, tuple[int, ...]]],
        rest: dict[str, Any],
        atoms: list[str],
    ) -> dict[str, Any]:
        name = "zero/optimizer_state.pt"
        common = self._value(name) if name in self._names else {}
        inner = common.get("optimizer_state_dict")
        self._add_scaler(rest, common)
        found: dict[str, dict[str, Any]] = {}
        steps: dict[str, dict[str, Any]] = {}
        if isinstance(inner, dict) and "state" in inner:  # not all atoms have steps
            singles = {
                number: {k: v for k, v in some.items() if getattr(v, "shape", ()) == ()}
                for number, some in inner["state"].items()
            }
            self._add_steps(steps, name, {"state": singles}, shapes)
        for parameter, shape in ((n, s) for group in shapes for n, s in group.items()):
            if parameter not in atoms:
                raise self._error(f"zero/{parameter}/fp32.pt", "it is not there")
            model[parameter] = self._atom(parameter, "fp32", shape)
            kinds = [
                m[1]
                for one in sorted(self._names)
                if (m := re.fullmatch(rf"zero/{re.escape(parameter)}/([^/]+)\.pt", one))
            ]
            moments = {k: self._atom(parameter, k, shape) for k in kinds if k != "fp32"}
            if moments:
                found[parameter] = {**steps.get(parameter, {}), **moments}
        if any("step" not in kinds for kinds in found.values()):
            self._notes.append("some parameters have no step count: their atoms have no step.pt")
        options = (inner or common).get("param_groups") or []
        if not options:
            self._notes.append("hyperparameters are not there: no zero/optimizer_state.pt has them")
            options = [{"params": [number]} for number in range(len(shapes))]
        groups = [[n for index in group["params"] for n in shapes[index]] for group in options]
        return {"state": found, "param_groups": _options(options, groups)}

    def _atom(self, parameter: str, kind: str, shape: tuple[int, ...]) -> Any:
        name = f"zero/{parameter}/{kind}.pt"
        value = self._open(name).value
        if isinstance(value, dict):
            value = value.get("param")
        if not isinstance(value, TensorRef):
            if kind == "step":
                return value
            raise self._error(name, "it holds no tensor")
        wanted = () if kind == "step" else shape
        if value.shape == (math.prod(wanted),) and value.strides == (1,):
            parts = self._run(name, value, 0, 0, math.prod(wanted), wanted, 0)
            return ForeignLeaf(value.dtype, wanted, tuple(parts))
        if value.shape != wanted:
            raise self._error(name, f"it has the shape {value.shape}, the model has {wanted}")
        leaf = Tree(self._open(name)).value()
        return leaf["param"] if isinstance(leaf, dict) else leaf


def _third_cuts(
    group: Mapping[str, tuple[int, ...]], rank: int, world: int
) -> Iterator[tuple[str, int, int, int]]:
    """(parameter, begin in the flat, its first element, elements) of a rank after ZeRO-3."""
    begin = 0
    for name, shape in group.items():
        volume = math.prod(shape)
        each = -(-volume // world)
        start = min(volume, rank * each)
        yield name, begin, start, min(each, volume - start)
        begin += each


def _options(options: list[dict[str, Any]], groups: list[list[str]]) -> list[dict[str, Any]]:
    return [{**one, "params": names} for one, names in zip(options, groups, strict=True)]


def _is_hollow(leaf: Any) -> bool:
    return isinstance(leaf, ForeignLeaf) and leaf.shape == (0,)
