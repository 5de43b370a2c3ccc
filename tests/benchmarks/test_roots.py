"""A start on a bucket takes as many requests as its budget allows, by a server that counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kit.object_server import BUCKET, serving
from benchmarks.roots import Start, build, counted, list_s

#: A start lists the manifests a thousand at a time, and once more for the numbers of the starts.
CHECKPOINTS, BUDGET, PAGES = 60, 30, 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_takes_thirty_requests_with_ten_thousand_checkpoints(tmp_path: Path) -> None:
    build(tmp_path / "root", CHECKPOINTS, ranks=2)
    with serving() as server:
        server.load(tmp_path / "root", "runs/root")
        root = f"s3://{BUCKET}/runs/root"
        for saves in (18, 0):  # without an index, and with the one that the first leaves
            server.requests()
            start = Start(root, 10 * CHECKPOINTS, saves, server.environment)
            assert start.found["step"] >= CHECKPOINTS
            made = server.requests()
            pages = made.count(("GET list-type", "runs/root/manifests/"))
            assert pages == 2, "one page, and one of the numbers"
            assert counted(made) - 1 + PAGES <= BUDGET, made
            for _ in range(saves):
                start.go_on()
            start.end()
            server.requests()
        assert ("GET", "runs/root/.index") in made
        rows = list_s(root, server.environment)[1]
        assert rows >= CHECKPOINTS and counted(server.requests()) <= BUDGET
