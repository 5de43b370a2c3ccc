"""A run that torchrun may start again says by itself what doctor says before."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import events
from holdfast.observe.text import FAULT, REMEDY, SHARE_STORE, restart_warning

UNDER = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}
FRESH = UNDER | {"TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("version", "settings", "is_said"),
    [
        ("2.13.0+cpu", UNDER, True),
        ("2.13.0", FRESH | {"TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ("2.13.0", UNDER | {SHARE_STORE: "0"}, True),
        ("2.13.0", FRESH | {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ("2.13.0", UNDER | {SHARE_STORE: "1"}, False),
        ("2.13.0", {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ("2.13.0", UNDER | {"TORCHELASTIC_RESTART_COUNT": "?"}, False),
        ("2.12.1", UNDER, False),
        ("", UNDER, False),
    ],
)
def test_only_what_may_be_restarted_onto_a_dead_store_is_warned(
    version: str, settings: dict[str, str], is_said: bool
) -> None:
    assert restart_warning(version, settings) == (
        f"{FAULT}. Before torchrun: {REMEDY}" if is_said else ""
    )


@pytest.mark.parametrize("count", ["0", "2"])
def test_a_restart_without_the_setting_says_so_once(
    count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.delenv(SHARE_STORE, raising=False)
    for name, value in (UNDER | {"TORCHELASTIC_RESTART_COUNT": count}).items():
        monkeypatch.setenv(name, value)
    said: list[str] = []

    def note(event: events.Event, _: float) -> None:
        if isinstance(event, events.Warned):
            said.append(event.message)

    end = events.subscribe(note)
    try:
        with holdfast.Checkpointer(tmp_path, {"n": 1}) as ckpt:
            ckpt.save(0)
            ckpt.save(1).wait_captured()
    finally:
        end()
    assert [SHARE_STORE in message for message in said] == ([True] if count == "2" else [])
