"""What doctor says of accelerators: their names, pinned memory, memory nodes and contexts."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.accelerator import device_facts, vendors
from holdfast.cli.doctor.accelerator import probe_near, probe_torch
from holdfast.cli.doctor.rules.accelerator_rules import judge_accelerators
from holdfast.cli.doctor.rules.probe_facts import (
    Facts,
    Finding,
    HostFacts,
    Near,
    Pinning,
    PlaceFacts,
    Torch,
)

MB = 10**6
HOST = HostFacts("Linux", "6.8", (3, 12, 1), 8, 8, None, 64 << 30, None, 8 * MB, 65536)
H200 = Torch("2.12", "13.0", True, ("H200", "H200"), "580.1", accelerator="cuda")
FACTS = Facts(HOST, PlaceFacts("/dev/shm"), PlaceFacts("/data"), H200)


def said(facts: Facts, about: str) -> list[Finding]:
    return [one for one in judge_accelerators(facts) if one.about == about]


def pinned(reason: str = "", torch: Torch = H200, size_bytes: int = 64 * MB) -> Facts:
    return replace(FACTS, torch=replace(torch, pinning=Pinning(size_bytes, 0.016, reason)))


def near(**change: object) -> Facts:
    return replace(FACTS, near=replace(Near(), **change))  # type: ignore[arg-type]


def test_an_accelerator_of_another_maker_is_named() -> None:
    facts = replace(FACTS, torch=Torch("2.12", cuda=False, devices=("Max",), accelerator="xpu"))
    assert said(facts, "accelerator") == [Finding("ok", "accelerator", "xpu, 1 device: Max")]
    assert said(facts, "CUDA") == []


def test_what_pinning_gave_is_said() -> None:
    assert "at 4.00 GB/s" in said(pinned(), "pinning")[0].text
    (refused,) = said(pinned("error 2 of its driver"), "pinning")
    assert refused.severity == "warn" and "error 2 of its driver" in refused.text
    assert "ulimit -l" in refused.remedy
    assert said(FACTS, "pinning") == []


def test_a_limit_that_the_driver_does_not_count_is_no_trouble() -> None:
    assert said(pinned(), "locked memory")[0].severity == "ok"
    assert "does not count" in said(pinned(), "locked memory")[0].text
    for facts in (FACTS, pinned("error 2"), pinned(size_bytes=4 * MB)):
        assert said(facts, "locked memory")[0].severity == "warn"


def test_accelerators_far_from_the_cores_are_told() -> None:
    both = {"nodes": (0, 1), "nodes_of_accelerators": (0, 1, 1)}
    (fine,) = said(near(nodes_of_cores=(0, 1), **both), "NUMA")
    assert fine.severity == "ok" and "1 on node 0, 2 on node 1" in fine.text
    (far,) = said(near(nodes_of_cores=(0,), **both), "NUMA")
    assert far.severity == "warn" and "copies from node 1 cross" in far.text
    assert "numa-binding" in far.remedy
    assert said(near(nodes=(0,), nodes_of_accelerators=(1,)), "NUMA") == []
    unknown = near(nodes=(0, 1), nodes_of_cores=(0,), nodes_of_accelerators=(-1,))
    assert said(unknown, "NUMA")[0].severity == "ok"


def test_a_process_with_contexts_on_several_gpus_is_told() -> None:
    (fine,) = said(near(contexts=((7, (0,)), (8, (1,)), (9, (1,)))), "contexts")
    assert fine == Finding("ok", "contexts", "processes on each GPU: GPU 0: 1, GPU 1: 2")
    (several,) = said(near(contexts=((7, (0,)), (8, (0, 1)), (9, (0, 2)))), "contexts")
    assert several.severity == "warn" and "process 8 has a context on GPUs 0, 1" in several.text
    assert "and 1 more so" in several.text and "set_device" in several.remedy


def test_pages_of_shared_memory_are_said() -> None:
    (pages,) = said(near(huge_pages="within_size"), "huge pages")
    assert pages == Finding("ok", "huge pages", "of shared memory: within_size (shmem_enabled)")


def test_nodes_of_cores_and_accelerators_are_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    files = {
        "devices/system/node/node0/cpulist": "0-3,8\n",
        "devices/system/node/node1/cpulist": "4-7\n",
        "bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "bus/pci/devices/0000:01:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:02:00.0/class": "0x120000\n",
        "bus/pci/devices/0000:02:00.0/numa_node": "-1\n",
        "bus/pci/devices/0000:03:00.0/class": "0x020000\n",
        "kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = probe_near(tmp_path, cores=frozenset({8}))
    assert found == Near((0, 1), (0,), (1, -1), "advise")
    assert probe_near(tmp_path, cores=frozenset({4, 0})).nodes_of_cores == (0, 1)
    assert probe_near(tmp_path / "none", cores=frozenset({0})) == Near()


def test_contexts_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in *gpu=*) echo "0, GPU-a"; echo "1, GPU-b";;'
        ' *) echo "70, GPU-b"; echo "71, GPU-a"; echo "71, GPU-b"; echo "72, GPU-gone";; esac\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert probe_near().contexts == ((70, (1,)), (71, (0, 1)))


def test_torch_reports_what_this_machine_has(tmp_path: Path) -> None:
    found = probe_torch(ask=True, directory=str(tmp_path))
    assert found.fault == ""
    assert bool(found.devices) == bool(found.accelerator) == torch.accelerator.is_available()
    assert (found.pinning is None) == (not found.devices)


class Driver(vendors.Vendor):
    """Pins what it is told, or refuses with an error."""

    def __init__(self, status: int) -> None:
        self.status, self.pinned = status, 0

    def register(self, address: int, size_bytes: int) -> int:
        self.pinned += 1
        return self.status

    def unregister(self, address: int) -> None:
        self.pinned -= 1


@pytest.mark.parametrize("status", [0, 2])
def test_what_is_pinned_to_try_it_is_let_go_again(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(status)
    monkeypatch.setitem(vendors._vendors, "cpu", driver)
    found = device_facts.pin(str(tmp_path), torch.device("cpu"), 1 << 20)
    assert found["size_bytes"] == 1 << 20 and found["elapsed_s"] >= 0
    assert found["reason"] == ("error 2 of its driver" if status else "")
    assert driver.pinned == bool(status)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_pins_nothing() -> None:
    found = device_facts.pin("/proc/self", torch.device("cpu"), 1 << 20)
    assert found["reason"] != ""


def test_devices_of_any_maker_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vendors._vendors, "xpu", vendors.Vendor())
    monkeypatch.setattr("holdfast.accelerator.devices.use_device", lambda _: nullcontext())
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("current_accelerator", lambda: torch.device("xpu")),
    ):
        monkeypatch.setattr(torch.accelerator, name, answer)
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    found = device_facts.report(str(tmp_path))
    assert (found["accelerator"], found["cuda"]) == ("xpu", False)
    assert found["devices"] == ["xpu:0", "xpu:1"]
    assert found["pinning"]["reason"] == "not known for this device"
