"""Shows ``holdfast show --for``: if a checkpoint can be restored on other ranks, at what cost."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from holdfast.cli.checkpoints import ChosenCheckpoint
from holdfast.cli.command import print_json
from holdfast.cli.output import SlowProgress, plain_table, stdout
from holdfast.geometry.parallelism import NamedLayout, asked
from holdfast.observe.text import count_text, size_text
from holdfast.restore.reading.layout_check import PLANNED, RankPlan, RestorePlan, dry_run_asked

#: The table shows no more ranks than these: those that read most.
MAX_ROWS = 16


def show_plan(chosen: ChosenCheckpoint, wish: str, *, as_json: bool) -> None:
    """Plans the restore and prints it. Raises UsageError when ``wish`` names no parallelism."""
    layout = NamedLayout(chosen.checkpoint.layout, asked(wish))
    planned = min(PLANNED, sum(1 for _ in layout.different()))
    with SlowProgress("planning") as progress:
        plan = dry_run_asked(
            chosen.checkpoint,
            chosen.manifest.step,
            layout,
            on_planned=lambda done: progress(done, planned),
        )
    record = chosen.facts | _record(wish, plan)
    print_json(record) if as_json else _print(record, plan)


def _record(wish: str, plan: RestorePlan) -> dict[str, Any]:
    return {
        "for": wish,
        "for_world": plan.world,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "assumptions": list(plan.assumptions),
        "different_ranks": plan.different,
        "wanted_bytes": plan.wanted_bytes,
        "most_bytes": plan.most_bytes,
        "balance": plan.balance,
        "read_bytes": plan.read_bytes,
        "read_once_bytes": plan.read_once_bytes,
        "memory_bytes": plan.memory_bytes,
        "ranks": [
            {
                "rank": one.rank,
                "alike": one.alike,
                "wanted_bytes": one.wanted_bytes,
                "read_bytes": one.read_bytes,
                "images": one.images,
                "memory_bytes": one.memory_bytes,
            }
            for one in plan.ranks
        ],
    }


def _print(record: dict[str, Any], plan: RestorePlan) -> None:
    console = stdout()
    verdict = "[green]can be restored[/]" if plan.fits else "[red]cannot be restored[/]"
    console.print(
        f"[bold]{record['checkpoint']}[/], saved by {count_text(record['world'], 'rank')},"
        f" {verdict} on {count_text(plan.world, 'rank')} as {escape(record['for'])}, if",
        soft_wrap=True,
    )
    for text in plan.assumptions:
        console.print(f"  {escape(text)}", soft_wrap=True)
    console.print()
    columns = ("rank", "wants", "reads", "images", "memory")
    table = plain_table(*columns, right=columns)
    for one in _dearest(plan):
        more = f" +{one.alike - 1}" if one.alike > 1 else ""
        sizes = (one.wanted_bytes, one.read_bytes, one.memory_bytes)
        wants, reads, memory = map(size_text, sizes)
        table.add_row(f"{one.rank}{more}", wants, reads, str(one.images), memory)
    console.print(table)
    left_out = plan.different - min(len(plan.ranks), MAX_ROWS)
    if left_out:
        console.print(f"and {left_out} more that differ from these", style="dim")
    console.print()
    for text in _totals(plan):
        console.print(text, soft_wrap=True)


def _dearest(plan: RestorePlan) -> list[RankPlan]:
    """Returns the ranks that read most, in their order."""
    ranked = sorted(plan.ranks, key=lambda one: (-one.read_bytes, one.rank))[:MAX_ROWS]
    return sorted(ranked, key=lambda one: one.rank)


def _totals(plan: RestorePlan) -> list[str]:
    mean = size_text(plan.wanted_bytes / plan.world)
    texts = [
        f"all ranks want {size_text(plan.wanted_bytes)}, {mean} each; the most that one wants is"
        f" {size_text(plan.most_bytes)}, {plan.balance:.2f} of that"
    ]
    if plan.read_bytes is None or plan.read_once_bytes is None:
        texts.append(f"planned for {len(plan.ranks)} of {plan.different} ranks that differ")
    else:
        texts.append(
            f"they read {size_text(plan.read_bytes)} in whole blocks if each reads for itself,"
            f" {size_text(plan.read_once_bytes)} if each block is read once and passed on"
        )
    texts.append(
        f"a rank needs at most {size_text(plan.memory_bytes)}: its leaves, and what is staged"
    )
    return texts
