"""PURE. What the machine, its limits, torch and the settings mean for a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from holdfast.cli.doctor.facts import Facts, Host, Place, Torch
from holdfast.cli.doctor.finding import Finding
from holdfast.errors import UsageError
from holdfast.observe.units import count_text, size_text
from holdfast.policy.arguments import parity_rate

#: A run keeps this many images of each rank in shared memory, and one more with parity.
SLOTS = 3
#: As many hosts are in a group where there are enough, as in ``holdfast.keeper.heads``.
GROUP_SIZE = 8
#: Docker and Kubernetes give a container this much unless told otherwise.
CONTAINER_DEFAULT_BYTES = 64 << 20
FEW_FILES = 1024
IN_MEMORY = ("tmpfs", "ramfs")
SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
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
    "HOLDFAST_EXCHANGE",
)
#: As in ``holdfast.load.together``, which needs torch.
EXCHANGE_MODES = ("auto", "always", "never")
_MAX_NAME = 150


def judge_host(facts: Facts) -> Iterator[Finding]:
    """Everything that does not depend on a root."""
    host = facts.host
    yield _system(host)
    yield _python(host)
    yield _cores(host)
    yield from _memory(facts)
    yield _files(host)
    yield from _shared_memory(facts)
    yield from _torch(facts.torch)
    yield from _locked_memory(facts)
    yield from _settings(facts)


def _system(host: Host) -> Finding:
    text = f"{host.system} {host.kernel}"
    if host.system != "Linux":
        return Finding("bad", "system", text, "Holdfast runs on Linux only: use a Linux machine.")
    return Finding("ok", "system", text)


def _python(host: Host) -> Finding:
    text = ".".join(map(str, host.python))
    if host.python < (3, 11, 0):
        return Finding("bad", "Python", text, "Install Python 3.11 or newer.")
    return Finding("ok", "Python", text)


def _cores(host: Host) -> Finding:
    usable = f"{host.cores_usable:g} of {count_text(host.cores, 'core')}"
    if host.cores_usable < 2:
        return Finding(
            "warn", "cores", f"{usable} can be used: the keeper shares one with training",
            "Give this process two or more: taskset, docker --cpus, or cpus in the job's request.",
        )  # fmt: skip
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
            "bad", "memory", f"{text}; {size_text(needed)}, all in memory, do not fit: {what}",
            "Raise the limit (docker --memory, resources.limits.memory): shared memory counts too.",
        )  # fmt: skip
    else:
        yield Finding("ok", "memory", text)


def _needed(facts: Facts) -> tuple[int, str]:
    """Shared memory that a run of this root takes on a host, and for what; 0: it is not known."""
    root = facts.root
    if root is None:
        return 0, ""
    share = root.newest_bytes / max(1, len(root.hosts))
    protected = root.protected
    if protected is None or protected.hosts < 2:
        return int(SLOTS * share), f"{SLOTS} images a rank"
    members = min(protected.hosts, GROUP_SIZE)
    parity = min(protected.parity, members - 1)
    images = SLOTS + 1 + 2 * parity / (members - parity)
    return int(images * share), f"{SLOTS + 1} images a rank, and parity of two generations"


def _files(host: Host) -> Finding:
    if host.open_files is not None and host.open_files < FEW_FILES:
        return Finding(
            "warn", "open files", f"at most {host.open_files} in a process",
            f"Raise the limit: ulimit -n {4 * FEW_FILES}",
        )  # fmt: skip
    limit = "no limit" if host.open_files is None else f"up to {host.open_files}"
    return Finding("ok", "open files", limit)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    place, about = facts.memory, "shared memory"
    if place.fault:
        yield Finding(
            "bad", about, f"{place.path}: {place.fault}",
            "Set HOLDFAST_ARENA_DIR to a directory in memory (tmpfs) that this user can write to.",
        )  # fmt: skip
        return
    if place.kind not in IN_MEMORY:
        yield Finding(
            "warn", about, f"{place.path} is not in memory but on {place.kind or 'a disk'}: every "
            "snapshot costs it a write",
            "Set HOLDFAST_ARENA_DIR to a directory on tmpfs, such as /dev/shm.",
        )  # fmt: skip
    yield _room(facts, place, about)


def _room(facts: Facts, place: Place, about: str) -> Finding:
    run_id = "" if facts.root is None else facts.root.run_id
    own = sum(arena.size_bytes for arena in facts.arenas if run_id and arena.run_id == run_id)
    free, (needed, what) = place.free_bytes + own, _needed(facts)
    text = f"{size_text(free)} free of {size_text(place.size_bytes)} in {place.path}"
    grow = "docker run --shm-size=SIZE, Kubernetes: an emptyDir with medium Memory at /dev/shm"
    if needed > free:
        return Finding(
            "bad", about, f"{text}; this run needs {size_text(needed)} ({what})",
            f"Enlarge it ({grow}; elsewhere: mount -o remount,size=SIZE {place.mount}), clear what "
            "is stale below, or set HOLDFAST_ARENA_DIR to a larger tmpfs.",
        )  # fmt: skip
    if place.size_bytes <= CONTAINER_DEFAULT_BYTES:
        return Finding(
            "warn" if needed else "bad", about,
            f"{text}: what a container gets unless it asks for more; {SLOTS} images of each rank "
            "must fit",
            f"Ask for more: {grow}.",
        )  # fmt: skip
    return Finding("ok", about, f"{text} ({place.kind})")


def _torch(torch: Torch) -> Iterator[Finding]:
    if not torch.version:
        yield Finding("bad", "torch", "is not installed in this Python", "pip install torch")
        return
    if version_of(torch.version) < (2, 11):
        yield Finding("bad", "torch", torch.version, "Holdfast needs 2.11: pip install -U torch")
    else:
        yield Finding("ok", "torch", torch.version)
    yield from _cuda(torch)


def _cuda(torch: Torch) -> Iterator[Finding]:
    driver = f"driver {torch.driver}" if torch.driver else "no NVIDIA driver"
    if torch.fault:
        yield Finding(
            "warn", "CUDA", f"torch could not be asked: {torch.fault}",
            'Try it: python -c "import torch; print(torch.cuda.is_available())"',
        )  # fmt: skip
    elif torch.cuda:
        kinds = ", ".join(dict.fromkeys(torch.devices))
        count = count_text(len(torch.devices), "device")
        yield Finding("ok", "CUDA", f"{torch.built_for}, {driver}, {count}: {kinds}")
    elif torch.driver and torch.cuda is not None:
        built = f"for CUDA {torch.built_for}" if torch.built_for else "without CUDA"
        yield Finding(
            "warn", "CUDA", f"{driver}, but torch, built {built}, sees no device",
            "Look at nvidia-smi and CUDA_VISIBLE_DEVICES; install a torch built for this driver.",
        )  # fmt: skip
    elif torch.cuda is None:
        yield Finding("ok", "CUDA", f"{driver}; torch was not asked")
    else:
        yield Finding("ok", "CUDA", f"{driver}: training runs on the processor")


def _locked_memory(facts: Facts) -> Iterator[Finding]:
    limit, about = facts.host.locked_memory_bytes, "locked memory"
    if limit is None:
        yield Finding("ok", about, "no limit")
    elif facts.torch.cuda:
        yield Finding(
            "warn", about, f"at most {size_text(limit)}: where the driver counts it, shared memory "
            "is not pinned and copies from the GPU are slow",
            "Raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity",
        )  # fmt: skip
    else:
        yield Finding("ok", about, f"at most {size_text(limit)}; only a GPU needs more")


def _settings(facts: Facts) -> Iterator[Finding]:
    for name, value in sorted(facts.settings.items()):
        if name.startswith("HOLDFAST_"):
            yield _setting(name, value)
    torch = version_of(facts.torch.version)
    if torch >= (2, 13) and facts.settings.get(SHARE_STORE) != "1":
        yield Finding(
            "warn", "torchrun",
            f"{SHARE_STORE} is not 1: restarted workers may meet at the dead round's store, and "
            "hang",
            f"export {SHARE_STORE}=1",
        )  # fmt: skip


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
    """What is wrong with the value of a known setting, in words; "" when nothing is."""
    if name == "HOLDFAST_ARENA_DIR" and value and not value.startswith("/"):
        return "relative, so it means another directory to every process: give an absolute path"
    if name == "HOLDFAST_LOG" and value.strip().lower() not in ("", "info", "debug", "off"):
        return "say info, debug or off"
    if name == "HOLDFAST_EXCHANGE" and value.strip().lower() not in ("", *EXCHANGE_MODES):
        return "say auto, always or never"
    if name in ("HOLDFAST_KEEPER_IDLE_S", "HOLDFAST_KEEPER_SCRUB_S") and not _is_seconds(value):
        return "give a number of seconds"
    if name == "HOLDFAST_ARENA_BYTES" and not _is_bytes(value):
        return "give a number of bytes, such as 8589934592 for 8 GiB"
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


def _is_parity_rate(text: str) -> bool:
    try:
        return parity_rate("", text) >= 0
    except UsageError:
        return False


def _is_file_name(text: str) -> bool:
    return not text.startswith(".") and not set(text) & set("/\0") and len(text) <= _MAX_NAME


def version_of(text: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu126"; (0, 0) when it cannot be read."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0
