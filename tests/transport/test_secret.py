"""The run's secret comes from a file that nobody else can read, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.transport.channel import read_secret, secret_from_environment


def written(path: Path, data: bytes = b"0123456789abcdef\n", mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read_without_the_line_break_at_its_end(
    tmp_path: Path, mode: int
) -> None:
    assert read_secret(written(tmp_path / "secret", mode=mode)) == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o700, 0o660, 0o200])
def test_a_file_that_others_might_read_is_refused(tmp_path: Path, mode: int) -> None:
    if mode == 0o200 and os.getuid():
        pytest.skip("only root can open it at all")
    with pytest.raises(UsageError, match="must be readable by its owner alone"):
        read_secret(written(tmp_path / "secret", mode=mode))


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "secret")
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        read_secret(path)


def test_a_link_is_followed_to_a_file_that_is_looked_at(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(written(tmp_path / "secret"))
    assert read_secret(link) == b"0123456789abcdef"
    written(tmp_path / "secret", mode=0o644)
    with pytest.raises(UsageError, match="owner alone"):
        read_secret(link)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="is not a file"):
            read_secret(path)
    with pytest.raises(UsageError, match="cannot read the run's secret"):
        read_secret(tmp_path / "nothing")


def test_a_large_file_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="larger than a secret"):
        read_secret(written(tmp_path / "secret", b"x" * 5000))


def test_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret_from_environment() is None
    monkeypatch.setenv("HOLDFAST_SECRET_FILE", str(written(tmp_path / "secret")))
    assert secret_from_environment() == b"0123456789abcdef"
