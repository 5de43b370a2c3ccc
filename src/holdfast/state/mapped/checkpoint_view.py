"""Shows a checkpoint's leaves through rules, by the names the state has for them.

The stored leaves that a tensor is made of are looked up and compared with it before anything is
read. The result is a table under the state's own names, as if the checkpoint had been saved without
rules. Where neither rules nor a selection stand between them, leaves match by name alone, and the
table is the checkpoint's own.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec import Struct, field

from holdfast.geometry.box import HAVE_A_MEAN, Box
from holdfast.state.hidden_state import memory_gone
from holdfast.state.identity import MASTER, TensorNames, TensorOwner, shares_its_own
from holdfast.state.mapped.mapper import RuleMapper, Spec, StateView, shard_sight
from holdfast.state.mapped.tensor_parts import LeafPart, TensorMapping
from holdfast.state.tensors import DTYPE_NAMES, held_boxes


class RowCopies(Struct, frozen=True):
    """Copies in the checkpoint: ``count`` rows of ``leaf``; ``name`` is one of them here.

    Their elements have no mean: the elements of a copy that lie in ``boxes`` must be equal in all
    copies.
    """

    name: str
    leaf: str
    dtype: str
    count: int
    boxes: tuple[Box, ...]


class TiedCopies(Struct, frozen=True):
    """One tensor here, of which the checkpoint has two leaves: ``copy``, called ``name`` here, must
    have the bytes of ``leaf`` in the ``boxes`` that this rank holds.
    """

    name: str
    leaf: str
    copy: str
    boxes: tuple[Box, ...]


class CheckpointView(Struct):
    """A checkpoint as this state sees it.

    ``specs``: (dtype, shape) by the names here. ``aliases``: further names here -> the name here.
    ``targets``: name and tensor of what modules hold, tied tensors once. ``kinds``: by optimizer
    and parameter the kinds of state that are stored.
    ``stored``: the stored form of the leaves that tensors here are made of, by the names the rules
    give them. ``left``: the names here that keep their present content. ``numbers``: names here ->
    the stored one-element leaves that must all equal it. ``rows``: see RowCopies. ``tied``: see
    TiedCopies. ``claimed``: the stored leaves that are used.
    """

    through: RuleMapper
    specs: dict[str, Spec] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    kinds: dict[str, dict[str, dict[str, Spec]]] = field(default_factory=dict)
    stored: dict[str, tuple[str, Spec] | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    numbers: dict[str, list[str]] = field(default_factory=dict)
    rows: list[RowCopies] = field(default_factory=list)
    tied: list[TiedCopies] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    rest: set[str] = field(default_factory=set)
    """Stored leaves that belong to no module or optimizer: ``specs`` has them under their own
    names.
    """
    origins: dict[str, TensorOwner] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    """Stored leaves that values may refer to -> their names here."""

    def sight(self, name: str, tensor: torch.Tensor) -> TensorMapping | None:
        """Returns the mapping of the tensor of this name to stored leaves; None for a tensor stored
        under its own name.
        """
        origin = self.origins.get(name)
        if origin is None:
            return shard_sight(name, tensor, self.through.rank)
        return self.through.sight(origin, tensor)

    def find(self, leaf: str) -> tuple[str, Spec] | None:
        """Returns name and spec of the stored leaf for a leaf that the rules name; None where
        nothing is stored of it.
        """
        if leaf in self.stored:
            return self.stored[leaf]
        spec = self.specs.get(leaf)
        return None if spec is None else (leaf, spec)


# Builds the table of a checkpoint's leaves by the names of the state, and reports what does not
# fit.
#
# Nothing is read for it: names, dtypes and shapes suffice.


#: Limits how many missing names are compared with how many stored ones: each comparison takes time.
_HINTS, _SEARCHED = 5, 2000


class PartMatch(Struct, frozen=True):
    """A part of a tensor, with name and spec of its stored leaf; None where nothing is stored."""

    part: LeafPart
    found: tuple[str, Spec] | None


class TensorMatch(Struct, frozen=True):
    """A tensor of the state, matched with the stored leaves of its parts.

    ``first``: the name under which the tensor was first met. ``leaves``: of all its parts.
    ``unselected``: the parts that a selection by leaf leaves out. ``is_left_out``: the tensor keeps
    its content.
    """

    origin: TensorOwner
    first: str
    mapping: TensorMapping | None
    spec: Spec
    leaves: tuple[str, ...]
    parts: tuple[PartMatch, ...] = ()
    unselected: tuple[LeafPart, ...] = ()
    is_left_out: bool = False

    @property
    def missing(self) -> list[str]:
        """The leaves of parts of which nothing is stored."""
        return [one.part.leaf for one in self.parts if one.found is None]


def make_offer(state_view: StateView, aliases: Mapping[str, str]) -> CheckpointView:
    """Builds the view of the checkpoint by the state's own names.

    ``aliases``: further names of stored leaves.
    """
    return _ViewBuilder(state_view, aliases).run()


class _ViewBuilder:
    """Builds one CheckpointView.

    In the plain case names and specs are those of the checkpoint, without a look at each leaf: a
    restore of thousands of leaves is compared in milliseconds.
    """

    def __init__(self, state_view: StateView, aliases: Mapping[str, str]) -> None:
        self._state_view, self._objects, self._through = (
            state_view,
            state_view.objects,
            state_view.through,
        )
        self._all, self._aliases, self._choice = state_view.stored, aliases, state_view.choice
        self._made_of: dict[object, str] = {}
        self._known, self._kept = TensorNames(), TensorNames()
        self._first_of: dict[str, str] = {}
        self._masters = {
            origin.leaf
            for key in self._objects.optimizers
            for origin, _ in self._objects.masters(key)
        }
        self._copies: dict[str, list[str | None]] = {}
        self._module_of = {key: self._objects.module_of(key) for key in self._objects.optimizers}
        self._hints = _HINTS
        self._tied = {*aliases, *aliases.values()}
        self.view = CheckpointView(state_view.through)

    def run(self) -> CheckpointView:
        view = self.view
        if self._state_view.is_plain:
            self._add_all()
            return view
        for key in self._objects.modules:
            for origin, tensor in self._state_view.held(key):
                if self._add(origin, tensor):
                    self._add_target(origin.leaf, tensor)
        for origin, tensor in self._objects.all_masters():
            self._add(origin, tensor)
        for key in self._objects.optimizers:
            self._add_state(key)
        for path in self._objects.shards:
            self._add_entry(path, self._objects.plain[path])
        for leaf, spec in self._all.items():
            is_free = leaf not in view.claimed and leaf not in view.specs
            if is_free and not leaf.endswith(MASTER):
                view.specs[leaf] = spec
                view.rest.add(leaf)
        view.aliases.update(
            (name, leaf)
            for name, leaf in self._aliases.items()
            if leaf in view.rest and name not in view.specs
        )
        return view

    def _add_all(self) -> None:
        """Adds every leaf under its own name."""
        view = self.view
        view.specs, view.rest = dict(self._all), set(self._all)
        view.aliases = dict(self._aliases)
        for key in self._objects.modules:
            for name, tensor in self._state_view.named(key):
                self._add_target(name, tensor)
        for key in self._objects.optimizers:
            kinds = self._kinds(key, {f"{key}.{name}" for name in self._objects.parameters(key)})
            view.kinds[key] = {
                prefix[len(key) + 1 :]: {
                    kind: self._all[self._aliases.get(leaf, leaf)]
                    for kind, leaf in found.items()
                    if leaf not in self._masters
                }
                for prefix, found in kinds.items()
            }

    # ── modules ──────────────────────────────────────────────────────────────────────────

    def _add_target(self, name: str, tensor: torch.Tensor) -> None:
        """Records a tensor of a module that is restored, and what does not fit of it."""
        view = self.view
        first, leaf = self._kept.name(tensor, name), view.aliases.get(name, name)
        if first == name:
            view.targets.append((leaf, tensor))
        found = view.specs.get(leaf)
        wanted = (DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        tied = self._first_of.setdefault(leaf, first)
        problem = ""
        if found is None:
            problem = self._missing(name, name) if first == name else ""
        elif found != wanted:
            problem = (
                f"{name}: the checkpoint has {found[0]} {list(found[1])}, the model "
                f"{wanted[0]} {list(wanted[1])}"
            )
        elif gone := memory_gone(tensor):
            problem = f"{name} {gone}: restore where it is gathered"
        elif shares_its_own(tensor):
            problem = f"{name}: several of its elements are the same memory; make it contiguous"
        elif view.aliases.get(first, first) != leaf and not self._is_copy(name, first, tensor):
            problem = f"{name}: tied to {first} in the model, but not in the checkpoint"
        elif tied != first:
            problem = f"{name}: tied to {tied} in the checkpoint, but not in the model"
        if problem:
            view.problems.append(problem)

    def _is_copy(self, name: str, first: str, tensor: torch.Tensor) -> bool:
        """True if the checkpoint has a tensor that is tied here under both of its names, each whole
        as it is: these are compared before anything is read.
        """
        view = self.view
        one, other = (view.find(view.aliases.get(each, each)) for each in (first, name))
        is_mapped = any(view.sight(each, tensor) is not None for each in (first, name))
        if is_mapped or one is None or other is None or one[1] != other[1]:
            return False
        boxes = held_boxes(name, tensor, self._through.rank)
        view.tied.append(TiedCopies(name, one[0], other[0], boxes))
        view.claimed.add(other[0])
        view.aliases[name] = view.references[other[0]] = view.aliases.get(first, first)
        return True

    def _add(self, origin: TensorOwner, tensor: torch.Tensor) -> bool:
        """Matches a tensor with the stored leaves it is made of, and records the result; False if
        it is left out.
        """
        match = self._match(origin, tensor)
        self.view.origins[origin.leaf] = origin
        for part in match.unselected:
            self.view.claimed.add(self._aliases.get(part.leaf, part.leaf))
            self.view.stored.setdefault(part.leaf, None)
        if match.is_left_out:
            self.view.left.add(origin.leaf)
            self.view.claimed.update(self._aliases.get(leaf, leaf) for leaf in match.leaves)
        else:
            self._record(match)
        return not match.is_left_out

    def _match(self, origin: TensorOwner, tensor: torch.Tensor) -> TensorMatch:
        name, first = origin.leaf, self._known.name(tensor, origin.leaf)
        mapping = self._through.sight(origin, tensor)
        spec = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
        parts = (LeafPart(name, spec[1], (), ()),) if mapping is None else mapping.parts
        leaves = tuple(part.leaf for part in parts)
        if not self._choice.takes(name, *leaves):
            return TensorMatch(origin, first, mapping, spec, leaves, is_left_out=True)
        takes_all = self._choice.takes(name)
        selected = [part for part in parts if takes_all or self._choice.takes(part.leaf)]
        matches = tuple(PartMatch(part, self._find(part, spec[0], origin)) for part in selected)
        is_left_out = all(
            one.found is None and self._choice.allows(name, one.part.leaf) for one in matches
        )
        return TensorMatch(
            origin,
            first,
            mapping,
            spec,
            leaves,
            matches,
            () if takes_all else tuple(part for part in parts if part not in selected),
            is_left_out,
        )

    def _record(self, match: TensorMatch) -> None:
        name, (dtype, shape) = match.origin.leaf, match.spec
        parts, found = [one.part for one in match.parts], [one.found for one in match.parts]
        self._note_tie(match.origin, match.first, match.mapping, parts, found)
        self.view.specs[name] = match.spec
        for leaf in match.missing:
            # One of several may be missing only by its own name: the rest would keep old content.
            if not self._choice.allows(leaf):
                if match.first == name:
                    self.view.problems.append(self._missing(name, leaf))
                else:
                    self.view.specs.pop(name, None)
        if len(parts) == 1 and found[0] is not None and found[0][1] == (dtype, shape):
            self.view.references.setdefault(found[0][0], name)
        for part, one in zip(parts, found, strict=True):
            self.view.stored[part.leaf] = one
            if one is not None:
                self._compare(name, part, one, dtype, match.mapping)
                self.view.claimed.add(one[0])

    def _find(self, part: LeafPart, dtype: str, origin: TensorOwner) -> tuple[str, Spec] | None:
        """Returns name and spec of the stored leaf for ``part``; None where nothing is stored.

        A parameter and a copy of it in higher precision that only an optimizer has replace each
        other: where the checkpoint has only one of the two, both are read from it.
        """
        leaf = self._aliases.get(part.leaf, part.leaf)
        found = self._all.get(leaf)
        if found is not None and found[0] == dtype:
            return leaf, found
        for other in self._stand_ins(part.leaf, origin):
            there = self._all.get(self._aliases.get(other, other))
            if there is not None and there[0] == dtype and there[1] == part.shape:
                self.view.claimed.add(leaf)  # it is the same elements in fewer digits
                return self._aliases.get(other, other), there
        return None if found is None else (leaf, found)

    def _stand_ins(self, leaf: str, origin: TensorOwner) -> Iterator[str]:
        if origin.suffix == MASTER:
            name = leaf.removeprefix(origin.prefix).removesuffix(MASTER)
            module = self._module_of[origin.prefix[:-1]]
            if module is not None:
                yield f"{module}.{name}"
        elif not origin.suffix:
            name = leaf.removeprefix(origin.prefix)
            for key, module in self._module_of.items():
                if f"{module}." == origin.prefix:
                    yield f"{key}.{name}{MASTER}"

    def _note_tie(
        self,
        origin: TensorOwner,
        met: str,
        mapping: TensorMapping | None,
        parts: Sequence[LeafPart],
        found: Sequence[tuple[str, Spec] | None],
    ) -> None:
        """Records tensors that are tied in the checkpoint: the first name becomes another name of
        the second tensor.

        ``met``: the first name of this tensor here. A copy is no other tensor's name, unless it was
        met under that name: then it is that tensor. Tensors of which nothing is stored are tied
        only where they are tied here.
        """
        is_copy = mapping is not None and mapping.is_copy
        leaves = [None if one is None else one[0] for one in found]
        if is_copy:
            self._copies[origin.leaf] = leaves
        if met != origin.leaf and (is_copy or self._copies.get(met) == leaves) and any(leaves):
            self.view.aliases[origin.leaf] = met
            return
        if is_copy or self._is_parted(origin):
            return
        has_some = mapping is None or any(part.boxes or part.instance for part in parts)
        made_of = (
            "" if has_some else met,
            *(
                (None if one is None else one[0], part.boxes, part.views if mapping else None)
                for part, one in zip(parts, found, strict=True)
            ),
        )
        first = self._made_of.setdefault(made_of, origin.leaf)
        if first != origin.leaf and any(one is not None for one in found):
            self.view.aliases[origin.leaf] = first

    def _is_parted(self, origin: TensorOwner) -> bool:
        return (origin.prefix[:-1], origin.name) in self._objects.parted

    def _compare(
        self,
        name: str,
        part: LeafPart,
        found: tuple[str, Spec],
        dtype: str,
        mapping: TensorMapping | None,
    ) -> None:
        leaf, (stored_dtype, stored_shape) = found
        shapes = {part.shape} | ({(*stored_shape[:1], *part.shape)} if part.rows else set())
        may_cast = mapping is not None and mapping.dtype == dtype
        if stored_shape in shapes and (stored_dtype == dtype or may_cast):
            self._note_rows(name, part, part.boxes, found)
            return
        if mapping is None:
            self.view.specs[name] = found[1]  # said where all others are
            return
        hint = "" if stored_shape not in shapes else f"; rules.cast({dtype!r}) converts it"
        self.view.problems.append(
            f"{name}: by the rules of {leaf}, of which the checkpoint has {stored_dtype} "
            f"{list(stored_shape)}, and they make it {dtype} {list(part.shape)}{hint}"
        )

    def _note_rows(
        self, name: str, part: LeafPart, boxes: tuple[Box, ...], found: tuple[str, Spec]
    ) -> None:
        """Records copies of a leaf saved on another number of ranks: copies that have no mean must
        be equal.
        """
        leaf, (dtype, shape) = found
        is_one_of_rows = part.rows > 0 and shape != part.shape and shape[0] != part.rows
        if is_one_of_rows and dtype not in HAVE_A_MEAN:
            self.view.rows.append(RowCopies(name, leaf, dtype, shape[0], boxes))

    def _missing(self, name: str, leaf: str) -> str:
        near = ""
        if self._hints:
            self._hints -= 1
            key = leaf.partition(".")[0]
            others = [each for each in self._all if each.startswith(f"{key}.")][:_SEARCHED]
            close = difflib.get_close_matches(leaf, others, n=1, cutoff=0.8)
            near = f"; did you mean {close[0]}?" if close else ""
        if leaf == name:
            return f"{name}: in the model, but not in the checkpoint{near}"
        return f"{name}: by the rules made of {leaf}, which is not in the checkpoint{near}"

    # ── optimizers ───────────────────────────────────────────────────────────────────────

    def _add_state(self, key: str) -> None:
        origins = self._state_view.origins[key]
        made_of = {name: self._through.leaf_parts(origin) for name, origin in origins.items()}
        prefixes = {
            origin.stored(leaf)
            for name, origin in origins.items()
            for leaf in (*made_of[name], origin.name)
        }
        kinds = self._kinds(key, prefixes)
        specs = self.view.specs
        for name, origin in origins.items():
            state = self.view.kinds.setdefault(key, {}).setdefault(name, {})
            found = {leaf: kinds.get(origin.stored(leaf), {}) for leaf in made_of[name]}
            own = {} if origin.name in found else kinds.get(origin.stored(origin.name), {})
            for kind in dict.fromkeys(kind for some in found.values() for kind in some):
                there = {leaf: some.get(kind) for leaf, some in found.items()}
                if f".{kind}" == MASTER and not self._is_state(key, origin, kind, there):
                    continue  # no state, but the parameter's own elements
                owner = origin._replace(suffix=f".{kind}")
                self._add_kind(owner, made_of[name], there)
                if owner.leaf in specs and owner.leaf not in self._masters:
                    state[kind] = specs[owner.leaf]
            for kind, leaf in own.items():
                owner = origin._replace(suffix=f".{kind}")
                self._add_alone(owner, leaf)
                state[kind] = specs[owner.leaf]

    def _is_state(
        self, key: str, origin: TensorOwner, kind: str, there: Mapping[str, str | None]
    ) -> bool:
        """True if a leaf named like a parameter's own elements is optimizer state of that name.

        It is where the optimizer has such state here, makes it itself for parameters of fewer
        digits, or had it tied to another tensor.
        """
        assert origin.parameter is not None
        optimizer = self._objects.optimizers[key]
        makes_it = hasattr(optimizer, "make_state") and origin.parameter.dtype != torch.float32
        is_here = makes_it or kind in optimizer.state.get(origin.parameter, {})
        return is_here or not self._tied.isdisjoint(there.values())

    def _kinds(self, key: str, prefixes: set[str]) -> dict[str, dict[str, str]]:
        """Collects the stored state of each parameter: its name with the key -> kind -> leaf."""
        found: dict[str, dict[str, str]] = {}
        for name in [*self._all, *self._aliases]:
            if not name.startswith(f"{key}."):
                continue
            prefix, _, _ = name.rpartition(".")
            while prefix and prefix not in prefixes:
                prefix, _, _ = prefix.rpartition(".")
            if prefix:
                found.setdefault(prefix, {})[name[len(prefix) + 1 :]] = name
        return found

    def _add_kind(
        self, origin: TensorOwner, made_of: Mapping[str, LeafPart], there: Mapping[str, str | None]
    ) -> None:
        """Adds one kind of state of a parameter, which has the parameter's shape or one element;
        other state goes by one name.
        """
        name = origin.leaf
        self.view.origins[name] = origin
        leaves = {leaf: self._aliases.get(full, full) for leaf, full in there.items() if full}
        specs = {leaf: self._all[full] for leaf, full in leaves.items()}
        missing = [leaf for leaf, full in there.items() if full is None]
        for leaf in missing:
            self.view.stored[origin.stored(leaf)] = None
            if not self._choice.allows(name, origin.stored(leaf)):
                self.view.problems.append(
                    f"{name}: by the rules made of {origin.stored(leaf)}, which is not in the "
                    f"checkpoint, although {next(iter(leaves.values()))} is"
                )
        for leaf, full in leaves.items():
            self.view.stored[origin.stored(leaf)] = full, specs[leaf]
            self.view.claimed.add(full)
        dtypes = sorted({dtype for dtype, _ in specs.values()})
        shape = self._shape(origin, made_of, specs)
        if len(dtypes) > 1 or shape is None:
            listed = ", ".join(f"{leaves[leaf]} {d} {list(s)}" for leaf, (d, s) in specs.items())
            self.view.problems.append(
                f"{name}: by the rules made of what does not fit together, or not its parameter: "
                f"{listed}"
            )
            return
        self.view.specs[name] = dtypes[0], shape
        for leaf, spec in specs.items():
            part = made_of[leaf]
            if spec[1][1:] == part.shape:  # which boxes of it are here only its tensor tells
                self._note_rows(name, part, (Box.whole(part.shape),), (leaves[leaf], spec))
        if math.prod(shape) == 1 and len(leaves) > 1 and shape != tuple(origin.parameter.shape):  # type: ignore[union-attr]
            self.view.numbers[name] = list(leaves.values())
        if not self._tied.isdisjoint(there.values()):
            self._note_tied_state(origin, shape, next(iter(leaves.values())))

    def _note_tied_state(self, origin: TensorOwner, shape: tuple[int, ...], leaf: str) -> None:
        """Records state that is tied to other state, or to a parameter, in the checkpoint."""
        parameter, found = origin.parameter, []
        assert parameter is not None
        mapping = self._through.sight(origin, parameter)
        # A copy has the same elements and is still a tensor of its own.
        of_copy = origin.name if mapping is not None and mapping.is_copy else ""
        if shape == tuple(parameter.shape):
            parts = (LeafPart(origin.leaf, shape, (), ()),) if mapping is None else mapping.parts
            for part in parts:
                one = self.view.stored[part.leaf]
                views = None if mapping is None else part.views
                found.append((None if one is None else one[0], part.boxes, views))
        else:  # one number, or one leaf that no rule divides
            found.append((leaf, (), None))
        first = self._made_of.setdefault((of_copy, *found), origin.leaf)
        # State of another dtype is not the same tensor any more, for example a master copy of a
        # parameter.
        if first != origin.leaf and self.view.specs.get(first) == self.view.specs[origin.leaf]:
            self.view.aliases[origin.leaf] = first

    def _shape(
        self, origin: TensorOwner, made_of: Mapping[str, LeafPart], specs: Mapping[str, Spec]
    ) -> tuple[int, ...] | None:
        """Returns the shape of such state here; None when the checkpoint does not determine it."""
        assert origin.parameter is not None
        if all(
            shape == made_of[leaf].shape
            or (made_of[leaf].rows and shape[1:] == made_of[leaf].shape)
            for leaf, (_, shape) in specs.items()
        ):
            return tuple(origin.parameter.shape)
        shapes = {shape for _, shape in specs.values()}
        if len(shapes) == 1 and (math.prod(next(iter(shapes))) == 1 or len(made_of) == 1):
            return shapes.pop()
        return None

    def _add_alone(self, origin: TensorOwner, leaf: str) -> None:
        """Adds state that no rule can divide: it has the name that its parameter has here."""
        full = self._aliases.get(leaf, leaf)
        self.view.origins[origin.leaf] = origin
        self.view.specs[origin.leaf] = self._all[full]
        self.view.stored[origin.leaf] = full, self._all[full]
        self.view.claimed.add(full)

    # ── entries of the state ─────────────────────────────────────────────────────────────

    def _add_entry(self, path: str, tensor: torch.Tensor) -> None:
        mapping = shard_sight(path, tensor, self._through.rank)
        assert mapping is not None
        dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        self.view.specs[path] = dtype, tuple(tensor.shape)
        for part in mapping.parts:
            found = self._all.get(part.leaf)
            if found is None:
                self.view.problems.append(self._missing(path, part.leaf))
                continue
            self.view.stored[part.leaf] = part.leaf, found
            self.view.claimed.add(part.leaf)
            self._compare(path, part, (part.leaf, found), dtype, mapping)
