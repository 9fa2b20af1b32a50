"""Two jobs, one folder."""

import errno
import os

import pytest
from training_cases import exit_code, hear, hold_lock, make_config, make_values, process, train

from mgk.training import RunLockedError, build_fabric, fit
from mgk.training.lock import LOCK, RunLock


def test_the_second_one_is_told_who_is_first(corpus, tmp_path):
    with process(train, tmp_path, corpus.folder, make_values(), "step") as (child, pipe):
        assert hear(pipe) == "here"
        before = sorted(path for path in tmp_path.rglob("*"))
        expected = f"must have one writer, got a second: process {child.pid} is at work there"
        with pytest.raises(RunLockedError, match=expected):
            fit(make_config(), tmp_path, corpus, build_fabric(device="cpu"))
        # Nothing was touched.
        assert sorted(path for path in tmp_path.rglob("*")) == before
        child.kill()
        assert exit_code(child) == -9
    # The system has let go of it.
    config = make_config(training={"steps": 4})
    assert fit(config, tmp_path, corpus, build_fabric(device="cpu"))["steps"] == 4


def test_it_is_free_after_a_kill_and_after_the_end(tmp_path):
    for _ in range(2):
        with process(hold_lock, tmp_path) as (child, pipe):
            owner = hear(pipe)
            with pytest.raises(RunLockedError, match=f"process {owner} is"), RunLock(tmp_path):
                pass
            child.kill()
            exit_code(child)
        for _ in range(2):
            with RunLock(tmp_path):
                assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
                with pytest.raises(RunLockedError, match=f"process {os.getpid()} is"), RunLock(tmp_path):
                    pass


def test_the_owner_before_leaves_no_digit_behind(tmp_path):
    (tmp_path / LOCK).write_text("123456789123456789\n")
    with RunLock(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_lock_that_says_nothing(tmp_path):
    with RunLock(tmp_path):
        (tmp_path / LOCK).write_bytes(b"\xff\xfe")
        with pytest.raises(RunLockedError, match=r"process .* is at work"), RunLock(tmp_path):
            pass
        (tmp_path / LOCK).write_bytes(b"")
        with pytest.raises(RunLockedError, match="process unknown is at work"), RunLock(tmp_path):
            pass


def test_a_file_system_without_locks_is_no_second_writer(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("mgk.training.lock.fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked, so nobody watches over two writers"), RunLock(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_full_disk_is_no_second_writer(tmp_path, monkeypatch):
    """Its number cannot be written, but the lock is taken, and let go of in the end."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mgk.training.lock.os.write", refuse)
        with RunLock(tmp_path), pytest.raises(RunLockedError, match="process unknown is at work"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_an_error_lets_go_of_it(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass
