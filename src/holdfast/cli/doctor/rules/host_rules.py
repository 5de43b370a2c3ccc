"""PURE. Judges the machine, its limits and the settings: ok, warn or bad."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from holdfast.cli.doctor.rules.accelerator_rules import judge_accelerators
from holdfast.cli.doctor.rules.probe_facts import Facts, Finding, HostFacts, PlaceFacts
from holdfast.coordinator.slots import SLOTS_PER_IMAGE, SLOTS_WITH_PARITY
from holdfast.errors import UsageError
from holdfast.observe import text as torchrun
from holdfast.observe.text import count_text, size_text
from holdfast.parity.planning.budget import HALVES
from holdfast.parity.planning.groups import GROUP_SIZE
from holdfast.policy.arguments import is_endpoint, parity_rate

#: Docker and Kubernetes give a container this much by default.
CONTAINER_DEFAULT_BYTES = 64 << 20
FEW_FILES = 1024
IN_MEMORY = ("tmpfs", "ramfs")
SETTINGS = (
    "HOLDFAST_ARENA_DIR",
    "HOLDFAST_ARENA_BYTES",
    "HOLDFAST_RUN_ID",
    "HOLDFAST_HOST_ID",
    "HOLDFAST_HOST_ADDRESS",
    "HOLDFAST_FAILURE_DOMAIN",
    "HOLDFAST_PARITY_RATE",
    "HOLDFAST_SECRET_FILE",
    "HOLDFAST_LOG",
    "HOLDFAST_KEEPER_IDLE_S",
    "HOLDFAST_KEEPER_SCRUB_S",
    "HOLDFAST_EVENT_BYTES",
    "HOLDFAST_METRICS",
    "HOLDFAST_OTLP",
    "HOLDFAST_EXCHANGE",
    "HOLDFAST_BUCKET_BYTES_S",
    "HOLDFAST_DRAIN_BYTES_S",
    "HOLDFAST_BUCKET_ONE_WRITER",
    "HOLDFAST_BUCKET_PLAIN_HTTP",
    "HOLDFAST_BUCKET_UNSIGNED",
    "HOLDFAST_GS_ENDPOINT",
    "HOLDFAST_DEVICE_BYTES_S",
    "HOLDFAST_ROOT",
)
#: As in ``holdfast.restore.read_once``, which needs torch.
EXCHANGE_MODES = ("auto", "always", "never")
_MAX_NAME = 150


def judge_host(facts: Facts) -> Iterator[Finding]:
    """Yields every finding that does not depend on a root."""
    host = facts.host
    yield _system(host)
    yield _python(host)
    yield _cores(host)
    yield from _memory(facts)
    yield _files(host)
    yield from _shared_memory(facts)
    yield from judge_accelerators(facts)
    yield from _settings(facts)


def _system(host: HostFacts) -> Finding:
    text = f"{host.system} {host.kernel}"
    if host.system != "Linux":
        return Finding("bad", "system", text, "Holdfast runs on Linux only: use a Linux machine.")
    return Finding("ok", "system", text)


def _python(host: HostFacts) -> Finding:
    text = ".".join(map(str, host.python))
    if host.python < (3, 11, 0):
        return Finding("bad", "Python", text, "Install Python 3.11 or newer.")
    return Finding("ok", "Python", text)


def _cores(host: HostFacts) -> Finding:
    usable = f"{host.cores_usable:g} of {count_text(host.cores, 'core')}"
    if host.cores_usable < 2:
        return Finding(
            "warn",
            "cores",
            f"{usable} can be used: the keeper shares one with training",
            "Give this process two or more: taskset, docker --cpus, or cpus in the job's request.",
        )
    return Finding("ok", "cores", f"{usable} can be used")


def _memory(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    needed, what = _needed(facts)
    limit = min(host.memory_bytes, host.memory_limit_bytes or host.memory_bytes)
    text = size_text(limit)
    if host.memory_limit_bytes is not None and host.memory_limit_bytes < host.memory_bytes:
        text += f", by the limit of its control group, of {size_text(host.memory_bytes)}"
    if needed and needed > limit:
        yield Finding(
            "bad",
            "memory",
            f"{text}; {size_text(needed)}, all in memory, do not fit: {what}",
            "Raise the limit (docker --memory, resources.limits.memory): shared memory counts too.",
        )
    else:
        yield Finding("ok", "memory", text)


def _needed(facts: Facts) -> tuple[int, str]:
    """Returns the shared memory that a run of this root takes on a host, and its use; 0:
    unknown.
    """
    root = facts.root
    if root is None:
        return 0, ""
    share = root.newest_bytes / max(1, len(root.hosts))
    protected = root.protected
    if protected is None or protected.hosts < 2:
        return int(SLOTS_PER_IMAGE * share), f"{SLOTS_PER_IMAGE} images a rank"
    members = min(protected.hosts, GROUP_SIZE)
    parity = min(protected.parity, members - 1)
    images = SLOTS_WITH_PARITY + HALVES * parity / (members - parity)
    return int(images * share), f"{SLOTS_WITH_PARITY} images a rank, and parity of two generations"


def _files(host: HostFacts) -> Finding:
    if host.open_files is not None and host.open_files < FEW_FILES:
        return Finding(
            "warn",
            "open files",
            f"at most {host.open_files} in a process",
            f"Raise the limit: ulimit -n {4 * FEW_FILES}",
        )
    limit = "no limit" if host.open_files is None else f"up to {host.open_files}"
    return Finding("ok", "open files", limit)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    place, about = facts.memory, "shared memory"
    if place.fault:
        yield Finding(
            "bad",
            about,
            f"{place.path}: {place.fault}",
            "Set HOLDFAST_ARENA_DIR to a directory in memory (tmpfs) that this user can write to.",
        )
        return
    if place.kind not in IN_MEMORY:
        yield Finding(
            "warn",
            about,
            f"{place.path} is not in memory but on {place.kind or 'a disk'}: every "
            "snapshot costs it a write",
            "Set HOLDFAST_ARENA_DIR to a directory on tmpfs, such as /dev/shm.",
        )
    yield _room(facts, place, about)


def _room(facts: Facts, place: PlaceFacts, about: str) -> Finding:
    root = facts.root
    own = sum(
        one.size_bytes
        for one in facts.arenas
        if root is not None and one.run_id == root.run_id and one.root_key in root.keys
    )
    free, (needed, what) = place.free_bytes + own, _needed(facts)
    text = f"{size_text(free)} free of {size_text(place.size_bytes)} in {place.path}"
    grow = "docker run --shm-size=SIZE, Kubernetes: an emptyDir with medium Memory at /dev/shm"
    if needed > free:
        return Finding(
            "bad",
            about,
            f"{text}; this run needs {size_text(needed)} ({what})",
            f"Enlarge it ({grow}; elsewhere: mount -o remount,size=SIZE {place.mount}), clear what "
            "is stale below, or set HOLDFAST_ARENA_DIR to a larger tmpfs.",
        )
    if place.size_bytes <= CONTAINER_DEFAULT_BYTES:
        return Finding(
            "warn" if needed else "bad",
            about,
            f"{text}: what a container gets unless it asks for more; {SLOTS_PER_IMAGE} images of "
            "each rank must fit",
            f"Ask for more: {grow}.",
        )
    return Finding("ok", about, f"{text} ({place.kind})")


def _settings(facts: Facts) -> Iterator[Finding]:
    for name, value in sorted(facts.settings.items()):
        if name.startswith("HOLDFAST_"):
            yield _setting(name, value)
    if torchrun.shares_store(facts.torch.version, facts.settings):
        yield Finding("warn", "torchrun", torchrun.FAULT, torchrun.REMEDY)


def _setting(name: str, value: str) -> Finding:
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        known = ", ".join(SETTINGS)
        return Finding(
            "warn", "settings", f"{name}={value} has no meaning", f"{meant}Known are {known}."
        )
    fault = _setting_fault(name, value)
    if fault:
        return Finding(
            "bad", "settings", f"{name}={value!r}: {fault}", f"Correct it, or: unset {name}"
        )
    return Finding("ok", "settings", f"{name}={value}")


def _setting_fault(name: str, value: str) -> str:
    """Returns the fault in the value of a known setting, in words; "" when there is none."""
    if name == "HOLDFAST_ARENA_DIR" and value and not value.startswith("/"):
        return "relative, so it means another directory to every process: give an absolute path"
    if name == "HOLDFAST_LOG" and value.strip().lower() not in ("", "info", "debug", "off"):
        return "say info, debug or off"
    if name == "HOLDFAST_EXCHANGE" and value.strip().lower() not in ("", *EXCHANGE_MODES):
        return "say auto, always or never"
    if name in ("HOLDFAST_KEEPER_IDLE_S", "HOLDFAST_KEEPER_SCRUB_S") and not _is_seconds(value):
        return "give a number of seconds"
    if name in ("HOLDFAST_ARENA_BYTES", "HOLDFAST_EVENT_BYTES") and not _is_bytes(value):
        return "give a number of bytes, such as 8589934592 for 8 GiB"
    if name == "HOLDFAST_METRICS" and not _is_port(value):
        return "give a port, such as 9464, or an IP address and a port"
    if name == "HOLDFAST_OTLP" and value.strip() and not is_endpoint(value.strip()):
        return "give the address of a receiver, such as http://127.0.0.1:4318"
    if name == "HOLDFAST_PARITY_RATE" and not _is_parity_rate(value):
        return "give bytes a second, such as 500M, and 4M or more"
    if name == "HOLDFAST_RUN_ID" and not _is_file_name(value):
        return "it names a directory: give letters, digits, - and _, not beginning with a dot"
    return ""


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _is_bytes(text: str) -> bool:
    said = text.strip()
    return not said or (said.isascii() and said.isdigit() and int(said) > 0)


def _is_port(text: str) -> bool:
    host, _, port = text.strip().rpartition(":")
    is_address = not host or ":" in host or host.replace(".", "").isdigit()
    return not text.strip() or (is_address and port.isdecimal() and 0 < int(port) < 1 << 16)


def _is_parity_rate(text: str) -> bool:
    try:
        return parity_rate("", text) >= 0
    except UsageError:
        return False


def _is_file_name(text: str) -> bool:
    return not text.startswith(".") and not set(text) & set("/\0") and len(text) <= _MAX_NAME
