"""Runs ``holdfast demo``: a real training run is killed in several ways, and resumes exactly."""

from __future__ import annotations

import argparse


def main(options: argparse.Namespace) -> int:
    """Runs the demo with ``out``, ``seed``, ``hosts``, ``root``, ``cache`` and ``json``; returns 0
    when all is as promised.
    """
    from holdfast.demo.orchestrate import run_demo  # not for the trainers, which also pass here

    return run_demo(
        options.out,
        seed=options.seed,
        as_json=options.json,
        hosts=options.hosts,
        root=options.root,
        has_cache=options.cache,
    )
