"""Runs of real processes whose root is a bucket on SeaweedFS: saved, killed, resumed, pruned."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.storage.bucket import RATE_VARIABLE
from support.servers.google_shim import make_key
from support.servers.object_servers import (
    BUCKET,
    SECRET_KEY,
    ObjectServer,
    object_store,
    use,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import os, signal, sys, torch, holdfast
root, steps, die_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
state = {"model": model, "optimizer": optimizer}
policies = {"storage": holdfast.Every(steps=2), "keep": holdfast.Keep(last=2)}
policies["cache"] = sys.argv[4] if len(sys.argv) > 4 else None
with holdfast.Checkpointer(root, state, **policies) as ckpt:
    restored = ckpt.restore()
    print("restored", restored and (restored.step, restored.source), flush=True)
    for step in range(restored.step + 1 if restored else 0, steps):
        optimizer.zero_grad()
        (model(torch.full((1, 64), step / 7)) ** 2).sum().backward()
        optimizer.step()
        handle = ckpt.step(step)
        if step == die_at:
            if len(sys.argv) > 5:  # what must be true before it dies
                getattr(handle, sys.argv[5])(60)
            os.kill(os.getpid(), signal.SIGKILL)
print("weights", model.weight.double().sum().item().hex())
"""

FORK = """
import multiprocessing, sys, torch, holdfast, obstore
from obstore.store import S3Store
import os
def work(root):  # as a data loader's worker: another client, and this one, in a forked child
    store = S3Store("holdfast-tests", endpoint=os.environ["AWS_ENDPOINT_URL"], region="us-east-1",
                    client_options={"allow_http": True}, virtual_hosted_style_request=False)
    data = bytes(obstore.get(store, root.split("/", 3)[3] + "/holdfast.json").bytes())
    with holdfast.open(root) as found:
        print("forked", len(data) > 0, found.step, flush=True)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
print(holdfast.load(sys.argv[1], {"model": model}))
child = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],))
child.start(); child.join(60)
print("exit", child.exitcode)
"""


@pytest.fixture
def environment(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, str]:
    """What processes are given; the parameter is a server's fixture."""
    use(request.getfixturevalue(getattr(request, "param", "seaweedfs_server")), monkeypatch)
    spool = tmp_path / "tmp"
    spool.mkdir()
    monkeypatch.setenv("TMPDIR", str(spool))
    monkeypatch.setenv("HOLDFAST_KEEPER_IDLE_S", "30")
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def run(command: list[str], environment: Mapping[str, str], code: int | None = 0) -> str:
    """Runs a process; returns all that it printed."""
    found = subprocess.run(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    said = found.stdout.decode()
    assert code is None or found.returncode == code, said
    return said


def train(
    root: str, environment: Mapping[str, str], steps: int, die_at: int = -1, *more: str
) -> str:
    code = -signal.SIGKILL if die_at >= 0 else 0
    words = [sys.executable, "-c", TRAIN, root, str(steps), str(die_at), *more]
    return run(words, environment, code)


def holdfast(environment: Mapping[str, str], *words: str, code: int | None = 0) -> str:
    return run([sys.executable, "-m", "holdfast.cli", *words], environment, code)


def keepers(arena: Path) -> list[int]:
    """Returns the processes whose environment names this test's arena, but this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if str(arena).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


CLOUDS = ["seaweedfs_server", "google_server", "azurite_server"]
in_each_cloud = pytest.mark.parametrize("environment", CLOUDS, indirect=True)


@in_each_cloud
def test_a_run_in_a_bucket_is_killed_and_goes_on_bit_for_bit_and_is_pruned(
    environment: dict[str, str], arena_dir: Path
) -> None:
    name = f"runs/{uuid.uuid4().hex}"
    root = object_store(name).url
    whole = f"{root}-whole"
    expected = train(whole, environment, 12).split()[-1]
    train(root, environment, 12, die_at=5)
    for keeper in keepers(arena_dir):  # the host is lost, with all that was in memory
        os.kill(keeper, signal.SIGKILL)
    for slot in arena_dir.iterdir():
        subprocess.run(["rm", "-rf", str(slot)], check=True)
    assert "'storage')" in train(root, environment, 9, die_at=8)
    assert "'memory')" in (said := train(root, environment, 12))  # the keeper lived on
    assert said.split()[-1] == expected
    store = object_store(name)
    found = catalogue(store)
    assert [one.step for one in found.lineage[-1:]] == [11] and not found.broken
    listed = json.loads(holdfast(environment, "ls", root, "--json"))
    assert listed["checkpoints"][-1]["step"] == 11
    holdfast(environment, "verify", "--deep", root)
    sink = store.create("steps/1-0-broken/live-00000", 30 << 20)
    sink.write(0, memoryview(bytes(9 << 20)))  # of an upload that nobody ends
    assert "broken" in holdfast(environment, "prune", root, "--dry-run")
    said = holdfast(environment, "prune", root, "--last", "1", "--abandoned", "--yes", "--json")
    # A request of the keeper that was killed may still land: what no checkpoint names stays.
    assert json.loads(said)["waits_s"] > 0
    assert len(store.bucket.uploads(name)) == 1 and "1-0-broken" in store.list("steps")
    assert len(store.list("manifests")) == 1
    holdfast(environment, "pin", root, "11")
    holdfast(environment, "report", root)
    said = holdfast(environment, "doctor", "--quick", root)
    assert any(f"is a bucket of {name}" in said for name in ("SeaweedFS", "Azurite", "GoogleShim"))
    assert "11" in holdfast(environment, "completion", "--words", "show", root, "--step", "")


def wrong_credentials(scheme: str, folder: Path) -> tuple[dict[str, str], str]:
    """Returns credentials that a server refuses, with a secret in each, and what it says."""
    if scheme == "gs":
        wrong = make_key(folder, 1)
        said = json.loads(wrong.read_text())
        said["token_uri"] = os.environ["HOLDFAST_GS_ENDPOINT"] + "/token"
        wrong.write_text(json.dumps(said))
        return {"GOOGLE_APPLICATION_CREDENTIALS": str(wrong)}, "invalid_grant"
    if scheme == "az":
        key = base64.b64encode(b"canary-ANOTHER-KEY").decode()
        return {"AZURE_STORAGE_KEY": key}, "AuthorizationFailure"
    wrong_key = {"AWS_ACCESS_KEY_ID": "another", "AWS_SESSION_TOKEN": f"t{SECRET_KEY}"}
    return wrong_key, "InvalidAccessKeyId"


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Returns what nothing may show: keys, each line of them, and the beginning of every token."""
    found = {SECRET_KEY, SECRET_KEY.replace("/", ""), "ya29.canary", "canary-ANOTHER"}
    found |= {one for name in ("AZURE_STORAGE_KEY",) if (one := environment.get(name))}
    if file := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        lines = json.loads(Path(file).read_text())["private_key"].splitlines()
        found |= {line for line in lines if not line.startswith("-----")}
    return found


@in_each_cloud
def test_no_secret_is_in_anything_that_a_run_leaves(
    environment: dict[str, str],
    arena_dir: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    name = f"runs/{uuid.uuid4().hex}"
    root = object_store(name).url
    scheme = root.partition(":")[0]
    said = [train(root, environment | {"HOLDFAST_LOG": "debug"}, 4, die_at=3)]
    for pid in keepers(arena_dir):
        said.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    said.append(train(root, environment, 6))
    for words in (["ls"], ["show"], ["verify"], ["report"], ["doctor", "--quick"], ["prune"]):
        said.append(holdfast(environment, words[0], root, *words[1:], "--json", code=None))
    changed, refusal = wrong_credentials(scheme, tmp_path_factory.mktemp("wrong"))
    wrong = environment | changed
    said.append(holdfast(wrong, "ls", root, code=5))
    said.append(run([sys.executable, "-c", TRAIN, root, "9", "-1"], wrong, 1))
    inside = root.replace("://", f"://another:{SECRET_KEY.replace('/', '')}@")
    said.append(holdfast(environment, "ls", inside, code=2))
    store = object_store(name)
    said += [store.bucket.get(key).body.decode(errors="replace") for key in store.bucket.keys(name)]
    for above in (tmp_path, arena_dir):
        for file in above.rglob("*"):
            if file.is_file() and "seaweedfs" not in str(file):
                said.append(file.read_bytes().decode(errors="replace"))
    assert len(said) > 20 and refusal in "".join(said)
    for secret in secrets_of(environment) | secrets_of(wrong):
        assert not any(secret in one for one in said)


def test_a_trainer_that_restored_from_a_bucket_forks_workers_that_use_buckets(
    environment: dict[str, str],
) -> None:
    pytest.importorskip("obstore", reason="no obstore: pip install obstore")
    root = f"s3://{BUCKET}/runs/{uuid.uuid4().hex}"
    train(root, environment, 4)
    said = run([sys.executable, "-c", FORK, root], environment)
    assert "forked True 3" in said and "exit 0" in said, said


def test_a_server_that_is_killed_and_comes_back_loses_no_checkpoint_and_no_training(
    seaweedfs_server: ObjectServer, environment: dict[str, str]
) -> None:
    name = f"runs/{uuid.uuid4().hex}"
    root = f"s3://{BUCKET}/{name}"
    slow = environment | {RATE_VARIABLE: "200000"}
    running = subprocess.Popen(
        [sys.executable, "-c", TRAIN, root, "20", "-1"], env=slow, stdout=subprocess.PIPE
    )
    until_s = time.monotonic() + 60
    while not object_store(name).list("manifests") and time.monotonic() < until_s:
        time.sleep(0.1)
    seaweedfs_server.kill()
    time.sleep(1)
    seaweedfs_server.start()
    said = running.communicate(timeout=120)[0].decode()
    assert running.returncode == 0, said
    found = catalogue(object_store(name))
    assert [one.step for one in found.lineage[-1:]] == [19] and not found.broken
    holdfast(environment, "verify", "--deep", root)


def test_a_run_with_a_cache_before_its_bucket_goes_on_bit_for_bit_from_either(
    environment: dict[str, str], arena_dir: Path, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    plain = train(f"s3://{BUCKET}/{uuid.uuid4().hex}", environment, 12)
    for lost, awaited in (("nothing", "wait_cached"), ("cache", "wait_durable")):
        root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        train(root, environment, 12, 7, cache, awaited)
        for pid in keepers(arena_dir):
            os.kill(pid, signal.SIGKILL)
        for entry in arena_dir.iterdir():
            shutil.rmtree(entry)
        if lost == "cache":
            shutil.rmtree(cache)
        said = train(root, environment, 12, -1, cache)
        assert "restored (" in said, said
        assert said.splitlines()[-1] == plain.splitlines()[-1]
        rows = json.loads(holdfast(environment, "ls", root, "--cache", cache, "--json"))
        assert {row["state"] for row in rows["checkpoints"]} == {"newest", "kept"}
        holdfast(environment, "verify", "--deep", root)
