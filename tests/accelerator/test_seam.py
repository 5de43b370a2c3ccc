"""The seam alone names a device: whoever else does would read memory that the host cannot read."""

from __future__ import annotations

import ast
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.accelerator import cuda, devices, generators, vendors
from holdfast.accelerator.pinnable_pages import PinnablePages, allocate
from support.project.contracts import PROJECT

SEAM = PROJECT / "src/holdfast/accelerator"
#: ``torch.cuda`` and its like name one vendor; ``is_cuda`` and ``data_ptr`` read by address.
_VENDORS = {"cuda", "xpu", "mps", "npu", "hpu", "mtia"}
_BY_ADDRESS = {"is_cuda", "is_xpu", "is_mps", "data_ptr", "cudart"}


def named(path: Path) -> list[str]:
    found = []
    nodes = list(ast.walk(ast.parse(path.read_text())))
    has_torch = any(
        one.name == "torch" for n in nodes if isinstance(n, ast.Import) for one in n.names
    )
    for node in nodes:
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node) if has_torch else ""  # other objects have that name, too
            words = [node.attr if node.attr in _BY_ADDRESS else whole]
        elif isinstance(node, ast.ImportFrom):
            words = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            words = [one.name for one in node.names]
        else:
            continue
        found += [f"{path.name}:{node.lineno} {one}" for one in words if is_named(one)]
    return found


def is_named(word: str) -> bool:
    module, _, rest = word.partition(".")
    return word in _BY_ADDRESS or (module == "torch" and rest.partition(".")[0] in _VENDORS)


def test_no_file_but_the_seam_names_a_vendor_or_reads_by_address() -> None:
    files = (PROJECT / "src/holdfast").rglob("*.py")
    outside = [path for path in files if SEAM not in path.parents]
    assert [one for path in outside for one in named(path)] == []
    assert named(SEAM / "cuda.py"), "the search finds nothing where there is something"


def test_no_file_but_the_seam_lets_torch_wait_for_an_event_of_a_vendor() -> None:
    """``torch.Stream.wait_event`` waits for nothing where the event is ``torch.cuda.Event``."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in (PROJECT / "src/holdfast").rglob("*.py")
        if SEAM not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("wait_event", "record_event", "elapsed_time")
        and ast.unparse(node.value) != "devices"
    ]
    assert found == []


def test_the_seam_names_vendors_only_in_their_own_files() -> None:
    assert named(SEAM / "vendors.py") == []
    assert {one.split()[1] for one in named(SEAM / "devices.py")} == {"data_ptr"}


def test_the_host_reads_no_address_of_another_device() -> None:
    assert devices.host_address(torch.ones(3)) > 0
    with pytest.raises(RuntimeError, match="on meta has no address on the host"):
        devices.host_address(torch.ones(3, device="meta"))


def test_a_device_without_streams_is_none_that_copies_run_beside() -> None:
    assert not devices.is_streamed(torch.device("cpu"))
    assert not devices.is_streamed(torch.device("meta"))
    assert not devices.is_streamed(torch.device("xla", 0))
    assert devices.streamed_devices([torch.ones(1), torch.ones(1, device="meta")]) == set()


def test_a_vendor_nobody_knows_pins_nothing_and_delays_nothing() -> None:
    device = torch.device("xla", 0)
    vendor = vendors.vendor_of(device)
    assert vendor.register(0, 0) == vendors.UNKNOWN
    vendor.unregister(0)
    vendor.clear_error(device)
    vendor.delay(1.0)
    stream: object = object()
    assert vendor.stream_of(stream) is stream  # type: ignore[arg-type]
    assert vendor.pci_address(device) == ""
    places, sources = list(torch.zeros(2, 3)), list(torch.ones(2, 3))
    vendor.copy_to_host(places, sources)
    assert all(map(torch.equal, places, sources))
    with vendor.relax_capture():
        pass
    assert devices.explain(vendors.UNKNOWN) == "not known for this device"
    assert devices.explain(2) == "error 2 of its driver"


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_vendor_that_has_a_file_is_asked_once_its_devices_are_met(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendors, "_vendors", {})
    device: Any = SimpleNamespace(type=kind)  # torch knows "npu" only with what its maker adds
    vendor = vendors.vendor_of(device)
    assert type(vendor).__module__ == f"holdfast.accelerator.{kind}"
    assert vendors.vendor_of(device) is vendor


def test_a_refused_registration_takes_its_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(vendors.Vendor):
        status, cleared = 2, 0

        def register(self, address: int, size_bytes: int) -> int:
            return self.status

        def clear_error(self, device: torch.device) -> None:
            self.cleared += 1

    vendor, device = Refusing(), torch.device("cuda", 1)
    entered: list[torch.device] = []

    def enter(device: torch.device) -> nullcontext[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setitem(vendors._vendors, "cuda", vendor)
    monkeypatch.setattr(devices, "use_device", enter)
    assert devices.register(1, 1, device) == 2
    assert (vendor.cleared, entered) == (1, [device])
    vendor.status = 0
    assert devices.register(1, 1, device) == 0
    vendor.status = vendors.UNKNOWN
    assert devices.register(1, 1, device) == vendors.UNKNOWN
    assert vendor.cleared == 1


#: Names of torch that the seam uses, each with an early version that has it.
_SINCE = {
    "torch.Event": (2, 5),
    "torch.Size": (0, 1),
    "torch.Stream": (2, 5),
    "torch.Tensor": (0, 1),
    "torch.Tensor.data_ptr": (0, 1),
    "torch.accelerator": (2, 6),
    "torch.accelerator.current_accelerator": (2, 6),
    "torch.accelerator.current_device_index": (2, 7),
    "torch.accelerator.current_stream": (2, 6),
    "torch.accelerator.device_count": (2, 6),
    "torch.accelerator.device_index": (2, 8),
    "torch.accelerator.is_available": (2, 6),
    "torch.accelerator.set_stream": (2, 6),
    "torch.device": (0, 4),
    "torch.dtype": (0, 4),
    "torch.empty": (0, 1),
    "torch.frombuffer": (1, 10),
    "torch.get_device_module": (2, 5),
    "torch.inference_mode": (1, 9),
    "torch.uint8": (0, 4),
    "torch.version": (0, 4),
    "torch.version.cuda": (0, 4),
    "torch.version.hip": (1, 7),
}


def names_of_torch(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return {name for name in used if name.startswith("torch.") and "(" not in name}


def test_torch_is_asked_only_for_names_it_has_had_since_the_oldest_supported_version() -> None:
    """None is newer than 2.11; files of vendors ask for what their own devices have."""
    files = [path for path in SEAM.glob("*.py") if not named(path) or path.name == "devices.py"]
    assert {path.name for path in SEAM.glob("*.py")} - {path.name for path in files} == {"cuda.py"}
    used = set().union(*map(names_of_torch, files))
    assert used == set(_SINCE)
    assert max(_SINCE.values()) <= (2, 11)


def test_names_of_torch_that_came_later_are_found(tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text("import torch\ntorch.accelerator.made_up(torch.ones(3).numel())\n")
    assert names_of_torch(file) - set(_SINCE) == {"torch.accelerator.made_up", "torch.ones"}


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "t.is_cuda",
        "t.untyped_storage().data_ptr()",
        "import torch.xpu",
        "from torch import npu",
        "from torch.cuda import Stream",
    ],
)
def test_a_file_that_names_a_vendor_or_an_address_is_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "new.py"
    file.write_text(f"import torch\n{line}\n")
    assert named(file)


def test_what_is_imported_for_a_save_loads_no_vendor() -> None:
    code = (
        "import sys, holdfast.accelerator.devices; "
        "print([n for n in sys.modules if n.startswith('holdfast.accelerator.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cuda" not in found.stdout and "npu" not in found.stdout


def test_relaxing_and_delaying_ask_the_vendor_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    class Asked(vendors.Vendor):
        def relax_capture(self) -> nullcontext[None]:
            asked.append("relaxed")
            return nullcontext()

        def delay(self, seconds: float) -> None:
            asked.append(seconds)

        def is_capturing(self, stream: torch.Stream) -> bool:
            asked.append(stream)
            return True

        def unregister(self, address: int) -> None:
            asked.append(address)

    monkeypatch.setitem(vendors._vendors, "cpu", Asked())
    monkeypatch.setattr(devices, "current_stream", lambda _: "stream")
    monkeypatch.setattr(devices, "is_streamed", lambda _: True)
    cpu = torch.device("cpu")
    with devices.relax_capture(cpu):
        devices.delay(cpu, 0.5)
    assert devices.is_capturing(cpu)
    devices.unregister(7, cpu)
    assert asked == ["relaxed", 0.5, "stream", "relaxed", 7]


def test_without_an_accelerator_there_are_no_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "accelerator_type", lambda: "")
    assert generators.generator_states() == []
    generators.set_generator_states([torch.zeros(16, dtype=torch.uint8)], 0)
    generators.seed_generators(1)


def test_more_memory_than_there_is_is_refused_with_its_size() -> None:
    with pytest.raises(MemoryError, match=r"no \d+ MiB of host memory for copies of a device"):
        allocate(torch.Size((1 << 60,)), torch.uint8)


def test_an_interrupt_right_behind_a_change_of_streams_leaves_the_thread_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side: Any = SimpleNamespace(device=torch.device("cpu"))
    current: list[object] = ["own"]

    def set_stream(stream: object) -> None:
        current[0] = stream
        if stream is side:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
    with pytest.raises(KeyboardInterrupt), devices.use_stream(side):
        raise AssertionError("work was enqueued")
    assert current == ["own"]


def test_the_error_of_a_refused_call_of_cuda_is_taken_without_memory_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that is full, too, would leave it to the next launch of training."""
    called: list[str] = []
    monkeypatch.setattr(cuda, "_function", lambda name: lambda *_: called.append(name))
    vendor = cuda.CudaVendor()
    vendor.clear_error(torch.device("cuda", 0))
    assert called == ["GetLastError"]
    monkeypatch.setattr(cuda, "_function", lambda _: None)
    vendor = cuda.CudaVendor()
    allocated: list[torch.device] = []

    def ones(_: int, device: torch.device) -> torch.Tensor:
        allocated.append(device)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", ones)
    vendor.clear_error(torch.device("cuda", 0))
    assert allocated == [torch.device("cuda", 0)]


def is_mapped(address: int) -> bool:
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_pages_that_are_still_pinned_stay_until_they_can_be_freed() -> None:
    """A device may copy into them; other memory would be there by then."""
    memory, answers = PinnablePages(1 << 20), [False, True]
    memory.unpin = lambda: answers.pop(0)
    memory.close()
    assert answers == [True] and is_mapped(memory.address)
    memory.close()
    assert answers == [] and not is_mapped(memory.address)


def test_memory_of_the_host_is_fetched_as_it_is() -> None:
    assert torch.equal(devices.fetch(torch.arange(3)), torch.arange(3))
