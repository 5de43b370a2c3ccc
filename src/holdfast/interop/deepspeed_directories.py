"""Reads DeepSpeed checkpoints of ZeRO 0 to 3, and their universal form.

The fp32 masters are the parameters; 16-bit copies beside them are not read. A rank's file has flat
runs of elements, each a range of a parameter in row-major order: padding belongs to none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msgspec.structs import replace

from holdfast.errors import ForeignFormatError, HoldfastError, UsageError
from holdfast.geometry.box import Box
from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.arrange import MODEL
from holdfast.interop.deepspeed_experts import DATA_FIRST, ExpertRanks, experts_in
from holdfast.interop.deepspeed_files import TagFiles, named_options
from holdfast.interop.deepspeed_frozen import add_frozen
from holdfast.interop.deepspeed_pipeline import Shapes, layers_in, merged_groups, require_trained
from holdfast.interop.deepspeed_shapes import require_shapes, shapes_of
from holdfast.interop.deepspeed_universal import COMMON, common_state, read_universal, step_of_atom
from holdfast.interop.foreign import ForeignLeaf, StoredBox
from holdfast.interop.master_copies import differing_copies, is_master_of
from holdfast.interop.parameter_partition import (
    PartitionError,
    mapped_cuts,
    model_ranks,
    partition_cuts,
)
from holdfast.interop.pickle_records import Record, TensorRef, shown
from holdfast.interop.rank_copies import RankCopies
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.tensor_ranks import INFO, TensorRanks

#: The masters of fp16 without ZeRO, in the dictionary of its optimizer.
_MASTERS = frozenset(("fp32_groups", "fp32_groups_flat"))
#: So many masters are compared with the copies of 16 bits: all of a save are of one step.
_COMPARED = 16
#: What hyperparameters may be that all ranks have alike.
_OPTIONS = (int, float, str, tuple, list, type(None), TensorRef)


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
        self._files = TagFiles(files, tag)
        names = self._files.names
        self._is_staged = any(map(tags.LAYER.fullmatch, names))
        self._is_universal = any(map(tags.ATOM.fullmatch, names))
        self._has_experts = any(map(tags.EXPERT.fullmatch, names))
        self._experts: ExpertRanks | None = None
        self._refuse_parallel()
        #: The optimizer files of each tensor-parallel rank, by their data-parallel ranks.
        self._optimizers: dict[int, dict[int, str]] = {}
        for (data_rank, rank), name in self._files.numbered(tags.OPTIMIZER).items():
            self._optimizers.setdefault(rank, {})[data_rank] = name
        #: The model's files of each tensor-parallel rank: of ZeRO-3 those of data-parallel ranks.
        self._models: dict[int, dict[int, str]] = {}
        for (data_rank, rank), name in self._files.numbered(tags.MODEL).items():
            self._models.setdefault(rank, {})[data_rank] = name
        self._is_partitioned = any(max(some) >= 0 for some in self._models.values())
        for some in self._models.values():  # the universal form has both for its readers
            if self._is_partitioned and -1 in some and not self._is_universal:
                raise self._files.error(
                    some[-1], "there are files of ZeRO-3, too: files of two saves are mixed"
                )
        self._mains = {
            rank: some[min(some)] for rank, some in self._models.items() if {0, -1} & some.keys()
        }
        self._main = self._mains.get(0)
        self._degree = 1 + max((*self._optimizers, *self._mains), default=0)
        self._copies = RankCopies(files)
        self._notes: list[str] = []
        #: Why the optimizer cannot be taken: without a part of its state it is another.
        self._unfit: list[str] = []

    def _refuse_parallel(self) -> None:
        if self._is_universal and (self._is_staged or self._has_experts):
            what = "pipelines" if self._is_staged else "models with experts"
            raise self._files.unread("", f"the universal form of DeepSpeed's {what}")

    @property
    def main(self) -> dict[str, Any] | None:
        """What the file of the model says; None where there is none."""
        return None if self._main is None else self._files.value(self._main)

    def read(self) -> DeepSpeedState:
        if self._main is None:
            raise self._files.missing(self._main_name(0), "the model's files")
        main = self._files.value(self._main)
        names = self._model_files(main)
        if self._has_experts and (main.get("ds_autoep_layers") or self._degree > 1):
            raise self._files.unread(
                self._main,
                "DeepSpeed checkpoints with experts that it cut by itself (AutoEP), or on "
                "tensor-parallel ranks or stages,",
            )
        trees = [self._files.tree(name) for name in names]
        ranks = self._tensor_ranks(main)
        tree = trees[0]
        rest = {k: v for k, v in tree.items() if k not in tags.DESCRIBING and v is not None}
        local = [shapes_of(self._files, name) for name in names]
        for rank, tree in enumerate(trees):
            ranks_files = self._models[rank].values() if self._is_partitioned else ()
            require_shapes(self._files, names[rank], tree, local[rank], ranks_files)
        shapes = merged_groups(self._files, local) if self._is_staged else local[0]
        model = self._module(trees, shapes, ranks)
        self._compare(trees, rest, main)
        optimizer: dict[str, Any] | None = tree.get("optimizer")
        if self._is_universal:
            optimizer = self._universal(model, shapes, rest, main)
        elif self._optimizers:
            optimizer = self._zero(model, shapes, local, rest, main, ranks)
        elif shapes:
            raise self._files.error(
                self._main, "it is of a ZeRO checkpoint, and no rank's optimizer file is there"
            )
        elif optimizer is not None or any(map(tags.EXPERT_OPTIMIZER.fullmatch, self._files.names)):
            self._refuse_numbered(optimizer or {})
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
        masters = {name for group in shapes for name in group}
        if self._is_staged:
            buffers = {*chain(*(one.get("buffer_names") or () for one in trees))}
            found = layers_in(self._files, {*masters, *buffers}, self._notes)
            require_trained(self._files, found.keys() - buffers, trees)
            return found
        modules = [dict(_module_of(one)) for one in trees]
        if self._is_partitioned:
            for rank, module in enumerate(modules):
                optimizers = self._optimizers.get(rank, {})
                self._notes += [
                    f"{name!r:.200} is left out: no rank's file has its elements"
                    for name in add_frozen(
                        self._files, module, self._models[rank], optimizers, masters
                    )
                ]
        if self._has_experts:
            counts = trees[0].get("num_experts")
            modules[0] |= experts_in(self._files, self._mains[0], counts)
        if ranks is not None:
            ranks.join_module(modules[0], modules, masters, trees[0].get("buffer_names"))
        return modules[0]

    def _compare(
        self, trees: list[dict[str, Any]], rest: Mapping[str, Any], main: Mapping[str, Any]
    ) -> None:
        """Note the values and buffers that ranks have otherwise than the first, whose are taken."""
        files = [name for rank in range(self._degree) for name in self._models[rank].values()]
        have = dict(zip(self._model_files(main), trees, strict=True))
        every = [have.get(name) or self._files.tree(name) for name in files]
        buffers = set(trees[0].get("buffer_names") or ())
        held = [
            {
                f"the buffer {k!s:.200}": v
                for k, v in (one.get("module") or {}).items()
                if k in buffers
            }
            | {f"{k!s:.200} of the client state": v for k, v in one.items() if k in rest}
            for one in every
        ]
        self._note_differing(held, self._mains[0])

    def _note_differing(self, values: list[dict[str, Any]], taken: str) -> None:
        self._notes += [
            f"{what} is not the same on all ranks: that of {taken} is taken"
            for what in self._copies.differing(values)
        ]

    def _refuse_numbered(self, optimizer: Mapping[str, Any]) -> None:
        """Note why an optimizer without ZeRO is left out, where it is."""
        if masters := optimizer.keys() & _MASTERS:
            self._unfit.append(
                f"{masters.pop()} of {self._main}, as fp16 without ZeRO has them, are masters in "
                "F32 without names, so parameters are the copies of 16 bits. Save with ZeRO-1 for "
                "both"
            )
        elif self._degree > 1 or self._has_experts:
            self._unfit.append("several ranks have it by their numbers. Save with ZeRO-1 for it")

    # ── tensor-parallel ranks and stages ─────────────────────────────────────────────────

    def _model_files(self, main: Mapping[str, Any]) -> list[str]:
        """The model's file of each tensor-parallel rank, of which a shard would look whole."""
        degree = max(self._degree, model_ranks(main))
        for rank in range(degree):
            if rank not in self._mains:
                name = self._main_name(rank)
                raise self._files.missing(name, f"{degree} ranks' files")
        return [self._mains[rank] for rank in range(self._degree)]

    def _main_name(self, rank: int) -> str:
        part = "zero_pp_rank_0_" if self._is_partitioned else ""
        return f"{part}mp_rank_{rank:02d}_model_states.pt"

    def _tensor_ranks(self, main: Mapping[str, Any]) -> TensorRanks | None:
        """What the file says of several tensor-parallel ranks; None for one, and for stages."""
        if self._degree == 1:
            return None
        for name in self._model_files(main):
            if self._files.value(name).get("global_steps") != main.get("global_steps"):
                raise self._files.error(name, "its global_steps are of another save")
        where = self._files.where(self._mains[0])
        return None if self._is_staged else TensorRanks(main.get(INFO), self._degree, where)

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
                raise self._files.missing(name, f"{count} ranks' files")
        extra = [rank for rank in there if rank >= count]
        if extra:
            raise self._files.error(
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
        counts = self._partition_counts(first, state, len(shapes))
        names = [self._ranks(max(counts), rank) for rank in range(self._degree)]
        states = [[self._zero_state(name) for name in some] for some in names]
        is_third = "fp32_flat_groups" in state
        if self._has_experts:
            if is_third:
                raise self._files.unread(first, "DeepSpeed checkpoints of ZeRO-3 with experts")
            is_data_first = (main.get("ds_config") or {}).get(DATA_FIRST) is True
            try:
                self._experts = ExpertRanks(shapes, counts, is_data_first)
            except PartitionError as error:
                raise self._files.error(first, str(error)) from None
            shapes = self._experts.shapes
            local = [shapes]
        key = "optimizer_state_dict" if is_third else "base_optimizer_state"
        self._refuse_mixed([*chain(*names)], [*chain(*states)], key)
        inner = state[key]
        parts: dict[tuple[str, str], list[StoredBox]] = {}
        copies: dict[tuple[str, str], list[StoredBox]] = {}
        dtypes: dict[tuple[str, str], str] = {}
        all_shapes = {name: shape for group in shapes for name, shape in group.items()}
        groups = [[*group] for group in shapes]
        if ranks and any([[*group] for group in one] != groups for one in local):
            raise self._files.error(first, "the tensor-parallel ranks have other parameters")
        joined = {} if ranks is None else ranks.join_groups(local)
        for rank, (files, some_states) in enumerate(zip(names, states, strict=True)):
            found_parts = self._flat_parts(files, some_states, key, local[rank], rank)
            for (name, kind), (dtype, boxes) in found_parts.items():
                if name in joined:
                    copies.setdefault((name, kind), []).extend(
                        joined[name].place_copies(boxes, dtype, rank)
                    )
                    boxes = [*joined[name].place(boxes, dtype, rank)]
                if dtypes.setdefault((name, kind), dtype) != dtype:
                    raise self._files.error(files[0], f"{name!r:.200} is of another type here")
                parts.setdefault((name, kind), []).extend(boxes)
        all_shapes |= {name: one.shape for name, one in joined.items()}
        self._require_held(first, all_shapes, {name for name, kind in parts if not kind})
        found, masters = self._whole_leaves(first, parts, copies, dtypes, all_shapes, model)
        compared = [*masters][:: -(-len(masters) // _COMPARED)] if masters else []
        self._notes += differing_copies(self._files.files, {n: masters[n] for n in compared}, model)
        model |= masters
        self._add_scaler(rest, state)
        self._compare_steps(first, inner, main)
        groups = [
            [n for index in group["params"] for n in shapes[index]]
            for group in inner["param_groups"]
        ]
        self._add_steps(found, first, inner, shapes)
        return {"state": found, "param_groups": named_options(inner["param_groups"], groups)}

    def _whole_leaves(
        self,
        first: str,
        parts: Mapping[tuple[str, str], list[StoredBox]],
        copies: Mapping[tuple[str, str], list[StoredBox]],
        dtypes: Mapping[tuple[str, str], str],
        shapes: Mapping[str, tuple[int, ...]],
        model: Mapping[str, Any],
    ) -> tuple[dict[str, dict[str, Any]], dict[str, ForeignLeaf]]:
        """Return moments and masters by parameter, whose elements the files hold once each."""
        found: dict[str, dict[str, Any]] = {}
        masters: dict[str, ForeignLeaf] = {}
        for (name, kind), boxes in parts.items():
            leaf = ForeignLeaf(
                dtypes[name, kind],
                shapes[name],
                tuple(boxes),
                tuple(copies.get((name, kind), ())),
            )
            if sum(part.box.volume for part in boxes) != math.prod(shapes[name]):
                raise self._files.error(first, f"{name!r:.200} is not covered by the ranks' files")
            if kind:
                found.setdefault(name, {})[kind] = leaf
            else:
                self._require_expert(name, leaf, model.get(name))
                masters[name] = leaf
        return found, masters

    def _partition_counts(self, name: str, state: Mapping[str, Any], groups: int) -> list[int]:
        """Over how many ranks each group is cut; one number where all are cut alike."""
        counts = state.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if not counts or any(type(one) is not int or one < 1 for one in counts):
            raise self._files.error(name, "it does not say over how many ranks it is cut")
        if len(set(counts)) > 1 and not self._has_experts:
            raise self._files.error(
                name,
                f"its groups are cut over {counts!s:.100} ranks, as of a model with experts, and "
                "there is no file of an expert. Copy these from where it was written",
            )
        return counts if len(counts) == groups or len(set(counts)) > 1 else counts[:1] * groups

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
                        partition_cuts(shapes[number], rank, len(files), flat.shape[0])
                        if is_third
                        else mapped_cuts(one, number)
                    )
                except PartitionError as error:
                    raise self._files.error(file, str(error)) from None
                for name, begin, start, count in cuts:
                    if self._experts is not None:
                        name = self._experts.name_of(name, number, rank)
                    if name not in all_shapes:
                        raise self._files.error(file, f"{name!r:.200} has no shape in {self._main}")
                    for kind, ref in kinds.items():
                        dtype, have = found.setdefault((name, kind), (ref.dtype, []))
                        if dtype != ref.dtype:
                            raise self._files.error(
                                file, f"{name!r:.200} is {ref.dtype}, not {dtype}"
                            )
                        at = start if is_third else sum(box.box.volume for box in have)
                        have += self._files.run(
                            file, ref, begin, at, count, all_shapes[name], image
                        )
        return found

    def _require_expert(self, name: str, master: ForeignLeaf, there: Any) -> None:
        """A master that is not that of the file of its expert is of another expert."""
        if self._experts is None or not isinstance(there, ForeignLeaf):
            return
        if not is_master_of(self._files.files, master, there):
            raise self._files.error(
                self._mains[0],
                f"{name!r:.200} is another in the ranks' files than in its own: which rank has "
                "which experts is not what DeepSpeed does by itself",
            )

    def _require_held(
        self, file: str, shapes: Mapping[str, tuple[int, ...]], held: set[str]
    ) -> None:
        """The copy of 16 bits that the model has of a parameter is never taken for it."""
        for name, shape in shapes.items():
            if math.prod(shape) and name not in held:
                raise self._files.error(file, f"{name!r:.200} is in no flat group of the ranks")

    def _zero_state(self, name: str) -> dict[str, Any]:
        state = self._files.value(name).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise self._files.error(name, "it holds no state of an optimizer of ZeRO")
        key = "optimizer_state_dict" if "fp32_flat_groups" in state else "base_optimizer_state"
        inner = state.get(key)
        if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
            raise self._files.error(
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

    def _refuse_mixed(self, names: list[str], states: list[dict[str, Any]], key: str) -> None:
        """Ranks of one save are at one step, with the same hyperparameters. Other single values
        that are not the same on all ranks are no state of a parameter, which has one of each.
        """
        marks = []
        for name, state in zip(names, states, strict=True):
            inner = state[key]
            singles = {
                (number, kind): self._files.single(name, value)
                for number, some in inner["state"].items()
                for kind, value in (some.items() if isinstance(some, dict) else ())
                if not isinstance(value, TensorRef) or value.shape == ()
            }
            steps = [value for (_, kind), value in singles.items() if kind == "step"]
            options = [
                {
                    k: self._files.single(name, v)
                    for k, v in group.items()
                    if k != "params" and isinstance(v, _OPTIONS)
                }
                for group in inner["param_groups"]
            ]
            marks.append((steps, options, singles))
        first_steps, first_options, first_singles = marks[0]
        for name, (steps, options, singles) in zip(names, marks, strict=True):
            if self._copies.differing([{"": (first_steps, first_options)}, {"": (steps, options)}]):
                raise self._files.error(
                    name,
                    f"its steps are {[*map(shown, steps)]!s:.60}, those of {names[0]} "
                    f"{[*map(shown, first_steps)]!s:.60}, or "
                    "hyperparameters differ: files of two saves are mixed",
                )
            kinds = {
                key[1]
                for key in singles.keys() | first_singles.keys()
                if self._copies.differing([{"": s.get(key, ())} for s in (first_singles, singles)])
            }
            if kinds:
                self._unfit.append(
                    f"{min(map(str, kinds)):.100} in {name} is a single value, and not that of "
                    f"{names[0]}: which a parameter of both has is not stored"
                )
        scalers = [{"the loss scaler": state.get("loss_scaler")} for state in states]
        self._note_differing(scalers, names[0])

    def _compare_steps(self, name: str, inner: Mapping[str, Any], main: Mapping[str, Any]) -> None:
        """Note an optimizer that has not taken the steps of the model: it may be of another save,
        or was new when a run went on.
        """
        steps, skipped = main.get("global_steps"), main.get("skipped_steps") or 0
        if type(steps) is not int or type(skipped) is not int:
            return
        for some in inner["state"].values():
            taken = self._files.number(name, some.get("step")) if isinstance(some, dict) else None
            if taken is not None and taken != steps - skipped:
                self._notes.append(
                    f"the optimizer in {name} has taken {taken:g} steps, {self._main} says "
                    f"{steps - skipped}: files of two saves may be mixed"
                )
                return

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
                        extent = replace(self._files.open(file).place(value), strides=None)
                        part = StoredBox(Box((), ()), extent)
                        found.setdefault(name, {})[kind] = ForeignLeaf(value.dtype, (), (part,))
                    elif not isinstance(value, TensorRef):
                        found.setdefault(name, {})[kind] = value

    def _add_scaler(self, rest: dict[str, Any], state: Mapping[str, Any]) -> None:
        if isinstance(state.get("loss_scaler"), Record):
            rest.setdefault("loss_scaler", state["loss_scaler"])

    def _universal(
        self, model: dict[str, Any], shapes: Shapes, rest: dict[str, Any], main: Mapping[str, Any]
    ) -> dict[str, Any]:
        common = common_state(self._files)
        inner = common.get("optimizer_state_dict")
        self._add_scaler(rest, common)
        steps: dict[str, dict[str, Any]] = {}
        if isinstance(inner, dict) and "state" in inner:
            singles = {
                number: {k: v for k, v in some.items() if getattr(v, "shape", ()) == ()}
                for number, some in inner["state"].items()
            }
            self._add_steps(steps, COMMON, {"state": singles}, shapes)
        found = read_universal(
            self._files, model, shapes, steps, self._notes, is_cut=self._degree > 1
        )
        taken = {name: {"step": step_of_atom(self._files, name)} for name in [*found["state"]][:1]}
        said = inner if isinstance(inner, dict) and "state" in inner else {"state": {}}
        self._compare_steps(COMMON, {"state": taken | said["state"]}, main)
        return found


def _module_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    return tree.get("module") or {}
