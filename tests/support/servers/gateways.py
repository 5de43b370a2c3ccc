"""Starts servers that speak S3 in front of something else, from an environment of their own.

They are tried, not relied on: what each keeps of what a root needs stands in
docs/operations/object-stores.md.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.servers.object_servers import ACCESS_KEY, SECRET_KEY, ObjectServer, free_ports

#: Where `make gateways` puts them.
PLACE = Path(os.environ.get("HOLDFAST_GATEWAYS", Path(__file__).parents[3] / ".gateways"))

_PROXY = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
workers = 0
user = {user}
[pipeline:main]
pipeline = catch_errors cache listing_formats s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:slo]
use = egg:swift#slo
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
min_segment_size = 1
[filter:tempauth]
use = egg:swift#tempauth
user_holdfast_{access} = {secret} .admin
"""
_BEHIND = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/disks
mount_check = false
workers = 0
user = {user}
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""


def tool(name: str) -> str:
    """Returns the path of a program; skips the test where it is not there."""
    found = PLACE / "bin" / name
    if not found.exists():
        pytest.skip(f"no {name}, one of the gateways that s3:// is tried on: make gateways")
    return str(found)


def rclone(folder: Path) -> ObjectServer:
    """``rclone serve s3`` in front of a directory."""
    (port,) = free_ports(1)
    key = f"{ACCESS_KEY},{SECRET_KEY}"
    (folder / "data").mkdir()
    command = [tool("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", key]
    return ObjectServer("rclone serve s3", [*command, str(folder / "data")], port, folder)


def juicefs(folder: Path) -> ObjectServer:
    """JuiceFS' gateway in front of a directory, with its metadata in SQLite."""
    (port,) = free_ports(1)
    meta = f"sqlite3://{folder}/meta.db"
    format_ = [tool("juicefs"), "format", "--storage", "file", "--bucket", f"{folder}/data/", meta]
    subprocess.run([*format_, "tests"], check=True, capture_output=True)

    class Gateway(ObjectServer):
        def _environment(self) -> dict[str, str]:
            roots = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}
            return super()._environment() | roots

    options = ["--no-usage-report", "--multi-buckets", "--no-banner", "--cache-size", "0"]
    command = [tool("juicefs"), "gateway", *options, meta, f"127.0.0.1:{port}"]
    return Gateway("JuiceFS gateway", command, port, folder)


def swift(folder: Path) -> ObjectServer:
    """Swift with s3api and tempauth: a proxy, and one server each of three kinds behind it."""
    proxy, *behind = free_ports(4)
    user, kinds = os.environ.get("USER", "root"), ("account", "container", "object")
    (folder / "disks/one").mkdir(parents=True)
    suffix = "[swift-hash]\nswift_hash_path_suffix = tests\nswift_hash_path_prefix = tests\n"
    policy = "[storage-policy:0]\nname = only\ndefault = yes\n"
    (folder / "swift.conf").write_text(suffix + policy)
    builder = tool("swift-ring-builder")
    lines = []
    for kind, port in zip(kinds, behind, strict=True):
        ring = f"{folder}/{kind}.builder"
        for words in (
            ["create", "4", "1", "0"],
            ["add", f"r1z1-127.0.0.1:{port}/one", "1"],
            ["rebalance"],
        ):
            subprocess.run([builder, ring, *words], check=True, capture_output=True)
        text = _BEHIND.format(port=port, folder=folder, kind=kind, user=user)
        (folder / f"{kind}.conf").write_text(text)
        lines.append(f"{tool(f'swift-{kind}-server')} {folder}/{kind}.conf &")
    text = _PROXY.format(port=proxy, folder=folder, user=user, access=ACCESS_KEY, secret=SECRET_KEY)
    (folder / "proxy.conf").write_text(text)
    lines.append(f"{tool('swift-proxy-server')} {folder}/proxy.conf & wait")

    class Swift(ObjectServer):
        def _environment(self) -> dict[str, str]:
            known = {"AWS_ACCESS_KEY_ID": f"holdfast:{ACCESS_KEY}", "SWIFT_DIR": str(folder)}
            return super()._environment() | known

    return Swift("Swift s3api", ["sh", "-c", "\n".join(lines)], proxy, folder)


GATEWAYS: dict[str, Callable[[Path], ObjectServer]] = {
    "rclone": rclone,
    "juicefs": juicefs,
    "swift": swift,
}
