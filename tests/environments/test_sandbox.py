"""What code of a model may not do. Each attack prints BREACH if it succeeds."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.environments import sandbox
from hone.environments.sandbox import Limits, missing_protections, run_python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits are those of Linux")
LIMITS = Limits(seconds=3.0, memory_mb=256)
SECRET = Path(__file__).resolve()

#: What only bubblewrap prevents.
FILES = {
    "reads a file of the project": f"open({str(SECRET)!r}).read(); print('BREACH')",
    # the interpreter itself may lie below the home
    "lists the home": f"import os, sys; names = set(os.listdir({str(Path.home())!r})); "
    f"print('BREACH' if names - set({sys.base_prefix!r}.split('/')) else '')",
    "lists the temporary folder": "import os; print('BREACH' if len(os.listdir('/tmp')) > 1 else '')",
    "reads the passwords": "open('/etc/passwd').read(); print('BREACH')",
    "reads the hosts": "open('/etc/hosts').read(); print('BREACH')",
    "writes beside its folder": "open('../breach', 'w').write('x'); print('BREACH')",
    "writes into /var": "open('/var/tmp/hone-breach', 'w').write('x'); print('BREACH')",
    "links to a file outside": f"import os; os.symlink({str(SECRET)!r}, 'x'); open('x').read(); print('BREACH')",
    "imports the project": f"import sys; sys.path.insert(0, {str(SECRET.parents[2])!r}); import hone; print('BREACH')",
    "imports installed packages": "import sys; sys.path += ["
    f"{next((p for p in sys.path if p.endswith('site-packages')), '')!r}]; import numpy; print('BREACH')",
    "fills the disk": "import os\nfor i in range(20):\n open(f'f{i}', 'wb').write(b'0' * 10**7)\nprint('BREACH')",
    "names of other processes": "import os\nfor p in os.listdir('/proc'):\n if p.isdigit() and "
    "b'hone-sandbox-marker' in open(f'/proc/{p}/cmdline', 'rb').read() and int(p) > 5: print('BREACH')",
    "the environment of its parent": "import os; "
    "print('BREACH' if 'HONE_SECRET' in open(f'/proc/{os.getppid()}/environ').read() else '')",
    "mounts": "import ctypes; r = ctypes.CDLL(None).mount(b'none', b'/work', b'tmpfs', 0, b'size=10g'); "
    "print('BREACH' if r == 0 else r)",
}
ATTACKS = {
    # network
    "connects": "import socket; socket.create_connection(('1.1.1.1', 53), 2); print('BREACH')",
    "connects to loopback": "import socket; socket.create_connection(('127.0.0.1', PORT), 2); print('BREACH')",
    "sends datagrams": "import socket; s = socket.socket(2, 2); s.sendto(b'x', ('1.1.1.1', 53)); print('BREACH')",
    "resolves names": "import socket; socket.getaddrinfo('example.com', 80); print('BREACH')",
    "downloads": "import urllib.request as u; u.urlopen('http://1.1.1.1', timeout=2); print('BREACH')",
    "abstract socket of the host": "import socket; s = socket.socket(1); s.connect('\\0hone-breach'); print('BREACH')",
    # memory
    "a large array": "x = bytearray(10**9); print('BREACH')",
    "a growing list": "x = []\nwhile True: x.append('y' * 10**6)\n",
    "a doubling text": "x = 'a'\nwhile len(x) < 2**30: x += x\nprint('BREACH')",
    "a large integer": "x = 1 << 8 * 10**9; print('BREACH')",
    "a memory map": "import mmap; mmap.mmap(-1, 10**9); print('BREACH')",
    # time
    "a loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "a power": "x = 9 ** 9 ** 9; print('BREACH')",
    "a regular expression": "import re; re.match(r'(a+)+b', 'a' * 60); print('BREACH')",
    "ignores signals": "import signal as s, time\nfor n in (1, 2, 3, 15): s.signal(n, s.SIG_IGN)\ntime.sleep(1000)",
    "waits for input": "input(); input(); print('BREACH')",
    "a lock": "import threading; l = threading.Lock(); l.acquire(); l.acquire(); print('BREACH')",
    # processes
    "leaves a process": "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(40)\n print('BREACH')",
    "leaves a daemon": "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(31.4159)\n",
    "a subprocess that stays": "import subprocess; subprocess.Popen(['sleep', '31.4159'], start_new_session=True)",
    "kills the trainer": "import os; os.kill(TRAINER, 9); print('BREACH')",
    "kills all": "import os; os.kill(-1, 15); print('still here')",
    "kills its parent": "import os; os.kill(os.getppid(), 9)",  # outside a namespace that is 0: its own group
    "traces the trainer": "import ctypes; print('BREACH' if ctypes.CDLL(None).ptrace(16, TRAINER, 0, 0) == 0 else '')",
    # output
    "much output": "print('x' * 10**8)",
    "endless output": "while True: print('x' * 1000)",
    "output of errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "raw bytes": "import os; os.write(1, bytes(range(256)))",
    "terminal codes": "print('\\x1b[2J')",
    # files
    "a large file": "open('big', 'wb').write(b'0' * 10**8); print('BREACH')",
    "many open files": "import os; f = [os.open('.', 0) for _ in range(1000)]; print('BREACH')",
    "a sparse file": "f = open('big', 'wb'); f.truncate(10**11); print('BREACH')",
    "a core dump": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (10**9, 10**9)); print('BREACH')",
    "higher limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (10**12, 10**12)); x = bytearray(10**9); "
    "print('BREACH')",
    # the interpreter
    "crashes": "import ctypes; ctypes.string_at(0)",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "exits": "import os; os._exit(0)",
    "null bytes": "x = '\\0'; print(len(x))",
    "secrets of the environment": "import os; print('BREACH' if 'HONE_SECRET' in os.environ else '')",
    "inherited files": "import os\nfor fd in range(3, 64):\n try: os.fstat(fd); print('BREACH')\n except OSError: pass",
}
QUICK = ("connects", "a large array", "a loop", "much output", "a large file", "secrets of the environment")


@pytest.fixture(params=["bubblewrap", "namespaces"])
def protected(request, monkeypatch):
    monkeypatch.setenv("HONE_SECRET", "x")
    if request.param == "bubblewrap" and not sandbox.has_bubblewrap():
        pytest.skip("bubblewrap is not installed")
    if request.param == "namespaces":
        if not sandbox._has_namespaces():
            pytest.skip("this system permits no namespaces; missing_protections says so")
        monkeypatch.setattr(sandbox, "has_bubblewrap", lambda: False)
    return request.param


def attack(code: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        filled = code.replace("PORT", str(server.getsockname()[1])).replace("TRAINER", str(os.getpid()))
        started = time.monotonic()
        output = run_python(filled, LIMITS)
        seconds = time.monotonic() - started
    assert "BREACH" not in output
    assert len(output.encode()) < 4 * LIMITS.output + 200
    assert seconds < LIMITS.seconds + 5
    left = subprocess.run(["pgrep", "-f", "sleep 31.4159"], capture_output=True, text=True).stdout
    assert not left, "a process outlived the call"


@pytest.mark.parametrize("name", QUICK)
def test_attacks_that_are_tried_in_every_test(protected, name):
    attack(ATTACKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in QUICK])
def test_attacks(protected, name):
    attack(ATTACKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_attacks_on_files(protected, name):
    if protected == "namespaces":
        assert any(line.startswith("files: ") for line in missing_protections())
        return
    attack(FILES[name])
    assert not Path("/var/tmp/hone-breach").exists()


@pytest.mark.slow
def test_a_fork_bomb(protected):
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass\n"
    if os.geteuid() == 0:
        assert any("root" in line for line in missing_protections())
    elif protected == "bubblewrap":
        attack(bomb)
        attack(
            "import os\nn = 0\nwhile n < 200:\n if os.fork() == 0: import time; time.sleep(9)\n n += 1\nprint('BREACH')"
        )


def test_the_list_is_long():
    assert len(ATTACKS) + len(FILES) >= 40


def test_what_code_prints(protected):
    assert run_python("print(6 * 7)") == "42\n"
    assert run_python("import fractions; print(fractions.Fraction(1, 3) + 1)") == "4/3\n"
    assert "ZeroDivisionError" in run_python("1 / 0")
    assert "SyntaxError" in run_python("for")
    assert run_python("") == ""
    assert "ended after 0.5 s" in run_python("while True: pass", Limits(seconds=0.5))
    assert "at most 100000 are run" in run_python("x" * 100_001)
    assert run_python("print('\ud800é')") == "?é\n"


def test_missing_protections_are_named(monkeypatch):
    monkeypatch.setattr(sandbox, "has_bubblewrap", lambda: False)
    monkeypatch.setattr(sandbox, "_has_namespaces", lambda: False)
    missing = missing_protections()
    assert [line.split(":")[0] for line in missing[:3]] == ["files", "network", "processes"]
    assert shutil.which("bwrap") or "install bubblewrap" in missing[0]
