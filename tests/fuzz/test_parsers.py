"""Every parser reads what earlier searches kept, and what a few changes make of it, or refuses.

`make fuzz` searches on with atheris, guided by the code that an input reaches.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.parsers import CORPUS, PARSERS, corpus


def test_each_parser_has_inputs_that_are_read_and_inputs_that_are_refused() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(PARSERS)
    for name, parser in PARSERS.items():
        outcomes = {parser(data) for data in corpus(name)}
        assert True in outcomes, name
        if name not in ("listings", "peer-answers", "peer-requests"):  # which return the refusal
            assert False in outcomes, name


@pytest.mark.parametrize("name", PARSERS)
def test_changed_inputs_are_read_or_refused(name: str) -> None:
    kept, parser = corpus(name), PARSERS[name]

    @settings(
        max_examples=60,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        data=st.sampled_from(kept),
        other=st.sampled_from(kept),
        changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
        cut=st.one_of(st.none(), st.integers(0, 2**16)),
        spliced=st.booleans(),
    )
    def check(
        data: bytes,
        other: bytes,
        changes: list[tuple[int, int]],
        cut: int | None,
        spliced: bool,
    ) -> None:
        changed = bytearray(data)
        for at, value in changes:
            if changed:
                changed[at % len(changed)] = value
        if cut is not None and changed:
            at = cut % len(changed)
            changed[at:] = other[at:] if spliced else b""
        parser(bytes(changed))

    check()
