"""Compute what losses of hosts snapshots in memory survive, by formula and by drawing lots.

Nothing is measured: the tables follow from how hosts are divided into groups. `--write` puts them
into docs/operations/choosing-parity.md, between the two comments there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.kit import results
from benchmarks.kit.options import Parser
from holdfast.parity.planning.groups import GROUP_SIZE, GroupHost, divide
from holdfast.parity.planning.survival import (
    Sizes,
    check_times,
    host_count,
    loss_over,
    survival,
)

PAGE = results.DOCS / "operations" / "choosing-parity.md"
BEGIN, END = "<!-- by benchmarks/survival.py -->", "<!-- to here -->"
SEED = 20261122
DRAWS, LIVES = 2000, 400

#: name -> (parity, group size). Pairs are replication as GEMINI places it.
LAYOUTS = {
    "pairs": (1, 2),
    "`parity=1`": (1, GROUP_SIZE),
    "`parity=2`": (2, GROUP_SIZE),
    "`parity=3`": (3, GROUP_SIZE),
}
AT_ONCE = [
    (4, 1),
    (4, 2),
    (8, 2),
    (8, 3),
    (16, 2),
    (16, 3),
    (64, 2),
    (64, 4),
    (128, 3),
    (128, 8),
    (1024, 4),
    (1024, 8),
]
OVER_TIME = [
    (8, 10),
    (64, 1),
    (64, 10),
    (64, 60),
    (512, 1),
    (512, 10),
    (512, 60),
    (2048, 1),
    (2048, 10),
    (2048, 60),
]
HOST_DAYS, HORIZON_DAYS = 256, 30
MINUTES_A_DAY = 24 * 60


def simulated_loss_over(
    groups: Sizes, *, rate: float, repair: float, horizon: float, trials: int, seed: int
) -> float:
    """Return the share of ``trials`` simulated runs that lose a group, as in ``loss_over``."""
    check_times(rate, repair, horizon)
    group_of, draw = _group_of(groups), random.Random(seed)
    return (
        sum(_is_overcome(groups, group_of, draw, rate, repair, horizon) for _ in range(trials))
        / trials
    )


def _is_overcome(
    groups: Sizes,
    group_of: list[int],
    draw: random.Random,
    rate: float,
    repair: float,
    horizon: float,
) -> bool:
    now = draw.expovariate(rate)
    while now < horizon:
        lost, next_one = 1, draw.expovariate(rate)
        while next_one < repair:
            lost, next_one = lost + 1, next_one + draw.expovariate(rate)
        if lost > len(group_of):
            return True
        hit = draw.sample(range(len(group_of)), lost)
        if not _survives(groups, (group_of[host] for host in hit)):
            return True
        now += repair + draw.expovariate(rate)
    return False


def simulated(groups: Sizes, lost: int, *, trials: int, seed: int) -> float:
    """Return the share of ``trials`` random losses of ``lost`` hosts that are survived."""
    hosts, draw = host_count(groups, lost), random.Random(seed)
    group_of = _group_of(groups)
    survived = sum(
        _survives(groups, (group_of[host] for host in draw.sample(range(hosts), lost)))
        for _ in range(trials)
    )
    return survived / trials


def _survives(groups: Sizes, hit: Iterable[int]) -> bool:
    return all(count <= groups[group][1] for group, count in Counter(hit).items())


def _group_of(groups: Sizes) -> list[int]:
    """Return the group number of each host."""
    return [number for number, (size, _) in enumerate(groups) for _ in range(size)]


def sizes_of(hosts: int, layout: str) -> Sizes:
    """The groups that so many hosts are divided into."""
    parity, group_size = LAYOUTS[layout]
    division = divide(
        [GroupHost(f"h{n:04d}") for n in range(hosts)], parity=parity, group_size=group_size
    )
    return [(len(group.hosts), group.parity) for group in division.groups]


def memory_text(sizes: Sizes) -> str:
    """What protection adds to the bytes of one snapshot, at most."""
    return f"{max(parity / (size - parity) for size, parity in sizes):+.0%}"


def chance_text(chance: float) -> str:
    """Three digits, and never a certainty that is none."""
    if chance in (0, 1):
        return f"{chance:.0f}"
    nines = next(digits for digits in range(3, 16) if round(chance, digits) < 1)
    return f"{chance:.{nines}f}"


def risk_text(risk: float) -> str:
    """In percent, two digits."""
    if risk >= 0.9995:
        return "100 %"
    if risk < 1e-9:
        return "< 0.0000001 %"
    decimals = next(n for n in range(10) if round(100 * risk, n) >= 10 ** (1 - n) or n == 9)
    return f"{100 * risk:.{decimals}f} %"


def at_once() -> Iterator[str]:
    """So many hosts are lost at the same moment, any of them: what is left suffices."""
    yield "| hosts | lost | " + " | ".join(LAYOUTS) + " |"
    yield "|---:|---:|" + "---:|" * len(LAYOUTS)
    for hosts, lost in AT_ONCE:
        cells = []
        for layout in LAYOUTS:
            sizes = sizes_of(hosts, layout)
            exact = float(survival(sizes, lost))
            drawn = simulated(sizes, lost, trials=DRAWS, seed=SEED)
            cells.append(f"{chance_text(exact)} ({drawn:.3f})")
        yield f"| {hosts} | {lost} | " + " | ".join(cells) + " |"
    memory = " | ".join(
        "/".join(dict.fromkeys(memory_text(sizes_of(n, layout)) for n in (4, 8, 1024)))
        for layout in LAYOUTS
    )
    yield f"| memory | 4/8/many hosts | {memory} |"


def over_time() -> Iterator[str]:
    """Losses come one by one: the chance that memory fails within the horizon."""
    yield "| hosts | one lost every | protected again after | " + " | ".join(LAYOUTS) + " |"
    yield "|---:|---:|---:|" + "---:|" * len(LAYOUTS)
    for hosts, minutes in OVER_TIME:
        times = {
            "rate": hosts / (HOST_DAYS * MINUTES_A_DAY),
            "repair": float(minutes),
            "horizon": float(HORIZON_DAYS * MINUTES_A_DAY),
        }
        cells = []
        for layout in LAYOUTS:
            sizes = sizes_of(hosts, layout)
            exact = loss_over(sizes, **times)
            drawn = simulated_loss_over(sizes, **times, trials=LIVES, seed=SEED)
            cells.append(f"{risk_text(exact)} ({100 * drawn:.1f})")
        every = f"{HOST_DAYS * 24 / hosts:.0f} h" if hosts > 8 else f"{HOST_DAYS // hosts} days"
        yield f"| {hosts} | {every} | {minutes} min | " + " | ".join(cells) + " |"


def tables() -> str:
    """Both, as they stand in the page."""
    return "\n".join(
        [
            "The probability that the memory left suffices, after so many hosts are lost at once:",
            "",
            *at_once(),
            "",
            "The probability that memory does not suffice, and storage is needed, at least once in "
            f"{HORIZON_DAYS} days, where each host is lost once in {HOST_DAYS} days:",
            "",
            *over_time(),
        ]
    )


def in_page(page: str, made: str) -> str:
    """The page with these tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Print the tables, or write them."""
    parser = Parser("survival", __doc__)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    options, made = parser.parse(arguments), tables()
    if options.write:
        PAGE.write_text(in_page(PAGE.read_text(), made))
    else:
        print(made)
    return 0
