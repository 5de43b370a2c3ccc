"""PURE. Judges torch, accelerators, and how near their memory is: ok or warn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.cli.doctor.rules.probe_facts import Facts, Finding, Near, Torch
from holdfast.observe.text import count_text, rate_text, size_text, version_of

_RAISE = "Raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity"


def judge_accelerators(facts: Facts) -> Iterator[Finding]:
    """Yields the findings about torch and its devices, and about memory that they copy to."""
    torch = facts.torch
    if not torch.version:
        yield Finding("bad", "torch", "is not installed in this Python", "pip install torch")
    else:
        if version_of(torch.version) < (2, 11):
            remedy = "Holdfast needs 2.11: pip install -U torch"
            yield Finding("bad", "torch", torch.version, remedy)
        else:
            yield Finding("ok", "torch", torch.version)
        yield _devices(torch)
    if torch.pinning is not None:
        yield _pinning(facts)
    yield _locked_memory(facts)
    if torch.devices:
        yield from _near(facts.near)
    yield from _contexts(facts.near)


def _devices(torch: Torch) -> Finding:
    driver = f"driver {torch.driver}" if torch.driver else "no NVIDIA driver"
    kinds = ", ".join(dict.fromkeys(torch.devices))
    count = count_text(len(torch.devices), "device")
    if torch.fault:
        return Finding(
            "warn",
            "CUDA",
            f"torch could not be asked: {torch.fault}",
            'Try it: python -c "import torch; print(torch.cuda.is_available())"',
        )
    if torch.cuda:
        return Finding("ok", "CUDA", f"{torch.built_for}, {driver}, {count}: {kinds}")
    if torch.accelerator:
        return Finding("ok", "accelerator", f"{torch.accelerator}, {count}: {kinds}")
    if torch.driver and torch.cuda is not None:
        built = f"for CUDA {torch.built_for}" if torch.built_for else "without CUDA"
        return Finding(
            "warn",
            "CUDA",
            f"{driver}, but torch, built {built}, sees no device",
            "Look at nvidia-smi and CUDA_VISIBLE_DEVICES; install a torch built for this driver.",
        )
    if torch.cuda is None:
        return Finding("ok", "CUDA", f"{driver}; torch was not asked")
    return Finding("ok", "CUDA", f"{driver}: training runs on the processor")


def _pinning(facts: Facts) -> Finding:
    pinning = facts.torch.pinning
    assert pinning is not None
    size = size_text(pinning.size_bytes)
    if pinning.reason:
        return Finding(
            "warn",
            "pinning",
            f"{size} of shared memory could not be pinned ({pinning.reason}): copies from the "
            "device are slow",
            "Nothing is lost by it. Where the driver counts locked memory, raise the limit: "
            "ulimit -l unlimited",
        )
    rate = rate_text(pinning.size_bytes / max(pinning.elapsed_s, 1e-9))
    return Finding("ok", "pinning", f"{size} of shared memory were pinned, at {rate}")


def _locked_memory(facts: Facts) -> Finding:
    limit, about = facts.host.locked_memory_bytes, "locked memory"
    if limit is None:
        return Finding("ok", about, "no limit")
    text, pinning = f"at most {size_text(limit)}", facts.torch.pinning
    if pinning is not None and not pinning.reason and pinning.size_bytes > limit:
        return Finding("ok", about, f"{text}, which the driver does not count")
    if facts.torch.devices:
        return Finding(
            "warn",
            about,
            f"{text}: where the driver counts it, shared memory "
            "is not pinned and copies from the GPU are slow",
            _RAISE,
        )
    return Finding("ok", about, f"{text}; only a GPU needs more")


def _near(near: Near) -> Iterator[Finding]:
    if near.huge_pages:
        text = f"of shared memory: {near.huge_pages} (shmem_enabled)"
        yield Finding("ok", "huge pages", text)
    if len(near.nodes) < 2:
        return
    cores = ", ".join(map(str, near.nodes_of_cores))
    counts = Counter(near.nodes_of_accelerators)
    there = ", ".join(f"{n} on node {node}" for node, n in sorted(counts.items()) if node >= 0)
    text = f"{len(near.nodes)} memory nodes; cores of node {cores}; accelerators: {there or '?'}"
    far = {node for node in counts if node >= 0} - set(near.nodes_of_cores)
    if far:
        yield Finding(
            "warn",
            "NUMA",
            f"{text}: copies from node {', '.join(map(str, sorted(far)))} cross the machine",
            "Run each rank near its device: torchrun --numa-binding=node, or numactl "
            "--cpunodebind=NODE --membind=NODE",
        )
    else:
        yield Finding("ok", "NUMA", text)


def _contexts(near: Near) -> Iterator[Finding]:
    if not near.contexts:
        return
    several = [(pid, on) for pid, on in near.contexts if len(on) > 1]
    if several:
        pid, on = several[0]
        more = f", and {len(several) - 1} more so" if several[1:] else ""
        yield Finding(
            "warn",
            "contexts",
            f"process {pid} has a context on GPUs {', '.join(map(str, on))}{more}: each takes "
            "memory of the rank that trains there",
            "Have each rank call torch.cuda.set_device(LOCAL_RANK) before anything uses CUDA.",
        )
        return
    counts = Counter(gpu for _, on in near.contexts for gpu in on)
    text = ", ".join(f"GPU {gpu}: {n}" for gpu, n in sorted(counts.items()))
    yield Finding("ok", "contexts", f"processes on each GPU: {text}")
