"""PURE. How many bytes may leave now, so that no more leave in any stretch of time than allowed."""

from __future__ import annotations

LEAST_BYTES = 64 << 10
"""Less is not worth a call; what is asked for and less than this is given whole."""
BURST_S = 0.05


class TokenBucket:
    """Fills with time, at ``rate_bytes_s`` up to ``burst_bytes``; None has no bound.

    In any stretch of ``t`` seconds at most ``burst_bytes + rate_bytes_s * t`` are granted. A clock
    that goes back only fills nothing.
    """

    def __init__(self, rate_bytes_s: int | None, now_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._filled_s = now_s
        self._tokens = float(self.burst_bytes)

    @property
    def burst_bytes(self) -> int:
        """How many bytes may leave at once after a pause."""
        return max(LEAST_BYTES, int((self.rate_bytes_s or 0) * BURST_S))

    def set_rate(self, rate_bytes_s: int | None, now_s: float) -> None:
        """Another rate from now on."""
        self._fill(now_s)
        self.rate_bytes_s = rate_bytes_s
        self._tokens = min(self._tokens, self.burst_bytes)

    def take(self, wanted: int, now_s: float) -> tuple[int, float]:
        """(bytes granted, 0), at most ``wanted``; or (0, seconds after which to ask again)."""
        if self.rate_bytes_s is None:
            return wanted, 0.0
        self._fill(now_s)
        least = min(wanted, LEAST_BYTES)
        if self._tokens < least:
            return 0, (least - self._tokens) / self.rate_bytes_s
        granted = int(min(wanted, self._tokens))
        self._tokens -= granted
        return granted, 0.0

    def give_back(self, count: int) -> None:
        """So many of the bytes that were granted did not leave."""
        self._tokens = min(self._tokens + count, self.burst_bytes)

    def _fill(self, now_s: float) -> None:
        gone_s, self._filled_s = max(0.0, now_s - self._filled_s), now_s
        gained = gone_s * (self.rate_bytes_s or 0)
        self._tokens = min(self._tokens + gained, self.burst_bytes)
