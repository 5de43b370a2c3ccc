"""Takes root and step from the ids that callers of ``torch.distributed.checkpoint`` give."""

from __future__ import annotations

import os
import re

from holdfast.storage.open import normal_root

_STEP = re.compile(r"(?P<root>.+)/[^/]*?(?P<step>[0-9]+)/?", re.DOTALL)
_LONGEST_STEP = 15


def root_and_step(
    checkpoint_id: str | os.PathLike[str], root: str | None = None
) -> tuple[str, int | None]:
    """The root and the step that an id such as ``runs/gpt/step-500`` means.

    With a ``root``: only the step is taken from it.
    """
    text = os.fsdecode(os.fspath(checkpoint_id))
    matched = _STEP.fullmatch(text if "/" in text else f"./{text}")
    is_step = matched is not None and len(matched["step"]) <= _LONGEST_STEP
    step = int(matched["step"]) if matched is not None and is_step else None
    if root is not None:
        return root, step
    if step is None or matched is None:
        return normal_root(text), None
    return normal_root(matched["root"]), step
