"""Measure what planning costs at thousands of ranks: to agree, to save, to restore.

Nothing is read. All ranks are simulated: what a rank would have been told is computed here, and
what it would compute is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.options import Parser
from benchmarks.plan.exchange import count_reads, timed
from benchmarks.plan.meshes import Kind, kinds
from holdfast.coordinator.layouts import AgreedLayout, agree_layout
from holdfast.format.image import fill_in, parse_header, plan_image
from holdfast.format.manifest import ImageRef, Manifest, seal, unseal
from holdfast.geometry.layout import (
    Layout,
    Mesh,
    Placement,
    deflate,
    local_boxes,
    table_hash,
    table_to_json,
)
from holdfast.protocol.image_plan import image_items, plan_sizes
from holdfast.restore.planning.plan import Want, plan_batches, plan_fetches

#: Seconds and bytes of issue 4: the first plan of a rank, its restore plan, the layout.
FIRST_S, RESTORE_S, LAYOUT_BYTES = 0.5, 1.0, 1 << 20
HOST_RANKS, RESTORED_WORLD = 8, 512


def measure(kind: Kind, leaves: int) -> dict[str, Any]:
    """All figures of one way to cut."""
    tables: dict[int, bytes] = {}
    for rank in range(kind.world):
        if kind.table_of(rank) not in tables:
            tables[kind.table_of(rank)] = table_to_json(kind.table(rank, leaves))
    hashes = {key: table_hash(data) for key, data in tables.items()}
    of_rank = [kind.table_of(rank) for rank in range(kind.world)]
    found: dict[str, Any] = {"tables": len(tables), "table_bytes": max(map(len, tables.values()))}
    held = {hashes[key]: deflate(data) for key, data in tables.items()}
    asked = tuple(hashes[key] for key in of_rank)
    found["agree_s"], agreement = timed(lambda: agree_layout(lambda _: None, asked, held))
    agreed = AgreedLayout(agreement.layout)
    host = range(kind.world // 2, kind.world // 2 + HOST_RANKS)
    found["sizes_s"], sizes = timed(lambda: plan_sizes(agreed.layout, host))
    agreed.planned(sizes.by_rank)
    found["again_s"], _ = timed(lambda: [agreed.image_bytes(rank, 1000) for rank in host])
    data = agreed.layout.to_json()
    found["leaves"], found["layout_bytes"] = len(agreed.layout.leaves), len(data)
    rank = kind.world // 2 + 3
    found |= _first_plan(data, rank)
    for world in (kind.world, RESTORED_WORLD):
        found[f"restore_{'same' if world == kind.world else world}"] = _restore(
            data, rank * world // kind.world, world, kind
        )
    if kind.name.startswith("HSDP"):
        found["exchange"] = count_reads(kind, agreed.layout, leaves)
    return found


def _first_plan(data: bytes, rank: int) -> dict[str, Any]:
    """What a rank does when it is told a layout, and when it saves in it again."""
    decode_s, layout = timed(lambda: Layout.from_json(data))
    first_s, plan = timed(lambda: plan_image(image_items(layout, rank)))
    held_s, _ = timed(lambda: [layout.held(n, rank) for n in range(len(layout.leaves))])
    return {
        "decode_s": decode_s,
        "pieces_s": first_s,
        "held_s": held_s,
        "first_s": decode_s + first_s + held_s,
        "pieces": len(plan.entries),
    }


def _restore(data: bytes, rank: int, world: int, kind: Kind) -> dict[str, Any]:
    """The plan of one of ``world`` ranks that restores: as it was saved, or cut by FSDP alone."""
    layout = Layout.from_json(data)
    held = (
        [layout.held(n, rank) for n in range(len(layout.leaves))]
        if world == kind.world
        else [
            local_boxes(leaf.shape, mesh, (Placement(0 if leaf.shape else -1),), rank)
            for mesh in [Mesh((world,), tuple(range(world)))]
            for leaf in layout.leaves
        ]
    )
    wants = [
        Want(leaf.name, box, 0)
        for leaf, boxes in zip(layout.leaves, held, strict=True)
        for box, _ in boxes
    ]
    if world == kind.world and kind.name.startswith("DDP"):
        # Replicas read a share each and exchange them: all of it is every piece of every image.
        wants = [Want(layout.leaves[p.leaf].name, p.box, 0) for p in layout.pieces(rank)]
    layout = Layout.from_json(data)
    fetch_s, fetches = timed(lambda: plan_fetches(wants, layout))
    shown = [*fetches][:8]  # their headers are made here, not read
    headers = {r: _header(layout, r) for r in shown}
    parse_s, _ = timed(lambda: [parse_header(*_raw(layout, r)) for r in shown[:4]])
    some = {r: fetches[r] for r in shown}
    batch_s, _ = timed(lambda: plan_batches(some, headers))
    count = sum(map(len, fetches.values()))
    share = sum(map(len, some.values())) / max(1, count)
    return {
        "fetch_s": fetch_s,
        "batch_s": batch_s / max(share, 1e-9),
        "wants": len(wants),
        "plan_s": fetch_s + batch_s / max(share, 1e-9),
        "fetches": count,
        "images": len(fetches),
        "header_s": parse_s / max(1, len(shown[:4])) * len(fetches),
    }


def _raw(layout: Layout, rank: int) -> tuple[bytes, str, int]:
    image = fill_in(plan_image(image_items(layout, rank)), {}, 2)
    return image.header, "image", image.size_bytes


def _header(layout: Layout, rank: int) -> Any:
    return parse_header(*_raw(layout, rank))


def manifests(world: int) -> dict[str, Any]:
    """How large a manifest of so many images is, and how long it takes to read."""
    images = tuple(
        ImageRef(
            path=f"steps/1-7-{'a' * 20}/live-{rank:05d}.safetensors",
            rank=rank,
            size_bytes=10**9 + rank,
            header_xxh3=f"{rank:016x}",
            table_xxh3=f"{rank:016x}",
        )
        for rank in range(world)
    )
    written = Manifest(
        run_id="r",
        incarnation=1,
        step=7,
        attempt="a" * 20,
        world=world,
        layout="0" * 32,
        images=images,
    )
    seal_s, data = timed(lambda: seal(written))
    unseal_s, _ = timed(lambda: unseal(Manifest, data, "m"))
    return {"bytes": len(data), "seal_s": seal_s, "unseal_s": unseal_s}


def shown(found: dict[str, dict[str, Any]], documents: dict[str, Any], world: int) -> str:
    """The figures, beside their targets."""
    ms = "{:.0f}".format
    head = [
        "",
        "leaves",
        "coordinator, ms",
        "rank, first, ms",
        "of target",
        "again, ms",
        "layout, KB",
        "restore same, ms",
        f"restore on {RESTORED_WORLD}, ms",
        "images read",
        "fetches",
    ]
    rows = []
    for name, one in found.items():
        same, other = one["restore_same"], one[f"restore_{RESTORED_WORLD}"]
        rows.append(
            [
                name,
                str(one["leaves"]),
                ms(1e3 * (one["agree_s"] + one["sizes_s"])),
                ms(1e3 * one["first_s"]),
                f"{one['first_s'] / FIRST_S:.2f}",
                ms(1e3 * one["again_s"]),
                ms(one["layout_bytes"] / 1e3),
                ms(1e3 * same["plan_s"]),
                ms(1e3 * other["plan_s"]),
                f"{same['images']}, {other['images']}",
                f"{same['fetches']}, {other['fetches']}",
            ]
        )
    counts = [
        f"{name}, ranks reading for each other: {one['read_over_unique']:.3f} times the bytes "
        f"({one['alone_over_unique']:.0f} each for itself), "
        f"{one['peers']} of {one['hosts'] - 1} other hosts met, {one['at_once']} connections of a "
        f"host at most, {ms(1e3 * one['plan_s'])} ms of planning a rank.\n\n"
        for name, one in (
            (name, each["exchange"]) for name, each in found.items() if "exchange" in each
        )
    ]
    return (
        f"{markdown.table(head, rows)}\n\n{''.join(counts)}"
        f"A manifest of {world} images: {documents['bytes'] / 1e6:.1f} MB, written in "
        f"{ms(1e3 * documents['seal_s'])} ms, read in {ms(1e3 * documents['unseal_s'])} ms."
    )


def main(arguments: Sequence[str]) -> int:
    """Exit 1 where a target is missed."""
    parser = Parser("plan", __doc__, quick="1,024 ranks, and 1,000 leaves only")
    parser.add_argument("--leaves", type=int, nargs="*", help="how many (1000, and 3000)")
    parser.add_argument("--only", default="", help="the ways to cut whose name begins so")
    parser.add_document()
    parser.add_argument("--no-results", action="store_true", help="write no files")
    options = parser.parse(arguments)
    world = 1024 if options.quick else 16384
    found: dict[str, dict[str, Any]] = {}
    for leaves in options.leaves or ([1000] if options.quick else [1000, 3000]):
        for kind in kinds(world):
            if kind.name.startswith(options.only):
                name = f"{kind.name}, {leaves:,} leaves"
                series.show(name)
                found[name] = measure(kind, leaves)
    documents = manifests(world)
    text = shown(found, documents, world)
    print(f"\n{text}\n")
    if not options.no_results:
        facts = machine.facts(Path(__file__).parent, ["msgspec", "numpy"])
        result = {"world": world, "manifest": documents, "layouts": found}
        kept = "plan_quick" if options.quick else "plan"
        results.keep(kept, facts, result, text, document=options.document, block="plan")
    met = (
        one["first_s"] <= FIRST_S
        and one["layout_bytes"] <= LAYOUT_BYTES
        and one["restore_same"]["plan_s"] <= RESTORE_S
        and one[f"restore_{RESTORED_WORLD}"]["plan_s"] <= RESTORE_S
        for name, one in found.items()
        if "1,000" in name and "names" not in name
    )
    return 0 if all(met) else 1
