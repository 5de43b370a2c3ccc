"""PURE. Every way in which a request is turned away: what it is counted as, and the status told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is not served."""

    kind: str
    """What it is counted as."""
    status: int
    is_known: bool = False
    """Signed with our secret: only such a request gets a signed answer, and others after it."""


MALFORMED = Refused("malformed", 400)
SLOW = Refused("slow", 408)
BODY = Refused("body", 413)
METHOD = Refused("method", 405)
TOO_LARGE = Refused("too_large", 431)
CROWDED = Refused("crowded", 503)
UNSIGNED = Refused("unsigned", 401)
FORGED = Refused("forged", 401)
MISDIRECTED = Refused("misdirected", 421, is_known=True)
FENCED = Refused("fenced", 403, is_known=True)
BEHIND = Refused("behind", 403, is_known=True)
"""Who asks is of a newer incarnation than this server, which then must not serve."""
CHALLENGED = Refused("challenged", 401, is_known=True)
"""Signed over no challenge, or over one that is over: the answer brings the current one."""
REPLAYED = Refused("replayed", 409, is_known=True)
UNKNOWN = Refused("unknown", 404, is_known=True)
WITHDRAWN = Refused("withdrawn", 410, is_known=True)
BAD_RANGE = Refused("bad_range", 416, is_known=True)

ALL = (
    MALFORMED, SLOW, BODY, METHOD, TOO_LARGE, CROWDED, UNSIGNED, FORGED, MISDIRECTED, FENCED,
    BEHIND, CHALLENGED, REPLAYED, UNKNOWN, WITHDRAWN, BAD_RANGE,
)  # fmt: skip
