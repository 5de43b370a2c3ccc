"""What each phase of the demo promised, and whether it was so: decided from the journals alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.demo.records import Incarnation

#: How far losses may be from the reference on another number of ranks, relative to it.
#:
#: The restored state is the reference's to the last bit there too (its checksum is compared). But
#: the gradients that follow are sums of float32 over other parts in another order, each rounded to
#: 2**-24, or 6e-8, of itself. Measured over these steps, that leaves losses within 6e-8 of the
#: reference. A wrong state is off by more: the moments lost, 4e-3 to 7e-1; the learning rate wrong
#: by 1 %, or the step count by one, 2e-5. The tolerance lies between.
TOLERANCE = 1e-6
#: What failed in the reference.
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Interruption:
    """What failed, the incarnation that ended with it, and the moment time is taken from."""

    what: str
    killed: Incarnation
    time_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses of a run beside the reference's at the same steps."""

    steps: int
    identical: int
    largest: float
    """The largest difference, relative to the reference."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``broken`` says in words which promises were not kept."""

    what: str
    world: str
    resumed_at: int | None
    source: str
    lost_steps: int | None
    resume_s: float | None
    losses: Comparison
    is_bitwise: bool
    """Whether bit for bit was promised; else the tolerance."""
    has_same_state: bool | None
    """Whether the restored state had the reference's checksum; None: there is none of that step."""
    broken: tuple[str, ...]


def compare(losses: Mapping[int, float], reference: Mapping[int, float]) -> Comparison:
    """Compare at every step of ``losses`` that the reference has."""
    pairs = [(loss, reference[step]) for step, loss in losses.items() if step in reference]
    return Comparison(
        steps=len(pairs),
        identical=sum(loss == wanted for loss, wanted in pairs),
        largest=max((abs(loss - wanted) / abs(wanted) for loss, wanted in pairs), default=0.0),
    )


def judge_reference(
    reference: Incarnation, steps: int, published: Sequence[int], every: int
) -> Row:
    """The run without failures: whole, learning, and durable every so many steps."""
    broken = _faults_of_course(reference, 0, steps - 1)
    wanted = list(range(every - 1, steps, every))
    if list(published) != wanted:
        broken.append(f"checkpoints after steps {wanted} were promised, there are {published}")
    if not broken and not reference.losses[steps - 1] < reference.losses[0]:
        broken.append("it learned nothing")
    return Row(
        what=NOTHING, world=_world(reference), resumed_at=None, source="",
        lost_steps=None, resume_s=None, losses=compare(reference.losses, reference.losses),
        is_bitwise=True, has_same_state=None, broken=tuple(broken),
    )  # fmt: skip


def judge_one_killed(kill: Interruption, resumed: Incarnation, reference: Incarnation) -> Row:
    """One trainer died: back from memory, after the last completed step or the one before.

    A step is made with its update, and over when ``Checkpointer.step`` has returned: in the
    instant between, the snapshot before it may not be sealed on all ranks.
    """
    broken = _faults_of_course(resumed, _first(resumed), resumed.last_updated)
    at, over, made = resumed.restored, kill.killed.last_over, kill.killed.last_updated
    if at is None or at.source != "memory":
        broken.append(f"memory was promised, it {_how(resumed)}")
    elif over is None or made is None or not over - 1 <= at.step <= made:
        broken.append(f"step {made} was made and {over} over on all ranks, it {_how(resumed)}")
    return _row(kill, _world(resumed), resumed, reference, broken)


def judge_all_killed(
    kill: Interruption, resumed: Incarnation, newest: int | None, reference: Incarnation
) -> Row:
    """Everything died and memory is gone: back from the newest checkpoint, in the same world."""
    broken = _faults_of_storage(resumed, newest, reference)
    return _row(kill, _world(resumed), resumed, reference, broken)


def judge_other_world(
    start: Interruption,
    world: str,
    resumed: Incarnation,
    newest: int | None,
    reference: Incarnation,
) -> Row:
    """The same checkpoint on other ranks: the same state, and losses within the tolerance."""
    broken = _faults_of_storage(resumed, newest, reference)
    return _row(start, world, resumed, reference, broken, is_bitwise=False)


def judge_host_lost(
    kill: Interruption, resumed: Incarnation, protected: int, reference: Incarnation
) -> Row:
    """One host was lost with its memory: back from the others', at a protected step or after it."""
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
    resumed: Incarnation,
    newest: int | None,
    before: Sequence[Incarnation],
    reference: Incarnation,
) -> Row:
    """More were lost than parity replaces: back from the newest checkpoint.

    Its state is compared with what the ranks that made it had, on their number of hosts.
    """
    broken = _faults_of_storage(resumed, newest, reference)
    states = {step: state for one in before for step, state in one.states.items()}
    row = _row(kill, _hosts(resumed), resumed, reference, broken, is_bitwise=False, states=states)
    return _with_known_state(row)


def _with_known_state(row: Row) -> Row:
    """A state that nobody could compare is no promise kept."""
    if row.has_same_state is None and row.resumed_at is not None:
        return replace(row, broken=(*row.broken, "the restored state was compared with none"))
    return row


def _row(
    kill: Interruption,
    world: str,
    resumed: Incarnation,
    reference: Incarnation,
    broken: list[str],
    *,
    is_bitwise: bool = True,
    states: Mapping[int, str] | None = None,
) -> Row:
    at, made = resumed.restored, kill.killed.last_updated
    losses = compare(resumed.losses, reference.losses)
    if is_bitwise and losses.identical < losses.steps:
        broken.append(f"{losses.steps - losses.identical} losses are not those of the reference")
    if not is_bitwise and not losses.largest <= TOLERANCE:  # a NaN is not within it either
        broken.append(f"losses differ from the reference by up to {losses.largest:.1e}")
    is_same = _has_same_state(resumed, reference.states if states is None else states)
    if is_same is False:
        broken.append("the restored state is not the one that was saved")
    return Row(
        what=kill.what, world=world, resumed_at=at.step if at else None,
        source=at.source if at else "",
        lost_steps=None if at is None or made is None else made - at.step,
        resume_s=resume_time(kill, resumed), losses=losses, is_bitwise=is_bitwise,
        has_same_state=is_same, broken=tuple(broken),
    )  # fmt: skip


def resume_time(kill: Interruption, resumed: Incarnation) -> float | None:
    """Seconds from the kill to the end of the first new step, less the demo's own checksum."""
    going_s = resumed.going_since_s
    return None if going_s is None else going_s - resumed.checking_s - kill.time_s


def _has_same_state(resumed: Incarnation, states: Mapping[int, str]) -> bool | None:
    at = resumed.restored
    wanted = states.get(at.step) if at is not None else None
    return None if at is None or wanted is None else resumed.states.get(at.step) == wanted


def _first(resumed: Incarnation) -> int:
    return resumed.restored.step + 1 if resumed.restored else 0


def _faults_of_course(run: Incarnation, first: int, last: int | None) -> list[str]:
    """Every step made once, by all ranks alike."""
    faults = []
    missing = [] if last is None else sorted(set(range(first, last + 1)) - run.losses.keys())
    if last is None or missing:
        faults.append(f"steps {missing} were not made" if missing else "no step was made")
    if run.disagreements:
        faults.append(f"ranks report different losses at steps {run.disagreements}")
    return faults


def _faults_of_storage(
    resumed: Incarnation, newest: int | None, reference: Incarnation
) -> list[str]:
    """Back from the newest published checkpoint, and on to the last step."""
    faults = _faults_of_course(resumed, _first(resumed), max(reference.losses))
    at = resumed.restored
    if at is None or (at.source, at.step) != ("storage", newest):
        faults.append(f"storage and its newest step {newest} were promised, it {_how(resumed)}")
    return faults


def _how(resumed: Incarnation) -> str:
    at = resumed.restored
    return "began afresh" if at is None else f"resumed after step {at.step} from {at.source}"


def _world(run: Incarnation) -> str:
    return f"FSDP2 {run.world} rank{'s' if run.world != 1 else ''}"


def _hosts(run: Incarnation) -> str:
    return f"FSDP2 {run.world} host{'s' if run.world != 1 else ''}"
