"""Formats sizes, times and rates as short text for people: three digits, decimal units."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from unicodedata import category

NOTHING = "-"


def size_text(size_bytes: float | None) -> str:
    """Formats ``1.61 GB``: decimal units, as disks and networks are sold."""
    if size_bytes is None:
        return NOTHING
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def shared_text(size_bytes: int, reused_bytes: int) -> str:
    """Formats ``14.1 GB (50.0 MB own)``: a size, and the part of it that was not stored before."""
    own = f" ({size_text(size_bytes - reused_bytes)} own)" if reused_bytes else ""
    return size_text(size_bytes) + own


def seconds_text(elapsed_s: float | None) -> str:
    """Formats ``41 µs``, ``3.20 ms``, ``1.75 s`` or ``2 h 05 min``."""
    if elapsed_s is None:
        return NOTHING
    if elapsed_s == 0:
        return "0 s"
    if elapsed_s < 1e-3:
        return f"{elapsed_s * 1e6:.0f} µs"
    if elapsed_s < 1:
        return f"{_three_digits(elapsed_s * 1e3)} ms"
    if elapsed_s < 600:
        return f"{_three_digits(elapsed_s)} s"
    hours, minutes = divmod(round(elapsed_s / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def rate_text(bytes_per_s: float | None) -> str:
    """Formats ``2.31 GB/s``."""
    return NOTHING if bytes_per_s is None else size_text(bytes_per_s) + "/s"


def count_text(count: int, noun: str) -> str:
    """Formats ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counts_text(counts: Mapping[str, int]) -> str:
    """Formats ``12 forged, 3 too large``: the most frequent first."""
    by_number = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in by_number)


def moment_text(time_s: float) -> str:
    """Formats local date and time to the second; ``-`` for a moment that was not recorded, or does
    not exist.
    """
    if time_s <= 0:
        return NOTHING
    try:
        return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a document can say any number
        return NOTHING


def zone_text(time_s: float) -> str:
    """Formats ``UTC+02:00``: the zone of ``moment_text`` at a moment."""
    try:
        offset = datetime.datetime.fromtimestamp(time_s).astimezone().strftime("%z")
    except (ValueError, OverflowError, OSError):
        return "local time"
    return f"UTC{offset[:3]}:{offset[3:]}"


def _three_digits(value: float) -> str:
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


# Makes text from files safe for a terminal: every character of it is visible, and none acts.
#
# Names, values, notes, hosts and run ids come out of files that anybody can have written. A control
# character in one moves the cursor, paints over lines or retitles the window; a bidirectional mark
# or a character of no width shows one name as another. Each is replaced by its escape in Python,
# ``\x1b`` or ``\u202e``. Letters of every script, accents and emoji are left as they are.


#: Controls, formats (bidirectional marks, zero widths, tags), halves of characters, and the
#: separators of lines and paragraphs.
_ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
#: Letters and marks of no width or form of their own, and those reserved to be such (Unicode's
#: Default_Ignorable_Code_Point). Not U+FE0F, which only asks for a coloured emoji.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0e\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)
#: The most of a line that a report shows.
_MOST_SHOWN = 600


def printable(text: str) -> str:
    """Returns ``text`` on one line, with invisible characters as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_seen(char) else _written(char) for char in text)


def on_one_line(text: str) -> str:
    """Returns a message of several lines as one line, for a cell of a table."""
    return " ".join(line.strip() for line in text.split("\n"))


def shortened(line: str) -> str:
    """Returns as much of a line as is shown."""
    return line if len(line) <= _MOST_SHOWN else line[:_MOST_SHOWN] + " ... (whole in --json)"


def printable_lines(text: str) -> str:
    """Returns a message with its further lines indented, so that none looks like another
    message.
    """
    return "\n  ".join(printable(line) for line in text.split("\n"))


def _is_seen(char: str) -> bool:
    return category(char) not in _ACTING and not _INVISIBLE.match(char)


def _written(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


# PURE. Checks the setting without which workers that torchrun starts again may not meet.
#
# ``doctor`` reports it before a run, a run itself where torchrun may restart it, or has.


SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
FAULT = f"{SHARE_STORE} is not 1: restarted workers may meet at the dead round's store, and hang"
REMEDY = f"export {SHARE_STORE}=1"
_FIRST_WITH_IT = (2, 13)
_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")


def shares_store(torch_version: str, settings: Mapping[str, str]) -> bool:
    """True if this torch hands restarted workers the store of those before."""
    return version_of(torch_version) >= _FIRST_WITH_IT and settings.get(SHARE_STORE) != "1"


def restart_warning(torch_version: str, settings: Mapping[str, str]) -> str:
    """Returns the warning for a run that torchrun restarts; "" for any other."""
    counts = [settings.get(name, "") for name in _RESTARTS]
    may_be_restarted = any(count.isdecimal() and int(count) > 0 for count in counts)
    if _UNDER_TORCHRUN not in settings or not may_be_restarted:
        return ""
    if not shares_store(torch_version, settings):
        return ""
    return f"{FAULT}. Before torchrun: {REMEDY}"


def version_of(text: str) -> tuple[int, int]:
    """Returns (2, 13) of "2.13.0+cu126"; (0, 0) when it cannot be read."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0
