"""Records which frozen leaves change between saves, and which are the same in image after image.

A parameter that needs no gradient and is in no optimizer looks frozen, but so does an averaged
copy of the weights, which is updated after every step. Stored among the frozen leaves it would
cause all of them to be written again each time. So a leaf that was seen to change between saves
is no longer frozen; one change is forgiven, because other weights may be loaded once. Checksums
alone decide what is written.

As nothing tells when a frozen leaf changes, it is copied before ``save`` returns. Of a model that
is fine-tuned by adapters that is nearly everything, at every save. So leaves that were the same in
several images count as constant: a snapshot in memory captures them in place, and is discarded if
its checksums do not show the same bytes once more. A durable save relies on nothing, and copies
them first. What no checksum shows is a leaf that changes, and changes back before it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from msgspec import Struct

from holdfast.accelerator.devices import memory_key
from holdfast.state.tensors import local_of
from holdfast.state.walk import Found

#: After so many changes a leaf no longer counts as frozen, or as constant.
MOVES = 2
#: After so many equal images in a row a leaf counts as constant.
EQUAL_IMAGES = 2


class _History(Struct):
    """What is known of one leaf that looks frozen."""

    version: int
    """Its version at the last save."""
    memory: int = 0
    moves: int = 0
    """Number of changes seen by then."""
    pieces: object = None
    """What the last image held of it; None: it was seen to change since."""
    checksum: str = ""
    equal_images: int = 0
    silent_changes: int = 0
    """Number of changes that images showed, and no version."""

    def forget(self) -> None:
        """Rely on no image from before."""
        self.pieces, self.equal_images = None, 0

    @property
    def is_constant(self) -> bool:
        """True if it was the same in several images, and seldom changed without a version."""
        return self.equal_images >= EQUAL_IMAGES and self.silent_changes < MOVES


class FrozenLeaves:
    """What is known of the leaves of one rank that look frozen, from save to save."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}
        self._settled: list[tuple[str, torch.Tensor, bool]] = []
        """The leaves that looked frozen in the last walk, each with whether it is treated as
        frozen.
        """
        self._constant: frozenset[str] | None = frozenset()
        self.restless: frozenset[str] = frozenset()
        """Leaves that changed without a version so often that no image is asked of them."""
        self._last: tuple[Mapping[str, object], str] = {}, ""
        """What the last image held of all leaves, and the checksum of all together."""

    def settle(self, leaves: list[Found]) -> None:
        """Removes the frozen mark, in ``leaves`` itself, from leaves that do change."""
        self._settled.clear()
        self._constant = None
        for number, (name, tensor, is_lazy, spread, looks_frozen) in enumerate(leaves):
            if looks_frozen:
                is_frozen = self._is_frozen(name, tensor)
                history, memory = self._histories[name], _address(tensor)
                if memory != history.memory:  # another tensor, perhaps
                    history.forget()
                    history.memory = memory
                self._settled.append((name, tensor, is_frozen))
                leaves[number] = (name, tensor, is_lazy, spread, is_frozen)

    def is_settled(self) -> bool:
        """True if ``settle`` would give these leaves the same marks again. Each save calls one of
        the two.
        """
        now = [self._is_frozen(name, tensor) for name, tensor, _ in self._settled]
        return now == [before for _, _, before in self._settled]

    @property
    def constant(self) -> frozenset[str]:
        """The frozen leaves of the last walk that were the same in several images."""
        if self._constant is None:
            self._constant = frozenset(
                name
                for name, _, is_frozen in self._settled
                if is_frozen and self._histories[name].is_constant
            )
        return self._constant

    def take_image(
        self,
        pieces: Mapping[str, object],
        checksum: str,
        checksum_of: Callable[[str], str],
        in_place: Container[str],
    ) -> tuple[str, bool] | None:
        """Compare the leaves in a new image with the image before it. Return one that was captured
        in place and is not shown to be the same as there, and True if it is another.

        ``pieces``: what the image holds of each; what is equal can be compared. ``checksum``: that
        of all these; ``checksum_of``: of one. Runs on the worker, before the next save describes
        the state.
        """
        histories = [(name, self._histories[name]) for name in pieces]
        is_same, self._last = (pieces, checksum) == self._last, (pieces, checksum)
        if is_same and all(one.pieces is not None for _, one in histories):
            if any(one.equal_images < EQUAL_IMAGES for _, one in histories):
                self._constant = None
            for _, one in histories:
                one.equal_images += 1
            return None
        self._constant = None
        refuted = None
        for name, one in histories:
            now, is_known = checksum_of(name), one.pieces == pieces[name]
            if is_known and now == one.checksum:
                one.equal_images += 1
                continue
            one.silent_changes += is_known
            if name in in_place:
                one.forget()
                refuted = refuted or (name, is_known)
            else:
                one.pieces, one.checksum, one.equal_images = pieces[name], now, 1
        if any(one.silent_changes >= MOVES for _, one in histories):
            self.restless |= {name for name, one in histories if one.silent_changes >= MOVES}
        return refuted

    def forget_images(self) -> None:
        """Rely on no image from before: the next saves copy all frozen leaves first."""
        for history in self._histories.values():
            history.forget()
        self._constant = None

    def _is_frozen(self, name: str, tensor: torch.Tensor) -> bool:
        version = _version(tensor)
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = _History(version)
        elif version != history.version:
            history.version = version
            history.moves += 1
            history.forget()
            self._constant = None
        return history.moves < MOVES


def _version(tensor: torch.Tensor) -> int:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.is_inference():  # it has none
        return 0
    return local._version if local is tensor else local._version + tensor._version


def _address(tensor: torch.Tensor) -> int:
    try:
        return memory_key(local_of(tensor))
    except (RuntimeError, ValueError):  # without memory of its own: it is refused when it is bound
        return 0
