"""Hosts whose networks are real: each in a namespace, on two wires, one of which can be spoilt.

What the ranks compute goes over one wire, what their keepers say over the other, as on machines
with a fabric for training beside their ordinary network. So what happens to training when only
keepers cannot hear each other shows by itself. Needs root, for as long as a test takes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
TRAIN, KEEP = "train", "keep"
_SUBNETS = {TRAIN: "10.77.1", KEEP: "10.77.2"}
_numbers = itertools.count(1)


def run(*command: str) -> str:
    """What a command prints. AssertionError with its complaint when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def why_not() -> str:
    """Why no such hosts can be made here; "" where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"hf-try-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except (OSError, AssertionError) as error:
        return f"no network namespace can be made here: {error}"
    try:
        run("ip", "-n", name, "link", "add", "name", "one", "type", "veth", "peer", "name", "two")
        run("ip", "-n", name, "link", "add", "name", "three", "type", "bridge")
        run("tc", "-n", name, "qdisc", "add", "dev", "one", "root", *_tbf("1mbit"))
    except (OSError, AssertionError) as error:
        return f"veth, bridge or tc tbf is missing here: {error}"
    finally:
        run("ip", "netns", "del", name)
    return ""


def _tbf(rate: str, *, burst: str = "64kb", limit: str = "128kb") -> tuple[str, ...]:
    return "tbf", "rate", rate, "burst", burst, "limit", limit


def enter(namespace: str) -> None:
    """This thread, and all that it starts from now on, in that namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(descriptor)


class Networks:
    """``with Networks("a", "b")``: both wires of these hosts, joined by a switch each."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self._prefix = f"hf{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-switch"

    def __enter__(self) -> Networks:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (*self.hosts, "switch"):
            if Path(f"/run/netns/{self._prefix}-{host}").exists():
                run("ip", "netns", "del", f"{self._prefix}-{host}")

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        for wire in (TRAIN, KEEP):
            run("ip", "-n", self._switch, "link", "add", wire, "type", "bridge")
            run("ip", "-n", self._switch, "link", "set", wire, "up")
        for number, host in enumerate(self.hosts, start=1):
            there = self.namespace(host)
            run("ip", "netns", "add", there)
            run("ip", "-n", there, "link", "set", "lo", "up")
            for wire in (TRAIN, KEEP):
                port = f"{wire}-{host}"
                run(
                    "ip",
                    "-n",
                    self._switch,
                    "link",
                    "add",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    wire,
                    "netns",
                    there,
                )
                run("ip", "-n", self._switch, "link", "set", port, "master", wire, "up")
                address = f"{_SUBNETS[wire]}.{number}/24"
                run("ip", "-n", there, "address", "add", address, "dev", wire)
                run("ip", "-n", there, "link", "set", wire, "up")

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def namespaces(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """For a life: where each of its ranks is."""
        return tuple(map(self.namespace, hosts))

    def settings(self, hosts: Sequence[str]) -> tuple[dict[str, str], ...]:
        """For a life: what each of its ranks is told of its networks."""
        return tuple(
            {
                "GLOO_SOCKET_IFNAME": TRAIN,
                "HOLDFAST_HOST_ADDRESS": f"{_SUBNETS[KEEP]}.{self.hosts.index(host) + 1}",
            }
            for host in hosts
        )

    # ── what happens to a wire ───────────────────────────────────────────────────────────

    def cut(self, host: str, *wires: str) -> None:
        """Pull the plug of a host: what is sent goes nowhere, and nobody is told."""
        for wire in wires or (KEEP,):
            run("ip", "-n", self._switch, "link", "set", f"{wire}-{host}", "down")

    def join(self, host: str, *wires: str) -> None:
        """Plug it in again."""
        for wire in wires or (KEEP,):
            run("ip", "-n", self._switch, "link", "set", f"{wire}-{host}", "up")

    def slow(self, host: str, rate: str) -> None:
        """The wire of the keepers brings no more than this to a host and from it."""
        self._shape(host, _tbf(rate))

    def lose(self, host: str) -> str:
        """Packets to and from a host are lost; how: in the words of tc."""
        ways = [
            ("netem", "loss", "5%", "delay", "5ms"),
            # Where there is no netem: what does not fit into a short queue is dropped.
            _tbf("400mbit", burst="70kb", limit="90kb"),
        ]
        for way in ways:
            try:
                self._shape(host, way)
            except AssertionError:
                continue
            return " ".join(way)
        raise AssertionError("no packets can be lost here")

    def mend(self, host: str) -> None:
        """The wire of the keepers is as it was."""
        for namespace, device in self._ends(host):
            run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def dropped(self, host: str) -> int:
        """Packets that its wire has lost since it was spoilt, both ways."""
        shown = (
            run("tc", "-n", namespace, "-s", "qdisc", "show", "dev", device)
            for namespace, device in self._ends(host)
        )
        return sum(int(found) for text in shown for found in re.findall(r"dropped (\d+)", text))

    def _shape(self, host: str, way: Sequence[str]) -> None:
        for namespace, device in self._ends(host):
            run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *way)

    def _ends(self, host: str) -> tuple[tuple[str, str], ...]:
        return (self._switch, f"{KEEP}-{host}"), (self.namespace(host), KEEP)
