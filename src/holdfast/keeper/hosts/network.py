"""Network listeners of a keeper in a run on several hosts, authenticated by the run's secret."""

from __future__ import annotations

import contextlib
from functools import partial

from holdfast.errors import KeeperError
from holdfast.keeper.connections import CONTROL, PEERS, AdmissionCounters
from holdfast.parity.exchange.windows import PATIENCE_S
from holdfast.transport.channel import ChannelServer, Welcome
from holdfast.transport.server import PeerServer
from holdfast.transport.server_connection import Limits

LIMITS = Limits(progress_s=4 * PATIENCE_S, idle_s=4 * PATIENCE_S)
"""Timeouts of peers: a host that makes parity reads and sends nothing while it waits for another
host, which must be the one reported.
"""


class Network:
    """The listeners of one host in one incarnation. Created and used on the keeper's loop."""

    def __init__(
        self, secret: bytes, name: str, address: str, doors: AdmissionCounters | None = None
    ) -> None:
        self.secret, self.name, self.address = secret, name, address
        self.port = self.control_port = 0
        self._admission = doors = doors or AdmissionCounters(name)
        self.peers = PeerServer(
            secret,
            name=name,
            incarnation=0,
            limits=LIMITS,
            on_refused=partial(doors.refused, PEERS),
        )
        self.control: ChannelServer | None = None

    async def listen(self, port: int = 0) -> None:
        """Listen for peers, on another port if this one is taken. Raises KeeperError on failure."""
        self.port = await self._listen(self.peers, port)

    async def listen_for_followers(self, welcome: Welcome, port: int = 0) -> None:
        """Listen for the keepers of other hosts. Raises KeeperError on failure."""
        self.control = ChannelServer(
            self.secret,
            name=self.name,
            incarnation=0,
            welcome=welcome,
            on_refused=partial(self._admission.refused, CONTROL),
        )
        self.control_port = await self._listen(self.control, port, must_be=True)

    async def _listen(
        self, server: PeerServer | ChannelServer, port: int, *, must_be: bool = False
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
        """Accept requests of this incarnation only, from now on."""
        self.peers.begin(incarnation)
        if self.control is not None:
            self.control.incarnation = incarnation

    async def close(self) -> None:
        """Stop listening, and break open connections."""
        if self.control is not None:
            await self.control.close()
        await self.peers.close()
