"""Saves are shown over the axes of the device mesh, which a run reports itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.cli import main
from observe.test_report_page import Page
from support.runs.told import Told, of, tell_save, tell_start

RANKS = {rank: "ab"[rank // 4] for rank in range(8)}


def told_run(root: Path, slow: set[int], mesh: dict[str, Any] | None) -> Path:
    told = Told(root)
    tell_start(told, 1, 10.0, RANKS)
    if mesh is not None:
        told(of(events.MeshUsed, 1, 0, step=0, **mesh), 11.0)
    for step in range(6):
        copy_s = {rank: 0.8 + rank / 100 for rank in slow}
        tell_save(told, 1, step, 20.0 + 10 * step, RANKS, copy_s=copy_s)
    return told.write()


def first_row(text: str) -> str:
    (row, *_) = re.findall(r"^│? ?((?:dp|tp|not) .*?) +│", text, flags=re.MULTILINE)
    return str(row)


def by_mesh(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["report", str(run), "--by", "mesh", *options]) == 0
    return capsys.readouterr().out


MESH = {"names": ("dp", "tp"), "sizes": (2, 4)}


@pytest.mark.parametrize(
    ("slow", "mesh", "axis"),
    [
        ({3, 7}, MESH, "tp 3"),
        ({4, 5, 6, 7}, MESH, "dp 1"),
        ({6, 7}, MESH | {"ranks": (0, 2, 4, 6, 1, 3, 5, 7)}, "tp 3"),
    ],
)
def test_the_axis_whose_ranks_are_slow_comes_first(
    slow: set[int],
    mesh: dict[str, Any],
    axis: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = told_run(tmp_path, slow, mesh)
    assert first_row(by_mesh(run, capsys)) == axis
    main(["report", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)["mesh"]
    assert found == {"names": ["dp", "tp"], "sizes": [2, 4], "ranks": list(mesh.get("ranks", ()))}


def test_a_mesh_can_be_given_and_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = told_run(tmp_path, {1, 3, 5, 7}, None)
    assert main(["report", str(run), "--by", "mesh"]) == 3
    assert "give --mesh dp=4,tp=2" in capsys.readouterr().err
    assert first_row(by_mesh(run, capsys, "--mesh", "dp=4,tp=2")) == "tp 1"
    assert main(["report", str(run), "--by", "mesh", "--mesh", "row=4"]) == 2
    assert "names no parallelism" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mesh",
    [
        {"names": ("dp",), "sizes": (2, 4)},
        {"names": ("dp", "tp"), "sizes": (1 << 20, 1 << 20)},
        {"names": ("dp", "tp"), "sizes": (0, 4)},
        {"names": ("dp",), "sizes": (4,), "ranks": (0, 1, 1, 2)},
        {"names": (), "sizes": ()},
    ],
)
def test_what_is_no_mesh_is_none(mesh: dict[str, Any], tmp_path: Path) -> None:
    from holdfast.observe.report_builder import read_report

    assert read_report(told_run(tmp_path, set(), mesh)).mesh is None


def test_the_page_draws_the_mesh_with_the_slow_ranks_darkest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = told_run(tmp_path, {3, 7}, MESH), tmp_path / "r.html"
    assert main(["report", str(run), "--html", str(path)]) == 0
    text = path.read_text()
    assert "by mesh" in Page(text).seen
    assert "copying over the mesh, tp to the right; darkest 870 ms" in Page(text).seen
    drawn = text[text.index('class="map map-copy_s rows-mesh"') :]
    drawn = drawn[: drawn.index("</svg>")]
    cells = {
        name: float(shade)
        for shade, name in re.findall(r'fill-opacity="([\d.]+)"><title>(dp \d, tp \d), rank', drawn)
    }
    assert len(cells) == 8
    assert {name for name, shade in cells.items() if shade > 0.9} == {"dp 1, tp 3", "dp 0, tp 3"}


def test_a_run_without_a_mesh_has_no_such_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = told_run(tmp_path, set(), None), tmp_path / "r.html"
    assert main(["report", str(run), "--html", str(path)]) == 0
    assert "by mesh" not in Page(path.read_text()).seen
    assert main(["report", str(run), "--html", str(path), "--mesh", "dp=2,tp=4"]) == 0
    assert "by mesh" in Page(path.read_text()).seen
