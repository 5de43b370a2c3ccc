"""What all stores share: when an image may be written, finished and let go of."""

from __future__ import annotations

import errno

import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.storage.base import SinkFill, first_gap, os_failure


class TestFilling:
    def setup_method(self) -> None:
        self.releases = 0
        self.filling = SinkFill("image", 10, self.release)

    def release(self) -> None:
        self.releases += 1

    def fill(self) -> None:
        with self.filling.writing(0, 10):
            pass

    def test_a_finished_image_lets_go_once(self) -> None:
        self.fill()
        assert self.releases == 0
        with self.filling.finishing():
            assert self.releases == 0
        assert not self.filling.abort()
        assert self.releases == 1

    def test_an_aborted_image_lets_go_once(self) -> None:
        assert self.filling.abort()
        assert not self.filling.abort()
        assert self.releases == 1

    def test_an_image_aborted_under_two_writes_lets_go_after_both(self) -> None:
        with self.filling.writing(0, 5):
            with self.filling.writing(5, 5):
                assert self.filling.abort()
            assert self.releases == 0
        assert self.releases == 1

    def test_an_image_broken_under_another_write_lets_go_after_it(self) -> None:
        with self.filling.writing(0, 5):
            with pytest.raises(OSError, match="lost"), self.filling.writing(5, 5):
                raise OSError("lost")
            assert self.filling.abort()
            assert self.releases == 0
        assert self.releases == 1

    def test_a_broken_image_can_only_be_aborted(self) -> None:
        with pytest.raises(OSError, match="lost"), self.filling.writing(0, 10):
            raise OSError("lost")
        with pytest.raises(StorageError, match="earlier"), self.filling.writing(0, 10):
            pass
        with pytest.raises(StorageError, match="earlier"), self.filling.finishing():
            pass
        assert self.filling.abort()
        assert self.releases == 1

    def test_an_image_is_not_finished_while_it_is_written(self) -> None:
        with (
            self.filling.writing(0, 10),
            pytest.raises(UsageError, match="while it is written"),
            self.filling.finishing(),
        ):
            pass
        with self.filling.finishing():
            pass

    def test_an_image_is_not_written_or_finished_while_it_is_finished(self) -> None:
        self.fill()
        with self.filling.finishing():
            with pytest.raises(UsageError, match="being finished"):
                self.fill()
            with pytest.raises(UsageError, match="being finished"), self.filling.finishing():
                pass
        assert self.releases == 1

    def test_an_image_aborted_while_it_is_finished_is_not_finished(self) -> None:
        self.fill()
        finishing = self.filling.finishing()
        finishing.__enter__()
        assert self.filling.abort()
        assert self.releases == 0
        with pytest.raises(StorageError, match="aborted"):
            finishing.__exit__(None, None, None)
        assert self.releases == 1
        assert not self.filling.abort()

    def test_an_image_that_failed_to_finish_can_only_be_aborted(self) -> None:
        self.fill()
        with pytest.raises(OSError, match="lost"), self.filling.finishing():
            raise OSError("lost")
        with pytest.raises(StorageError, match="earlier"), self.filling.finishing():
            pass
        assert self.filling.abort()
        assert self.releases == 1


def test_a_refusal_says_what_where_and_why_and_what_to_do() -> None:
    cause = OSError(errno.ENOSPC, "whatever")
    error = os_failure("write", "steps/1/image", "file:///data", cause)
    assert str(error) == (
        "write of steps/1/image in file:///data failed: No space left on device (ENOSPC). "
        "Free some space or keep fewer checkpoints."
    )
    assert error.fields["errno"] == errno.ENOSPC


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EIO, True),
        (errno.EROFS, False),
        (errno.EACCES, False),
    ],
)
def test_only_what_may_pass_by_itself_is_retryable(code: int, retryable: bool) -> None:
    assert os_failure("write", "name", "file:///", OSError(code, "")).retryable is retryable


@pytest.mark.parametrize(
    ("spans", "gap"),
    [
        ([], 0),
        ([(0, 10)], None),
        ([(5, 10), (0, 5)], None),
        ([(0, 8), (2, 4), (4, 10)], None),
        ([(0, 4), (5, 10)], 4),
        ([(1, 10)], 0),
        ([(0, 9)], 9),
        ([(0, 0), (10, 10)], 0),
    ],
)
def test_the_first_byte_never_written_is_found(
    spans: list[tuple[int, int]], gap: int | None
) -> None:
    assert first_gap(spans, 10) == gap


def test_nothing_is_missing_from_an_empty_image() -> None:
    assert first_gap([], 0) is None
