"""A bucket that can be no root gets one error: what, where, what to do; and stays as it was."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.catalogue import LOCK, catalogue
from holdfast.cli import main
from holdfast.errors import HoldfastError, RootBusy, StorageError, UsageError
from holdfast.maintenance.repairs import plan_repair
from holdfast.restore.reading.verify import verify
from holdfast.storage.http_client import Answer, Connections
from support.checkpoints.keeper_roots import paths_in, save_steps
from support.servers.bucket_model import World, model_store
from support.servers.object_servers import ObjectServer, object_store, use

ROOT = "s3://bucket/runs/gpt"


def _said(status: int, code: str, **headers: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"content-length": str(len(body)), **named}, body)


ANSWERS = {
    "no such bucket": (_said(404, "NoSuchBucket"), "Make the bucket"),
    "no rights": (_said(403, "AccessDenied"), "the right to do that on this bucket"),
    "another region": (
        _said(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"),
        "set AWS_REGION=eu-west-1",
    ),
    "a token that has ended": (_said(400, "ExpiredToken"), "Renew the credentials"),
    "another clock": (_said(403, "RequestTimeTooSkewed"), "Set this machine's clock"),
}
DOORS: dict[str, Callable[[str], object]] = {
    "open": holdfast.open,
    "load": lambda root: holdfast.load(root, {"w": torch.zeros(4)}),
    "save": lambda root: holdfast.save(root, {"w": torch.zeros(4)}, step=1),
    "Checkpointer": lambda root: holdfast.Checkpointer(root, {"w": torch.zeros(4)}),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What the server answers to everything."""
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "canary"), ("REGION", "r")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    answers = list[Answer]()
    monkeypatch.setattr(Connections, "send", lambda *_, **__: answers[0])
    return answers


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", ANSWERS)
def test_a_bucket_that_refuses_is_one_error_that_says_what_to_do(
    what: str, door: str, said: list[Answer], arena_dir: Path
) -> None:
    answer, advice = ANSWERS[what]
    said.append(answer)
    with pytest.raises(HoldfastError) as raised:
        DOORS[door](ROOT)
    text = str(raised.value)
    assert advice in text and "runs/gpt" in text and "canary" not in text
    assert not (isinstance(raised.value, StorageError) and raised.value.retryable)
    assert not list(arena_dir.iterdir()), "no keeper was started"


@pytest.mark.parametrize("what", ANSWERS)
def test_a_command_says_it_too(
    what: str, said: list[Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    answer, advice = ANSWERS[what]
    said.append(answer)
    assert main(["ls", ROOT]) not in (0, None)
    shown = capsys.readouterr()
    assert advice in " ".join((shown.out + shown.err).split()) and "Traceback" not in shown.err


def test_of_a_bucket_of_which_a_rule_deleted_half_the_rest_is_restored_and_all_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=1.0)
    save_steps(store, (10, 20, 30))
    images = sorted(key for key in world.objects if "/steps/" in key)
    gone = [key for key in images if "/1-10-" in key or "/1-30-" in key][::2]
    for key in gone:
        del world.objects[key]
    before = dict(world.objects)
    found = {m.step: verify(store, m, deep=True).faults for m in catalogue(store).manifests}
    assert not found[20] and found[10] and found[30]
    plan = plan_repair(store, [], None)
    assert {f"root/{one.path}" for one in plan.files} == set(gone)
    assert all(one.lost and one.faults[0] == "it is missing" for one in plan.files)
    assert {key: data for key, data in world.objects.items() if "/readers/" not in key} == before


@pytest.mark.parametrize("door", DOORS)
def test_an_address_with_credentials_in_it_is_refused_without_showing_them(
    door: str, said: list[Answer], arena_dir: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        DOORS[door]("s3://AKIAKEY:canary@bucket/runs/gpt")
    text = str(raised.value)
    assert "credentials" in text and "canary" not in text and "AKIAKEY" not in text
    assert not list(arena_dir.iterdir()), "no keeper was started"


@pytest.mark.parametrize("door", ["save", "Checkpointer"])
def test_a_root_that_another_run_writes_to_is_one_error_and_stays_as_it_was(
    door: str, moto_server: ObjectServer, monkeypatch: pytest.MonkeyPatch, arena_dir: Path
) -> None:
    use(moto_server, monkeypatch)
    store = object_store(f"busy/{uuid.uuid4().hex}")
    save_steps(store, (10, 20))
    before = {path: store.read(path) for path in paths_in(store)}
    with store.lock(LOCK, "run blue on host-9"):
        with pytest.raises(RootBusy) as raised:
            DOORS[door](store.url)
        text = str(raised.value)
        assert "run blue on host-9" in text and store.url in text
        assert {path: store.read(path) for path in paths_in(store)} == before
