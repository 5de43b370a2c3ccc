"""Have another writer make its golden checkpoints, in the environment of its list.

.venv-foreign/deepspeed/bin/python tests/golden/foreign/write.py deepspeed    # as `make foreign`

A list ``NAME.txt`` begins with the library and its version, ``library==1.2``. The script
``write_library.py`` (with "_" for "-") writes its cases, and they go to ``library-1.2/CASE``: what
is there already stays as it is. A case has the checkpoint as it was written, ``checkpoint/``, and
what the writer's own loader gives of it, ``expected.safetensors`` and ``expected.json``
(``golden.foreign.kit``). ``library-1.2/SHA256SUMS`` has the sums of all files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(name: str) -> None:
    first = (HERE / f"{name}.txt").read_text().splitlines()[0]
    library, _, version = first.partition("==")
    script = HERE / f"write_{library.replace('-', '_')}.py"
    target = HERE / f"{library}-{version}"
    with tempfile.TemporaryDirectory() as scratch:
        paths = os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
        subprocess.run(
            [sys.executable, str(script), scratch],
            env={**os.environ, "PYTHONPATH": paths, "HOME": scratch},
            check=True,
        )
        target.mkdir(exist_ok=True)
        for case in sorted(Path(scratch).glob("*/expected.json")):
            to = target / case.parent.name
            is_new = not to.exists()
            if is_new:
                shutil.copytree(case.parent, to)
            print(f"{to.relative_to(HERE)}: {'written' if is_new else 'is there'}")
    write_sums(target)


def write_sums(target: Path) -> None:
    files = sorted(path for path in target.rglob("*") if path.is_file() and path.parent != target)
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(target)}\n"
        for path in files
    ]
    (target / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
