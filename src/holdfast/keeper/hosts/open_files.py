"""Allows a coordinating keeper as many open files as the hosts of its run need."""

from __future__ import annotations

import resource

from holdfast.events import warn

#: Open files that a keeper needs: for itself, its ranks and its peers; and for each other host.
FILES, FILES_OF_HOST = 4096, 2


def allow_open_files(hosts: int) -> None:
    """Raise this process's limit of open files to what so many hosts need, or as far as allowed."""
    needed = FILES + FILES_OF_HOST * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        warn(
            f"this keeper may open {allowed} files, and with {hosts} hosts needs up to "
            f"{needed}: raise the hard limit where training is started (ulimit -Hn)"
        )
