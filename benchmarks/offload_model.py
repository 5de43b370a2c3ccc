"""Compare the model of an offloaded update with what Deep Optimizer States published.

Nothing is measured here. Each published run with the update on the host gives its own times of
forward, backward and update; the model then says how long the same step takes when GPU and host
take turns as they did it, and as a schedule of ours would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.kit import markdown, results
from benchmarks.kit.options import Parser
from holdfast.offload.planning.schedule import Rates, Schedule, plan, timeline
from holdfast.offload.planning.simulate import Name, SimulatedTask, Timeline, run, tasks
from holdfast.offload.planning.subgroups import rotate

DOCUMENT = results.DOCS / "offload-model.md"
SUBGROUP = 100_000_000
SLOTS = 3


@dataclass(frozen=True)
class Machine:
    """What one GPU has of its host; ``memory`` and ``blocking`` are fitted to one run each."""

    name: str
    link_bytes_s: float
    device_elements_s: float
    memory_bytes_s: float  # fitted to the interleaved run of the 20B model
    blocking_elements_s: float  # gradients copied while backward waits; fitted to the same model


@dataclass(frozen=True)
class Case:
    """A published run: one GPU's share of the model, and the times of all three ways."""

    name: str
    machine: Machine
    elements: float  # a GPU, as the logs count them
    update_s: float  # all on the host
    base_s: float  # the whole step: gradients copied while backward waits
    async_s: float  # with gradients copied behind backward
    interleaved_s: float  # and every ``stride``-th subgroup on the GPU
    stride: int
    ratio: float = 1.0  # of the state in host memory; the rest never leaves the GPU
    is_guess: bool = False  # the log of the update was not there: the rate of another run

    @property
    def around_s(self) -> float:
        """Forward and backward."""
        return self.async_s - self.update_s * self.ratio

    @property
    def sizes(self) -> list[int]:
        """The subgroups that lie in host memory."""
        left, sizes = round(self.elements * self.ratio), []
        while left > 0:
            sizes.append(min(SUBGROUP, left))
            left -= sizes[-1]
        return sizes

    @property
    def rates(self) -> Rates:
        """The host's rate is that of its own run, the cast included."""
        machine = self.machine
        return Rates(
            machine.link_bytes_s,
            machine.link_bytes_s,
            self.elements / self.update_s,
            machine.device_elements_s,
            host_memory_bytes_s=machine.memory_bytes_s,
        )


H100 = Machine("4 x H100, PCIe 5", 50e9, 80e9, 86e9, 1.105e9)
A100 = Machine("4 x A100, PCIe 4", 25e9, 45e9, 38.5e9, 1.463e9)
ALONE = Machine("1 x A100, PCIe 4", 25e9, 45e9, 154e9, 1.463e9)
GUESSED_ELEMENTS_S = 0.9e9  # what a GPU's part of an A100 host updates in the run of the 20B model
CASES = (
    Case("20B", H100, 3.83e9, 2.278, 6.938, 3.472, 2.438, 2),
    Case("20B, 0.8 on the host", H100, 3.83e9, 2.278, 5.542, 2.904, 2.115, 2, ratio=0.8),
    Case("20B, 0.5 on the host", H100, 3.83e9, 2.278, 3.904, 2.213, 1.701, 2, ratio=0.5),
    Case("20B", A100, 4.68e9, 5.19, 11.995, 8.799, 6.981, 2),
    Case("13B", A100, 2.82e9, 3.80, 7.116, 5.611, 4.209, 2),
    Case("7B", A100, 1.49e9, 2.05, 3.796, 3.076, 2.253, 2),
    Case("13B", ALONE, 11.2e9, 7.96, 19.416, 13.849, 12.996, 5),
    Case("13B, 16 batches a step", ALONE, 11.2e9, 7.96, 86.521, 78.651, 76.254, 5),
    Case("70B on 16 GPUs", A100, 3.45e9, 7.31, 54.271, 52.827, 57.020, 5),
    Case("30B on 8 GPUs", A100, 3.45e9, 3.45 / 0.9, 32.916, 31.351, 27.016, 2, is_guess=True),
    Case("7B on 16 GPUs", A100, 0.372e9, 0.372 / 0.9, 6.439, 6.138, 6.128, 5, is_guess=True),
)


# ── how they did it ──────────────────────────────────────────────────────────────────────────


def interleaved(case: Case) -> Timeline:
    """Every ``stride``-th subgroup on the GPU, in one slot, driven by the thread that updates."""
    everyone = range(len(case.sizes))
    device = [one for one in everyone if (one + 1) % case.stride == 0]
    host = [one for one in everyone if one not in device]
    given = tasks(case.sizes, host, device, case.rates, device_slots=1)
    return run([*_in_turns(given, case.stride)], case.rates)


def _in_turns(given: list[SimulatedTask], stride: int) -> Iterator[SimulatedTask]:
    """Every stride begins with a flush and a prefetch, and ends with a wait for that prefetch."""
    names = {task.name for task in given}
    for task in given:
        act, one = task.name
        waits = {
            "prefetch": [Name("update", one - stride)],
            "flush": [Name("update", one)],  # of the stride after it; there may be none
            "compute": [Name("update", one - 1)],
            "update": [Name("prefetch", one - 1)],
        }.get(act, [])
        if act == "flush":
            waits = [Name("prefetch", one)]
        yield task._replace(after=(*task.after, *(name for name in waits if name in names)))


# ── what is shown ────────────────────────────────────────────────────────────────────────────


def ours(case: Case) -> Schedule:
    """What would be planned with a few slots."""
    return plan(case.sizes, case.rates, device_slots=SLOTS)


def blocking_s(case: Case) -> float:
    """How long backward waits for copies of gradients, by the model."""
    return case.elements * case.ratio / case.machine.blocking_elements_s


def comparison() -> str:
    """All runs: what was published, beside the model."""
    head = [
        "run",
        "stride",
        "async gradients: published",
        "model",
        "interleaved: published",
        "model",
        "both: published",
        "model",
        "step published, s",
        "model",
        "off by",
    ]
    rows = []
    for case in CASES:
        by_model_s = case.around_s + interleaved(case).finished_s
        host_s = case.around_s + plan(case.sizes, case.rates, device_slots=0).expected_s
        base_s = host_s + blocking_s(case)
        rows.append(
            [
                _named(case),
                str(case.stride),
                f"{case.base_s / case.async_s:.2f}x",
                f"{base_s / host_s:.2f}x",
                f"{case.async_s / case.interleaved_s:.2f}x",
                f"{host_s / by_model_s:.2f}x",
                f"{case.base_s / case.interleaved_s:.2f}x",
                f"{base_s / by_model_s:.2f}x",
                f"{case.interleaved_s:.2f}",
                f"{by_model_s:.2f}",
                f"{by_model_s / case.interleaved_s - 1:+.0%}",
            ]
        )
    return markdown.table(head, rows)


def updates() -> str:
    """The update alone, which is all that a schedule changes."""
    head = [
        "run",
        "on the host, s",
        "interleaved: published, s",
        "model, s",
        "a schedule: share",
        "model, s",
        "of the update on the host",
        "of the whole step",
    ]
    rows = []
    for case in CASES:
        alone_s = plan(case.sizes, case.rates, device_slots=0).expected_s
        planned = ours(case)
        rows.append(
            [
                _named(case),
                f"{alone_s:.2f}",
                f"{case.interleaved_s - case.around_s:.2f}",
                f"{interleaved(case).finished_s:.2f}",
                f"{planned.share:.2f}",
                f"{planned.expected_s:.2f}",
                f"{alone_s / planned.expected_s:.2f}x",
                f"{case.async_s / (case.around_s + planned.expected_s):.2f}x",
            ]
        )
    return markdown.table(head, rows)


def links() -> str:
    """What crosses the link, on average over the update: a check that no time was fitted to."""
    published = {2: (19.4, 19.1), 3: (11.9, 10.6), 4: (9.0, 9.5)}
    head = ["stride", "to the host: published, GB/s", "model", "to the GPU: published", "model"]
    rows = []
    for stride, (out, into) in published.items():
        case = Case("", H100, 3.83e9, 2.278, 0, 2.278, 0, stride)
        took_s = interleaved(case).finished_s
        there = sum(size for one, size in enumerate(case.sizes) if (one + 1) % stride == 0)
        rates, here = case.rates, sum(case.sizes) - there
        back = there * rates.state_out_bytes / took_s
        forth = (there * rates.state_in_bytes + here * rates.parameter_bytes) / took_s
        rows.append([str(stride), f"{out}", f"{back / 1e9:.1f}", f"{into}", f"{forth / 1e9:.1f}"])
    return markdown.table(head, rows)


def slots() -> str:
    """What more room on the device is worth."""
    case = CASES[0]
    head = ["slots", "memory, GB", "share", "update, s", "without waiting for the last flush, s"]
    rows = []
    for count in (0, 1, 2, 3, 4):
        planned = plan(case.sizes, case.rates, device_slots=count)
        free = plan(case.sizes, case.rates, device_slots=count, flush_is_awaited=False)
        rows.append(
            [
                str(count),
                f"{count * SUBGROUP * case.rates.state_in_bytes / 1e9:.1f}",
                f"{planned.share:.2f}",
                f"{planned.expected_s:.3f}",
                f"{free.expected_s:.3f}",
            ]
        )
    return markdown.table(head, rows)


def busy() -> str:
    """How much of the update each lane works."""
    head = ["run", "to the GPU", "to the host", "host", "GPU"]
    rows = []
    for case in (CASES[0], CASES[3]):
        played = timeline(case.sizes, ours(case), case.rates, device_slots=SLOTS)
        shares = [played.busy_s(lane) / played.finished_s for lane in _LANES]
        rows.append([_named(case), *(f"{share:.0%}" for share in shares)])
    return markdown.table(head, rows)


def wrong() -> str:
    """What a schedule costs that was planned with wrong rates."""
    case = CASES[0]
    head = ["taken for other than it is", "by 0.5", "by 0.7", "by 1.4", "by 2"]
    rows = []
    for name, fields in _RATES.items():
        cells = []
        for factor in (0.5, 0.7, 1.4, 2.0):
            believed = {field: factor * getattr(case.rates, field) for field in fields}
            found = plan(case.sizes, replace(case.rates, **believed), device_slots=SLOTS)
            took = timeline(case.sizes, found, case.rates, device_slots=SLOTS).finished_s
            cells.append(f"{took / ours(case).expected_s - 1:+.1%}")
        rows.append([name, *cells])
    return markdown.table(head, rows)


def rotations() -> str:
    """How much of the state goes to storage and back in each step."""
    sizes = [12 * size for size in CASES[0].sizes]
    head = ["in host memory", "kept between steps", "read and written each", "not read: of all"]
    rows = []
    for part in (0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
        budget = round(part * sum(sizes))
        first = rotate(sizes, budget_bytes=budget)
        moved = sum(
            sizes[one.subgroup] for one in rotate(sizes, budget_bytes=budget, after=first).reads
        )
        rows.append(
            [
                f"{part:.0%}",
                f"{len(first.kept)} of {len(sizes)}",
                f"{moved / 1e9:.1f} GB",
                f"{1 - moved / sum(sizes):.0%}",
            ]
        )
    return markdown.table(head, rows)


_LANES = ("h2d", "d2h", "host", "device")
_RATES = {
    "the link, both ways": ("h2d_bytes_s", "d2h_bytes_s"),
    "the host's update": ("host_update_elements_s",),
    "the device's update": ("device_update_elements_s",),
    "the host's memory": ("host_memory_bytes_s",),
}
BLOCKS = {
    "comparison": comparison,
    "updates": updates,
    "links": links,
    "slots": slots,
    "busy": busy,
    "wrong": wrong,
    "rotations": rotations,
}


def _named(case: Case) -> str:
    return f"{case.name}, {case.machine.name}" + (" *" if case.is_guess else "")


def main(arguments: Sequence[str]) -> int:
    """Print, and put into the document where asked to."""
    parser = Parser("offload_model", __doc__)
    parser.add_document("docs/offload-model.md")
    options = parser.parse(arguments)
    for name, table in BLOCKS.items():
        text = table()
        print(f"{name}\n\n{text}\n")
        if options.document:
            results.replace_block(DOCUMENT, name, text)
    return 0
