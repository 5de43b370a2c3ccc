"""Machines and lists of subgroups to plan for, as hypothesis draws them."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import strategies as st

from holdfast.offload.planning.simulate import Lane, Rates, Timeline, speed

_rate = st.floats(20, 20_000)
machines = st.builds(
    Rates,
    h2d_bytes_s=_rate,
    d2h_bytes_s=_rate,
    host_update_elements_s=_rate,
    device_update_elements_s=_rate,
    host_cast_elements_s=_rate | st.just(math.inf),
    both_ways=st.sampled_from([1.0, 0.8, 0.5]),
    host_memory_bytes_s=st.floats(20, 50_000) | st.just(math.inf),
    state_in_bytes=st.sampled_from([8, 12, 16]),
    state_out_bytes=st.sampled_from([8, 12, 16]),
    gradient_bytes=st.sampled_from([2, 4]),
    parameter_bytes=st.sampled_from([2, 4]),
    overhead_s=st.sampled_from([0.0, 0.01]),
)
#: Whole numbers of elements, some of them none.
subgroups = st.lists(st.integers(0, 300), max_size=14)
slots = st.integers(1, 4)
LANES: tuple[Lane, ...] = ("h2d", "d2h", "host", "device")


def worked_s(played: Timeline, rates: Rates) -> dict[Lane, float]:
    """How much each lane got done, counted from the spans of all: a check of ``run`` itself."""
    edges = sorted({edge for span in played.spans.values() for edge in span})
    done: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    for begin_s, end_s in pairwise(edges):
        busy = {
            played.tasks[name].lane
            for name, span in played.spans.items()
            if span.begin_s <= begin_s and end_s <= span.end_s
        }
        for lane in busy:
            done[lane] += (end_s - begin_s) * speed(lane, busy, rates)
    return done
