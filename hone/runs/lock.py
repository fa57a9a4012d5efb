"""One writer per run folder: a lock file beside the folder, which names its owner and is renewed while it writes.

    with held(Path("runs/mine")):       # UserError, exit code 2, if another process has it
        ...
    check(Path("runs/mine"))            # before a write: LockLost if another process has the run

`runs/.mine.lock` stands beside the folder, which may be renamed. On one machine an owner is judged at once, by its
process id, when that process started, and the boot of the machine; one that is suspended is alive. Where the owner is
on another machine (or in another container) the file is a lease: it counts as abandoned when it has not changed for
`STALE` seconds by the clock of the process that waits for it. Clocks of two machines are never compared.

The processes that a launcher starts share its lock: they find its token in their environment and only check it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hone.base.owner import Owner, as_bytes, myself, parse
from hone.base.settings import UserError

#: Seconds from one renewal to the next.
BEAT = 10.0
#: Seconds without a renewal after which the lock of another machine is taken over.
STALE = 60.0
#: Seconds after which the winner of a takeover is read back: two machines may have taken it over at the same moment.
SETTLE = 1.0

#: Names the lock of the launcher to its workers: TOKEN@PATH.
SHARED = "HONE_RUN_LOCK"


class Held(UserError):
    """Another process is writing this run folder."""


class LockLost(UserError):
    """Another process has taken over the run folder, so this one must no longer write there."""


class Lock:
    """A lock that this process holds, or shares with the launcher that holds it."""

    def __init__(
        self, path: Path, owner: Owner, shared: bool = False, before: Owner | None = None, made: Sequence[Path] = ()
    ) -> None:
        self.path, self.owner, self.shared = path, owner, shared
        self._made = made  # folders above the lock that were not there before, the innermost first
        self.before = before  # the previous owner, if it did not release the lock
        self._lost: str | None = None
        self._seen = _clock()  # when it was last seen to be ours
        self._end = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="hone-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Called before a write. Raises LockLost, or OSError if the lock file cannot be read."""
        if self._lost is None and _clock() - self._seen > STALE / 2:  # suspended, or the storage does not respond
            self.renew()
        if self._lost is not None:
            raise LockLost(self._lost)

    def renew(self) -> None:
        """Check that the lock is still ours, and renew it."""
        with self._busy:
            now = _clock()
            try:
                with self.path.open("rb" if self.shared else "r+b") as file:
                    owner = parse(file.read())
                    if owner is not None and owner.token == self.owner.token:
                        if not self.shared:
                            self.owner = replace(self.owner, beat=self.owner.beat + 1)
                            file.seek(0)  # a takeover renames another file into place: this write cannot reach it
                            file.write(as_bytes(self.owner))
                            file.flush()
                            os.fsync(file.fileno())
                        self._seen = now
                        return
            except FileNotFoundError:
                owner = None
            whose = "its lock is gone" if owner is None else f"{owner} has taken it over"
            self._lost = (
                f"{self.path}: this process no longer holds the run folder: {whose}. It was suspended or cut off for "
                "too long; nothing more is written. Continue with --resume when no other process uses the folder"
            )

    def release(self) -> None:
        """Stop renewing, and remove the file if it is still ours."""
        self._end.set()
        self._thread.join()
        if self.shared or self._lost is not None:
            return
        with _guard(self.path.parent):
            owner = _read(self.path)
            if owner is not None and owner.token == self.owner.token:
                self.path.unlink(missing_ok=True)
        _remove(self._made)

    def _beat(self) -> None:
        while not self._end.wait(BEAT) and self._lost is None:
            with contextlib.suppress(OSError):  # brief storage failures; `check` raises if they last
                self.renew()
        if self._lost is not None:
            print(self._lost, file=sys.stderr, flush=True)


_mine: dict[Path, Lock] = {}  # of this process, by lock file


@contextlib.contextmanager
def held(folder: Path, share: bool = False) -> Iterator[Lock]:
    """Hold the lock while a run folder is written. `share`: also with processes that are started meanwhile.

    Raises Held if another process has it; if that is on another machine, this takes some seconds to find out.
    """
    path = place(folder)
    lock = _shared(path) or acquire(path)
    _mine[path] = lock
    if share:
        os.environ[SHARED] = f"{lock.owner.token}@{path}"
    try:
        yield lock
    finally:
        if share:
            os.environ.pop(SHARED, None)
        del _mine[path]
        lock.release()


def check(folder: Path) -> None:
    """Raises LockLost if this process has lost the lock of a run folder, or of a folder above it."""
    for lock in _of(folder):
        lock.check()


def lost(folder: Path) -> bool:
    """Whether this process must no longer write into a run folder."""
    try:
        check(folder)
    except LockLost:
        return True
    return False


def taken_over(folder: Path) -> Owner | None:
    """The previous owner, if it ended without releasing the lock; returned once, to be recorded as an event."""
    for lock in _of(folder):
        before, lock.before = lock.before, None
        if before is not None:
            return before
    return None


def place(folder: Path) -> Path:
    """The lock file of a run folder, the same for every path to the folder."""
    return _beside(folder.resolve())


def owner_of(folder: Path) -> Owner | None:
    """The owner of a run folder's lock, dead or alive; None if it is free."""
    return _read(place(folder))


def _beside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _of(folder: Path) -> list[Lock]:
    if not _mine:
        return []
    real = folder.resolve()
    return [_mine[path] for one in (real, *real.parents) if (path := _beside(one)) in _mine]


# --- taking it ------------------------------------------------------------------------------------------------------


def acquire(path: Path, watch: bool = True) -> Lock:
    """Take the lock at `path`. Without `watch`, a lock of another machine counts as held. Raises Held, OSError."""
    mine = myself()
    made = [one for one in path.parents if not one.exists()]
    try:
        return Lock(path, mine, before=_won(path, mine, watch), made=made)
    except BaseException:
        _remove(made)
        raise


def _remove(made: Sequence[Path]) -> None:
    """Remove folders that were created only for the lock, so that a failed start leaves no trace."""
    for one in made:
        with contextlib.suppress(OSError):
            one.rmdir()


def _won(path: Path, mine: Owner, watch: bool) -> Owner | None:
    """Become the owner; returns the previous owner, if it is dead. Raises Held."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another start has ended and removed its folders
            if _created(path, mine):
                return None
            content = _content(path)
            if content is None:  # released just now
                continue
            owner = parse(content)
            if owner is not None and owner.here:
                if not owner.dead:
                    raise Held(_in_use(path, owner))
            elif not watch or _renewed(path, content, owner):
                raise Held(_in_use(path, owner))
            if _replaced(path, owner, mine):
                before = owner or replace(mine, token="", command="?", pid=0, host="an unknown machine")
                print(f"{path}: the lock of {before}, which has ended, is taken over", file=sys.stderr)
                return before


def _created(path: Path, mine: Owner) -> bool:
    """Create the file atomically with its content; False if it exists already."""
    aside = path.with_name(f"{path.name}.{mine.token}")
    aside.write_bytes(as_bytes(mine))
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links on this file system
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(as_bytes(mine))
    finally:
        aside.unlink(missing_ok=True)
    return True


def _renewed(path: Path, content: bytes, owner: Owner | None) -> bool:
    """Watch a lease of another machine: False if it does not change for `STALE` seconds, or is gone."""
    who = owner or "an owner that cannot be read"
    print(f"{path}: held by {who}; watching for {STALE:g} s whether it is renewed", file=sys.stderr, flush=True)
    end = time.monotonic() + STALE
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT / 4))
        now = _content(path)
        if now != content:
            return now is not None
    return False


def _replaced(path: Path, before: Owner | None, mine: Owner) -> bool:
    """Replace an abandoned lock by ours; False if another process was faster."""
    aside = path.with_name(f"{path.name}.{mine.token}")
    with _guard(path.parent):
        there = _read(path)
        if (there and there.token) != (before and before.token) or not path.exists():
            return False
        aside.write_bytes(as_bytes(mine))
        os.replace(aside, path)
    if before is None or not before.here:  # the guard may not reach other machines: of two that replace, the later wins
        time.sleep(SETTLE)
    owner = _read(path)
    return owner is not None and owner.token == mine.token


def _shared(path: Path) -> Lock | None:
    """The lock of the launcher that started this process for this run. Raises LockLost if it no longer holds it."""
    token, _, where = os.environ.get(SHARED, "").partition("@")
    if not token or where != str(path):
        return None
    owner = _read(path)
    if owner is None or owner.token != token:
        raise LockLost(f"{path}: the launcher of this process no longer holds the run folder; start the run again")
    return Lock(path, owner, shared=True)


@contextlib.contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Only one process of this machine at a time replaces or removes a lock; if the storage cannot, see `SETTLE`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network file systems lock no folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _in_use(path: Path, owner: Owner | None) -> str:
    folder = path.with_name(path.name.removeprefix(".").removesuffix(".lock"))
    how = f"stop it with `kill {owner.pid}` on {owner.host}" if owner is not None else f"remove {path}"
    return (
        f"{folder}: {owner or 'another process'} is writing this run folder, and a run has one writer. Wait for it, "
        f"{how}, or give this run another name (name=...)"
    )


def _clock() -> float:
    """A clock in seconds that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read(path: Path) -> Owner | None:
    return parse(_content(path) or b"")
