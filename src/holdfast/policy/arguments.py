"""Checks the numbers and flags that callers pass, once at the public door.

A step that is no number, or too large for the format, is refused before anything is written: a
checkpoint under such a name could not be found again.
"""

from __future__ import annotations

import math
import operator
import re
import urllib.parse
from typing import Any, SupportsIndex

from holdfast.errors import UsageError
from holdfast.policy.when import Every, Keep

#: Larger whole numbers are not exact in every reader of JSON.
MAX_STEP = (1 << 53) - 1
#: The largest number of hosts in a group.
MAX_PARITY = 128
#: Bytes a second: below this, hosts wait for each other longer than the timeout that counts as a
#: failure.
LEAST_PARITY_RATE = 4_000_000
_RATE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)([KMG]?)")
_TIMES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def _whole(value: Any) -> int | None:
    """Converts Python's, numpy's and a tensor's whole numbers; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """Returns ``value`` as an int: whole numbers of any library; UsageError otherwise."""
    number = _whole(value)
    if number is None and least is None:
        raise UsageError(f"{name}={value!r:.100}: a whole number is needed")
    if number is None or (least is not None and number < least):
        raise UsageError(f"{name}={value!r:.100}: a whole number from {least} on is needed")
    return number


def step_number(step: SupportsIndex) -> int:
    """Returns ``step`` as an int: Python's, numpy's and a tensor's whole numbers; UsageError
    otherwise.
    """
    number = _whole(step)
    if number is None or not 0 <= number <= MAX_STEP:
        raise UsageError(f"a step is a whole number from 0 to 2**53 - 1, not {step!r}")
    return number


def require_beyond(restored: int | None, step: int) -> None:
    """Raises UsageError for a save of ``step`` by a run that goes on from ``restored`` or a later
    step.

    The newest checkpoint of a run is that of its largest step: a run that began at a smaller one
    would look older than the checkpoint it restored.
    """
    if restored is not None and step <= restored:
        raise UsageError(
            f"step {step} is not beyond step {restored}, which was restored: nothing was saved. "
            "A restart takes the largest step of a run, and would drop all work done since. Count "
            "on from it, `for step in range(restored.step + 1, steps)`; to count from 0 again, "
            "begin a run with another root and fill it with holdfast.load."
        )


def wanted_step(step: SupportsIndex | str | None) -> int | str | None:
    """Returns the step to restore: a number, "incarnation-step" as text, or None for the newest."""
    return step if step is None or isinstance(step, str) else step_number(step)


def duration_s(name: str, value: float, *, least: str = "above 0") -> float:
    """Returns a finite number of seconds; UsageError otherwise. ``least``: "above 0" or "from 0
    on".
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (not value and "above" in least):
        raise UsageError(f"{name}={value!r}: a number of seconds {least} is needed")
    return float(value)


def patience_s(name: str, value: float | None) -> float | None:
    """Checks as ``duration_s``, from 0 on; None: without end."""
    return None if value is None else duration_s(name, value, least="from 0 on")


def count_of_saves(name: str, value: SupportsIndex | None) -> int | None:
    """Returns a whole number from 0 on, or None; UsageError otherwise."""
    if value is None:
        return None
    number = _whole(value)
    if number is None or not 0 <= number <= MAX_STEP:
        raise UsageError(f"{name}={value!r}: a number of saves from 0 on is needed, or None")
    return number


def bytes_per_second(name: str, text: str) -> int:
    """Parses a whole number of bytes a second; 0, no limit, for "". UsageError otherwise."""
    if not (text or "0").isdecimal():
        raise UsageError(f"{name}={text!r:.100} is no number of bytes a second")
    return int(text or 0)


def parity_rate(name: str, text: str) -> int:
    """Parses bytes a second as people write them: "500M" is 500,000,000; 0 for "". UsageError
    otherwise.
    """
    said = text.strip().upper()
    if not said:
        return 0
    found = _RATE.fullmatch(said)
    rate = int(float(found[1]) * _TIMES[found[2]]) if found else 0
    if rate < LEAST_PARITY_RATE:
        raise UsageError(
            f"{name}={text!r:.100}: say how many bytes a second parity may take of the network, "
            f"such as 500M, and {LEAST_PARITY_RATE // 10**6}M or more"
        )
    return rate


def claim(name: str, value: Any) -> bool:
    """Returns True or False itself; refuses "no" and 0, which may be meant otherwise."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r:.100}: True or False is needed")
    return value


def check_policies(
    memory: object, storage: object, keep: object, parity: object, cache_keep: object = None
) -> None:
    """Raises UsageError for a value that is no policy."""
    for name, policy in (("memory", memory), ("storage", storage)):
        if not (policy is None or isinstance(policy, Every)):
            raise UsageError(
                f"{name}={policy!r}: say holdfast.Every(steps=...), Every(minutes=...) or None"
            )
    if not isinstance(keep, Keep):
        raise UsageError(f"keep={keep!r}: say holdfast.Keep(last=...), or Keep() for all")
    if not (cache_keep is None or isinstance(cache_keep, Keep)):
        raise UsageError(f"cache_keep={cache_keep!r}: say holdfast.Keep(last=...)")
    number = _whole(parity)
    if number is None or not 0 <= number < MAX_PARITY:
        raise UsageError(
            f"parity={parity!r}: say how many hosts of a group may be lost with what they have in "
            f"memory, 0 to {MAX_PARITY - 1}; 1 protects against the loss of any one"
        )


def is_endpoint(text: str) -> bool:
    """Returns True for an address of HTTP with a host."""
    try:
        parts = urllib.parse.urlsplit(text)
        _ = parts.port  # raises ValueError if it is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
