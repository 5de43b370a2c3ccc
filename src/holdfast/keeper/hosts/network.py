"""Where a keeper of a run on several hosts is reached by the others, with the run's secret."""

from __future__ import annotations

import contextlib
from functools import partial

from holdfast.errors import KeeperError
from holdfast.keeper.doors import CONTROL, PEERS, Doors
from holdfast.peers.connection import Limits
from holdfast.peers.control import ControlServer, Welcome
from holdfast.peers.server import PeerServer
from holdfast.redundancy.exchange import PATIENCE_S

LIMITS = Limits(progress_s=4 * PATIENCE_S, idle_s=4 * PATIENCE_S)
"""Who makes parity reads nothing, and asks for nothing, while it waits for another host, which is
the one to be named."""


class Network:
    """The listeners of one host in one incarnation. Made and used on the keeper's loop."""

    def __init__(self, secret: bytes, name: str, address: str, doors: Doors | None = None) -> None:
        self.secret, self.name, self.address = secret, name, address
        self.port = self.control_port = 0
        self._doors = doors = doors or Doors(name)
        self.peers = PeerServer(
            secret, name=name, incarnation=0, limits=LIMITS,
            on_refused=partial(doors.refused, PEERS),
        )  # fmt: skip
        self.control: ControlServer | None = None

    async def listen(self, port: int = 0) -> None:
        """For peers; on another port where this one is taken. KeeperError when that cannot be."""
        self.port = await self._listen(self.peers, port)

    async def listen_for_hands(self, welcome: Welcome, port: int = 0) -> None:
        """For the keepers of the other hosts. KeeperError when that cannot be."""
        self.control = ControlServer(
            self.secret, name=self.name, incarnation=0, welcome=welcome,
            on_refused=partial(self._doors.refused, CONTROL),
        )  # fmt: skip
        self.control_port = await self._listen(self.control, port, must_be=True)

    async def _listen(
        self, server: PeerServer | ControlServer, port: int, *, must_be: bool = False
    ) -> int:
        if port and not must_be:
            with contextlib.suppress(OSError):
                return await server.start(self.address, port)
            port = 0
        try:
            return await server.start(self.address, port)
        except OSError as error:
            if port:
                raise KeeperError(
                    f"the keeper of {self.name} coordinates this run, and cannot listen for the "
                    f"others at {self.address} port {port}, where they look for it: "
                    f"{error.strerror or error}. End the process that has that port, or start the "
                    "run again."
                ) from error
            raise KeeperError(
                f"the keeper of {self.name} cannot listen at {self.address} port {port}: "
                f"{error.strerror or error}. Set HOLDFAST_HOST_ADDRESS to an address of this host "
                "that the others reach."
            ) from error

    def begin(self, incarnation: int) -> None:
        """Serve this incarnation from now on."""
        self.peers.begin(incarnation)
        if self.control is not None:
            self.control.incarnation = incarnation

    async def close(self) -> None:
        """Listen no more, and break what is under way."""
        if self.control is not None:
            await self.control.close()
        await self.peers.close()
