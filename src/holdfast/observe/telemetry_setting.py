"""Reads whether keepers send the saves of a run to OpenTelemetry as they come: ``HOLDFAST_OTLP``.

What sends them is loaded only where it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.policy.arguments import is_endpoint

if TYPE_CHECKING:
    from holdfast.observe.live_telemetry import LiveTelemetry

_SETTING = "HOLDFAST_OTLP"
#: What sending takes, by the names of packages, and a module of each.
_PACKAGES = {
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}


def telemetry_endpoint() -> str | None:
    """Returns the receiver that spans are sent to; None where there is none.

    Raises UsageError for a bad setting.
    """
    said = os.environ.get(_SETTING, "").strip()
    if not said:
        return None
    if not is_endpoint(said):
        raise UsageError(
            f"{_SETTING} is {said!r}: give the address of a receiver of OTLP over HTTP, such as "
            "http://127.0.0.1:4318, or leave it unset"
        )
    return said


def require_live_telemetry() -> None:
    """Raises UsageError if spans are to be sent and cannot be."""
    if telemetry_endpoint() is None:
        return
    for package, module in _PACKAGES.items():
        if not _is_installed(module):
            raise UsageError(
                f"{_SETTING} is set, and {package} is not installed: install "
                f"holdfast[otel] (pip install 'holdfast[otel]'), or unset {_SETTING}"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package that it lies in is missing
        return False


def send_telemetry(warn: Callable[[str], object]) -> LiveTelemetry | None:
    """Returns what sends the spans of this keeper where a setting asks for it; None where none
    does, or that is not possible, which ``warn`` is told.
    """
    try:
        require_live_telemetry()
        endpoint = telemetry_endpoint()
    except UsageError as error:
        warn(f"spans are not sent: {error}; the run goes on without")
        return None
    if endpoint is None:
        return None
    from holdfast.observe.live_telemetry import LiveTelemetry
    from holdfast.observe.telemetry import TelemetrySender

    live = LiveTelemetry(TelemetrySender(endpoint).send, warn)
    live.start()
    return live
