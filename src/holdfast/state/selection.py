"""Selects by name patterns which part of a checkpoint is restored, and what may be missing in
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.rules.patterns import Pattern


class LeafSelection(Struct, frozen=True):
    """A selection by patterns. Names are those of the state, key first, or those of the checkpoint;
    either will do.

    ``only``: None for all. Values beside the tensors of a key (a scheduler, an optimizer's groups,
    a plain value) are selected with the key itself; "key.**" means that too.
    """

    only: tuple[Pattern, ...] | None = None
    allow_missing: tuple[Pattern, ...] = ()

    @property
    def is_all(self) -> bool:
        """True if the selection restricts nothing."""
        return self.only is None and not self.allow_missing

    @property
    def texts(self) -> list[str] | None:
        """Returns the patterns of ``only`` as they were given."""
        return None if self.only is None else [pattern.text for pattern in self.only]

    def takes(self, *names: str) -> bool:
        """True if a leaf that has these names is selected."""
        return self.only is None or _match(self.only, names)

    def takes_key(self, path: str) -> bool:
        """True if all values without a name of their own at this path of the state are selected."""
        return self.only is None or _match_key(self.only, path)

    def allows(self, *names: str) -> bool:
        """True if the leaf or value with these names may be missing."""
        return _match(self.allow_missing, names) or any(
            _match_key(self.allow_missing, name) for name in names
        )

    def used(self, names: Iterable[str]) -> bytes:
        """Returns for each pattern of ``only`` whether it matches one of these names: a byte
        each.
        """
        known = list(names)
        return bytes(
            any(_match((pattern,), (name,)) or _match_key((pattern,), name) for name in known)
            for pattern in self.only or ()
        )

    def refuse_unused(self, used: Sequence[bytes]) -> None:
        """Raises UsageError for a pattern that matches nothing on any rank."""
        for number, pattern in enumerate(self.only or ()):
            if not any(one[number] for one in used):
                raise UsageError(
                    f"only={pattern.text!r} means no leaf and no key, here or in the checkpoint: "
                    "give names as `holdfast show` has them, or as the state has, key first",
                    pattern=pattern.text,
                )


def choose(only: Sequence[str] | None, allow_missing: Sequence[str]) -> LeafSelection:
    """Builds the selection the user asked for; raises UsageError for a value that is no list of
    patterns.
    """
    return LeafSelection(
        None if only is None else _patterns("only", only), _patterns("allow_missing", allow_missing)
    )


def refuse_different(said: Sequence[tuple[int, list[str] | None]]) -> None:
    """Raises UsageError, the same on all ranks, where they select differently: a rank, and its
    ``texts``.
    """
    first = said[0][1]
    for rank, texts in said:
        if texts != first:
            raise UsageError(
                f"only={first} on rank 0, and only={texts} on rank {rank}: give all ranks the "
                "same patterns; those that mean nothing on a rank do no harm there"
            )


def _patterns(what: str, given: Sequence[str]) -> tuple[Pattern, ...]:
    if isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise UsageError(f"{what} is a list of patterns, such as ['model.**'], not {given!r:.60}")
    return tuple(map(Pattern, given))


def _match(patterns: Iterable[Pattern], names: Iterable[str]) -> bool:
    known = list(names)
    return any(pattern.match(name) is not None for pattern in patterns for name in known)


def _match_key(patterns: Iterable[Pattern], path: str) -> bool:
    for pattern in patterns:
        head = pattern.text.removesuffix("**").removesuffix(".")
        is_all = pattern.text.endswith("**") and (not head or Pattern(head).match(path) is not None)
        if is_all or pattern.match(path) is not None:
            return True
    return False
