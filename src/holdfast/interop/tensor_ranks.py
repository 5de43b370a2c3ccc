"""Joins the shards that tensor-parallel ranks have of a tensor, as DeepSpeed's files say.

``universal_checkpoint_info`` has a map of each parameter (AutoTP), or lists of names by how they
are joined. What it does not say for certain is refused by name: a guess would be almost right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.leaves import MAX_DIMS
from holdfast.interop.extent_reader import extent_of, row_major
from holdfast.interop.foreign import ForeignLeaf, StoredBox, tensor_parts

INFO = "universal_checkpoint_info"
#: The one form of a map that is read.
_MAP_VERSION = 1
REPLICATED, ROW = "tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"
HALVES, _VOCABULARY = "parameter_with_2_sub_params_cat_dim_0", "vocabulary_parameter_patterns"
#: Parameters that no part of a file gives back: averages, parts of parts, those without a map.
_REFUSED = ("parameter_to_average_patterns", "autotp_unsupported_parameter_patterns")
_PARTED = "parameter_with_sub_params"
MAX_PATTERNS = 100_000
#: More than maps have of one rank's shard; each is compared with those of the other ranks.
MAX_PIECES = 4096
#: What patterns may have, so that none takes long: letters, ``\.``, ``.``, ``.*``, ``\d``, ``\d+``.
_TOKEN = re.compile(r"\\d\+?|\\[^a-zA-Z0-9]|\.\*|[^\\.^$*+?{}()\[\]|]|\.")
_MAX_REPEATED = 1
#: A name so long is matched with none, and so many matches are made: they take a second or two.
_MAX_NAME = 1024
_MAX_MATCHES = 200_000


@dataclass(frozen=True, slots=True)
class JoinedPiece:
    """A box of a rank's shard, and the box of the whole tensor that it is, of the same shape."""

    inner: Box
    whole: Box


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """The shape of a tensor, and what each rank has of it that no rank before it has.

    ``copies``: what each rank has that one before it has too.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[JoinedPiece, ...], ...]
    copies: tuple[tuple[JoinedPiece, ...], ...]

    def place(self, parts: Sequence[StoredBox], dtype: str, rank: int) -> Iterator[StoredBox]:
        """The parts of the shard of a tensor-parallel rank as parts of the whole."""
        return _placed(self.pieces[rank], parts, dtype)

    def place_copies(
        self, parts: Sequence[StoredBox], dtype: str, rank: int
    ) -> Iterator[StoredBox]:
        """Those of the parts that a rank before it has too."""
        return _placed(self.copies[rank], parts, dtype)


def _placed(
    pieces: Sequence[JoinedPiece], parts: Sequence[StoredBox], dtype: str
) -> Iterator[StoredBox]:
    for part in parts:
        for piece in pieces:
            common = part.box.intersect(piece.inner)
            if common is None or common.is_empty:
                continue
            extent = extent_of(part, common, dtype)
            at = common.shift(piece.whole.start).relative_to(piece.inner).start
            for one in tensor_parts(dtype, common.shape, extent, extent.file):
                yield StoredBox(one.box.shift(at), one.extent, part.rank)


class _Names:
    """The values that patterns have in a file; a name has that of the first that fits it."""

    def __init__(self, where: str, patterns: Mapping[Any, Any]) -> None:
        self._where, self._left = where, _MAX_MATCHES
        self._exact: dict[str, Any] = {}
        self._others: list[tuple[re.Pattern[str], Any]] = []
        if len(patterns) > MAX_PATTERNS:
            raise UsageError(f"{where}: {len(patterns)} patterns are more than any model needs")
        for pattern, value in patterns.items():
            literal = _literal(pattern)
            if literal is not None:
                self._exact.setdefault(literal, value)
            else:
                self._others.append((_compiled(pattern, where), value))

    def get(self, name: str) -> Any:
        """The value of the first pattern that fits; UsageError where looking takes too long."""
        if name in self._exact:
            return self._exact[name]
        self._left -= len(self._others)
        if self._left < 0 or (self._others and len(name) > _MAX_NAME):
            raise UsageError(
                f"{self._where}: {INFO} has too many patterns, or a name of {len(name)} characters"
            )
        return next((value for pattern, value in self._others if pattern.match(name)), None)


@dataclass(slots=True)
class TensorRanks:
    """What a file says of ``degree`` tensor-parallel ranks. UsageError where that is not enough."""

    info: Any
    degree: int
    where: str
    _lists: dict[str, _Names] = field(default_factory=dict)
    _maps: _Names | None = None

    def __post_init__(self) -> None:
        info = self.info if isinstance(self.info, dict) else {}
        maps = info.get("affine_map")
        if maps is not None:
            is_known = isinstance(maps, dict) and maps.get("version") == _MAP_VERSION
            if not is_known or not isinstance(maps.get("params"), dict):
                raise UsageError(
                    f"{self.where}: its affine_map is in a newer form than {_MAP_VERSION}, which "
                    "can't be read yet"
                )
            self._maps = _Names(self.where, maps["params"])
        elif not isinstance(info.get(REPLICATED), (list, tuple)):
            raise UsageError(
                f"{self.where}: DeepSpeed checkpoints of several model-parallel ranks "
                f"(mp_rank_01) can't be read without {INFO}, with the names of parameters that are "
                "not cut: nothing else says along which dimension each weight is joined"
            )
        for key in (REPLICATED, ROW, HALVES, _VOCABULARY, *_REFUSED):
            self._lists[key] = _Names(self.where, dict.fromkeys(info.get(key) or (), True))
        parted = info.get(_PARTED) or ()
        patterns = [p for one in parted if isinstance(one, dict) for p in one.get("patterns") or ()]
        self._lists[_PARTED] = _Names(self.where, dict.fromkeys(patterns, True))

    def join(self, name: str, shapes: Sequence[tuple[int, ...]]) -> JoinedTensor:
        """How the shards of a parameter are joined; ``shapes``: of each rank's shard."""
        found = self._maps.get(name) if self._maps else None
        if found is not None:
            return self._by_map(name, found, shapes)
        for key in (*_REFUSED, _PARTED):
            if self._lists[key].get(name):
                self._refuse(name, f"{key} has its name, and no map says how its shards are joined")
        if self._lists[REPLICATED].get(name):
            if len(set(shapes)) > 1:
                self._refuse(name, f"it should be whole on all ranks, which have {[*shapes]}")
            whole = Box.whole(shapes[0])
            piece, others = (JoinedPiece(whole, whole),), self.degree - 1
            return JoinedTensor(shapes[0], (piece, *((),) * others), ((), *(piece,) * others))
        if self._maps is not None:
            self._refuse(name, "no map has its name")
        return self._by_lists(name, shapes)

    def join_groups(
        self, shapes: Sequence[list[dict[str, tuple[int, ...]]]]
    ) -> dict[str, JoinedTensor]:
        """How each parameter is joined; ``shapes``: by the groups of each rank, all of one form."""
        return {
            name: self.join(name, [one[number][name] for one in shapes])
            for number, group in enumerate(shapes[0])
            for name in group
        }

    def join_leaves(self, name: str, leaves: Sequence[Any]) -> ForeignLeaf:
        """The whole of a tensor that the ranks have shards of."""
        if not all(isinstance(leaf, ForeignLeaf) for leaf in leaves):
            self._refuse(name, "not all ranks have a tensor of its name")
        if len({leaf.dtype for leaf in leaves}) > 1:
            self._refuse(name, "the ranks have it with different element types")
        joined = self.join(name, [leaf.shape for leaf in leaves])
        parts: list[StoredBox] = []
        copies: list[StoredBox] = []
        for rank, leaf in enumerate(leaves):
            parts += joined.place(leaf.parts, leaf.dtype, rank)
            copies += joined.place_copies(leaf.parts, leaf.dtype, rank)
        return ForeignLeaf(leaves[0].dtype, joined.shape, tuple(parts), tuple(copies))

    def join_module(
        self,
        model: dict[str, Any],
        modules: Sequence[Mapping[str, Any]],
        masters: Collection[str],
        buffers: Collection[str] | None,
    ) -> None:
        """Join what the ranks' ``modules`` have in ``model`` and no optimizer has: frozen
        parameters. ``buffers``, whose joining no file describes, stay those of the first rank.
        """
        for name, one in [*model.items()]:
            if isinstance(one, ForeignLeaf) and name not in masters and name not in (buffers or ()):
                model[name] = self.join_leaves(name, [some.get(name) for some in modules])

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise UsageError(
            f"{self.where}: {name!r:.200} of {self.degree} tensor-parallel ranks can't be joined: "
            f"{why}",
            leaf=name[:200],
        )

    def _by_lists(self, name: str, shapes: Sequence[tuple[int, ...]]) -> JoinedTensor:
        dim = 1 if self._lists[ROW].get(name) else 0
        if len({(*one[:dim], *one[dim + 1 :]) for one in shapes}) > 1 or len(shapes[0]) <= dim:
            self._refuse(name, f"shards of the shapes {[*shapes]} do not fit along dimension {dim}")
        total = sum(shape[dim] for shape in shapes)
        whole = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
        runs = 1
        if self._lists[HALVES].get(name):
            if any(shape[0] % 2 for shape in shapes) or dim:
                self._refuse(name, f"shards of the shapes {[*shapes]} have no halves")
            runs = 2
        limit = total
        if self._lists[_VOCABULARY].get(name):
            size = self.info.get("original_vocab_size")
            if type(size) is not int or not 0 < size <= total or dim or runs > 1:
                self._refuse(name, f"a vocabulary of {size!r:.50} rows is not in its {total}")
            limit = size
        pieces: list[list[JoinedPiece]] = [[] for _ in shapes]
        at = 0
        for run in range(runs):
            for rank, shape in enumerate(shapes):
                size = shape[dim] // runs
                taken = max(0, min(size, limit - at))
                inner = Box.whole(shape).between(dim, run * size, run * size + taken)
                pieces[rank].append(
                    JoinedPiece(inner, Box.whole(whole).between(dim, at, at + taken))
                )
                at += size
        whole = (*whole[:dim], limit, *whole[dim + 1 :])
        return JoinedTensor(whole, tuple(map(tuple, pieces)), ((),) * self.degree)

    def _by_map(self, name: str, found: Any, shapes: Sequence[tuple[int, ...]]) -> JoinedTensor:
        ranks = found.get("ranks") if isinstance(found, dict) else None
        whole = _sizes(found.get("logical_shape")) if isinstance(found, dict) else None
        if whole is None or not isinstance(ranks, dict) or ranks.keys() != {*range(self.degree)}:
            self._refuse(name, "its map is not one of so many ranks")
        pieces: list[list[JoinedPiece]] = [[] for _ in shapes]
        copies: list[list[JoinedPiece]] = [[] for _ in shapes]
        for rank, shape in enumerate(shapes):
            about = ranks[rank] if isinstance(ranks[rank], dict) else {}
            held, listed = _sizes(about.get("shard_shape")), about.get("pieces")
            if held != shape or not isinstance(listed, list):
                self._refuse(name, f"its map has {held} for rank {rank}, whose shard is {shape}")
            if len(listed) > MAX_PIECES:
                self._refuse(name, f"its map has {len(listed)} pieces for rank {rank}")
            for is_first, piece in self._pieces(name, listed, rank, shape, whole):
                (pieces if is_first else copies)[rank].append(piece)
            every = chain(pieces[rank], copies[rank])
            if sum(piece.inner.volume for piece in every) > math.prod(shape):
                self._refuse(name, f"its map has elements of rank {rank} twice")
        count = sum(piece.whole.volume for some in pieces for piece in some)
        if count != math.prod(whole):
            self._refuse(name, f"its map has {count} of the {math.prod(whole)} elements of {whole}")
        return JoinedTensor(whole, tuple(map(tuple, pieces)), tuple(map(tuple, copies)))

    def _pieces(
        self,
        name: str,
        listed: list[Any],
        rank: int,
        shape: tuple[int, ...],
        whole: tuple[int, ...],
    ) -> Iterator[tuple[bool, JoinedPiece]]:
        """The pieces of a rank's shard, and of each whether no rank before it has it."""
        for one in listed:
            about = one if isinstance(one, dict) else {}
            sizes, holders = _sizes(about.get("shape")), about.get("locations")
            if sizes is None or not isinstance(holders, list) or rank not in holders:
                self._refuse(name, "a piece of its map has no shape, or is of another rank")
            if about.get("scale", 1.0) != 1.0:
                self._refuse(
                    name,
                    f"its shards are the whole times {about['scale']!r:.30}, which can't be undone "
                    "in the moments without other hyperparameters",
                )
            if 0 in sizes:
                continue
            inner = _box(about.get("dest"), sizes, shape)
            outer = _box(about.get("source"), sizes, whole)
            if inner is None or outer is None:
                self._refuse(name, "a piece of its map is no box of the tensor")
            yield rank == min(holders), JoinedPiece(inner, outer)


def _box(place: Any, sizes: tuple[int, ...], of: tuple[int, ...]) -> Box | None:
    """The box that an offset and strides in a tensor of the shape ``of`` mean; None for none."""
    if not isinstance(place, (list, tuple)) or len(place) != 2 or len(sizes) != len(of):
        return None
    offset, strides = place[0], _sizes(place[1])
    if type(offset) is not int or not 0 <= offset < math.prod(of) or strides is None:
        return None
    steps = row_major(of)
    if len(strides) != len(of) or any(
        size > 1 and stride != step
        for size, stride, step in zip(sizes, strides, steps, strict=True)
    ):
        return None
    start = tuple(offset // step % size for step, size in zip(steps, of, strict=True))
    box = Box(start, tuple(a + b for a, b in zip(start, sizes, strict=True)))
    return box if Box.whole(of).contains(box) else None


def _sizes(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, (list, tuple)) and len(value) <= MAX_DIMS
    if not is_list or any(type(one) is not int or not 0 <= one < 1 << 62 for one in value):
        return None
    return tuple(value)


def _literal(pattern: Any) -> str | None:
    """The one name that a pattern fits, if it is ``^NAME$`` with its signs escaped."""
    if type(pattern) is not str or not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\([^a-zA-Z0-9])", r"\1", pattern[1:-1])
    return name if f"^{re.escape(name)}$" == pattern else None


def _compiled(pattern: Any, where: str) -> re.Pattern[str]:
    """A pattern of a file, if it is one that takes no time to match."""
    if type(pattern) is str and len(pattern) <= 1024:
        inner = pattern.removeprefix("^").removesuffix("$")
        tokens = _TOKEN.findall(inner)
        repeated = sum(token in (r"\d+", ".*") for token in tokens)
        if "".join(tokens) == inner and repeated <= _MAX_REPEATED:
            return re.compile(pattern)
    raise UsageError(f"{where}: {INFO} has the pattern {pattern!r:.100}, which is not read")
