"""Results as markdown: what ``docs/performance.md`` shows."""

from __future__ import annotations

from typing import Any

import harness


def save(result: dict[str, Any], facts: dict[str, str]) -> str:
    """The tables of one run of save.py."""
    rows = []
    for name, entry in result["systems"].items():
        figures = entry["figures"]
        first = figures.get("blocked, first saves")
        in_training = figures["durable in training"] if first else None
        rows.append([
            f"{name} ({entry['settings']})",
            harness.seconds(figures["blocked"]),
            harness.seconds(figures["blocked in training"]) if first else "the same",
            harness.seconds(figures["lost"]) if first else "the same",
            harness.seconds(figures["durable"]),
            harness.seconds(in_training) if in_training else "the same",
            " / ".join(f"{value:.2f}" for value in first["values"]) if first else "–",
            entry["stored"],
        ])  # fmt: skip
    size = result["size_bytes"]
    limits = [
        [label, harness.seconds(found), f"{size / found['median'] / 1e9:.1f} GB/s"]
        for label, found in result["limits"].items()
    ]
    alone, idle = result["alone"], result["idle_before"]
    return "\n\n".join([
        f"{harness.today()}: {facts['processor']}, {facts['cores']} cores, {facts['memory']}, "
        f"{facts['disk']}; Linux {facts['kernel']}, Python {facts['python']}, torch "
        f"{facts['torch']}, safetensors {facts['safetensors']}. State: {size / 1e9:.2f} GB in "
        f"{result['leaves']} leaves. Medians of {result['rounds']} rounds (lowest–highest), in "
        f"seconds. Before each measurement the processors were {idle['median']:.0%} idle "
        f"({idle['min']:.0%}–{idle['max']:.0%}).",
        harness.table(
            ["", "blocked, update at once", "blocked, in training", "lost in training",
             "durable", "durable, in training", "blocked at the first saves", "what was stored"],
            rows,
        ),
        harness.table(["limit, same series", "seconds", "rate"], limits),
        f"A training step alone takes {alone['step']['median']:.2f} s, of which forward and "
        f"backward {alone['forward and backward']['median']:.2f} s. The check itself was tried on "
        f"an asynchronous save whose update does not wait; it says: {result['control']}.",
    ])  # fmt: skip
