"""The names keepers ask each other for never change: keepers of one run may be of two versions."""

from __future__ import annotations

from holdfast.format.manifest import Generation
from holdfast.peers.wire import check_names
from holdfast.redundancy import paths


def test_the_names_are_these() -> None:
    assert paths.generation_name(Generation(3, 1200)) == "3-1200"
    found = {
        paths.image_path("a0", 7): "/images/a0/7",
        paths.parity_path("a0", 2, 1): "/parity/a0/2/1",
        paths.record_path("a0", 2, 1): "/records/a0/2/1",
        paths.note_path("a0", 9, 2, 1): "/windows/a0/9/2/1",
        paths.window_path("a0", 9, 2, 1, 33): "/windows/a0/9/2/1/33",
    }
    for path, expected in found.items():
        assert path == expected
        check_names(path, "3-1200")
    check_names(paths.window_path("A" * 128, 10**15, 127, 127, 10**9), "3-1200")
