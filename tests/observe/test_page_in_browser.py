"""The page of a report in a browser: no request, worked by keyboard, for all to read."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast.observe.findings import find
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_page import render_page
from holdfast.observe.spans import RecordChoice, SaveName, read_spans
from observe.test_report_page import EVIL
from observe.test_restore_view import restored_run
from support.runs.told import tell_sick_run

MISSING = "make browser, with chromium installed: it takes playwright and axe-playwright-python"
CHROMIUM, FIREFOX = shutil.which("chromium"), shutil.which("firefox-esr")
pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason=MISSING)
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason=MISSING)
if CHROMIUM is None:
    pytest.skip(MISSING, allow_module_level=True)

SCHEMES = ("light", "dark")
SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(params=["sick", "hostile", "restored"])
def page_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The pages of three runs, on disk."""
    if request.param == "restored":
        root = restored_run(tmp_path, {2: 7.0})
    else:
        root = tell_sick_run(tmp_path, evil=EVIL if request.param == "hostile" else "")
    report = read_report(root)
    newest = report.saves[-5]
    one = RecordChoice(SaveName(newest.incarnation, newest.step))
    path = tmp_path / "report.html"
    path.write_text(render_page(report, find(report), read_spans(root, one)))
    return path


def opened(browser: Any, path: Path, scheme: str, *, width: int = 1040) -> tuple[Any, list[str]]:
    """The page, with all that it asked for and complained of."""
    context = browser.new_context(
        bypass_csp=True, offline=True, color_scheme=scheme, viewport={"width": width, "height": 900}
    )
    page, heard = context.new_page(), list[str]()
    page.on("request", lambda one: None if one.url == path.as_uri() else heard.append(one.url))
    page.on("console", lambda one: heard.append(f"{one.type}: {one.text}"))
    page.on("pageerror", lambda one: heard.append(str(one)))
    page.goto(path.as_uri())
    return page, heard


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_serious_and_the_page_asks_for_nothing(
    browser: Any, page_file: Path, scheme: str
) -> None:
    page, heard = opened(browser, page_file, scheme)
    found = axe_api.Axe().run(page).response["violations"]
    seen = [
        (one["id"], one["help"], [node["html"][:160] for node in one["nodes"][:3]])
        for one in found
        if one["impact"] in SERIOUS
    ]
    assert seen == []
    assert heard == []
    page.context.close()


def test_every_chart_has_drawn_pixels(browser: Any, page_file: Path) -> None:
    page, _ = opened(browser, page_file, "light")
    drawings = [one for one in page.query_selector_all("svg") if one.is_visible()]
    assert len(drawings) >= 4
    for drawing in drawings:
        box = drawing.bounding_box()
        assert box["width"] > 300 and box["height"] > 5
        with Image.open(io.BytesIO(drawing.screenshot())) as picture:
            counts = sorted(n for n, _ in picture.convert("RGB").getcolors(1 << 24) or [])
        assert sum(counts[:-1]) > 0.003 * sum(counts), "all but the ground is drawn upon it"
    page.context.close()


def test_the_heat_map_is_chosen_by_keyboard(browser: Any, page_file: Path) -> None:
    page, _ = opened(browser, page_file, "light")

    def shown() -> list[str]:
        return [
            one.get_attribute("class")
            for one in page.query_selector_all(".map")
            if one.is_visible()
        ]

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id"))

    before = shown()
    assert len(before) == 1
    for _ in range(40):
        page.keyboard.press("Tab")
        if focused().startswith("map-"):
            break
    assert focused().startswith("map-"), "the buttons are reached by Tab"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "who tabs sees where"
    page.keyboard.press("ArrowRight")
    after = shown()
    assert len(after) == 1 and after != before
    page.keyboard.press("Tab")
    assert focused() == "rows-rank"
    page.keyboard.press("ArrowRight")
    assert len(shown()) == 1 and "rows-host" in shown()[0]
    page.context.close()


@pytest.mark.skipif(FIREFOX is None, reason="apt install firefox-esr")
def test_firefox_draws_it_too_and_nothing_beyond_the_margin(
    page_file: Path, tmp_path: Path
) -> None:
    shot = tmp_path / "shot.png"
    profile = tmp_path / "profile"
    profile.mkdir()
    options = ["--headless", "--profile", str(profile), "--window-size=1040,3000"]
    command = [str(FIREFOX), *options, "--screenshot", str(shot), page_file.as_uri()]
    subprocess.run(command, check=True, timeout=240)
    with Image.open(shot) as picture:
        drawn = picture.convert("RGB")
    width, height = drawn.size
    counts = sorted(n for n, _ in drawn.getcolors(1 << 24) or [])
    assert len(counts) > 100 and sum(counts[:-1]) > 0.03 * sum(counts)
    margin = drawn.crop((width - 20, 0, width, height))
    assert len(margin.getcolors(1 << 24) or []) == 1


@pytest.mark.parametrize("width", [360, 1040])
def test_nothing_is_wider_than_the_window(browser: Any, page_file: Path, width: int) -> None:
    page, _ = opened(browser, page_file, "light", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.context.close()
