"""Start servers of object stores for benchmarks: SeaweedFS and Azurite, where installed."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

BUCKET = "bench"
_KEY = base64.b64encode(b"benchmarks").decode()
_ACCOUNT = "benchmarks"
#: Where `make azurite` puts it.
_AZURITE = Path(__file__).parents[2] / ".azurite/node_modules/.bin/azurite-blob"


def _ports(count: int) -> list[int]:
    """Ports below 22,700: SeaweedFS adds 10,000 to each."""
    found, number = list[int](), os.getpid() % 2000
    while len(found) < count:
        number += 1
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", 20_500 + number))
            found.append(20_500 + number)
    return found


def _seaweedfs(folder: Path) -> tuple[list[str], dict[str, str]] | None:
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        return None
    s3, master, volume, filer = _ports(4)
    command = [
        str(weed),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        "-volume.max=80",
        "-master.volumeSizeLimitMB=1024",
        f"-filer.localSocket={folder}/filer.sock",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
    ]
    return command, {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
    }


def _azurite(folder: Path) -> tuple[list[str], dict[str, str]] | None:
    program = str(_AZURITE) if _AZURITE.exists() else shutil.which("azurite-blob")
    if program is None:
        return None
    (port,) = _ports(1)
    options = ("--inMemoryPersistence", "--disableTelemetry", "--silent", "--blobPort", str(port))
    return [program, *options], {
        "AZURE_STORAGE_ACCOUNT": _ACCOUNT,
        "AZURE_STORAGE_KEY": _KEY,
        "AZURE_STORAGE_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}",
    }


_SERVERS = {"SeaweedFS": _seaweedfs, "Azurite": _azurite}


@contextmanager
def serving_store(name: str) -> Iterator[Mapping[str, str] | None]:
    """Starts a server with a bucket; yields what a client needs, None where it is not installed."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        found = _SERVERS[name](Path(folder))
        if found is None:
            yield None
            return
        command, environment = found
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **environment},
        )
        try:
            os.environ.update(environment)
            _make_bucket("az" if name == "Azurite" else "s3", next(iter(environment.values())))
            yield environment
        finally:
            process.kill()
            process.wait()


def _make_bucket(scheme: str, address: str) -> None:
    from holdfast.storage.providers import open_bucket
    from holdfast.storage.wrap import Patience

    until_s = time.monotonic() + 60
    while address.startswith("http") and time.monotonic() < until_s:
        try:
            urllib.request.urlopen(address, timeout=1).close()
        except urllib.error.HTTPError as error:
            if error.code < 500:
                break
        except OSError:
            time.sleep(0.1)
    bucket = open_bucket(BUCKET, f"{scheme}://{BUCKET}", patience=Patience(60.0), answer_s=60.0)
    outcome = bucket.send("PUT", "", query={"restype": "container"} if scheme == "az" else {})
    assert outcome.is_done or outcome.status == 409, outcome
