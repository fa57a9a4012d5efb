"""What a verifier can do wrong, for test_workers.py."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

STARTED = os.getpid()
state = {}


def check(what, value=None):
    return globals()[what](value)


def double(value):
    return 2 * value


def modules(_):
    return sorted(sys.modules)


def sleep(_):
    time.sleep(1000)


def spin(_):
    re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter lock for ever


def stubborn(_):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def error(_):
    raise ValueError("this one is faulty")


def leave(_):
    sys.exit(0)


def leave_at_once(_):
    os._exit(3)


def segfault(_):
    import ctypes

    ctypes.string_at(0)


def memory(_):
    return len([b"x" * 2**20 for _ in range(10**6)])


def unpicklable(_):
    return lambda: None


def huge(_):
    return b"x" * (17 * 2**20)


def noise(value):
    print("x" * 10**6)
    print("y" * 10**6, file=sys.stderr)
    os.write(1, b"z" * 10**6)
    return value


def fork_and_hang(_):
    os.fork()
    time.sleep(1000)


def fork_and_return(_):
    os.fork()
    return "twice"


def start_processes(folder):
    """One in the group, one that leaves it, one that leaves it and loses its parent; none is waited for."""
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(99)"
    stay = [sys.executable, "-c", code]
    subprocess.Popen([*stay, f"{folder}/group"])
    subprocess.Popen([*stay, f"{folder}/session"], start_new_session=True)
    if os.fork() == 0:
        subprocess.Popen([*stay, f"{folder}/orphan"], start_new_session=True)
        os._exit(0)
    while len([f for f in Path(folder).iterdir() if f.read_text()]) < 3:
        time.sleep(0.01)


def start_and_return(folder):
    start_processes(folder)
    return "done"


def start_and_hang(folder):
    start_processes(folder)
    time.sleep(1000)


def eat_in_two_processes(_):
    eat = [sys.executable, "-c", "import time; x = b'x' * (60 * 2**20); time.sleep(99)"]
    for process in [subprocess.Popen(eat) for _ in range(2)]:
        process.wait()


def count(_):
    state["calls"] = state.get("calls", 0) + 1
    return state["calls"]


def die_later(_):
    """The answer is right; the process dies in the call after it."""
    import threading

    threading.Timer(0.2, lambda: os._exit(9)).start()
    return "answer"


def nap(seconds):
    time.sleep(seconds)
    return seconds
