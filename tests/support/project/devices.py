"""Chooses the device of the tests that need an accelerator: a real one, or the simulated one.

With ``--device=sim`` a run loads the simulated device, which stays the accelerator of its process
until the end: so it is a run of its own, `make device-tests`. Its delays follow a profile and a
seed, both of the day where none are given.
"""

from __future__ import annotations

import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support.project.sample import SEED

PROFILES = ("kernels", "down", "up", "all")
#: Folders of the tests whose ``device`` is an accelerator.
_FOLDERS = ("device", "gpu")
REQUIRED = "REQUIRE_SIMULATED_DEVICE"
"""Set where a machine without a compiler fails the tests instead of skipping them."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Which work of the simulated device is late, and by which seed."""

    profile: str
    seed: int


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("device")
    group.addoption("--device", choices=["sim"], help="the simulated device, even beside a GPU")
    group.addoption("--profiles", metavar="NAME", help=f"every, or one of {', '.join(PROFILES)}")
    group.addoption("--seeds", type=int, metavar="N", help="so many seeds instead of the day's")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") is None:
        return
    from device import simulator

    try:
        simulator.load()
    except simulator.CannotBuild as error:
        if REQUIRED in os.environ:
            raise pytest.UsageError(str(error)) from error
        config.stash[_MISSING] = str(error)
    from holdfast.protocol import client
    from support.runs.keeper_forks import KeeperForks

    vars(client)["subprocess"] = KeeperForks()


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--device") is None:
        return None
    missing = config.stash.get(_MISSING, "")
    return f"simulated device: {missing or ', '.join(map(_name, chosen_delays(config)))}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames and metafunc.definition.path.parent.name in _FOLDERS:
        is_simulated = metafunc.config.getoption("--device") is not None
        delays = chosen_delays(metafunc.config) if is_simulated else []
        if metafunc.definition.get_closest_marker("untimed"):
            delays = delays[:1]
        elif metafunc.definition.get_closest_marker("one_seed"):
            delays = [one for one in delays if one.seed == delays[0].seed]
        metafunc.parametrize("device", delays or [None], indirect=True, ids=_name)


def chosen_delays(config: pytest.Config) -> list[Delays]:
    """Returns the delays of a run: those of the day, or those that were asked for."""
    day = int.from_bytes(os.environ[SEED].encode())
    profile = config.getoption("--profiles") or random.Random(day).choice(PROFILES)
    profiles = PROFILES if profile == "every" else [profile]
    count = config.getoption("--seeds")
    seeds = [day % 10_000] if count is None else range(count)
    return [Delays(profile, seed) for seed in seeds for profile in profiles]


def count_of_delays(config: pytest.Config) -> int:
    """Returns how many profiles and seeds a run has in all; a real device has one."""
    profiles = len(PROFILES) if config.getoption("--profiles") == "every" else 1
    return profiles * (config.getoption("--seeds") or 1)


def check_simulated(config: pytest.Config) -> None:
    """Skips the test where the simulated device is not loaded."""
    if config.getoption("--device") is None:
        pytest.skip("needs the simulated device: --device=sim, as in `make device-tests`")
    if _MISSING in config.stash:
        pytest.skip(config.stash[_MISSING])


def provide(config: pytest.Config, delays: Delays | None, allowed: str) -> Iterator[str]:
    """Gives the type of the device; afterwards no access may have been unordered but ``allowed``
    ones.
    """
    import torch

    if delays is None:
        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator: a CUDA device, or --device=sim")
        yield "cuda"
        return
    check_simulated(config)
    from device import simulator, vendor

    if len(sys.modules) > _frozen[-1] + _MANY_MODULES:  # such as a compiler of torch
        leave_out_objects()
        _frozen.append(len(sys.modules))
    sim = simulator.load()
    vendor.add_simulated_vendor(sim)
    sim.reports()
    simulator.use_profile(delays.profile, delays.seed)
    sim.strict(True)
    yield "sim"
    simulator.calm()
    reports = {one for one in sim.reports() if not (allowed and re.search(allowed, one))}
    if reports:
        pytest.fail("nothing orders these accesses:\n" + "\n".join(sorted(reports)))


def leave_out_objects() -> None:
    """Leaves what there is out of collections of garbage from now on: those that tests ask for took
    half of the processor time of their run.
    """
    gc.collect()
    gc.freeze()


def _name(delays: Delays | None) -> str:
    return f"{delays.profile}-{delays.seed}" if delays else "real"


_MANY_MODULES = 100
_frozen = [0]
"""The number of modules there were when what was there was left out."""
_MISSING = pytest.StashKey[str]()
