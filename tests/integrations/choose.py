"""Chooses three frameworks for a run of their adapters' tests, by a seed.

usage: choose.py [SEED]; prints targets of make, and the seed to the error output
"""

from __future__ import annotations

import random
import sys
from pathlib import Path


def choose(seed: int, count: int = 3) -> list[str]:
    """Returns the targets of some frameworks that have a list of packages, by name."""
    lists = sorted(Path(__file__).parent.glob("*.txt"))
    return sorted(f"integrations-{one.stem}" for one in random.Random(seed).sample(lists, count))


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(10**6)
    print(f"SEED={seed}", file=sys.stderr)
    print(*choose(seed))


if __name__ == "__main__":
    main()
