"""What doctor finds out about a device: its name, and whether memory can be pinned for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from device.vendor import add_simulated_vendor
from holdfast.accelerator import device_facts


@pytest.fixture
def known(sim: Any) -> Any:
    """The simulated device, whose vendor pins memory."""
    add_simulated_vendor(sim)
    return sim


def test_devices_are_named_and_what_was_pinned_to_try_it_is_let_go(
    known: Any, tmp_path: Path
) -> None:
    found = device_facts.report(str(tmp_path))
    assert (found["accelerator"], found["devices"]) == ("sim", ["sim:0", "sim:1"])
    assert found["pinning"]["reason"] == ""
    assert found["pinning"]["elapsed_s"] > 0
    counts = known.counts()
    assert (counts["registered"], counts["unregistered"]) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_report_is_one_line_of_json_and_says_what_could_not_be_tried(
    known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["-c", str(tmp_path / "missing")])
    device_facts.main()
    said = capsys.readouterr().out
    assert "\n" not in said
    found = json.loads(said)
    assert found["devices"] == ["sim:0", "sim:1"]
    assert "No such file" in found["pinning"]["reason"]


def test_a_refusal_is_named_and_fails_nothing_that_follows(known: Any, tmp_path: Path) -> None:
    known.fail(registration=1, registrations=1)
    found = device_facts.pin(str(tmp_path), torch.device("sim", 0), 1 << 20)
    assert found["reason"] == "error 2 of its driver"
    assert torch.zeros(3, device="sim").add_(1).sum().item() == 3.0
