"""Measure how fast parity is made, and lost members from it, beside ISA-L called bare.

Both work in place on the same bytes of shared memory, one thread, alternating. What ISA-L and
numpy compute is compared before anything is timed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.options import Parser
from holdfast.parity.coding.backends import candidates, chosen
from holdfast.parity.coding.codes import Coder, NumpyBackend, parity_rows, weights

MIB = 1 << 20
SHAPES = ((3, 1), (4, 1), (3, 2), (4, 2), (14, 2), (5, 3))
#: Of a bare call in place, from issue 6.
TARGET = 0.9
OURS, BARE, CHUNKS, ADDED, NUMPY = (
    "Holdfast",
    "ISA-L, bare",
    "Holdfast, 1 MiB at a time",
    "Holdfast, member by member, 1 MiB",
    "Holdfast on numpy",
)
SECTION = results.Section(
    "Parity",
    "`python -m benchmarks coding`: made and used in place, one thread; speed is bytes of data a "
    "second.",
)


class Bare:
    """``ec_encode_data`` and nothing else: tables and pointers are made beforehand."""

    def __init__(
        self, rows: Sequence[bytes], sources: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        self._library = _library()
        coefficients = b"".join(rows)
        self._tables = ctypes.create_string_buffer(32 * len(coefficients))
        self._library.ec_init_tables(len(sources), len(rows), coefficients, self._tables)
        self._arguments = (
            len(sources[0]),
            len(sources),
            len(rows),
            self._tables,
            _pointers(sources),
            _pointers(outputs),
        )

    def __call__(self) -> None:
        self._library.ec_encode_data(*self._arguments)


def _library() -> ctypes.CDLL:
    for _, load in candidates():
        try:
            return ctypes.CDLL(load)
        except OSError:
            continue
    raise SystemExit("there is no ISA-L to compare with: pip install 'holdfast[parity]'")


def _pointers(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


class Case:
    """One shape: its memory, and every way to make and to use parity."""

    def __init__(self, data: int, parity: int, total_bytes: int) -> None:
        self.data, self.parity = data, parity
        self.size = total_bytes // data // MIB * MIB
        self._memory = mmap.mmap(-1, (data + 2 * parity) * self.size)
        whole = np.frombuffer(self._memory, np.uint8)
        parts = [whole[n * self.size : (n + 1) * self.size] for n in range(data + 2 * parity)]
        self.sources, self.outputs = parts[:data], parts[data : data + parity]
        self.again = parts[data + parity :]
        random = np.random.default_rng(data)
        for part in parts:  # touched, and different
            part.view(np.uint64)[:] = random.integers(0, 1 << 63, self.size // 8, np.uint64)
        self.coder = Coder(data, parity, chosen().backend)
        self.numpy = Coder(data, parity, NumpyBackend())

    def ways(self) -> dict[str, dict[str, Callable[[], None]]]:
        """What is measured: encode and decode, by name."""
        lost = list(range(self.parity))
        used = [*range(self.parity, self.data), *range(self.data, self.data + self.parity)]
        left = [*self.sources[self.parity :], *self.outputs]
        present = dict(zip(used, left, strict=True))
        wanted = dict(zip(lost, self.again, strict=True))
        return {
            "encode": {
                BARE: Bare(parity_rows(self.data, self.parity), self.sources, self.outputs),
                OURS: lambda: self.coder.encode(self.sources, self.outputs),
                CHUNKS: lambda: self._in_chunks(self.sources, self.outputs),
                ADDED: self._added,
                NUMPY: lambda: self.numpy.encode(self.sources, self.outputs),
            },
            "decode": {
                BARE: Bare(weights(self.data, self.parity, used, lost), left, self.again),
                OURS: lambda: self.coder.decode(present, wanted),
                NUMPY: lambda: self.numpy.decode(present, wanted),
            },
        }

    def check(self) -> None:
        """SystemExit unless all ways give the same, and the lost members come back."""
        ways = self.ways()
        found = []
        for way in ways["encode"].values():
            for output in self.outputs:
                output[:] = 7
            way()
            found.append([output.copy() for output in self.outputs])
        for way in ways["decode"].values():
            for output in self.again:
                output[:] = 7
            way()
            if not all(map(np.array_equal, self.again, self.sources)):
                raise SystemExit(f"{self.data}+{self.parity}: what was lost did not come back")
        if not all(map(np.array_equal, *two) for two in pairwise(found)):
            raise SystemExit(f"{self.data}+{self.parity}: two ways gave different parity")

    def _in_chunks(self, sources: Sequence[Any], outputs: Sequence[Any]) -> None:
        for start in range(0, self.size, MIB):
            self.coder.encode(
                [source[start : start + MIB] for source in sources],
                [output[start : start + MIB] for output in outputs],
            )

    def _added(self) -> None:
        """As chunks come from peers: one after another, each added where it belongs."""
        for start in range(0, self.size, MIB):
            outputs = [output[start : start + MIB] for output in self.outputs]
            for output in outputs:
                output[:] = 0
            for member, source in enumerate(self.sources):
                self.coder.add(member, source[start : start + MIB], outputs)


def measure(case: Case, rounds: int, patience_s: float) -> dict[str, Any]:
    """Seconds of every way, alternating."""
    case.check()
    found: dict[str, Any] = {"data_bytes": case.data * case.size}

    def before(name: str) -> None:
        if name == BARE and patience_s:
            machine.wait_until_idle(patience_s)

    for what, ways in case.ways().items():
        found[what] = series.summaries(series.timed(ways, rounds, warm_up=0, before=before))
    return found


def share(figures: dict[str, Any]) -> float:
    """Of the speed of the bare call, by medians."""
    return float(figures[BARE]["median"] / figures[OURS]["median"])


def shown(found: dict[str, Any], facts: dict[str, str], rounds: int) -> str:
    """The figures as markdown."""
    parts = [
        f"{markdown.heading(facts, is_short=True)}, {chosen().text}. GB/s of data, medians of "
        f"{rounds} rounds."
    ]
    for what, names in (
        ("encode", (BARE, OURS, CHUNKS, ADDED, NUMPY)),
        ("decode", (BARE, OURS, NUMPY)),
    ):
        rows = []
        for shape, one in found.items():
            speeds = [one["data_bytes"] / one[what][name]["median"] / 1e9 for name in names]
            ratio = share(one[what])
            met = "" if ratio >= TARGET else ", **missed**"
            rows.append([shape, *(f"{speed:.1f}" for speed in speeds), f"{ratio:.2f}{met}"])
        head = [f"{what}, data+parity", *names, f"of bare (wanted: {TARGET})"]
        parts.append(markdown.table(head, rows))
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Exit 1 where the target is missed."""
    parser = Parser("coding", __doc__, quick="little memory, two rounds, no figures")
    parser.add_argument("--rounds", type=int, help="measurements of every way (15)")
    parser.add_argument("--mebibytes", type=int, help="of data, in all members together (256)")
    parser.add_document()
    options = parser.parse(arguments)
    rounds = options.rounds or (2 if options.quick else 15)
    total = (options.mebibytes or (32 if options.quick else 256)) * MIB
    found: dict[str, Any] = {}
    for data, parity in SHAPES[:3] if options.quick else SHAPES:
        case = Case(data, parity, total)
        found[f"{data}+{parity}"] = measure(case, rounds, 0 if options.quick else 20)
    facts = machine.facts(Path(__file__).parent, ["numpy", "pyeclib"])
    text = shown(found, facts, rounds)
    print(text)
    if options.quick:
        return 0
    results.keep(
        "coding", facts, {"shapes": found}, text, document=options.document, section=SECTION
    )
    met = (share(one[what]) >= TARGET for one in found.values() for what in ("encode", "decode"))
    return 0 if all(met) else 1
