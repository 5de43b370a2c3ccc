"""The table of what a checkpoint offers to a state, made leaf by leaf; what does not fit is said.

Nothing is read for it: names, dtypes and shapes tell.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import HAVE_A_MEAN
from holdfast.state.known import Known
from holdfast.state.offer import Lens, Offer, Rows, Spec
from holdfast.state.origin import MASTER, Origin
from holdfast.state.sight import Part, Sight
from holdfast.state.tensors import DTYPE_NAMES
from holdfast.state.through import shard_sight

#: How many missing names are compared with how many stored ones: each takes a moment.
_HINTS, _SEARCHED = 5, 2000


def make_offer(lens: Lens, aliases: Mapping[str, str]) -> Offer:
    """What ``lens`` shows, by the state's own names.

    ``aliases``: further names of stored leaves.
    """
    return _Offering(lens, aliases).run()


class _Offering:
    """One table being made."""

    def __init__(self, lens: Lens, aliases: Mapping[str, str]) -> None:
        self._lens, self._objects, self._through = lens, lens.objects, lens.through
        self._all, self._aliases, self._choice = lens.stored, aliases, lens.choice
        self._made_of: dict[object, str] = {}
        self._known = Known()
        self._copies: dict[str, list[str | None]] = {}
        self._module_of = {key: self._objects.module_of(key) for key in self._objects.optimizers}
        self._hints = _HINTS
        self._tied = {*aliases, *aliases.values()}
        self.offer = Offer(lens.through)

    def run(self) -> Offer:
        offer = self.offer
        for key in self._objects.modules:
            for origin, tensor in self._lens.held(key):
                self._take(origin, tensor)
        for origin, tensor in self._objects.all_masters():
            self._take(origin, tensor)
        for key in self._objects.optimizers:
            self._take_state(key)
        for path in self._objects.shards:
            self._take_entry(path, self._objects.plain[path])
        for leaf, spec in self._all.items():
            is_free = leaf not in offer.claimed and leaf not in offer.specs
            if is_free and not leaf.endswith(MASTER):
                offer.specs[leaf] = spec
                offer.rest.add(leaf)
        offer.aliases.update(
            (name, leaf) for name, leaf in self._aliases.items()
            if leaf in offer.rest and name not in offer.specs
        )  # fmt: skip
        return offer

    # ── modules ──────────────────────────────────────────────────────────────────────────

    def _take(self, origin: Origin, tensor: torch.Tensor) -> None:
        name, first = origin.leaf, self._known.name(tensor, origin.leaf)
        sight = self._through.sight(origin, tensor)
        self.offer.origins[name] = origin
        leaves = [name] if sight is None else [part.leaf for part in sight.parts]
        if not self._choice.takes(name, *leaves):
            self._leave(name, leaves)
            return
        dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        shape = tuple(tensor.shape)
        parts = [Part(name, shape, (), ())] if sight is None else list(sight.parts)
        if not self._choice.takes(name):  # but some of what it is made of
            for part in [part for part in parts if not self._choice.takes(part.leaf)]:
                parts.remove(part)
                self.offer.claimed.add(self._aliases.get(part.leaf, part.leaf))
                self.offer.stored.setdefault(part.leaf, None)
        found = [self._find(part, dtype, origin) for part in parts]
        missing = [part.leaf for part, one in zip(parts, found, strict=True) if one is None]
        if len(missing) == len(parts) and all(self._choice.allows(name, one) for one in missing):
            self._leave(name, leaves)
            return
        self._note_tie(origin, first, sight, parts, found)
        self.offer.specs[name] = dtype, shape
        for leaf in missing:  # one of several only by its own name, or the rest would be as it was
            if not self._choice.allows(leaf):
                if first == name:
                    self.offer.problems.append(self._missing(name, leaf))
                else:
                    self.offer.specs.pop(name, None)
        if len(parts) == 1 and found[0] is not None and found[0][1] == (dtype, shape):
            self.offer.references.setdefault(found[0][0], name)
        for part, one in zip(parts, found, strict=True):
            self.offer.stored[part.leaf] = one
            if one is not None:
                self._compare(name, part, one, dtype, sight)
                self.offer.claimed.add(one[0])

    def _leave(self, name: str, leaves: Sequence[str]) -> None:
        self.offer.left.add(name)
        self.offer.claimed.update(self._aliases.get(leaf, leaf) for leaf in leaves)

    def _find(self, part: Part, dtype: str, origin: Origin) -> tuple[str, Spec] | None:
        """What is stored of a leaf, and under which name.

        A parameter and a copy of it that only an optimizer has, in more digits, stand for each
        other: whoever needs one takes it where only the other has the digits.
        """
        leaf = self._aliases.get(part.leaf, part.leaf)
        found = self._all.get(leaf)
        if found is not None and found[0] == dtype:
            return leaf, found
        for other in self._stand_ins(part.leaf, origin):
            there = self._all.get(self._aliases.get(other, other))
            if there is not None and there[0] == dtype and there[1] == part.shape:
                self.offer.claimed.add(leaf)  # it is the same elements in fewer digits
                return self._aliases.get(other, other), there
        return None if found is None else (leaf, found)

    def _stand_ins(self, leaf: str, origin: Origin) -> Iterator[str]:
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
        self, origin: Origin, met: str, sight: Sight | None, parts: Sequence[Part],
        found: Sequence[tuple[str, Spec] | None],
    ) -> None:  # fmt: skip
        """Tensors that are one in the checkpoint: of the second the first is another name.

        ``met``: the first name of this one here. A copy is no other tensor's name, unless it was
        met under that: then it is that tensor. Tensors with nothing of a leaf are one only where
        they are one here.
        """
        is_copy = sight is not None and sight.is_copy
        leaves = [None if one is None else one[0] for one in found]
        if is_copy:
            self._copies[origin.leaf] = leaves
        if met != origin.leaf and (is_copy or self._copies.get(met) == leaves) and any(leaves):
            self.offer.aliases[origin.leaf] = met
            return
        if is_copy or self._is_parted(origin):
            return
        has_some = sight is None or any(part.boxes or part.instance for part in parts)
        made_of = (
            "" if has_some else met,
            *(
                (None if one is None else one[0], part.boxes, part.views if sight else None)
                for part, one in zip(parts, found, strict=True)
            ),
        )
        first = self._made_of.setdefault(made_of, origin.leaf)
        if first != origin.leaf and any(one is not None for one in found):
            self.offer.aliases[origin.leaf] = first

    def _is_parted(self, origin: Origin) -> bool:
        return (origin.prefix[:-1], origin.name) in self._objects.parted

    def _compare(
        self, name: str, part: Part, found: tuple[str, Spec], dtype: str, sight: Sight | None
    ) -> None:
        leaf, (stored_dtype, stored_shape) = found
        shapes = {part.shape} | ({(*stored_shape[:1], *part.shape)} if part.rows else set())
        may_cast = sight is not None and sight.dtype == dtype
        if stored_shape in shapes and (stored_dtype == dtype or may_cast):
            self._note_rows(name, part, part.boxes, found)
            return
        if sight is None:
            self.offer.specs[name] = found[1]  # said where all others are
            return
        hint = "" if stored_shape not in shapes else f"; rules.cast({dtype!r}) converts it"
        self.offer.problems.append(
            f"{name}: by the rules of {leaf}, of which the checkpoint has {stored_dtype} "
            f"{list(stored_shape)}, and they make it {dtype} {list(part.shape)}{hint}"
        )

    def _note_rows(
        self, name: str, part: Part, boxes: tuple[Box, ...], found: tuple[str, Spec]
    ) -> None:
        """Another number of ranks had copies of a leaf: those that have no mean must be equal."""
        leaf, (dtype, shape) = found
        is_one_of_rows = part.rows > 0 and shape != part.shape and shape[0] != part.rows
        if is_one_of_rows and dtype not in HAVE_A_MEAN:
            self.offer.rows.append(Rows(name, leaf, dtype, shape[0], boxes))

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

    def _take_state(self, key: str) -> None:
        origins = self._lens.origins[key]
        made_of = {name: self._through.made_of(origin) for name, origin in origins.items()}
        prefixes = {origin.stored(leaf) for name, origin in origins.items()
                    for leaf in (*made_of[name], origin.name)}  # fmt: skip
        kinds = self._kinds(key, prefixes)
        for name, origin in origins.items():
            found = {leaf: kinds.get(origin.stored(leaf), {}) for leaf in made_of[name]}
            own = {} if origin.name in found else kinds.get(origin.stored(origin.name), {})
            for kind in dict.fromkeys(kind for some in found.values() for kind in some):
                there = {leaf: some.get(kind) for leaf, some in found.items()}
                if f".{kind}" == MASTER and not self._is_state(key, origin, kind, there):
                    continue  # no state, but the parameter's own elements
                self._take_kind(origin._replace(suffix=f".{kind}"), made_of[name], there)
            for kind, leaf in own.items():
                self._take_alone(origin._replace(suffix=f".{kind}"), leaf)

    def _is_state(
        self, key: str, origin: Origin, kind: str, there: Mapping[str, str | None]
    ) -> bool:
        """Whether what is called as a parameter's own elements is state under that name.

        It is where the optimizer has such state here, or had it tied to another tensor.
        """
        assert origin.parameter is not None
        state = self._objects.optimizers[key].state.get(origin.parameter, {})
        return kind in state or not self._tied.isdisjoint(there.values())

    def _kinds(self, key: str, prefixes: set[str]) -> dict[str, dict[str, str]]:
        """What is stored of each parameter: its name with the key -> kind -> leaf."""
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

    def _take_kind(
        self, origin: Origin, made_of: Mapping[str, Part], there: Mapping[str, str | None]
    ) -> None:
        """State of a parameter: of its shape, or one number; other state goes by one name."""
        name = origin.leaf
        self.offer.origins[name] = origin
        leaves = {leaf: self._aliases.get(full, full) for leaf, full in there.items() if full}
        specs = {leaf: self._all[full] for leaf, full in leaves.items()}
        missing = [leaf for leaf, full in there.items() if full is None]
        for leaf in missing:
            self.offer.stored[origin.stored(leaf)] = None
            if not self._choice.allows(name, origin.stored(leaf)):
                self.offer.problems.append(
                    f"{name}: by the rules made of {origin.stored(leaf)}, which is not in the "
                    f"checkpoint, although {next(iter(leaves.values()))} is"
                )
        for leaf, full in leaves.items():
            self.offer.stored[origin.stored(leaf)] = full, specs[leaf]
            self.offer.claimed.add(full)
        dtypes = sorted({dtype for dtype, _ in specs.values()})
        shape = self._shape(origin, made_of, specs)
        if len(dtypes) > 1 or shape is None:
            listed = ", ".join(f"{leaves[leaf]} {d} {list(s)}" for leaf, (d, s) in specs.items())
            self.offer.problems.append(
                f"{name}: by the rules made of what does not fit together, or not its parameter: "
                f"{listed}"
            )
            return
        self.offer.specs[name] = dtypes[0], shape
        for leaf, spec in specs.items():
            part = made_of[leaf]
            if spec[1][1:] == part.shape:  # which boxes of it are here only its tensor tells
                self._note_rows(name, part, (Box.whole(part.shape),), (leaves[leaf], spec))
        if math.prod(shape) == 1 and len(leaves) > 1 and shape != tuple(origin.parameter.shape):  # type: ignore[union-attr]
            self.offer.numbers[name] = list(leaves.values())
        if not self._tied.isdisjoint(there.values()):
            self._note_tied_state(origin, shape, next(iter(leaves.values())))

    def _note_tied_state(self, origin: Origin, shape: tuple[int, ...], leaf: str) -> None:
        """State that is one with other state, or with a parameter, in the checkpoint."""
        parameter, found = origin.parameter, []
        assert parameter is not None
        sight = self._through.sight(origin, parameter)
        # A copy has the same elements, and is a tensor of its own all the same.
        of_copy = origin.name if sight is not None and sight.is_copy else ""
        if shape == tuple(parameter.shape):
            parts = (Part(origin.leaf, shape, (), ()),) if sight is None else sight.parts
            for part in parts:
                one = self.offer.stored[part.leaf]
                views = None if sight is None else part.views
                found.append((None if one is None else one[0], part.boxes, views))
        else:  # one number, or one leaf that no rule divides
            found.append((leaf, (), None))
        first = self._made_of.setdefault((of_copy, *found), origin.leaf)
        # Of another dtype it is not the same tensor any more: a master of a parameter, say.
        if first != origin.leaf and self.offer.specs.get(first) == self.offer.specs[origin.leaf]:
            self.offer.aliases[origin.leaf] = first

    def _shape(
        self, origin: Origin, made_of: Mapping[str, Part], specs: Mapping[str, Spec]
    ) -> tuple[int, ...] | None:
        """The shape that such state has here; None when that cannot be told."""
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

    def _take_alone(self, origin: Origin, leaf: str) -> None:
        """State that no rule can divide: it has the name that its parameter has here."""
        full = self._aliases.get(leaf, leaf)
        self.offer.origins[origin.leaf] = origin
        self.offer.specs[origin.leaf] = self._all[full]
        self.offer.stored[origin.leaf] = full, self._all[full]
        self.offer.claimed.add(full)

    # ── entries of the state ─────────────────────────────────────────────────────────────

    def _take_entry(self, path: str, tensor: torch.Tensor) -> None:
        sight = shard_sight(path, tensor, self._through.rank)
        assert sight is not None
        dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        self.offer.specs[path] = dtype, tuple(tensor.shape)
        for part in sight.parts:
            found = self._all.get(part.leaf)
            if found is None:
                self.offer.problems.append(self._missing(path, part.leaf))
                continue
            self.offer.stored[part.leaf] = part.leaf, found
            self.offer.claimed.add(part.leaf)
            self._compare(path, part, (part.leaf, found), dtype, sight)
