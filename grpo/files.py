"""Files that are there whole or not at all, also after a power failure: written aside, fsynced, renamed.

A rename within a folder is atomic, but it lasts only once the file's bytes and then the folder's entry have reached the
disk: hence the two fsyncs, in this order.

And files and folders that one process at a time writes to, by locks that end with the process that holds them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ASIDE = ".tmp"
"""Ends the name of what is not finished. Whatever bears it may be removed by the process that holds the run's lock."""


def write_atomic(path: str | Path, content: str | bytes, durable: bool = True) -> None:
    """Write `content` so that `path` holds either what it held before or all of it.

    Args:
        durable: wait for the disk. Without, a killed process loses nothing, a power failure may (`sync` it later).

    Raises:
        OSError: with `path` unchanged; what was written aside is removed then, as it may be what filled the disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}{ASIDE}")
    try:
        with open(aside, "wb") as file:
            # A lone surrogate becomes its escape: valid in JSON, readable elsewhere, and no error that costs the file.
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def commit_folder(aside: Path, target: Path) -> None:
    """Put the finished folder `aside` in the place of `target`; both lie in the same folder.

    A kill in between may leave `target` missing, with its old content under a name that ends in `ASIDE`.
    """
    for path in sorted(aside.rglob("*")):
        sync(path)
    sync(aside)
    if target.exists():
        remove_folder(target)
    aside.rename(target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first: a kill half-way leaves nothing that looks like the folder it was."""
    doomed = folder.with_name(f"{folder.name}.old{ASIDE}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """fsync a folder's entries; file systems that cannot do that keep their own order."""
    try:
        sync(folder)
    except OSError:
        pass


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces: weights may be larger than memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def lock(descriptor: int) -> bool:
    """Lock an open file or folder for as long as it is open here; False where another process has it.

    True on a file system without locks: there nobody can be kept out.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Within, no other process gets here with `path`, which need not exist: `.NAME.lock` beside it is locked.

    That file is removed at the end. A killed process leaves it behind, and unlocked.

    Raises:
        BlockingIOError: another process is at it.
        OSError: there can be no such file.
    """
    beside = path.with_name(f".{path.name}.lock")
    while True:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not lock(descriptor):
                raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing to it", str(path))
            if _is_at(beside, descriptor):
                try:
                    yield
                finally:
                    beside.unlink(missing_ok=True)
                return
            # The one before removed it between our opening and locking it: the next file of that name is another.
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Is the open file still the one that `path` names?"""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
