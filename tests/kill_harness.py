"""Kills a command at many moments of its work and checks after each that nothing is half done.

killed_at_random()      kill -9 from outside, at random moments of its running time
killed_at_every_step()  it ends itself without a word in front of its n-th change to the file system, for every n
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

BEGUN = b"begun"
STEPPED, WHOLE = 77, 0


@dataclass(frozen=True)
class Kills:
    """killed: runs that were ended early; finished: runs that were quicker than their kill; seconds: of a whole run."""

    killed: int
    finished: int
    seconds: float


def killed_at_random(
    command: Sequence[str],
    check: Callable[[int], None],
    *,
    kills: int,
    seed: int,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[int], None] = lambda number: None,
    timeout: float = 120.0,
) -> Kills:
    """Until `kills` runs have been killed: prepare(n), the command, kill -9 to it and its children, check(n).

    command: prints "begun" as its first line, flushed, where its work begins; moments are counted from there. They are
    spread over the time of a whole run, measured first (its check is made too, with n = 0) and whenever one comes to an
    end. check: raises when something is half done.
    """
    chance = random.Random(seed)
    prepare(0)
    seconds = one_run(command, None, env, timeout)[0]
    check(0)
    killed = finished = number = 0
    while killed < kills:
        number += 1
        assert number <= 4 * kills, f"{finished} of {number - 1} runs ended before they were killed: begin later"
        prepare(number)
        # One moment in each slice of the running time, so that few runs cover all of it.
        moment = seconds * (killed + chance.random()) / kills
        elapsed, early = one_run(command, moment, env, timeout)
        if early:
            killed += 1
        else:  # quicker than the run before it was: the machine is less busy now
            finished += 1
            seconds = elapsed
        check(number)
    return Kills(killed, finished, seconds)


def one_run(
    command: Sequence[str], moment: float | None, env: Mapping[str, str] | None, timeout: float
) -> tuple[float, bool]:
    """Seconds from "begun" on, and whether the kill came in time. moment: seconds until the kill, None for none."""
    # Files, not pipes: nobody reads while it runs, and a full pipe would hold it up.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env={**os.environ, **(env or {})}, start_new_session=True
        )
        try:
            end = time.perf_counter() + timeout
            while os.pread(output.fileno(), len(BEGUN) + 1, 0) != BEGUN + b"\n":
                assert process.poll() is None and time.perf_counter() < end, told(errors) or "it never said 'begun'"
                time.sleep(0.001)
            begun = time.perf_counter()
            process.wait(timeout if moment is None else moment)
            assert process.returncode == 0, told(errors)
            return time.perf_counter() - begun, False
        except subprocess.TimeoutExpired:
            assert moment is not None, f"{command} runs for more than {timeout} s"
            return moment, True
        finally:
            with contextlib.suppress(ProcessLookupError):  # its children too, should it have ended before them
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def told(errors: IO[bytes]) -> str:
    return os.pread(errors.fileno(), 100_000, 0).decode(errors="replace")


def killed_at_every_step(
    code: str, check: Callable[[int], None], *, prepare: Callable[[int], None], first: str = "", most: int = 500
) -> int:
    """Runs Python code once for each change that it makes to the file system; returns their number.

    first: code that is run once, before: its imports. After each run check(n). What counts is what CPython audits:
    open() for writing, rename, remove, mkdir, rmdir, chmod, truncate; a sync or a lock is none.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, first, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with server:
        assert server.stdin is not None and server.stdout is not None
        try:
            for number in range(1, most):
                prepare(number)
                server.stdin.write(f"{number}\n".encode())
                server.stdin.flush()
                answer = server.stdout.readline().strip()
                assert answer in (str(STEPPED).encode(), str(WHOLE).encode()), answer or "the server ended"
                check(number)
                if answer == str(WHOLE).encode():
                    return number - 1
        finally:
            server.stdin.close()
            server.kill()
    raise AssertionError(f"it makes more than {most} changes")


# Forks for each number that it reads, so that imports are paid once; the child dies in front of that change.
SERVER = f"""
import os, sys
first, code = sys.argv[1:]
names = {{}}
exec(first, names)
CHANGES = {{"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link", "os.symlink"}}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

def arm(left):
    def hook(event, arguments):
        nonlocal left
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            left -= 1
            if left == 0:
                os._exit({STEPPED})
    sys.addaudithook(hook)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            arm(int(line))
            exec(code, names)
            status = {WHOLE}
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def python(code: str) -> list[str]:
    """The command that runs this code."""
    return [sys.executable, "-c", code]
