"""A long way between keepers: all bytes arrive later, some much later, as after a lost packet."""

from __future__ import annotations

import asyncio
import random
import time

#: How long TCP waits at least before it sends again what was lost.
AGAIN_S = 0.2


class Relay:
    """Passes connections on, with a delay each way; so many of the pieces are sent twice."""

    def __init__(self, delay_s: float, loss: float) -> None:
        self.delay_s, self.loss = delay_s, loss
        self.port = 0
        self._random = random.Random(1)
        self._to = "", 0
        self._server: asyncio.Server | None = None

    async def lead_to(self, address: str, port: int) -> None:
        """Lead there from now on."""
        before, self._to = self._to, (address, port)
        if before[0] != address:  # another host: the way begins at its address
            self.end()
            self._server = await asyncio.start_server(self._pass_on, address, 0, backlog=4096)
            self.port = self._server.sockets[0].getsockname()[1]

    def end(self) -> None:
        """Take no new connections."""
        if self._server is not None:
            self._server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        ways = [self._one_way(reader, there[1]), self._one_way(there[0], writer)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.transport.abort()
            there[1].transport.abort()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send(pieces, writer))
        try:
            while data := await reader.read(1 << 16):
                late_s = AGAIN_S + 2 * self.delay_s if self._random.random() < self.loss else 0.0
                pieces.put_nowait((time.monotonic() + self.delay_s + late_s, data))
        except OSError:
            return
        finally:
            sender.cancel()

    async def _send(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            writer.write(data)
