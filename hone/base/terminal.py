"""The command line's environment: closed streams, characters that cannot be shown, a full disk, signals.

    stop_at_once_on_ctrl_c_in_imports()  # before anything slow is imported
    prepare_streams()                    # before anything is printed
    stop_at_once_on_sigterm()            # `hone train`, before anything slow is imported
    disk_problem(error)                  # a message for errors of the disk, else None

Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
from types import FrameType
from typing import Any

_leave = os._exit  # saved here: it is replaced while user functions run (`hone.rewards.functions.no_exit`)

#: Exit code after SIGTERM (EX_TEMPFAIL of sysexits.h: try again), as in `hone.base.stop`.
EX_TEMPFAIL = 75

#: Errors that do not occur in another folder.
OF_THE_FOLDER = (errno.EROFS, errno.EACCES, errno.EPERM)
#: How a verb is given another folder to write to.
ELSEWHERE = {
    "train": "give another folder with runs=PATH",
    "init": "give the path of another folder as NAME",
    "report": "give another folder with --out",
    "eval": "give another folder with --out",
    "export": "give another folder as OUT",
}

#: File errors caused by the environment, and their remedies. A missing file is not among them: it may be our own bug.
DISK = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("a file would be larger than is allowed", "raise the limit (ulimit -f, or the file system's)"),
    errno.EROFS: ("the file system is read-only", "mount it writable"),
    errno.EACCES: ("there is no permission", "change the permissions"),
    errno.EPERM: ("there is no permission", "change the permissions"),
    errno.ENOTDIR: ("a file is where a folder is needed", "move the file away"),
    errno.EISDIR: ("a folder is where a file is needed", "move the folder away"),
    errno.EMFILE: ("too many files are open in this process", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("too many files are open on this machine", "close some programs"),
    errno.EIO: ("the disk could not be read or written", "look at the disk"),
    errno.ESTALE: ("the network file system has lost a file", "mount it again"),
}


# --- the disk ---------------------------------------------------------------------------------------------------------


def disk_problem(error: BaseException, verb: str = "train") -> str | None:
    """A message if `error` or one of its causes is in `DISK`, else None. `verb`: of the command line."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        number = _errno(cause)
        if number in DISK and not isinstance(cause, ConnectionError):
            what, remedy = DISK[number]
            if number in OF_THE_FOLDER and verb in ELSEWHERE:
                remedy += f", or {ELSEWHERE[verb]}"
            after = "; with --resume a run continues from its last checkpoint" if verb == "train" else ""
            return f"{what}: {error}. What to do: {remedy}{after}"
        cause = cause.__cause__ or cause.__context__
    return None


def _errno(error: BaseException) -> int:
    """errno of an OSError, or of an error of a Rust library (safetensors, tokenizers), from its text; else 0."""
    if isinstance(error, OSError):
        return error.errno or 0
    if type(error).__name__ == "SafetensorError" or type(error) is Exception:
        text = re.search(r"\(os error (\d+)\)", str(error))
        return int(text[1]) if text else 0
    return 0


# --- streams ----------------------------------------------------------------------------------------------------------


class Lossy(io.TextIOWrapper):
    """A text stream that drops output once it has no reader: a run survives the loss of its terminal."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            redirect(self.fileno())
            super().flush()


def prepare_streams(lossy_output: bool) -> None:
    """Make the standard streams writable: closed ones lead to /dev/null, and characters that a terminal cannot show are
    escaped.

    `lossy_output`: drop standard output when its reader has gone, instead of failing; standard error always does so.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:  # closed: the next opened file would get its number, and with it all output
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            if name == "stderr" or lossy_output:
                settings: dict[str, Any] = {
                    "line_buffering": stream.line_buffering,
                    "write_through": stream.write_through,
                }
                encoding = stream.encoding
                other = Lossy(stream.detach(), encoding, errors="backslashreplace", **settings)
                setattr(sys, name, other)
                setattr(sys, f"__{name}__", other)
            else:
                stream.reconfigure(errors="backslashreplace")


def redirect(number: int) -> None:
    """Discard everything written to this stream from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


# --- signals ----------------------------------------------------------------------------------------------------------


def stop_at_once_on_sigterm() -> None:
    """Until a loop handles it (`hone.base.stop`), SIGTERM ends the process with exit code 75.

    Nothing is lost: a run may be cut at any moment. Child processes, such as servers, end too. The process exits here
    instead of raising an exception, which imports and callbacks of libraries would swallow.
    """

    def leave(number: int, frame: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.write(
                2, b"SIGTERM: stopped before training; --resume continues from the last checkpoint, if there is one\n"
            )
        end_children()
        _leave(EX_TEMPFAIL)

    signal.signal(signal.SIGTERM, leave)


def stop_at_once_on_ctrl_c_in_imports() -> None:
    """Ctrl-C while a module is being imported ends the process with exit code 130 and one line; else it raises
    KeyboardInterrupt, as before.

    An exception in the middle of a library's import would be printed as a traceback, or swallowed. Where SIGINT is
    ignored, as in a job in the background, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def leave(number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None:
            if at.f_code.co_filename == "<frozen importlib._bootstrap>":
                with contextlib.suppress(OSError, ValueError):
                    os.write(2, b"Ctrl-C: stopped while hone was being loaded\n")
                end_children()
                _leave(128 + number)
            at = at.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, leave)


def leave_at_once_on_ctrl_c() -> None:
    """After a Ctrl-C: another one ends the process without a traceback, whatever it is still closing."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_children() -> None:
    """Send SIGTERM to all descendants of this process."""
    if "subprocess" not in sys.modules and "multiprocessing" not in sys.modules:
        return
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.terminate()
