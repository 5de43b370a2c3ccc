"""Judges from the journals alone whether each phase of the demo kept its promises."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from holdfast.demo.records import DemoIncarnation

#: How far losses may be from the reference on another number of ranks, relative to it.
#:
#: The restored state is the reference's to the last bit there too (its checksum is compared). But
#: the gradients that follow are sums of float32 over other parts in another order, each rounded to
#: 2**-24, or 6e-8, of itself. Measured over these steps, that leaves losses within 6e-8 of the
#: reference. A wrong state is off by more: the moments lost, 4e-3 to 7e-1; the learning rate wrong
#: by 1 %, or the step count by one, 2e-5. The tolerance lies between.
TOLERANCE = 1e-6
#: The entry for "what failed" of the reference.
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Interruption:
    """A failure: what failed, the incarnation that ended with it, and the moment time is measured
    from.
    """

    what: str
    killed: DemoIncarnation
    time_s: float


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """Losses of a run beside the reference's at the same steps."""

    steps: int
    identical: int
    largest: float
    """The largest difference, relative to the reference."""


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """One line of the table. ``broken`` names the promises that were not kept, in words."""

    what: str
    world: str
    resumed_at: int | None
    source: str
    lost_steps: int | None
    resume_s: float | None
    losses: CurveComparison
    is_bitwise: bool
    """True if equality bit for bit was promised; otherwise within the tolerance."""
    has_same_state: bool | None
    """True if the restored state had the reference's checksum; None: there is none of that step."""
    broken: tuple[str, ...]


def compare(losses: Mapping[int, float], reference: Mapping[int, float]) -> CurveComparison:
    """Compares at every step of ``losses`` that the reference has."""
    pairs = [(loss, reference[step]) for step, loss in losses.items() if step in reference]
    return CurveComparison(
        steps=len(pairs),
        identical=sum(loss == wanted for loss, wanted in pairs),
        largest=max((abs(loss - wanted) / abs(wanted) for loss, wanted in pairs), default=0.0),
    )


def judge_reference(
    reference: DemoIncarnation, steps: int, published: Sequence[int], every: int
) -> VerdictRow:
    """Judges the run without failures: complete, learning, and durable at every interval."""
    broken = _faults_of_course(reference, 0, steps - 1)
    wanted = list(range(every - 1, steps, every))
    if list(published) != wanted:
        broken.append(f"checkpoints after steps {wanted} were promised, there are {published}")
    if not broken and not reference.losses[steps - 1] < reference.losses[0]:
        broken.append("it learned nothing")
    return VerdictRow(
        what=NOTHING,
        world=_world(reference),
        resumed_at=None,
        source="",
        lost_steps=None,
        resume_s=None,
        losses=compare(reference.losses, reference.losses),
        is_bitwise=True,
        has_same_state=None,
        broken=tuple(broken),
    )


def judge_one_killed(
    kill: Interruption, resumed: DemoIncarnation, reference: DemoIncarnation
) -> VerdictRow:
    """Judges one killed trainer: back from memory, after the last completed step or the one before.

    A step is made with its update, and over when ``Checkpointer.step`` has returned: in the instant
    between, the snapshot before it may not be sealed on all ranks.
    """
    broken = _faults_of_course(resumed, _first(resumed), resumed.last_updated)
    at, over, made = resumed.restored, kill.killed.last_over, kill.killed.last_updated
    if at is None or at.source != "memory":
        broken.append(f"memory was promised, it {_how(resumed)}")
    elif over is None or made is None or not over - 1 <= at.step <= made:
        broken.append(f"step {made} was made and {over} over on all ranks, it {_how(resumed)}")
    return _row(kill, _world(resumed), resumed, reference, broken)


def judge_all_killed(
    kill: Interruption, resumed: DemoIncarnation, newest: int | None, reference: DemoIncarnation
) -> VerdictRow:
    """Judges the loss of everything, memory included: back from the newest checkpoint, in the same
    world.
    """
    broken = _faults_of_storage(resumed, newest, reference)
    return _row(kill, _world(resumed), resumed, reference, broken)


def judge_other_world(
    start: Interruption,
    world: str,
    resumed: DemoIncarnation,
    newest: int | None,
    reference: DemoIncarnation,
) -> VerdictRow:
    """Judges the same checkpoint on other ranks: the same state, and losses within the
    tolerance.
    """
    broken = _faults_of_storage(resumed, newest, reference)
    return _row(start, world, resumed, reference, broken, is_bitwise=False)


def judge_host_lost(
    kill: Interruption, resumed: DemoIncarnation, protected: int, reference: DemoIncarnation
) -> VerdictRow:
    """Judges the loss of one host with its memory: back from the others', at a protected step or
    after it.
    """
    broken = _faults_of_course(resumed, _first(resumed), resumed.last_updated)
    at, made = resumed.restored, kill.killed.last_updated
    if at is None or at.source != "memory":
        broken.append(f"memory was promised, it {_how(resumed)}")
    elif made is None or not protected <= at.step <= made:
        broken.append(f"step {protected} was protected and {made} made, it {_how(resumed)}")
    row = _row(kill, _hosts(resumed), resumed, reference, broken, is_bitwise=False)
    return _with_known_state(row)


def judge_hosts_lost(
    kill: Interruption,
    resumed: DemoIncarnation,
    newest: int | None,
    before: Sequence[DemoIncarnation],
    reference: DemoIncarnation,
) -> VerdictRow:
    """Judges the loss of more hosts than parity replaces: back from the newest checkpoint.

    Its state is compared with that of the ranks that made it, on their number of hosts.
    """
    broken = _faults_of_storage(resumed, newest, reference)
    states = {step: state for one in before for step, state in one.states.items()}
    row = _row(kill, _hosts(resumed), resumed, reference, broken, is_bitwise=False, states=states)
    return _with_known_state(row)


def _with_known_state(row: VerdictRow) -> VerdictRow:
    """Treats a state that could not be compared as a broken promise."""
    if row.has_same_state is None and row.resumed_at is not None:
        return replace(row, broken=(*row.broken, "the restored state was compared with none"))
    return row


def _row(
    kill: Interruption,
    world: str,
    resumed: DemoIncarnation,
    reference: DemoIncarnation,
    broken: list[str],
    *,
    is_bitwise: bool = True,
    states: Mapping[int, str] | None = None,
) -> VerdictRow:
    at, made = resumed.restored, kill.killed.last_updated
    losses = compare(resumed.losses, reference.losses)
    if is_bitwise and losses.identical < losses.steps:
        broken.append(f"{losses.steps - losses.identical} losses are not those of the reference")
    if not is_bitwise and not losses.largest <= TOLERANCE:  # a NaN is not within it either
        broken.append(f"losses differ from the reference by up to {losses.largest:.1e}")
    is_same = _has_same_state(resumed, reference.states if states is None else states)
    if is_same is False:
        broken.append("the restored state is not the one that was saved")
    return VerdictRow(
        what=kill.what,
        world=world,
        resumed_at=at.step if at else None,
        source=at.source if at else "",
        lost_steps=None if at is None or made is None else made - at.step,
        resume_s=resume_time(kill, resumed),
        losses=losses,
        is_bitwise=is_bitwise,
        has_same_state=is_same,
        broken=tuple(broken),
    )


def resume_time(kill: Interruption, resumed: DemoIncarnation) -> float | None:
    """Returns the seconds from the kill to the end of the first new step, less the demo's own
    checksum.
    """
    going_s = resumed.going_since_s
    return None if going_s is None else going_s - resumed.checking_s - kill.time_s


def _has_same_state(resumed: DemoIncarnation, states: Mapping[int, str]) -> bool | None:
    at = resumed.restored
    wanted = states.get(at.step) if at is not None else None
    return None if at is None or wanted is None else resumed.states.get(at.step) == wanted


def _first(resumed: DemoIncarnation) -> int:
    return resumed.restored.step + 1 if resumed.restored else 0


def _faults_of_course(run: DemoIncarnation, first: int, last: int | None) -> list[str]:
    """Checks that every step was made once, by all ranks alike."""
    faults = []
    missing = [] if last is None else sorted(set(range(first, last + 1)) - run.losses.keys())
    if last is None or missing:
        faults.append(f"steps {missing} were not made" if missing else "no step was made")
    if run.disagreements:
        faults.append(f"ranks report different losses at steps {run.disagreements}")
    return faults


def _faults_of_storage(
    resumed: DemoIncarnation, newest: int | None, reference: DemoIncarnation
) -> list[str]:
    """Checks that the run came back from the newest published checkpoint, and went on to the last
    step.
    """
    faults = _faults_of_course(resumed, _first(resumed), max(reference.losses))
    at = resumed.restored
    if at is None or (at.source, at.step) != ("storage", newest):
        faults.append(f"storage and its newest step {newest} were promised, it {_how(resumed)}")
    return faults


def _how(resumed: DemoIncarnation) -> str:
    at = resumed.restored
    return "began afresh" if at is None else f"resumed after step {at.step} from {at.source}"


def _world(run: DemoIncarnation) -> str:
    return f"FSDP2 {run.world} rank{'s' if run.world != 1 else ''}"


def _hosts(run: DemoIncarnation) -> str:
    return f"FSDP2 {run.world} host{'s' if run.world != 1 else ''}"


# Holds the result of a demo as one value: the table, the curves, and their JSON.


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses one incarnation made, by step."""

    label: str
    losses: Mapping[int, float]
    is_bitwise: bool = True
    """True if it was promised to equal the reference bit for bit."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A kill: the step it came after, and the step training went on from."""

    what: str
    at: int
    back_to: int


@dataclass(slots=True)
class Result:
    """All results of the demo. The first curve is the reference."""

    seed: int
    hosts: int | None = None
    """The number of simulated hosts; None: on this one."""
    rows: list[VerdictRow] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    falls: list[Fall] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def is_as_promised(self) -> bool:
        """True if the demo was completed and every line of the table is as promised."""
        return not self.failure and not any(row.broken for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; losses as hexadecimal floats."""
        return {
            "as_promised": self.is_as_promised,
            "failure": self.failure,
            "seed": self.seed,
            "hosts": self.hosts,
            "tolerance": TOLERANCE,
            "rows": [asdict(row) for row in self.rows],
            "phases_s": {name: round(elapsed_s, 2) for name, elapsed_s in self.phases_s.items()},
            "losses": {
                curve.label: {str(step): loss.hex() for step, loss in curve.losses.items()}
                for curve in self.curves
            },
            "machine": {
                "python": platform.python_version(),
                "torch": importlib.metadata.version("torch"),
                "cores": os.cpu_count(),
            },
        }
