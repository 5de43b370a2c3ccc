"""The cost of detecting overtaken copies: versions and samples, at ``save`` and behind it.

With ``--simulated`` on the simulated device of the tests: the host's share alone is meaningful.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.accelerator import devices
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.state.describe import Describer


def main(arguments: Sequence[str]) -> int:
    """Print the median times in microseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks samples", description=__doc__)
    parser.add_argument("--layers", type=int, default=150)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args(arguments)
    device = _device(simulated=options.simulated)
    layers = [nn.Linear(64, 64) for _ in range(options.layers)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = measure({"model": model, "optimizer": optimizer}, device, options.tries)
    print(f"{8 * len(layers)} leaves on {device}, microseconds, median of {options.tries}:")
    for name, seconds in found.items():
        print(f"  {name:20}{seconds * 1e6:10.0f}")
    return 0


def measure(state: dict[str, Any], device: torch.device, tries: int) -> dict[str, float]:
    """Return the median seconds of each step of the detection."""
    bindings = Describer(state, 0).describe().bindings
    made: list[OvertakeDetector] = []
    found = {"at save": _median_s(tries, lambda: made.append(OvertakeDetector(bindings)))}
    detectors = iter(made)
    if devices.is_streamed(device):
        torch.accelerator.synchronize(device)
        with devices.use_stream(devices.make_stream(device)):
            found["behind the copies"] = _median_s(tries, lambda: next(detectors).enqueue(device))
        torch.accelerator.synchronize(device)
    detectors = iter(made)
    found["at the fence"] = _median_s(tries, lambda: next(detectors).pass_fence())
    detectors = iter(made)
    found["when landed"] = _median_s(tries, lambda: next(detectors).check_landed())
    return found


def _device(*, simulated: bool) -> torch.device:
    if simulated:
        sys.path.append(str(Path(__file__).parent.parent / "tests"))
        from device import simulator, vendor  # type: ignore[import-not-found]

        vendor.add_simulated_vendor(simulator.load())
        return torch.device("sim", 0)
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def _median_s(tries: int, act: Callable[[], object]) -> float:
    times = []
    for _ in range(tries):
        began_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)
