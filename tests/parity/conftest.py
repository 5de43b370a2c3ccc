"""Every backend that this machine has, one after another."""

from __future__ import annotations

import pytest

from holdfast.parity.coding import backends as isal
from holdfast.parity.coding.codes import Backend, NumpyBackend


def isal_backends() -> list[Backend]:
    """ISA-L, wherever it is found."""
    found: list[Backend] = []
    for name, load in isal.candidates():
        try:
            found.append(isal.IsalBackend(name, load))
        except OSError:
            continue
    return found


BACKENDS = [NumpyBackend(), *isal_backends()]


@pytest.fixture(params=BACKENDS, ids=[backend.name for backend in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found
