"""PURE. Leaves out of a report what was before a moment, or not in one start."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace

from holdfast.errors import NotFound, UsageError
from holdfast.observe.run_report import Report

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])")


def moment_of(text: str, newest_s: float) -> float:
    """Returns the moment that a text means, in seconds since 1970.

    ``text``: a span before ``newest_s``, such as "2h", or a date in local time. Raises UsageError.
    """
    if span := _SPAN.fullmatch(text):
        return newest_s - float(span[1]) * _UNITS_S[span[2]]
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text!r}: give a span such as 90s, 30m, 2h or 3d, or a date such as "
            "2026-05-17T08:00"
        ) from None


def since(report: Report, moment_s: float) -> Report:
    """Returns the report without what is known to have been before ``moment_s``.

    Ledger and reliability stay those of the whole run; what has no moment of its own stays.
    """
    saves = tuple(s for s in report.saves if s.time_s is None or s.time_s >= moment_s)
    reliability = report.reliability
    if reliability is not None:
        recent = tuple(one for one in reliability.interruptions if one.at_s >= moment_s)
        reliability = replace(reliability, interruptions=recent)
    return replace(
        report,
        saves=saves,
        starts=tuple(one for one in report.starts if one.time_s >= moment_s) or report.starts[-1:],
        restores=tuple(one for one in report.restores if one.time_s >= moment_s),
        keeper_losses=tuple(one for one in report.keeper_losses if one.time_s >= moment_s),
        damages=tuple(one for one in report.damages if one.time_s >= moment_s),
        reliability=reliability,
    )


def of_start(report: Report, number: int) -> Report:
    """Returns the report without what is known to be of another start than ``number``.

    Ledger and reliability stay those of the whole run, but for the end of this start; what is of no
    start stays. Raises NotFound where there is no such start.
    """
    starts = tuple(one for one in report.starts if one.incarnation == number)
    if not starts:
        known = ", ".join(str(one.incarnation) for one in report.starts[-5:]) or "none"
        raise NotFound(
            f"no start {number} in the events of {report.root}: the last are {known}",
            root=report.root,
        )
    reliability = report.reliability
    if reliability is not None:
        own = tuple(one for one in reliability.interruptions if one.incarnation == number)
        reliability = replace(reliability, interruptions=own)
    return replace(
        report,
        starts=starts,
        saves=tuple(save for save in report.saves if save.incarnation == number),
        restores=tuple(one for one in report.restores if one.incarnation == number),
        keeper_losses=tuple(one for one in report.keeper_losses if one.incarnation == number),
        protection=tuple(one for one in report.protection if one.incarnation == number),
        rebuilt=tuple(one for one in report.rebuilt if one.incarnation == number),
        damages=tuple(one for one in report.damages if one.incarnation == number),
        reliability=reliability,
    )
