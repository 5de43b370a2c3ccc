"""Lists the lines of the sources that name a stream, an event or pinned memory, and who runs them.

``python tests/support/project/device_lines.py [.coverage]`` prints those that the run which wrote
the file did not reach. It fails below 95 % of them, or if one line of the seam is missing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage

PROJECT = Path(__file__).resolve().parents[3]
SOURCES = PROJECT / "src/holdfast"
SEAM = SOURCES / "accelerator"
#: Each needs the device of its maker.
VENDORS = {SEAM / name for name in ("cuda.py", "npu.py")}
LEAST_SHARE = 0.95
_NAMES = re.compile(
    r"\b(use_|side_|make_|current_)?streams?\b|_stream\b|\bevents?\b|record_event|synchronize"
    r"|pin_memory|pinned\b|\bregister\(|unregister\("
)
_OF_A_DEVICE = re.compile(r"^from holdfast\.accelerator", re.MULTILINE)


def device_lines(data: coverage.Coverage) -> Iterator[tuple[Path, int, bool]]:
    """Yields (file, line, whether it ran) of each statement that names one of them, and of each in
    the seam.
    """
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        if path in VENDORS or (path.parent != SEAM and not _OF_A_DEVICE.search(text)):
            continue
        _, statements, _, missing, _ = data.analysis2(str(path))
        lines = text.splitlines()
        for number in statements:
            if path.parent == SEAM or _NAMES.search(lines[number - 1]):
                yield path, number, number not in missing


def main(file: str = ".coverage") -> int:
    data = coverage.Coverage(data_file=file)
    data.load()
    found = list(device_lines(data))
    reached = [line for line in found if line[2]]
    missing = [line for line in found if not line[2]]
    for path, number, _ in missing:
        print(f"{path.relative_to(PROJECT)}:{number}: {_text(path, number)}")
    share = len(reached) / max(1, len(found))
    print(f"{len(reached)} of {len(found)} device lines were reached: {100 * share:.1f} %")
    is_seam_whole = all(path.parent != SEAM for path, _, _ in missing)
    return 0 if share >= LEAST_SHARE and is_seam_whole else 1


def _text(path: Path, number: int) -> str:
    return path.read_text().splitlines()[number - 1].strip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
