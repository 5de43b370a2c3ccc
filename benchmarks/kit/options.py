"""Parse the options that benchmarks share; each benchmark adds those that it has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """The options of one benchmark.

    ``quick`` is the help of ``--quick``, and ``quick_settings`` are the values of other options
    that it stands for.
    """

    def __init__(
        self,
        name: str,
        caption: str | None,
        *,
        quick: str = "",
        quick_settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            prog=f"python -m benchmarks {name}",
            description=caption,
            formatter_class=argparse.RawTextHelpFormatter,
        )
        self._quick_settings = quick_settings or {}
        if quick:
            self.add_argument("--quick", action="store_true", help=quick)

    def add_rounds(self, count: int, what: str = "how often each is measured") -> None:
        """``--rounds``."""
        self.add_argument("--rounds", type=int, default=count, help=f"{what} ({count})")

    def add_bytes(self, count: int, what: str) -> None:
        """``--bytes``."""
        self.add_argument("--bytes", type=int, default=count, help=what)

    def add_patience(self) -> None:
        """``--patience``."""
        self.add_argument(
            "--patience",
            type=float,
            default=2,
            metavar="S",
            help="how long to wait for an idle machine before each measurement, in seconds (2)",
        )

    def add_directory(self, what: str = "a directory on the disk to measure") -> None:
        """``--dir``."""
        self.add_argument("--dir", help=f"{what} (default: the temporary one)")

    def add_document(self, page: str = "results/README.md") -> None:
        """``--document``."""
        self.add_argument("--document", action="store_true", help=f"put what is shown into {page}")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options, with what ``--quick`` stands for."""
        options = self.parse_args(arguments)
        if getattr(options, "quick", False):
            vars(options).update(self._quick_settings)
        return options
