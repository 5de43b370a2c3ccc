"""Gives the model of a checkpoint to ``from_pretrained(..., state_dict=)``, without a copy on disk.

safetensors files have no references to others, so a view of a checkpoint cannot be made on disk.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from holdfast.errors import NotFound
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.interop.opening import open_source
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.saved_state import map_state, saved_state
from holdfast.interop.writing.state_tree import MODEL
from holdfast.restore.reading.mapped_leaves import MappedLeaves
from holdfast.restore.reading.read import CARRIERS, Array
from holdfast.restore.reading.reader import CheckpointReader, tensor_of
from holdfast.rules import Rules

#: Small tensors are read together: many lie in one block, of which the checksum is compared.
_TOGETHER_BYTES = 256 << 20


def state_dict(
    root: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    rules: Rules | None = None,
    key: str = MODEL,
    format: str | None = None,
    copy: bool = False,
) -> dict[str, Any]:
    """Return the tensors of a model by the names that transformers has for them, verified.

    ``root`` and ``step``: as for ``holdfast.open``. ``rules``: how the names and tensors that were
    saved correspond to those of transformers, as ``holdfast.rules.llama`` gives them; None where
    they are the same. ``key``: that of the model in the state. ``format``: as for
    ``holdfast.open``.

    Tied tensors are one tensor under several names. In a directory on a file system of this host,
    tensors that one image has whole, as they are wanted, map its file: their bytes are compared
    with the checksums, and not copied; what is written to them stays in this process. A page that
    the system drops later is read from the disk again, and not compared again. ``copy``: no tensor
    does that, so that none needs the disk any more.

    Raises NotFound where there is no such model.
    """
    with CheckpointReader(open_source(root, format, step=step), step) as opened:
        saved = saved_state(opened.checkpoint)
        if rules is not None:
            saved = map_state(saved, rules, opened.checkpoint)
        names = saved.module_names().get(key)
        if names is None:
            raise NotFound(
                f"{root} has no model called {key!r}; it has "
                f"{', '.join(sorted(saved.module_names())) or 'none'}"
            )
        reader = LeafReader(opened.checkpoint, saved.leaves)
        mapped = MappedLeaves(opened.checkpoint)
        tensors: dict[str, Any] = {}
        wants: list[tuple[str, Box, memoryview]] = []
        wanted_bytes = 0
        for leaf in dict.fromkeys(names.values()):
            known = saved.leaves[leaf]
            carrier = CARRIERS[ITEMSIZE[known.dtype]]
            memory = mapped.take(known.same_as) if known.same_as and not copy else None
            if memory is not None:
                array: Array = np.frombuffer(memory, carrier).reshape(known.shape)
                tensors[leaf] = tensor_of(array, known.dtype)
                continue
            array = np.empty(known.shape, carrier)
            wants.append((leaf, Box.whole(known.shape), array.reshape(-1).view("u1").data))
            tensors[leaf] = tensor_of(array, known.dtype)
            wanted_bytes += known.size_bytes
            if wanted_bytes >= _TOGETHER_BYTES:
                reader.fill(wants)
                wants, wanted_bytes = [], 0
        reader.fill(wants)
        mapped.verify()
        opened.checkpoint.require_unchanged()
    return {name: tensors[leaf] for name, leaf in names.items()}
