"""Load a directory of safetensors by transformers, as the golden model is shaped.

    python tests/golden/foreign/read_transformers.py DIRECTORY OUT

The configuration is put beside the files first. What the model has then goes to OUT, as
`golden.foreign.kit` writes it, with the names that transformers did not find or did not expect.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel

from golden.foreign.kit import save_expected
from golden.foreign.write_transformers import SHAPE


def read(where: Path, out: Path) -> None:
    GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0).save_pretrained(str(where))
    model, told = GPT2LMHeadModel.from_pretrained(str(where), output_loading_info=True)
    assert model.lm_head.weight is model.transformer.wte.weight
    tensors = {f"model.{name}": one for name, one in model.state_dict().items()}
    out.mkdir(parents=True)
    save_expected(out, tensors, {key: sorted(map(str, found)) for key, found in told.items()})


if __name__ == "__main__":
    read(Path(sys.argv[1]), Path(sys.argv[2]))
