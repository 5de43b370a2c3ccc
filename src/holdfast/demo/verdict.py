"""Judges from the journals alone whether each phase of the demo kept its promises."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.testing.runs.journals import RunIncarnation

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
    killed: RunIncarnation
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
    reference: RunIncarnation, steps: int, published: Sequence[int], every: int
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


def judge_memory(
    kill: Interruption,
    resumed: RunIncarnation,
    reference: RunIncarnation,
    protected: int | None = None,
) -> VerdictRow:
    """Judges a loss that memory survives: back from it, after the last completed step or the one
    before.

    A step is made with its update, and over when ``Checkpointer.step`` has returned: in the instant
    between, the snapshot before it may not be sealed on all ranks. Of a host that is lost with its
    memory the others give back the newest ``protected`` step, or a later one.
    """
    broken = _faults_of_course(resumed, _first(resumed), resumed.last("update"))
    at, over, made = resumed.restored, kill.killed.last("over"), kill.killed.last("update")
    least, what = protected, f"step {protected} was protected and {made} made"
    if protected is None:
        least = None if over is None else over - 1
        what = f"step {made} was made and {over} over on all ranks"
    if at is None or at.source != "memory":
        broken.append(f"memory was promised, it {_how(resumed)}")
    elif least is None or made is None or not least <= at.step <= made:
        broken.append(f"{what}, it {_how(resumed)}")
    return _row(kill, resumed, reference, broken, on_hosts=protected is not None)


def judge_storage(
    kill: Interruption,
    resumed: RunIncarnation,
    newest: int | None,
    reference: RunIncarnation,
    *,
    world: str = "",
    before: Sequence[RunIncarnation] | None = None,
) -> VerdictRow:
    """Judges the loss of everything, or of more than memory survives: back from the newest
    checkpoint.

    On the ranks of another ``world`` the state is the same, and losses are within the tolerance.
    On fewer hosts, the state is compared with that of the ranks that made it, ``before``.
    """
    broken = _faults_of_course(resumed, _first(resumed), max(reference.losses))
    at = resumed.restored
    if at is None or (at.source, at.step) != ("storage", newest):
        broken.append(f"storage and its newest step {newest} were promised, it {_how(resumed)}")
    if before is None:
        return _row(kill, resumed, reference, broken, world=world)
    states = {step: state for one in before for step, state in one.states.items()}
    return _row(kill, resumed, reference, broken, on_hosts=True, states=states)


def _row(
    kill: Interruption,
    resumed: RunIncarnation,
    reference: RunIncarnation,
    broken: list[str],
    *,
    on_hosts: bool = False,
    world: str = "",
    states: Mapping[int, str] | None = None,
) -> VerdictRow:
    at, made = resumed.restored, kill.killed.last("update")
    losses, is_bitwise = compare(resumed.losses, reference.losses), not (on_hosts or world)
    if is_bitwise and losses.identical < losses.steps:
        broken.append(f"{losses.steps - losses.identical} losses are not those of the reference")
    if not is_bitwise and not losses.largest <= TOLERANCE:  # a NaN is not within it either
        broken.append(f"losses differ from the reference by up to {losses.largest:.1e}")
    wanted = None if at is None else (reference.states if states is None else states).get(at.step)
    is_same = None if at is None or wanted is None else resumed.states.get(at.step) == wanted
    if is_same is False:
        broken.append("the restored state is not the one that was saved")
    if on_hosts and is_same is None and at is not None:
        broken.append("the restored state was compared with none")
    return VerdictRow(
        what=kill.what,
        world=world or _world(resumed, "host" if on_hosts else "rank"),
        resumed_at=at.step if at else None,
        source=at.source if at else "",
        lost_steps=None if at is None or made is None else made - at.step,
        resume_s=resume_time(kill, resumed),
        losses=losses,
        is_bitwise=is_bitwise,
        has_same_state=is_same,
        broken=tuple(broken),
    )


def resume_time(kill: Interruption, resumed: RunIncarnation) -> float | None:
    """Returns the seconds from the kill to the end of the first new step, less the demo's own
    checksum.
    """
    going_s = resumed.going_since_s
    return None if going_s is None else going_s - resumed.checking_s - kill.time_s


def _first(resumed: RunIncarnation) -> int:
    return resumed.restored.step + 1 if resumed.restored else 0


def _faults_of_course(run: RunIncarnation, first: int, last: int | None) -> list[str]:
    """Checks that every step was made once, by all ranks alike."""
    faults = []
    missing = [] if last is None else sorted(set(range(first, last + 1)) - run.losses.keys())
    if last is None or missing:
        faults.append(f"steps {missing} were not made" if missing else "no step was made")
    if run.disagreements:
        faults.append(f"ranks report different losses at steps {run.disagreements}")
    return faults


def _how(resumed: RunIncarnation) -> str:
    at = resumed.restored
    return "began afresh" if at is None else f"resumed after step {at.step} from {at.source}"


def _world(run: RunIncarnation, kind: str = "rank") -> str:
    return f"FSDP2 {run.world} {kind}{'s' if run.world != 1 else ''}"


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
