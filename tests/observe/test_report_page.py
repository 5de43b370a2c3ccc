"""The page of a report: whole in itself, no request, no script, and all text is only text."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from holdfast import events
from holdfast.cli import main
from holdfast.observe.findings import find
from holdfast.observe.page_charts import escaped
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.report import Report
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_page import render_page
from holdfast.observe.rollups import PhaseSpread
from holdfast.observe.spans import RecordChoice, SaveName, read_spans
from holdfast.observe.tables import figure_rows
from holdfast.observe.text import moment_text, seconds_text
from holdfast.observe.trouble_lines import trouble_lines
from observe.test_findings import healthy, stall_of_one
from support.runs.told import RANKS, of, tell_sick_run

EVIL = (
    "</script></style></title><script>document.title='owned'</script>\"' onload=alert(1) "
    "<img src=//evil.example/x>&amp;\x1b[2J\u202egnp" + "x" * 10_000
)
CHROMIUM = shutil.which("chromium")


class Page(HTMLParser):
    """What a page has: tags with attributes, text, and every tag closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.seen = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.seen += data


def page_of(report: Report) -> str:
    return render_page(report, find(report))


@pytest.mark.promise
@pytest.mark.parametrize("evil", ["", EVIL], ids=["plain", "hostile"])
def test_the_page_asks_for_nothing_and_runs_nothing(tmp_path: Path, evil: str) -> None:
    text = page_of(read_report(tell_sick_run(tmp_path, evil=evil)))
    page = Page(text)
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object", "a", "form"} & set(page.tags)
    asking = {"src", "href", "action", "style", "srcset"}
    assert not [each for each in page.attributes if each[0] in asking or each[0].startswith("on")]
    assert text.count("<style>") == 1 and "url(" not in text and "@import" not in text
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policies = [value for name, value in page.attributes if value.startswith("default-src")]
    fixed = "base-uri 'none'; form-action 'none'"
    assert policies == [f"default-src 'none'; style-src 'sha256-{digest}'; {fixed}"]
    assert "\x1b" not in text and "\u202e" not in text
    assert len(text) < 300_000


def test_hostile_text_is_shown_as_it_was_written_and_cut(tmp_path: Path) -> None:
    page = Page(page_of(read_report(tell_sick_run(tmp_path, evil=EVIL))))
    assert "<script>document.title='owned'</script>" in page.seen
    assert "\\x1b[2J" in page.seen and "(whole in --json)" in page.seen
    assert "x" * 1000 not in page.seen
    assert escaped("a\"'<>&\nb") == "a&quot;&#x27;&lt;&gt;&amp; b"


def test_every_part_of_the_verdict_is_on_the_page(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path))
    text = Page(page_of(report)).seen
    assert report.ledger is not None and report.reliability is not None
    for one in find(report):
        assert one.evidence in text and one.remedy in text
    assert "lost work" in text and "rank 3 on b" in text and "eval" in text
    assert all(f"{save.incarnation}-{save.step}" in text for save in report.saves)
    assert page_of(report).count('<path d="M') > 100


def test_a_run_of_which_next_to_nothing_is_known_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "host-a.jsonl").write_text("{}\n")
    assert "<h2>Findings</h2>" in page_of(read_report(tmp_path))


@pytest.mark.parametrize("evil", ["", EVIL], ids=["plain", "hostile"])
def test_one_save_is_drawn_over_time_by_rank_and_keeper(tmp_path: Path, evil: str) -> None:
    root = tell_sick_run(tmp_path, evil=evil)
    page = tmp_path / "r.html"
    assert main(["report", str(root), "--save", "3-20", "--html", str(page)]) == 0
    text = page.read_text()
    found = Page(text)
    assert found.open == [] and "script" not in found.tags and "\x1b" not in text
    assert "Save 3-20 over time" in found.seen
    for lane in ("rank 0 on a", "rank 3 on b", "keeper of a"):
        assert lane in found.seen, lane
    assert "write: 2.20 s" in found.seen and "held: 10.0 ms" in found.seen
    # The hour that b's clock is ahead makes no hour of it.
    assert re.search(r"what ranks and keepers did in the [0-9.]+ m?s of this save", found.seen)
    assert main(["report", str(root), "--save", "9-9", "--html", str(page)]) == 3


def test_the_page_of_a_large_run_is_small(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path))
    slowest = tuple((rank, 1.0 + rank) for rank in range(16))
    spread = PhaseSpread(16384, 1.0, 2.0, 3.0, 16.0, slowest)
    save = dataclasses.replace(report.saves[-5], phases=dict.fromkeys(OF_SAVES, spread))
    saves = tuple(dataclasses.replace(save, step=step) for step in range(1000))
    hosts = {f"host-{n:05d}": tuple(range(8 * n, 8 * n + 8)) for n in range(2048)}
    text = page_of(dataclasses.replace(report, saves=saves, ranks_by_host=hosts))
    assert len(text) < 3_000_000
    page = Page(text)
    assert page.open == [] and "darkest 16.0 s" in page.seen


def test_heat_maps_are_by_rank_and_by_host_and_one_shows_at_a_time(tmp_path: Path) -> None:
    text = page_of(read_report(tell_sick_run(tmp_path)))
    ids = re.findall(r'<input type="radio" name="(\w+)" id="([\w-]+)"( checked)?', text)
    assert [name for name, _, is_checked in ids if is_checked] == ["map", "rows"]
    phases = [id_ for name, id_, _ in ids if name == "map"]
    assert [id_ for name, id_, _ in ids if name == "rows"] == ["rows-rank", "rows-host"]
    for phase in phases:
        for rows in ("rows-rank", "rows-host"):
            assert text.count(f'<div class="map {phase} {rows}">') == 1
            rule = (
                f"main:has(#{phase}:checked):has(#{rows}:checked) .{phase}.{rows}{{display:block}}"
            )
            assert text.count(rule) == 1
    (of_hosts,) = re.findall(r'<div class="map map-write_s rows-host">(.*?)</div>', text, re.S)
    assert "host b at 3-24: 2.20 s" in of_hosts and "rank" not in Page(of_hosts).seen


def test_who_does_not_see_the_drawings_has_their_figures(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path))
    newest = report.saves[-5]
    one = RecordChoice(SaveName(newest.incarnation, newest.step))
    text = render_page(report, find(report), read_spans(tmp_path, one))
    drawn = [tag for tag in re.findall(r"<(svg|table|h2)[ >]", text) if tag != "h2"]
    lone = [at for at, tag in enumerate(drawn) if drawn[at : at + 2] == ["svg", "svg"]]
    assert drawn.count("svg") > 10
    assert lone == [0] and "of 315 s: # 70.7 % productive" in text, "the bar is in words below it"
    written = text[text.index('<div class="map map-write_s rows-rank">') :]
    rows = re.findall(r"<tr>(.*?)</tr>", written[: written.index("</table>")])
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows[1:]]
    values = [
        s
        for save in report.saves
        if "write_s" in save.phases
        for rank, s in save.phases["write_s"].slowest
        if rank == 3
    ]
    mean, largest = map(seconds_text, (statistics.fmean(values), max(values)))
    assert cells[0][:5] == ["rank 3", "b", str(len(values)), mean, largest]


def test_the_first_screen_is_the_verdict_and_what_is_empty_is_silent(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path))
    heads = re.findall(r"<h2>(.*?)</h2>", page_of(report))
    assert heads[:3] == ["Findings", "Interruptions", "Where the time went"]
    text = page_of(report)
    assert text.index('class="critical verdict"') < text.index("<svg") < text.index("<h2>")
    calm = dataclasses.replace(report, starts=report.starts[-1:], restores=())
    heads = re.findall(r"<h2>(.*?)</h2>", page_of(calm))
    assert "Interruptions" not in heads and "Restores" not in heads


def test_the_heat_map_opens_with_the_phase_that_is_slow_and_says_its_figures(
    tmp_path: Path,
) -> None:
    report = read_report(tell_sick_run(tmp_path))
    text = page_of(report)
    (checked,) = re.findall(r'id="map-(\w+)" checked> ([^<]+)<', text)
    assert checked == ("write_s", "writing"), "rank 3 of b writes slowly"
    (drawn,) = re.findall(r'<div class="map map-write_s rows-rank">.*?<svg.*?>(.*?)</svg>', text)
    words = re.findall(r"<text [^>]*>([^<]+)</text>", drawn)
    values = [
        s
        for save in report.saves
        if "write_s" in save.phases
        for rank, s in save.phases["write_s"].slowest
        if rank == 3
    ]
    assert words[
        words.index("rank 3 on b") + 1
    ] == f"{seconds_text(statistics.fmean(values))}, " + ("1.00 MB")
    assert "1-0" in words, "where its columns begin"
    parts = re.findall(r'id="map-\w+"[^>]*> ([^<]+)<', text)
    assert "in save: describing" in parts and len(parts) == len(set(parts))


def test_of_a_stall_the_heat_map_shows_who_waited(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    stall_of_one(told)
    for rank, host in RANKS.items():
        times = {"copy_s": 0.2, "grant_s": 0.0 if rank == 2 else 20.0}
        told(of(events.ImageCaptured, 1, rank, step=20, size_bytes=1_000_000, **times), 381.0, host)
    text = page_of(read_report(told.write()))
    assert 'id="map-grant_s" checked> waiting for all, and a slot<' in text
    assert "rank 1 at 1-20: 20.0 s" in text


def test_saves_that_gave_nothing_are_crosses_in_the_chart(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path))
    text = page_of(report)
    assert text.count('class="cross"') == len(report.misses) == 4
    calm = dataclasses.replace(report, saves=report.saves[:5])
    assert "gave nothing" in text and 'class="cross"' not in page_of(calm)


def test_a_start_is_drawn_until_its_trainers_ended(tmp_path: Path) -> None:
    """Their keepers wait for them for longer."""
    report = read_report(tell_sick_run(tmp_path))
    later = dataclasses.replace(report, last_s=report.last_s + 3600)
    assert moment_text(report.trained_s) in Page(page_of(later)).seen
    (own,), (same,) = (
        re.findall(r"start 3: .*?<rect ([^>]+)>", page_of(each)) for each in (report, later)
    )
    assert own == same


def test_the_command_writes_the_page_or_says_why_not(tmp_path: Path) -> None:
    root = str(tell_sick_run(tmp_path))
    assert main(["report", root, "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", root, "--html", str(tmp_path / "none" / "r.html")]) == 5


def chromium(*options: str) -> subprocess.CompletedProcess[bytes]:
    assert CHROMIUM is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    return subprocess.run([CHROMIUM, *fixed, *options], capture_output=True, timeout=90)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_it_and_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    report = read_report(tell_sick_run(tmp_path, evil=EVIL))
    page, shot = tmp_path / "r.html", tmp_path / "r.png"
    page.write_text(page_of(report))
    dumped = chromium("--dump-dom", page.as_uri())
    dom = dumped.stdout.decode()
    assert dumped.returncode == 0 and "<h2>Findings</h2>" in dom
    assert not re.search(r"CONSOLE|Refused to|Content Security Policy", dumped.stderr.decode())
    assert "<title>owned" not in dom and "<script" not in dom and "<img" not in dom
    drawn = chromium(f"--screenshot={shot}", "--window-size=1040,2000", page.as_uri())
    assert drawn.returncode == 0
    from PIL import Image

    with Image.open(shot) as picture:
        colours = picture.convert("RGB").getcolors(1 << 24) or []
    # Productive time is drawn in its colour, on more than a stray pixel.
    assert sum(count for count, colour in colours if colour == (0x2D, 0xA4, 0x4E)) > 500


def test_the_page_says_all_that_the_report_says_in_words(tmp_path: Path) -> None:
    """Its figures of all saves, and what else happened or could not be read."""
    root = tell_sick_run(tmp_path)
    with (root / "events" / "host-a.jsonl").open("ab") as file:
        file.write(b'{"torn\n')
    dropped = "storage: <b>block 3</b>", "y" * 500  # as long as the terminal shows it whole
    report = dataclasses.replace(read_report(root), dropped_sources=dropped)
    text = page_of(report)
    seen = Page(text).seen
    lines = trouble_lines(report)
    assert any("torn line" in line for line in lines) and any("block 3" in line for line in lines)
    for line in lines:
        assert " ".join(line.split()) in " ".join(seen.split())
    rows = list(figure_rows(report.figures))
    assert any(row[1] == "1-0 rank 0" for row in rows)
    for row in rows:
        assert "".join(row) in seen
    assert "<b>" not in text
