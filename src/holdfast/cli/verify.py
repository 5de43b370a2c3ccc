"""Runs ``holdfast verify``: proves that checkpoints can be restored, or reports their faults."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from holdfast.catalogue import catalogue
from holdfast.cli.checkpoints import MAX_DIGITS, STEP_HELP, OpenedRoot, choose, open_readable
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import FormatError, UsageError
from holdfast.format.manifest import Manifest
from holdfast.leases import ReadLease
from holdfast.observe.text import count_text, on_one_line, rate_text, seconds_text, size_text
from holdfast.restore.reading.verify import EVERYTHING, DeepProgress, ReadPart, verify

#: A note of what was read is written at most so often.
_NOTE_S = 5.0
#: Of checkpoints that others wrote.
UNVERIFIED = "its bytes are unverified: its writer left no checksums of them"


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "verify",
        "check that checkpoints are whole: images, checksums, every element exactly once",
        "holdfast verify runs/gpt --deep",
        "holdfast verify runs/gpt --step 1200",
        "holdfast verify runs/gpt --deep --part $(date +%u)/7 --resume verify.json",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument("--step", metavar="STEP", help=STEP_HELP + "; without it, all are checked")
    command.add_argument(
        "--deep", action="store_true", help="read every block, not only headers and block tables"
    )
    command.add_argument(
        "--part",
        metavar="K/N",
        help="read the K-th of N parts of all blocks: 1/7 on Monday, ..., 7/7 on Sunday",
    )
    command.add_argument(
        "--resume",
        metavar="FILE",
        help="note in FILE what was read; broken off and called again, it goes on from there",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks one checkpoint or all; returns 4 when any of them has a fault."""
    if (args.part or args.resume) and not args.deep:
        raise UsageError("--part and --resume say which blocks are read: add --deep")
    part = _part(args.part)
    opened = open_readable(args.root, is_brief=args.step is None)
    note = ReadNote(args.resume, f"{opened.store.identity()} {part.number}/{part.of} {args.step}")
    rows = _check_all(opened, args.step, deep=args.deep, part=part, note=note)
    note.end()
    is_sound = all(not row["faults"] for row in rows)
    if args.json:
        shown = f"{part.number}/{part.of}" if args.part else None
        document = {"root": args.root, "deep": args.deep, "part": shown, "ok": is_sound}
        print_json({**document, "checkpoints": rows})
    else:
        _print(args.root, rows)
    return 0 if is_sound else FormatError.exit_code


def _part(text: str | None) -> ReadPart:
    if text is None:
        return EVERYTHING
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and len(text) < MAX_DIGITS):
        raise UsageError(f"--part {text}: give K/N, such as 1/7: the first of seven parts")
    return ReadPart(int(number), int(of))


class ReadNote:
    """What a check has read, in a file, so that the next one goes on from there; "" for no file."""

    def __init__(self, path: str | None, what: str) -> None:
        self._path = None if path is None else Path(path)
        self._what = what
        self._begun: dict[str, DeepProgress] = {}
        self._written_s = time.monotonic()
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def of(self, manifest: Manifest) -> DeepProgress:
        """Returns how far the checkpoint was read."""
        name = f"{manifest.generation}-{manifest.attempt}"
        return self._begun.setdefault(name, DeepProgress())

    def write(self, *, now: bool = False) -> None:
        """Writes the file, if that was not done just before."""
        if self._path is None or (time.monotonic() - self._written_s < _NOTE_S and not now):
            return
        begun = {name: [one.runs, one.faults] for name, one in self._begun.items()}
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_text(json.dumps({"read": self._what, "checkpoints": begun}))
            new.replace(self._path)
        except OSError as error:
            raise UsageError(f"--resume {self._path}: it cannot be written: {error}") from error
        self._written_s = time.monotonic()

    def end(self) -> None:
        """All is read: the next check begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            what, begun = found["read"], found["checkpoints"]
            self._begun = {
                name: DeepProgress(int(runs), [str(fault) for fault in faults])
                for name, (runs, faults) in begun.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"--resume {path}: it is no note of `holdfast verify`: give another file, or "
                "remove it"
            ) from error
        if what != self._what:
            raise UsageError(
                f"--resume {path}: it is the note of another check ({what}): give another file, or "
                "remove it to begin anew"
            )


def _check_all(
    opened: OpenedRoot, step: str | None, *, deep: bool, part: ReadPart, note: ReadNote
) -> list[dict[str, Any]]:
    lease = ReadLease(opened.store)
    try:
        if step is not None:
            manifest = choose(opened, step)
            lease.take(manifest)
            return [_check(opened, manifest, deep=deep, part=part, note=note)]
        found = catalogue(opened.store)  # each is read: an index says nothing of its bytes
        rows = [
            _check(opened, manifest, deep=deep, part=part, note=note)
            for manifest in found.manifests
            if lease.take(manifest)  # else it was pruned since it was listed
        ]
    finally:
        lease.end()
    return rows + [{"checkpoint": path, "faults": [reason]} for path, reason in found.broken]


def _check(
    opened: OpenedRoot, manifest: Manifest, *, deep: bool, part: ReadPart, note: ReadNote
) -> dict[str, Any]:
    with SlowProgress(f"verifying {manifest.generation}") as progress:

        def tell(done: int, total: int) -> None:
            progress(done, total)
            note.write()

        try:
            found = verify(
                opened.store,
                manifest,
                deep=deep,
                progress=tell,
                part=part,
                begun=note.of(manifest),
            )
        finally:
            note.write(now=True)
    return {
        "checkpoint": str(manifest.generation),
        "faults": list(found.faults),
        "images": found.images,
        "blocks": found.blocks,
        "size_bytes": found.size_bytes,
        "elapsed_s": found.elapsed_s,
        **({} if opened.has_sums else {"unverified": UNVERIFIED, "notes": opened.notes}),
    }


def _print(root: str, rows: list[dict[str, Any]]) -> None:
    console = stdout()
    for row in rows:
        colour, word = ("red", "FAULTY") if row["faults"] else ("green", "ok")
        console.print(
            f"{escape(row['checkpoint'])}  [{colour}]{word}[/]{_amount(row)}", soft_wrap=True
        )
        for text in (row["unverified"], *row["notes"]) if "unverified" in row else ():
            console.print(f"    {escape(on_one_line(text))}", soft_wrap=True)
        for fault in row["faults"]:
            for line in fault.split("\n"):
                console.print(f"    {escape(line)}", soft_wrap=True)
    if not rows:
        console.print(f"no checkpoints in {escape(root)} yet", soft_wrap=True)


def _amount(row: dict[str, Any]) -> str:
    """Formats how much was checked; bytes only where all of them were read."""
    if "images" not in row:
        return ""
    text = f"  {count_text(row['images'], 'image')}"
    if not row["blocks"]:
        return f"{text} in {seconds_text(row['elapsed_s'])}"
    size_bytes, elapsed_s = row["size_bytes"], row["elapsed_s"]
    return (
        f"{text}, {count_text(row['blocks'], 'block')}, {size_text(size_bytes)}"
        f" in {seconds_text(elapsed_s)} ({rate_text(size_bytes / elapsed_s)})"
    )
