"""Documents that carry their own checksum, and which generations descend from which."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import (
    MAX_NUMBER,
    Generation,
    ImageRef,
    Incarnation,
    Lineage,
    Manifest,
    Root,
    seal,
    unseal,
)
from holdfast.format.values import MAX_DEPTH

numbers = st.integers(0, MAX_NUMBER)
plain = st.recursive(
    st.none()
    | st.booleans()
    | numbers
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
words = st.text(max_size=12)
sums = st.integers(0, 2**64 - 1).map(text)
layouts = st.integers(0, 2**128 - 1).map("{:032x}".format)
attempts = st.text("0123456789abcXYZ_-", min_size=1, max_size=128)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Anything that a manifest can say."""
    incarnation, step, world = draw(numbers), draw(numbers), draw(st.integers(1, 3))
    directory = f"steps/{incarnation}-{step}-{draw(attempts)}"
    images = [
        ImageRef(
            path=f"{directory}/live-{rank:05d}.safetensors",
            rank=rank,
            size_bytes=draw(st.integers(1, 2**63 - 1)),
            header_xxh3=draw(sums),
            table_xxh3=draw(sums),
        )
        for rank in draw(st.permutations(range(world)))
    ]
    parts = [
        ImageRef(
            path=f"parts/{draw(numbers)}-{draw(numbers)}-{draw(attempts)}"
            f"/frozen-{rank:05d}.safetensors",
            rank=rank,
            size_bytes=draw(st.integers(1, 2**63 - 1)),
            header_xxh3=draw(sums),
            table_xxh3=draw(sums),
        )
        for rank in draw(st.sets(st.integers(0, world - 1)))
    ]
    says_so = draw(st.booleans())
    return Manifest(
        parts=tuple(parts),
        requires=("parts",) if parts or says_so else (),
        optional=draw(st.lists(words, max_size=2).map(tuple)),
        run_id=draw(words),
        incarnation=incarnation,
        step=step,
        attempt=draw(words),
        parent=draw(parents(incarnation)),
        world=world,
        layout=draw(layouts),
        images=tuple(images),
        values=draw(st.dictionaries(words, plain, max_size=3)),
        aliases=draw(st.dictionaries(words, words, max_size=3)),
        created_s=draw(st.floats(0, 1e12)),
    )


@st.composite
def parents(draw: st.DrawFn, incarnation: int) -> tuple[int, int] | None:
    """An earlier generation, or none."""
    if not incarnation or draw(st.booleans()):
        return None
    return draw(st.integers(0, incarnation - 1)), draw(numbers)


@st.composite
def incarnations(draw: st.DrawFn) -> Incarnation:
    n = draw(numbers)
    return Incarnation(
        run_id=draw(words),
        n=n,
        nonce=draw(words),
        parent=draw(parents(n)),
        world=draw(st.integers(1, 1 << 20)),
    )


# ── documents ────────────────────────────────────────────────────────────────────────────────


@given(manifest=manifests())
def test_a_manifest_reads_back_as_it_was_sealed(manifest: Manifest) -> None:
    assert unseal(Manifest, seal(manifest), "here") == manifest
    assert unseal(Manifest, memoryview(seal(manifest)), "here") == manifest


@given(incarnation=incarnations())
def test_an_incarnation_reads_back_as_it_was_sealed(incarnation: Incarnation) -> None:
    assert unseal(Incarnation, seal(incarnation), "here") == incarnation


@given(run_id=words)
def test_a_root_reads_back_as_it_was_sealed(run_id: str) -> None:
    root = Root(run_id=run_id, created_s=1.5)
    assert unseal(Root, seal(root), "here") == root


@given(manifest=manifests())
def test_any_tool_can_check_a_document(manifest: Manifest) -> None:
    data = seal(manifest)
    body = data[data.index(b'"body":') + len(b'"body":') : data.rindex(b"}")]
    assert json.loads(data)["checksum"] == text(checksum(body))
    assert json.loads(body) == json.loads(data)["body"]


def sealed(body: dict[str, Any]) -> bytes:
    """A document with any body, its checksum true."""
    raw = json.dumps(body).encode()
    return b'{"checksum":"%s","body":%s}\n' % (text(checksum(raw)).encode(), raw)


@given(manifest=manifests())
def test_fields_of_a_later_version_are_read_over_when_nothing_requires_them(
    manifest: Manifest,
) -> None:
    body = json.loads(seal(manifest))["body"]
    assert unseal(Manifest, sealed(body | {"later": [1, 2]}), "here") == manifest


@given(one=manifests(), other=manifests())
def test_a_body_does_not_pass_with_the_checksum_of_another(one: Manifest, other: Manifest) -> None:
    first, second = json.loads(seal(one)), seal(other)
    mixed = second.replace(json.loads(second)["checksum"].encode(), first["checksum"].encode(), 1)
    if one == other:
        assert unseal(Manifest, mixed, "here") == one
    else:
        with pytest.raises(ChecksumMismatch, match="here"):
            unseal(Manifest, mixed, "here")


def test_a_manifest_knows_its_generation_and_its_size() -> None:
    refs = [
        ImageRef(path="p", rank=rank, size_bytes=4096 * (rank + 1), header_xxh3="", table_xxh3="")
        for rank in range(3)
    ]
    manifest = Manifest(
        run_id="r", incarnation=2, step=40, attempt="a", world=3, layout="l", images=tuple(refs)
    )
    assert manifest.generation == Generation(2, 40)
    assert str(manifest.generation) == "2-40"
    assert manifest.size_bytes == manifest.image_bytes == 6 * 4096


@pytest.mark.parametrize(("levels", "is_read"), [(1, True), (5 * MAX_DEPTH, False)])
def test_a_manifest_with_values_nested_deeper_than_any_is_neither_sealed_nor_read(
    levels: int, is_read: bool
) -> None:
    nested: Any = 0
    for _ in range(levels):
        nested = [nested]
    ref = ImageRef(
        path="steps/2-40-a/live-00000.safetensors",
        rank=0,
        size_bytes=4096,
        header_xxh3="0" * 16,
        table_xxh3="0" * 16,
    )
    manifest = Manifest(
        run_id="r", incarnation=2, step=40, attempt="a", world=1, layout="0" * 32, images=(ref,)
    )
    body = json.loads(seal(manifest))["body"] | {"values": {"notes": nested}}
    if is_read:
        assert unseal(Manifest, sealed(body), "here").values == {"notes": nested}
        return
    with pytest.raises(FormatError, match=r"^here is not a valid manifest: its values are nested"):
        unseal(Manifest, sealed(body), "here")
    with pytest.raises(FormatError, match="its values are nested too deep"):
        seal(msgspec.structs.replace(manifest, values={"notes": nested}))


def test_a_manifest_knows_what_it_shares_with_earlier_ones() -> None:
    def ref(path: str, size_bytes: int) -> ImageRef:
        return ImageRef(path=path, rank=0, size_bytes=size_bytes, header_xxh3="", table_xxh3="")

    manifest = Manifest(
        run_id="r",
        incarnation=2,
        step=40,
        attempt="a",
        world=1,
        layout="l",
        images=(ref("steps/2-40-ab/live", 1),),
        parts=(ref("parts/2-40-ab/frozen", 20), ref("parts/2-30-ab/frozen", 300)),
    )
    assert (manifest.size_bytes, manifest.image_bytes, manifest.reused_bytes) == (321, 1, 300)
    assert manifest.directories == {"steps/2-40-ab", "parts/2-40-ab", "parts/2-30-ab"}


# ── lineage ──────────────────────────────────────────────────────────────────────────────────

Parents = dict[int, tuple[int, int] | None]


def test_what_came_after_the_fall_back_is_abandoned() -> None:
    line = Lineage({1: None, 2: (1, 10)})
    assert Generation(1, 10) in line
    assert Generation(1, 11) not in line
    assert Generation(2, 11) in line
    assert Generation(3, 0) not in line


def test_falling_back_twice_to_the_same_step_abandons_the_first_try() -> None:
    line = Lineage({1: None, 2: (1, 10), 3: (1, 10)})
    assert (1, 10) in line
    assert (2, 11) not in line
    assert (3, 11) in line


def test_an_incarnation_from_nothing_abandons_all_before_it() -> None:
    line = Lineage({1: None, 2: (1, 10), 3: None})
    assert (1, 5) not in line
    assert (2, 11) not in line
    assert (3, 0) in line


def test_nothing_is_in_an_empty_lineage_and_nonsense_is_in_none() -> None:
    assert (1, 0) not in Lineage({})
    for nonsense in ("1-0", (1,), (1, 2, 3), None, [1, 0]):
        assert nonsense not in Lineage({1: None})


def test_a_missing_record_is_not_a_beginning() -> None:
    line = Lineage({1: None, 3: (2, 10), 4: (3, 20)})
    assert line.missing == 2
    assert (2, 10) in line and (3, 20) in line and (1, 5) not in line
    assert line.is_undecided((1, 5)) and not line.is_abandoned((1, 5))
    for known in ((2, 11), (3, 21)):
        assert line.is_abandoned(known) and not line.is_undecided(known)
    assert Lineage({1: None, 2: (1, 5)}).missing is None


def test_of_a_newest_record_that_cannot_be_read_all_that_is_older_hangs() -> None:
    line = Lineage({1: None, 2: (1, 10)}, unreadable=[3])
    assert line.missing == 3
    assert line.is_undecided((1, 99)) and line.is_undecided((2, 11))
    assert (3, 5) in line


@st.composite
def histories(draw: st.DrawFn) -> Parents:
    """Runs as they happen: each incarnation goes on from nothing, or from a step before it."""
    parents: Parents = {}
    for n in range(1, draw(st.integers(1, 6)) + 1):
        fresh = n == 1 or draw(st.integers(0, 4)) == 0
        parents[n] = None if fresh else (draw(st.integers(1, n - 1)), draw(st.integers(0, 30)))
    return parents


def ancestors(parents: Parents) -> dict[int, int | None]:
    """By the definition: follow the parents from the newest, with the last step of each."""
    found: dict[int, int | None] = {}
    n, limit = max(parents), None
    while True:
        found[n] = limit
        parent = parents[n]
        if parent is None:
            return found
        n, limit = parent


@given(parents=histories(), n=st.integers(1, 7), step=st.integers(0, 40))
def test_a_generation_is_in_the_line_when_the_newest_incarnation_goes_back_to_it(
    parents: Parents, n: int, step: int
) -> None:
    limits = ancestors(parents)
    limit = limits.get(n, -1)
    assert (Generation(n, step) in Lineage(parents)) == (limit is None or step <= limit)


@given(parents=histories(), n=st.integers(1, 6), steps=st.sets(st.integers(0, 40)))
def test_with_a_generation_its_whole_past_in_that_incarnation_is_in_the_line(
    parents: Parents, n: int, steps: set[int]
) -> None:
    line = Lineage(parents)
    members = [step for step in sorted(steps) if (n, step) in line]
    assert members == sorted(steps)[: len(members)]


@given(parents=histories(), step=st.integers(0, 40))
def test_a_late_publication_of_an_abandoned_incarnation_changes_nothing(
    parents: Parents, step: int
) -> None:
    line = Lineage(parents)
    abandoned = {n for n in parents if (n, 0) not in line}
    for zombie in abandoned:
        assert (zombie, step) not in line
    kept = {n: parents[n] for n in parents if n not in abandoned}
    assert [(n, step) in line for n in kept] == [(n, step) in Lineage(kept) for n in kept]


@given(
    parents=st.dictionaries(
        st.integers(0, 5), st.none() | st.tuples(st.integers(0, 5), st.integers(0, 9))
    ),
    n=st.integers(0, 5),
)
def test_parents_that_make_no_sense_still_give_an_answer(parents: Parents, n: int) -> None:
    line = Lineage(parents)
    if parents:
        assert (max(parents), 10**9) in line
    assert isinstance((n, 3) in line, bool)


@given(parents=histories(), data=st.data(), step=st.integers(0, 40))
def test_a_lost_record_makes_nothing_abandoned_and_nothing_kept_that_was_not(
    parents: Parents, data: st.DataObject, step: int
) -> None:
    lost = data.draw(st.sampled_from(sorted(parents)))
    left = {n: parent for n, parent in parents.items() if n != lost}
    true, line = Lineage(parents), Lineage(left, [lost] if lost == max(parents) else [])
    for n in left:
        if (n, step) in line:
            assert (n, step) in true
        if line.is_abandoned((n, step)):
            assert (n, step) not in true
        assert line.missing in (None, lost)
