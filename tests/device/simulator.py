"""Builds and loads the simulated device ``sim``: its extension, ``torch.sim``, delays by profile.

Loading it makes it the accelerator of the whole process, as no other can be there beside it.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("simdev.cpp")
#: Longest delays in microseconds of kernels, copies down and copies up.
PROFILES = {
    "kernels": (800, 0, 0),
    "down": (0, 6000, 0),
    "up": (0, 0, 6000),
    "all": (400, 4000, 4000),
}
DEVICES = 2


class CannotBuild(Exception):
    """There is no compiler, or it refuses the source."""


def build() -> Path:
    """Return the extension for this torch and Python, compiled if nobody has done so yet."""
    root = Path(torch.__file__).parent
    includes = (f"{root}/include", f"{root}/include/torch/csrc/api/include")
    flags = [f"-I{one}" for one in (*includes, sysconfig.get_path("include"))]
    flags += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-ltorch", "-lc10"]
    flags += ["-ltorch_python", "-O1", "-fPIC", "-shared", "-std=c++20", "-w"]
    key = (torch.__version__, sysconfig.get_config_var("SOABI"), SOURCE.read_text(), *flags)
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "holdfast-tests")
    built = cache / f"simdev-{name}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("the simulated device needs a C++ compiler: g++ or clang++, or CXX")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "w") as lock:  # other processes wait for this one
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            made = built.with_suffix(".part")
            command = [compiler, str(SOURCE), "-o", str(made), *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CannotBuild(f"{compiler} refuses {SOURCE.name}:\n{done.stderr[:2000]}")
            made.rename(built)
    return built


def load() -> Any:
    """Make ``sim`` the accelerator of this process, and return its extension."""
    if "simdev" in sys.modules:
        return sys.modules["simdev"]
    spec = importlib.util.spec_from_file_location("simdev", build())
    assert spec is not None and spec.loader is not None
    sim = sys.modules["simdev"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sim)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _torch_sim(sim))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    torch.empty(1, pin_memory=True)  # torch calls no memory pinned before a device was used
    torch.set_num_threads(1)  # streams are threads already
    atexit.register(calm)
    return sim


def calm() -> None:
    """End every fault and delay, and wait until nothing is under way."""
    sim: Any = sys.modules["simdev"]
    sim.recover()
    sim.strict(False)
    sim.delays(0, 0, 0, 0)
    for device in range(DEVICES):
        torch.accelerator.synchronize(device)


def use_profile(profile: str, seed: int, chance: float = 0.2) -> None:
    """Delay work by ``profile``, at random by ``seed``."""
    sim: Any = sys.modules["simdev"]
    sim.seed(random.Random(f"{profile} {seed}").getrandbits(40))
    sim.delays(*PROFILES[profile], int(chance * 1000))


def _torch_sim(sim: Any) -> types.ModuleType:
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: DEVICES
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = lambda device: torch.accelerator.device_index(_index(device))
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = _stream, torch.Event
    module.stream = lambda stream: stream or nullcontext()
    module.current_stream = torch.accelerator.current_stream
    module.set_stream = torch.accelerator.set_stream
    generator = torch.ops.sim.generator
    module.get_rng_state = lambda device=-1: generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=-1: generator(_index(device)).set_state(state)
    module.manual_seed = lambda seed: generator(-1).manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator(n).manual_seed(seed) for n in range(DEVICES)]
    return module  # type: ignore[no-any-return]


def _stream(device: Any = None, **_: Any) -> torch.Stream:
    here = torch.accelerator.current_device_index()
    return torch.Stream(torch.device(device if device is not None else f"sim:{here}"))


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return -1 if index is None else index
