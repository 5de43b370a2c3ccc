"""Reads DeepSpeed checkpoints of ZeRO 0 to 3, and their universal form.

The fp32 masters are the parameters; 16-bit copies beside them are not read. A rank's file has flat
runs of elements, each a range of a parameter in row-major order: padding belongs to none of them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from holdfast.errors import ForeignFormatError, HoldfastError, UsageError
from holdfast.geometry.box import ITEMSIZE, Box, flat_boxes
from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.arrange import MODEL
from holdfast.interop.deepspeed_pipeline import Shapes, layers_in, merged_groups
from holdfast.interop.foreign import ForeignLeaf, StoredBox
from holdfast.interop.parameter_partition import (
    PartitionError,
    group_shapes,
    mapped_cuts,
    model_ranks,
    partition_cuts,
)
from holdfast.interop.pickle_records import Record, TensorRef
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.tensor_ranks import INFO, TensorRanks
from holdfast.interop.torch_files import TorchFile, Tree, open_torch_file

#: The masters of fp16 without ZeRO, in the dictionary of its optimizer.
_MASTERS = frozenset(("fp32_groups", "fp32_groups_flat"))
#: Of the element types that a count of steps has.
_CODES = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}


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
        self._is_staged = any(map(tags.LAYER.fullmatch, names))
        self._refuse_parallel(names)
        #: The optimizer files of each tensor-parallel rank, by their data-parallel ranks.
        self._optimizers: dict[int, dict[int, str]] = {}
        for found in filter(None, map(tags.OPTIMIZER.fullmatch, names)):
            self._optimizers.setdefault(int(found[2]), {})[int(found[1])] = found[0]
        models = [found for found in map(tags.MODEL.fullmatch, names) if found]
        self._partitioned = {int(m[1]): m[0] for m in models if m[1] is not None and not int(m[2])}
        #: The model's file of each tensor-parallel rank.
        self._mains = {int(m[2]): m[0] for m in models if m[1] and not int(m[1])}
        self._mains |= {int(m[2]): m[0] for m in models if m[1] is None}
        self._main = self._mains.get(0)
        self._degree = 1 + max((*self._optimizers, *self._mains), default=0)
        self._notes: list[str] = []
        #: Why the optimizer cannot be taken: without a part of its state it is another.
        self._unfit: list[str] = []
        self._opened: dict[str, TorchFile] = {}

    def _refuse_parallel(self, names: list[str]) -> None:
        if any(tags.EXPERT.fullmatch(name) for name in names):
            raise UsageError("DeepSpeed checkpoints with expert files can't be read yet")
        if self._is_staged and any(map(tags.ATOM.fullmatch, names)):
            raise UsageError("the universal form of DeepSpeed's pipelines can't be read yet")

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
        trees = [self._tree(name) for name in self._model_files()]
        ranks = self._tensor_ranks(main)
        tree = trees[0]
        rest = {k: v for k, v in tree.items() if k not in tags.DESCRIBING and v is not None}
        local = [self._shapes(name) for name in self._model_files()]
        shapes = merged_groups(local) if self._is_staged else local[0]
        model = self._module(trees, shapes, ranks)
        atoms = sorted(m[1] for name in self._names if (m := tags.ATOM.fullmatch(name)))
        optimizer: dict[str, Any] | None = tree.get("optimizer")
        if atoms:
            optimizer = self._universal(model, shapes, rest, atoms)
        elif self._optimizers:
            optimizer = self._zero(model, shapes, local, rest, main, ranks)
        elif shapes:
            raise self._error(
                self._main, "it is of a ZeRO checkpoint, and no rank's optimizer file is there"
            )
        elif optimizer is not None:
            self._refuse_numbered(optimizer)
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
        return DeepSpeedState(
            rest | ours,
            _step(main),
            max(1, sum(map(len, self._optimizers.values()))),
            tuple(self._notes),
        )

    def _module(
        self, trees: list[dict[str, Any]], shapes: Shapes, ranks: TensorRanks | None
    ) -> dict[str, Any]:
        """What the files of the model and its layers have of it: copies of 16 bits, perhaps."""
        if self._is_staged:
            wanted = [name for group in shapes for name in group]
            wanted += chain(*(one.get("buffer_names") or () for one in trees))
            return layers_in(self._names, self._tree, wanted, self._notes)
        modules = [one.get("module") or {} for one in trees]
        model = dict(modules[0])
        if ranks is not None:
            masters = {name for group in shapes for name in group}
            buffers = trees[0].get("buffer_names")
            self._notes += ranks.join_module(model, modules, masters, buffers)
        return model

    def _refuse_numbered(self, optimizer: Mapping[str, Any]) -> None:
        """Note why an optimizer without ZeRO is left out, where it is."""
        if masters := optimizer.keys() & _MASTERS:
            self._unfit.append(
                f"{masters.pop()} of {self._main}, as fp16 without ZeRO has them, are masters in "
                "F32 without names, so parameters are the copies of 16 bits. Save with ZeRO-1 for "
                "both"
            )
        elif self._degree > 1:
            self._unfit.append("several ranks have it by their numbers. Save with ZeRO-1 for it")

    # ── tensor-parallel ranks and stages ─────────────────────────────────────────────────

    def _model_files(self) -> list[str]:
        """The model's file of each tensor-parallel rank, of which a shard would look whole."""
        degree = max(self._degree, model_ranks(self.main or {}))
        for rank in range(degree):
            if rank not in self._mains:
                name = f"mp_rank_{rank:02d}_model_states.pt"
                raise self._error(name, f"it is not there, of {degree} ranks' files")
        return [self._mains[rank] for rank in range(self._degree)]

    def _tensor_ranks(self, main: Mapping[str, Any]) -> TensorRanks | None:
        """What the file says of several tensor-parallel ranks; None for one, and for stages."""
        if self._degree == 1:
            return None
        if self._partitioned and not any(map(tags.ATOM.fullmatch, self._names)):
            raise UsageError(
                "DeepSpeed checkpoints of ZeRO-3 on several model-parallel ranks can't be read "
                "yet: give their universal form, which DeepSpeed's ds_to_universal makes"
            )
        for name in self._model_files():
            if self._value(name).get("global_steps") != main.get("global_steps"):
                raise self._error(name, "its global_steps are of another save")
        where = self._files.where(self._tag + self._mains[0])
        return None if self._is_staged else TensorRanks(main.get(INFO), self._degree, where)

    def _tree(self, name: str) -> Any:
        return Tree(self._open(name)).value()

    def _shapes(self, name: str) -> Shapes:
        try:
            return group_shapes(self._value(name))
        except PartitionError as error:
            raise self._error(name, str(error)) from None

    # ── ZeRO ─────────────────────────────────────────────────────────────────────────────

    def _ranks(self, count: int, tensor_rank: int) -> list[str]:
        """The optimizer files of all data-parallel ranks beside a tensor-parallel one; an error
        that names the first that is missing.
        """
        there = self._optimizers.get(tensor_rank, {})
        for rank in range(max(count, *there, 0) if there else count):
            if rank not in there:
                some = self._optimizers[min(self._optimizers)]
                like = re.sub(r"pp_rank_[0-9]+", f"pp_rank_{rank}", some[min(some)])
                name = re.sub(r"mp_rank_[0-9]+", f"mp_rank_{tensor_rank:02d}", like)
                raise self._error(name, f"it is not there, of {count} ranks' files")
        extra = [rank for rank in there if rank >= count]
        if extra:
            raise self._error(
                there[min(extra)],
                f"{count} ranks wrote this checkpoint; the file is of another one",
            )
        return [there[rank] for rank in range(count)]

    def _zero(
        self,
        model: dict[str, Any],
        shapes: Shapes,
        local: list[Shapes],
        rest: dict[str, Any],
        main: Mapping[str, Any],
        ranks: TensorRanks | None,
    ) -> dict[str, Any]:
        some = self._optimizers[min(self._optimizers)]
        first = some[min(some)]
        state = self._zero_state(first)
        counts = state.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if not counts or any(type(one) is not int or one < 1 for one in counts):
            raise self._error(first, "it does not say over how many ranks it is cut")
        if len(set(counts)) > 1:
            raise UsageError("DeepSpeed checkpoints with groups of experts can't be read yet")
        names = [self._ranks(counts[0], rank) for rank in range(self._degree)]
        states = [[self._zero_state(name) for name in some] for some in names]
        is_third = "fp32_flat_groups" in state
        key = "optimizer_state_dict" if is_third else "base_optimizer_state"
        self._refuse_mixed([*chain(*names)], [*chain(*states)], key)
        inner = state[key]
        parts: dict[tuple[str, str], list[StoredBox]] = {}
        dtypes: dict[tuple[str, str], str] = {}
        all_shapes = {name: shape for group in shapes for name, shape in group.items()}
        groups = [[*group] for group in shapes]
        if ranks and any([[*group] for group in one] != groups for one in local):
            raise self._error(first, "the tensor-parallel ranks have other parameters")
        joined = {} if ranks is None else ranks.join_groups(local)
        for rank, (files, some_states) in enumerate(zip(names, states, strict=True)):
            found_parts = self._flat_parts(files, some_states, key, local[rank], rank)
            for (name, kind), (dtype, boxes) in found_parts.items():
                if name in joined:
                    boxes = [*joined[name].place(boxes, dtype, rank)]
                if dtypes.setdefault((name, kind), dtype) != dtype:
                    raise self._error(files[0], f"{name!r:.200} has another element type here")
                parts.setdefault((name, kind), []).extend(boxes)
        all_shapes |= {name: one.shape for name, one in joined.items()}
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
        self._compare_steps(first, inner, main)
        groups = [
            [n for index in group["params"] for n in shapes[index]]
            for group in inner["param_groups"]
        ]
        self._add_steps(found, first, inner, shapes)
        return {"state": found, "param_groups": _options(inner["param_groups"], groups)}

    def _flat_parts(
        self,
        files: list[str],
        states: list[dict[str, Any]],
        key: str,
        shapes: Shapes,
        tensor_rank: int,
    ) -> dict[tuple[str, str], tuple[str, list[StoredBox]]]:
        """The element type and the parts of each parameter and each of its moments, by its name and
        kind ("" for itself), as the data-parallel ranks have them. They hold it in their order.
        """
        found: dict[tuple[str, str], tuple[str, list[StoredBox]]] = {}
        all_shapes = {name: shape for group in shapes for name, shape in group.items()}
        is_third = key == "optimizer_state_dict"
        for rank, (file, one) in enumerate(zip(files, states, strict=True)):
            flats = one["fp32_flat_groups" if is_third else "single_partition_of_fp32_groups"]
            if is_third and len(flats) != len(shapes):
                raise UsageError(
                    f"{self._files.where(file)}: ZeRO-3 has cut its {len(shapes)} groups into "
                    f"{len(flats)} (sub_group_size), which can't be read yet: give its universal "
                    "form, which DeepSpeed's ds_to_universal makes of it"
                )
            image = tensor_rank * len(files) + rank
            for number, flat in enumerate(flats):
                kinds = {"": flat, **self._moments(file, one, one[key], number, flat)}
                try:
                    cuts = (
                        partition_cuts(shapes[number], rank, len(files))
                        if is_third
                        else mapped_cuts(one, number)
                    )
                except PartitionError as error:
                    raise self._error(file, str(error)) from None
                for name, begin, start, count in cuts:
                    if name not in all_shapes:
                        raise self._error(file, f"{name!r:.200} has no shape in {self._main}")
                    for kind, ref in kinds.items():
                        dtype, have = found.setdefault((name, kind), (ref.dtype, []))
                        if dtype != ref.dtype:
                            raise self._error(file, f"{name!r:.200} is {ref.dtype}, not {dtype}")
                        at = start if is_third else sum(box.box.volume for box in have)
                        have += self._run(file, ref, begin, at, count, all_shapes[name], image)
        return found

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
        shapes: Shapes,
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
        ranks = len(self._optimizers.get(0, {}))
        if ranks and count != ranks:
            name = f"zero_pp_rank_{count}_mp_rank_00_model_states.pt"
            raise self._error(name, f"it is not there, of {ranks} ranks' files")
        for name, shape in frozen.items():
            boxes, dtype = [], ""
            for rank in range(count):
                file = self._partitioned[rank]
                state = self._value(file)
                if state.get("global_steps") != main.get("global_steps"):
                    raise self._error(file, "its global_steps are of another save")
                ref = (state.get("frozen_param_fragments") or {}).get(name)
                for _, begin, start, some in partition_cuts({name: shape}, rank, count):
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
        shapes: Shapes,
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
            if self._degree > 1:
                shape = self._whole_shape(parameter)
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

    def _whole_shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a parameter of tensor-parallel ranks, which only its atom has."""
        name = f"zero/{parameter}/fp32.pt"
        value = self._open(name).value
        whole = value.get("param") if isinstance(value, dict) else None
        if not isinstance(whole, TensorRef):
            raise self._error(name, "it has no shape, and those of the ranks are of shards")
        return whole.shape

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


def _options(options: list[dict[str, Any]], groups: list[list[str]]) -> list[dict[str, Any]]:
    return [{**one, "params": names} for one, names in zip(options, groups, strict=True)]


def _is_hollow(leaf: Any) -> bool:
    return isinstance(leaf, ForeignLeaf) and leaf.shape == (0,)
