"""PURE. The metrics of a keeper: name, kind, labels and meaning, in one table.

The port serves what stands here and nothing else; ``docs/operations/metrics.md``, the alert rules
and the dashboard are generated from it, and a test compares each with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.observe.phases import PHASES

#: The upper bounds of the buckets of phases, in seconds.
BUCKETS_S = (0.001, 0.004, 0.016, 0.064, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
MOST_SERIES = 400
#: The values of a label that are not any of those in the table are counted as this one.
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter has ``_total`` behind its name when it is served.

    ``labels``: each label with its values. ``when``: where it is absent, in words.
    """

    name: str
    kind: str  # "counter" | "gauge" | "histogram"
    text: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    when: str = ""

    @property
    def served_name(self) -> str:
        """Returns the name that queries use."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_STATES = ("captured", "protected", "cached", "durable")
_AT_COORDINATOR = "of the keeper that coordinates the run"
_SAMPLED = "sampled every 10 s"

METRICS = (
    Metric("holdfast_build_info", "gauge", "always 1; the version is a label", (("version", ()),)),
    Metric("holdfast_keeper_start_time_seconds", "gauge", "when this keeper started, Unix time"),
    Metric(
        "holdfast_incarnation",
        "gauge",
        "the start of the run that this host's ranks are of; it counts up at each restart",
    ),
    Metric(
        "holdfast_generations",
        "counter",
        "generations that reached a state, or that did not",
        (("outcome", (*_STATES, "missed", "not_protected", "not_durable")),),
        _AT_COORDINATOR,
    ),
    Metric(
        "holdfast_newest_step",
        "gauge",
        "the step of the newest generation in a state",
        (("state", _STATES),),
        _AT_COORDINATOR,
    ),
    Metric(
        "holdfast_newest_reached_seconds",
        "gauge",
        "when the newest generation reached a state, Unix time; `time()` less this is the work at "
        "risk",
        (("state", _STATES),),
        _AT_COORDINATOR,
    ),
    Metric(
        "holdfast_phase_seconds",
        "histogram",
        "how long the phases of saves and restores took, of the ranks of this host together",
        (("phase", tuple(phase.name for phase in PHASES if phase.within != "restore")),),
    ),
    Metric(
        "holdfast_restore_seconds",
        "counter",
        "time of restores by what the ranks of this host did in it, of all ranks together",
        (("phase", tuple(phase.name for phase in PHASES if phase.within == "restore")),),
    ),
    Metric(
        "holdfast_image_bytes",
        "counter",
        "bytes of images of this host that were captured in memory, and made durable in storage",
        (("state", ("captured", "durable")),),
    ),
    Metric(
        "holdfast_restores",
        "counter",
        "restores of this host's ranks, by the source of the generation",
        (("source", ("memory", "storage", OTHER)),),
    ),
    Metric("holdfast_trainer_starts", "counter", "trainers of this host that joined the run"),
    Metric(
        "holdfast_trainers_lost",
        "counter",
        "trainers of all hosts that went away without a goodbye",
        when=_AT_COORDINATOR,
    ),
    Metric(
        "holdfast_damage_found",
        "counter",
        "changed bytes found in memory, by what became of them",
        (("outcome", ("repaired", "dropped", OTHER)),),
    ),
    Metric("holdfast_sources_dropped", "counter", "sources that failed a rank's restore"),
    Metric("holdfast_replicas_differ", "counter", "leaves that were not equal on all their ranks"),
    Metric(
        "holdfast_refused",
        "counter",
        "requests and connections that this keeper refused",
        (("door", ("socket", "peers", "control", OTHER)),),
    ),
    Metric("holdfast_loop_held", "counter", "times that this keeper answered nobody for 50 ms"),
    Metric("holdfast_warnings", "counter", "warnings of this host's processes"),
    Metric("holdfast_events_dropped", "counter", "records that were lost because a ring was full"),
    Metric(
        "holdfast_slots",
        "gauge",
        "slots in shared memory by their state",
        (
            (
                "state",
                (
                    *("allocating", "free", "granted", "writing"),
                    *("captured", "quarantined", OTHER),
                ),
            ),
        ),
        _SAMPLED,
    ),
    Metric(
        "holdfast_arena_bytes",
        "gauge",
        "shared memory by what takes it; `free` is what more slots may take",
        (("use", ("slots", "parity", "free")),),
        _SAMPLED,
    ),
    Metric(
        "holdfast_storage_queue_jobs",
        "gauge",
        "saves that wait to be written from this host, or are being written",
        when=_SAMPLED,
    ),
    Metric(
        "holdfast_storage_queue_bytes",
        "gauge",
        "the images of these saves: those that wait, and those whose writing has begun",
        (("state", ("waiting", "writing")),),
        _SAMPLED,
    ),
    Metric(
        "holdfast_storage_queue_age_seconds",
        "gauge",
        "for how long the oldest of these saves waits",
        when=_SAMPLED,
    ),
    Metric(
        "holdfast_trainers",
        "gauge",
        "trainers of this host that are connected to the keeper",
        when=_SAMPLED,
    ),
    Metric(
        "holdfast_resident_bytes",
        "gauge",
        "resident memory without what is shared",
        (("process", ("keeper", "trainers")),),
        _SAMPLED,
    ),
    Metric(
        "holdfast_keeper_cpu_seconds",
        "counter",
        "processor time of this keeper",
        when=_SAMPLED,
    ),
    Metric(
        "holdfast_pressure_ratio",
        "gauge",
        "part of the last 10 s in which a process of the host waited for it (PSI)",
        (("resource", ("cpu", "io", "memory")),),
        f"{_SAMPLED}, where the kernel tells it",
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
