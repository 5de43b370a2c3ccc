"""What keepers of one run say to each other, each a struct that tells its kind."""

from __future__ import annotations

import msgspec


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The common ancestor."""
