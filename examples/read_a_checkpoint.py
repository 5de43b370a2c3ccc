"""Look into a checkpoint without the code that trained it, on one process, reading only a part.

python examples/read_a_checkpoint.py runs/minimal     # of any run; the newest step, or add one
"""

from __future__ import annotations

import sys

import holdfast


def main(root: str, step: int | None) -> None:
    """Say what is in it, and read the first row of everything."""
    with holdfast.open(root, step) as checkpoint:
        print(f"step {checkpoint.step}, saved on {checkpoint.layout.world} ranks")
        for leaf in checkpoint.leaves.values():
            # Only these bytes are read, whatever ranks wrote them, and each block is verified.
            box = [slice(0, 1), *(slice(None) for _ in leaf.shape[1:])] if leaf.shape else None
            row = checkpoint.read(leaf.name, box).double()
            shape = "x".join(map(str, leaf.shape)) or "one number"
            print(f"{leaf.name:30} {leaf.dtype:5} {shape:12} first row: mean {row.mean():+.6f}")
        for name, value in checkpoint.values.items():
            print(f"{name} = {value!s:.60}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
