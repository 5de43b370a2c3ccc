"""Writes DeepSpeed's universal form: a file for each trained parameter and each of its moments.

It is what ``ds_to_universal`` makes of ZeRO-1 and -2. ZeRO-3 loads it too: its loader takes a
tensor out of a dictionary where there is one, and the step of ``optimizer_state.pt``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.interop.pickle_records import GlobalName
from holdfast.interop.pickle_writer import PickledCall, PickledObject
from holdfast.interop.writing.planned_files import FormatPlan, KnownBytes, PlannedFile
from holdfast.interop.writing.state_tree import SavedState, state_tree
from holdfast.interop.writing.torch_format import with_tensors
from holdfast.interop.writing.torch_zip import TorchTensor, plan_torch_zip

#: The version whose layout it is: its loaders want to know.
_VERSION, _UNIVERSAL = "0.19.8", 0.4
_STEP = "step"
#: What the file of a parameter itself is called.
_MASTER = "fp32"
#: What the file has before its name where ZeRO-3 looks for it.
_THIRD = "zero_pp_rank_0_"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
#: What DeepSpeed itself keeps beside the state of its user, and finds under these names.
_RESERVED = frozenset(
    (
        *("module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version"),
        "universal_checkpoint_info",
    )
)


def plan_deepspeed_universal(saved: SavedState, step: int) -> FormatPlan:
    """The directory: ``latest_universal``, and the tag that it names.

    Raises UsageError for a state that has no form there: DeepSpeed has one model and one optimizer,
    whose masters and moments are F32.
    """
    module, optimizer = _keys(saved)
    tree = state_tree(saved, numbered=False)
    state = with_tensors(tree.state, saved)
    found = _Universal(saved, module, state.pop(module), state.pop(optimizer))
    tag = f"global_step{step}_universal"
    scaler = _scaler(state.pop("loss_scaler", None), state)
    shared = found.model_states(state, step)
    files = [
        *(_file(f"{tag}/{name}mp_rank_00_model_states.pt", shared) for name in ("", _THIRD)),
        *(_file(f"{tag}/zero/{name}.pt", value) for name, value in found.atoms()),
        _file(f"{tag}/zero/optimizer_state.pt", {**found.optimizer_state(), **scaler}),
        PlannedFile("latest_universal", len(tag), (KnownBytes(0, tag.encode()),)),
    ]
    notes = [
        *tree.notes,
        "every weight says cat_dim 0: on several tensor-parallel ranks DeepSpeed would cut those "
        "that are row-parallel in the wrong dimension",
    ]
    if found.has_unlike_groups:
        notes.append(
            "ZeRO-3's loader gives all groups the options of the first: set those of the others"
        )
    if found.others:
        notes.append(
            f"{', '.join(found.others[:5])}{', ...' if len(found.others) > 5 else ''}: DeepSpeed "
            "loads trained parameters only; buffers and frozen parameters are in `module` of "
            "mp_rank_00_model_states.pt, for load_state_dict(..., strict=False)"
        )
    return FormatPlan(tuple(files), notes=tuple(notes))


def _keys(saved: SavedState) -> tuple[str, str]:
    """The key of the model and that of its optimizer."""
    modules, optimizers = sorted(saved.module_names()), saved.optimizers
    for kind, keys in (("model", modules), ("optimizer", optimizers)):
        if len(keys) != 1:
            there = ", ".join(keys) or "none"
            raise UsageError(
                f"DeepSpeed's universal form has one {kind}, and there are: {there}. Choose one "
                "with --only, or take another format"
            )
    return modules[0], optimizers[0]


def _scaler(value: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The entry of DeepSpeed's loss scaler; a value of another form stays the client's."""
    if isinstance(value, dict) and {"cur_scale", "dynamic"} <= value.keys():
        name = "DynamicLossScaler" if "cur_iter" in value else "LossScaler"
        return {"loss_scaler": PickledObject(GlobalName(_SCALERS, name), value)}
    if value is not None:
        state["loss_scaler"] = value
    return {}


def _file(path: str, value: Any) -> PlannedFile:
    zipped = plan_torch_zip(value)
    return PlannedFile(path, zipped.size_bytes, zipped.parts, zipped.finish)


class _Universal:
    """One model and its optimizer; ``others``: its tensors that the optimizer does not have."""

    def __init__(
        self,
        saved: SavedState,
        key: str,
        module: dict[str, Any],
        optimizer: Mapping[str, Any],
    ) -> None:
        self._key, self._module = key, module
        self._groups: list[dict[str, Any]] = optimizer["param_groups"]
        self._state: Mapping[str, Mapping[str, Any]] = optimizer["state"]
        self._names = [name for group in self._groups for name in group["params"]]
        self._aliases = self._tied(saved)
        known = {*self._names, *self._aliases}
        self.others = [name for name in module if name not in known]
        for name in self._names:
            self._require(name, self._module.get(name), "the parameter")
        for group in self._groups:
            self._require_alike(group["params"])

    def _require_alike(self, names: list[str]) -> None:
        """DeepSpeed has one flat tensor of each kind of state for all parameters of a group."""
        for name in names:
            mine, first = (set(self._state.get(one, {})) for one in (name, names[0]))
            if mine != first:
                raise UsageError(
                    f"{name} has other state than {names[0]} ({', '.join(sorted(first ^ mine))}), "
                    "and DeepSpeed has the same of all parameters of a group: take another format",
                    leaf=name,
                )

    def _tied(self, saved: SavedState) -> dict[str, str]:
        """The names that are others of a trained parameter, and that."""
        names = saved.module_names()[self._key]
        trained = {names[name]: name for name in self._names if name in names}
        return {
            name: trained[leaf]
            for name, leaf in names.items()
            if leaf in trained and trained[leaf] != name
        }

    @property
    def has_unlike_groups(self) -> bool:
        """True where the groups differ in more than their parameters."""
        options = [{**group, "params": None} for group in self._groups]
        return any(one != options[0] for one in options)

    def _require(self, name: str, tensor: Any, what: str) -> None:
        if not isinstance(tensor, TorchTensor):
            raise UsageError(f"{name}: {what} is no tensor of the model, as DeepSpeed has it")
        if tensor.dtype != "F32":
            raise UsageError(
                f"{name}: {what} is {tensor.dtype}, and DeepSpeed's universal form has F32: "
                "convert it with --cast F32",
                leaf=name,
            )
        parts = name.split("/")
        if len(parts) > 1 or name in ("", ".", "..") or len(name.encode()) > 200:
            raise UsageError(f"{name!r:.100} can't be the name of a directory, as DeepSpeed has it")

    def atoms(self) -> Iterable[tuple[str, Any]]:
        """(name, value) of each file below ``zero/``."""
        for name in self._names:
            parameter = self._module[name]
            yield f"{name}/{_MASTER}", {"cat_dim": 0, "param": parameter}
            for kind, value in self._state.get(name, {}).items():
                if kind == _STEP:
                    yield f"{name}/{kind}", value
                    continue
                self._require_moment(name, kind, value)
                yield f"{name}/{kind}", {"cat_dim": 0, "param": value}

    def _require_moment(self, name: str, kind: str, value: Any) -> None:
        shape = self._module[name].shape
        is_named = "/" not in kind and kind != _MASTER
        if not isinstance(value, TorchTensor) or value.shape != shape or not is_named:
            raise UsageError(
                f"{name}: its {kind} has not the shape of the parameter, or is called as that, and "
                "DeepSpeed's universal form has a place for such state and `step` only",
                leaf=name,
            )
        self._require(name, value, f"its {kind}")

    def optimizer_state(self) -> dict[str, Any]:
        """What all parameters share: the options of the groups, and a step for ZeRO-3."""
        groups = [{**group, "params": [number]} for number, group in enumerate(self._groups)]
        steps = {}
        for number, group in enumerate(self._groups):
            kinds = next((self._state[n] for n in group["params"] if n in self._state), {})
            steps[number] = {_STEP: kinds[_STEP]} if _STEP in kinds else {}
        return {
            "ds_version": _VERSION,
            "partition_count": [1] * len(groups),
            "param_groups": groups,
            "optimizer_state_dict": {"state": steps, "param_groups": groups},
        }

    def model_states(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        """The shapes, what is not trained, and all else of the state, as the client's."""
        if taken := sorted(_RESERVED & state.keys()):
            raise UsageError(
                f"{taken[0]} of the state has a name that DeepSpeed itself uses: leave it out with "
                "--only"
            )
        shapes = [
            OrderedDict((name, _size(self._module[name].shape)) for name in group["params"])
            for group in self._groups
        ]
        started = {"lr_scheduler": None, "skipped_steps": 0, "global_steps": step}
        return {
            "module": OrderedDict((name, self._module[name]) for name in self.others),
            "buffer_names": self.others,
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "shared_params": dict(self._aliases),
            "frozen_param_fragments": None,
            **started,
            **state,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": _VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL},
        }


def _size(shape: tuple[int, ...]) -> PickledCall:
    return PickledCall(GlobalName("torch", "Size"), (shape,))
