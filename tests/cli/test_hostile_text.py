"""Names, values, notes, hosts and run ids that act on a terminal: no command lets one through.

What is looked at are the bytes that a command writes, in a process of its own, as a terminal
would get them.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.catalogue import LOCK
from holdfast.cli import COMMANDS
from holdfast.cli.output import stdout
from holdfast.format.manifest import Generation, Incarnation, Root, seal
from holdfast.geometry.layout import REPLICATE, Instance, Layout, LeafSpec, Mesh
from holdfast.observe.log import LogSink, NoticeSink
from holdfast.observe.text import printable, printable_lines
from holdfast.persist import commit
from holdfast.persist.pins import pin
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import SOURCE
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf

#: Screen cleared, title set, line overwritten, links, C1 controls, DEL, bidirectional marks and
#: isolates, zero widths, line separators, tags, fillers; and markup of rich's.
EVIL = (
    "a\x1b[2J\x1b]0;owned\x07\rb\nholdfast: all is well\x9b31mc\x7f\u202egnp\u2066d\u200be\u2028f"
    "\u2029g\U000e0041h\u3164i\ufeffj\x00k\x85l\x0b\t[red]m[/]:bomb:"
)
HONEST = "模型.权重.café.Ω.🚀.नमस्ते.❤\ufe0f"
ALONE = Instance(Mesh((1,), (0,)), (REPLICATE,))
LAYOUT = Layout(
    1,
    tuple(
        LeafSpec(name, "F32", (2, 2), "lowest", (ALONE,)) for name in sorted([f"m.{EVIL}", HONEST])
    ),
)
VALUES: dict[str, Any] = {
    "shared": {EVIL: EVIL, "notes": {"$dict": [[EVIL, [EVIL]]]}, f"$not {EVIL}": {EVIL: {EVIL: 1}}},
    "own": {"rng" + EVIL: EVIL, "later": {"$" + EVIL: EVIL}},
    "aliases": {"tied." + EVIL: HONEST},
}


def make_root(directory: Path, seed: int = 0) -> Path:
    """Checkpoints, abandoned and broken ones too, a pin, a lock, what was left behind, events."""
    store = LocalStore(directory)
    commit.open_root(store, "r")
    store.publish("holdfast.json", seal(Root(run_id=EVIL)), replace=True)
    for incarnation, step in ((1, 10), (1, 20), (2, 15)):
        at = Generation(incarnation, step)
        values = json.loads(json.dumps(VALUES))
        values["shared"]["step"] = f"{EVIL}{step + seed}"
        leaves = {
            leaf.name: random_leaf("F32", leaf.shape, step + seed + number)
            for number, leaf in enumerate(LAYOUT.leaves)
        }
        images = images_of(LAYOUT, leaves, values=msgspec.json.encode(values), generation=at)
        made = publish_checkpoint(
            store, LAYOUT, images, at, parent=(1, 10) if incarnation == 2 else None
        )
        shown = msgspec.structs.replace(
            made, run_id=EVIL, values=values["shared"], aliases=values["aliases"], created_s=1e300
        )
        store.publish(f"manifests/{at}.json", seal(shown), replace=True)
    pin(store, Generation(1, 10), EVIL)
    store.publish("manifests/2-99.json", seal(shown), replace=True)
    store.publish("incarnations/3.json", seal(Incarnation(run_id=EVIL, n=9, nonce=EVIL)))
    body = json.dumps({"format_version": 1, "run_id": "r", EVIL: 1, "images": EVIL}).encode()
    store.publish("manifests/2-98.json", sealed(body))
    store.publish(f"steps/2-50-{'dead' * 4}/x", b"left")
    os.mkdir(directory / "steps" / EVIL.replace("/", "").replace("\0", ""))
    (directory / f".{LOCK}.lock").write_text(f"keeper {EVIL}".replace("\0", ""))
    (directory / "events").mkdir()
    lines = [msgspec.json.encode(events.to_record(each, 1e300)) for each in EVENTS]
    (directory / "events" / "rank-00000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    for number in (1, 2):
        name = EVIL.replace("/", "").replace("\0", "")[:60] + f".s{number:06d}.jsonl"
        (directory / "events" / name).write_bytes(b"")
    return directory


def sealed(body: bytes) -> bytes:
    """A document that says this, and whose checksum is true."""
    from holdfast.format.checksum import checksum, text

    return b'{"checksum":"%s","body":%s}\n' % (text(checksum(body)).encode(), body)


EVENTS: list[events.Event] = [
    events.RunStarted(incarnation=1, rank=0, run_id=EVIL, world=1, host=EVIL, pid=1),
    events.SnapshotMissed(incarnation=1, step=1, rank=0, reason=EVIL, overtaken=True, leaf=EVIL),
    events.Restored(
        incarnation=1,
        step=1,
        rank=0,
        source=EVIL,
        elapsed_s=1.0,
        size_bytes=1,
        saved_world=1,
        world=1,
        parent_incarnation=0,
    ),
    events.KeeperLost(incarnation=1, rank=0, reason=EVIL),
    events.PersistBroke(incarnation=1, step=1, reason=EVIL),
    events.SourceDropped(incarnation=1, rank=0, source=EVIL, reason=EVIL),
    events.RequestsRefused(host=EVIL, door=EVIL, counts={EVIL: 1}),
    events.Warned(message=EVIL),
    events.SinkFailed(sink=EVIL, reason=EVIL),
    events.SnapshotNotProtected(incarnation=1, step=1, reason=EVIL),
]


def acting(raw: bytes) -> list[str]:
    """The characters that a terminal would not show, line feeds aside."""
    text = raw.decode("utf-8")
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return [c for c in text if c != "\n" and (unicodedata.category(c) in kinds or c == "\u3164")]


def run(*argv: str, stdin: str = "") -> tuple[bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *argv],
        env=os.environ | {"PYTHONPATH": SOURCE, "PYTHONIOENCODING": "utf-8"},
        input=stdin.encode(),
        capture_output=True,
        timeout=120,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.stdout, done.stderr


def make_foreign(path: Path) -> Path:
    """A file of torch with such names in it, one of them of a class that is not known."""
    import torch

    tensors = {EVIL: torch.ones(2), HONEST: torch.zeros(2, 2)}
    torch.save({"model": tensors, EVIL: EVIL, f"left {EVIL}": Foreign()}, path)
    return path


class Foreign:
    """A class of a program that wrote a checkpoint."""


def foreign_calls(root: str, foreign: str) -> Iterator[tuple[str, ...]]:
    yield from (
        ("ls", foreign),
        ("show", foreign),
        ("show", foreign, f"model.{HONEST}"),
        ("show", foreign, "--for", "dp=2"),
        ("diff", root, foreign),
        ("diff", foreign, foreign),
        ("dump", foreign, f"model.{HONEST}"),
        ("dump", foreign, f"model.{EVIL}".replace("\0", "")),
        ("verify", foreign),
        ("verify", foreign, "--deep"),
        ("copy", foreign, root),
        ("import", foreign, f"{root}-new", "--dry-run"),
        ("import", foreign, f"{root}-new"),
        ("export", foreign, f"{root}.pt", "--to", "torch"),
        ("export", foreign, f"{root}-dcp", "--to", "dcp", "--dry-run"),
        ("completion", "--words", "show", foreign, ""),
    )


def calls(root: str, other: str, out: str) -> Iterator[tuple[str, ...]]:
    leaf = f"m.{EVIL}".replace("\0", "")  # no argument can have a null in it
    yield from (
        ("ls", root),
        ("show", root),
        ("show", root, "--step", "1-10"),
        ("show", root, HONEST),
        ("show", root, leaf),
        ("show", root, "--step", EVIL.replace("\0", "")),
        ("show", root, "--for", EVIL.replace("\0", "")),
        ("show", root, "--for", "dp=2"),
        ("diff", root, "--step", "1-10", "--other-step", "2-15"),
        ("diff", root, other),
        ("diff", root, other, "--leaf", leaf),
        ("diff", root, other, "--values-only"),
        ("dump", root, HONEST),
        ("dump", root, "notes"),
        ("dump", root, "later"),
        ("dump", root, leaf),
        ("dump", root, HONEST, "--out", f"{out}/a.npy"),
        ("dump", root, "notes", "--out", f"{out}/b.json"),
        ("verify", root),
        ("verify", root, "--deep"),
        ("verify", root, "--step", "2-99"),
        ("copy", root, f"{out}/copied", "--dry-run"),
        ("copy", root, f"{out}/copied"),
        ("copy", root, leaf, "--step", leaf),
        ("sync", root, other),
        ("sync", root, f"{out}/synced"),
        ("export", root, f"{out}/o.pt", "--to", "torch", "--step", "1-10"),
        ("export", root, f"{out}/o", "--to", "safetensors", "--only", leaf),
        ("export", root, leaf, "--to", leaf),
        ("export", root, leaf, "--to", "dcp", "--ranks"),
        ("import", leaf, root, "--ranks"),
        ("import", leaf, root, "--format", leaf),
        ("import", root, f"{out}/imported", "--cast", leaf),
        ("repair", root, "--from", other),
        ("repair", root, "--dry-run"),
        ("repair", root, "--step", leaf),
        ("unlock", root),
        ("unlock", f"s3://{leaf}"),
        ("pin", root, "--list"),
        ("pin", root, "1-20", "--note", leaf),
        ("pin", root, leaf),
        ("pin", root, "77", "--remove"),
        ("prune", root, "--last", "1", "--dry-run"),
        ("prune", root, "--events", "--dry-run"),
        ("prune", root, "--abandoned", "--yes"),
        ("report", root),
        ("report", root, "--last", "0"),
        ("top", root),
        ("top", leaf),
        ("events", root),
        ("events", root, "--kind", leaf),
        ("events", root, "--output", f"{root}/{leaf}/x"),
        ("trace", root, "--save", leaf),
        ("trace", root, "--since", "1h", "--output", f"{root}/{leaf}/x"),
        ("doctor", root, "--quick"),
        ("doctor", "--clean"),
        ("completion", "bash"),
        ("completion", "--words", "show", root, ""),
        ("completion", "--words", "show", root, "--step", ""),
        (leaf,),
        ("ls", leaf),
        ("ls", root, f"--{leaf}"),
        ("report", leaf),
        ("ls",),
    )


#: The commands whose calls are looked at together; "" for what names none.
TRIED = [*sorted(set(COMMANDS) - {"demo"}), ""]


@pytest.mark.parametrize("command", TRIED)
def test_no_command_writes_a_character_that_acts_on_a_terminal(
    tmp_path: Path, command: str
) -> None:
    root, other = str(make_root(tmp_path / "one")), str(make_root(tmp_path / "two", seed=5))
    foreign = str(make_foreign(tmp_path / "a.pt"))
    tried = 0
    for argv in (*foreign_calls(root, foreign), *calls(root, other, str(tmp_path))):
        if (argv[0] if argv[0] in TRIED else "") != command:
            continue
        for extra in ((), ("--json",)):
            if extra and "--words" in argv:
                continue
            out, err = run(*argv, *extra)
            assert acting(out) == acting(err) == [], (argv, out, err)
            assert not re.search(rb"(?m)^holdfast: all is well", out + err), argv
            if extra and out:
                json.loads(out)
                assert out.isascii()
        tried += 1
    assert tried


def test_what_was_escaped_is_told_and_json_says_what_is_stored(tmp_path: Path) -> None:
    root = str(make_root(tmp_path / "one"))
    out, _ = run("show", root, "--step", "1-10")
    text = out.decode()
    assert HONEST in text
    assert "\\x1b[2J\\x1b]0;owned\\x07" in text
    assert ":bomb:" in text
    assert "[red]m[/]" in text
    out, _ = run("show", root, "--step", "1-10", "--json")
    document = json.loads(out)
    assert {leaf["name"] for leaf in document["leaves"]} >= {f"m.{EVIL}", HONEST}
    assert document["run_id"] == document["values"][EVIL] == EVIL
    out, _ = run("dump", root, "notes", "--step", "1-10")
    assert json.loads(out) == VALUES["shared"]["notes"]


def test_a_terminal_gets_colours_and_no_other_control(tmp_path: Path) -> None:
    root = str(make_root(tmp_path / "one"))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "verify", root],
        env=os.environ | {"PYTHONPATH": SOURCE, "TERM": "xterm", "LANG": "C.UTF-8"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        close_fds=True,
    )
    os.close(slave)
    said = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the last one has closed its end
            break
        if not piece:
            break
        said += piece
    process.wait(60)
    os.close(master)
    assert b"\x1b[3" in said, "verify speaks in colours"
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", said).replace(b"\r\n", b"\n")
    assert acting(plain) == []


@pytest.mark.parametrize("sink", [LogSink("debug"), LogSink("info"), NoticeSink(0)])
def test_what_is_told_of_a_run_that_trains_does_not_act_on_its_terminal(
    sink: LogSink | NoticeSink, capfd: pytest.CaptureFixture[str]
) -> None:
    end = events.subscribe(sink)
    for event in EVENTS:
        sink(event, 1e9)
    end()
    said = capfd.readouterr().err
    assert "\\x1b" in said
    assert acting(said.encode()) == []


def test_every_character_is_seen_or_written_out_and_none_twice() -> None:
    for code in range(0x110000):
        char = chr(code)
        shown = printable(char)
        if shown != char:
            assert shown.isascii()
            assert shown.startswith("\\")
            assert shown.encode().decode("unicode_escape") == char
        else:
            assert unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    assert printable(HONEST) == HONEST
    assert printable(printable(EVIL)) == printable(EVIL)


def test_further_lines_of_a_message_are_set_in() -> None:
    assert printable_lines("a\nb\x1b") == "a\n  b\\x1b"


def test_cells_of_tables_pass_through_the_same_place(capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.cli.output import plain_table

    table = plain_table("one")
    table.add_row("x\x1b[31my")
    stdout().print(table)
    assert "x\\x1b[31my" in capsys.readouterr().out
