"""Tests of child processes: messages, limits, replacement and end."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tridecode.text.sandbox import Program, Sandbox, SandboxError, _Child

ENDLESS = "sum(iter(int, 1))"


def sandbox(setup: str = "lambda code: eval(code)", seconds: float = 30, max_answer_bytes: int = 1 << 20) -> Sandbox:
    """Return a sandbox that evaluates Python expressions. Only the limits of the process restrict them."""
    return Sandbox(Program("builtins:eval", lambda: setup, 256 << 20, seconds, max_answer_bytes))


def wait_until(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """Whether the process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def while_busy(pid: int, action) -> threading.Thread:
    """Call `action` in a thread as soon as the process uses CPU time."""
    before = cpu_seconds(pid)

    def act():
        wait_until(lambda: cpu_seconds(pid) > before + 0.1)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


# ---- messages


def test_result_equals_value_of_expression():
    made = sandbox()
    for code, result in (("1 + 1", 2), ("'é\\ud800\\n' * 2", "é\ud800\n" * 2), ("{'a': [None]}", {"a": [None]})):
        assert made.call(code, 30) == result
    made = sandbox("lambda message: message", max_answer_bytes=10 << 20)
    assert made.call("x" * (4 << 20), 30) == "x" * (4 << 20)


ERRORS = {
    # name: (code, kind of error, words that the message contains, whether the child process continues)
    "an error": ("1 // 0", "ZeroDivisionError", "modulo by zero", True),
    "an error without a message": ("next(iter(()))", "StopIteration", "StopIteration", True),
    "a long error": ("exec('raise ValueError(chr(10).join(99999 * [chr(120)]))')", "ValueError", "^x x.{296}…$", True),
    "a result that is not JSON": ("object()", "TypeError", "not JSON serializable", True),
    "an exit": ("exit()", "SystemExit", "None", False),
    "memory": ("'x' * 10**9", "MemoryError", "MemoryError", False),
    "a file": ("open('/etc/passwd')", "OSError", "Too many open files", True),
    "a new file": ("open('new', 'w')", "OSError", "Too many open files", True),
    "a socket": ("__import__('_socket').socket()", "OSError", "Too many open files", True),
    "time": (f"[{ENDLESS}]", None, "its process was stopped after 0.5 s", False),
    "a wait": ("__import__('time').sleep(60)", None, "its process was stopped after 0.5 s", False),
    "a crash": ("__import__('os').abort()", None, "its process ended with code -6", False),
    "an immediate exit": ("__import__('os')._exit(3)", None, "its process ended with code 3", False),
    "a long answer": ("'x' * (1 << 20)", None, "its process ended with code -9", False),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_error_is_reported_and_next_call_succeeds(case):
    code, kind, words, continues = ERRORS[case]
    made = sandbox()
    assert made.call("1", 30) == 1
    (pid,) = made.pids
    for _ in range(2):
        with pytest.raises(SandboxError, match=words) as caught:
            made.call(code, 0.5 if "stopped" in words else 30)
        assert caught.value.kind == kind and "\n" not in str(caught.value)
        assert made.call("1 + 1", 30) == 2
    assert (made.pids == [pid]) == continues


@pytest.mark.skipif(os.getuid() == 0, reason="the operating system does not limit the number of processes of root")
def test_child_cannot_start_processes():
    with pytest.raises(SandboxError, match="Resource temporarily unavailable"):
        sandbox().call("__import__('os').fork()", 30)


SETUPS = {"an error": ("1 // 0", "ZeroDivisionError", "zero"), "time": (ENDLESS, None, "was stopped after 0.5 s")}


@pytest.mark.parametrize("case", SETUPS)
def test_failed_setup_is_an_error_of_each_call(case):
    setup, kind, words = SETUPS[case]
    made = sandbox(setup, seconds=0.5 if kind is None else 30)
    made.start()
    made.wait()
    for _ in range(2):
        with pytest.raises(SandboxError, match=words) as caught:
            made.call("1", 30)
        assert caught.value.kind == kind


# ---- children


def test_children_are_ready_after_wait():
    made = sandbox()
    made.start(3)
    made.wait()
    pids = made.pids
    assert len(set(pids)) == 3
    made.start(3)
    made.wait()
    assert made.pids == pids, "another child process was started"
    made.close()
    assert made.pids == [] and all(map(ended, pids))
    assert made.call("1", 30) == 1


def test_callers_share_one_child():
    made = sandbox()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: made.call(str(n), 30), range(200))) == [*range(200)]
    assert len(made.pids) == 1


def test_busy_child_delays_only_its_caller():
    made = sandbox()
    made.start(2)
    made.wait()
    with ThreadPoolExecutor(1) as pool:
        (pid, _), busy = made.pids, pool.submit(made.call, ENDLESS, 60)
        while_busy(pid, lambda: None).join()
        assert [made.call(str(n), 30) for n in range(20)] == [*range(20)] and not busy.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended with code -9"):
            busy.result()


def test_ended_child_is_replaced():
    made = sandbox()
    made.start()
    made.wait()
    for _ in range(2):
        os.kill(made.pids[0], signal.SIGKILL)
        wait_until(lambda: made.pids == [])
        assert made.call("1", 30) == 1


def test_next_call_reports_the_error_of_a_background_start(monkeypatch):
    """When a program exits, the socket of a child that is starting may be closed. The thread prints no traceback."""
    printed, made = [], sandbox()
    monkeypatch.setattr(threading, "excepthook", printed.append)
    with monkeypatch.context() as patched:
        patched.setattr(_Child, "_exchange", lambda *args: os.close(-1))
        made.start()
        made.wait()
        with pytest.raises(OSError, match="Bad file descriptor"):
            made.call("1 + 1", 30)
    assert printed == [] and made.call("1 + 1", 30) == 2


def test_child_killed_during_call_is_an_error():
    made = sandbox()
    made.call("1", 30)
    thread = while_busy(made.pids[0], lambda pid=made.pids[0]: os.kill(pid, signal.SIGKILL))
    with pytest.raises(SandboxError, match="its process ended with code -9"):
        made.call(ENDLESS, 60)
    thread.join()
    assert made.call("1", 30) == 1


def test_interrupt_ends_child():
    made = sandbox()
    made.call("1", 30)
    (pid,) = made.pids
    thread = while_busy(pid, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        made.call(ENDLESS, 60)
    thread.join()
    assert ended(pid) and made.call("1", 30) == 1
    # A terminal sends Ctrl-C to a process group. Therefore the child process has its own group.
    assert os.getpgid(made.pids[0]) == made.pids[0] != os.getpgrp()


def test_children_end_when_sandbox_is_deleted():
    made = sandbox()
    made.start(2)
    made.wait()
    pids = made.pids
    del made
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a child process still exists"


@pytest.mark.parametrize("busy", [False, True])
def test_child_ends_when_parent_is_killed(busy):
    """A child in an endless loop ends too, because its CPU time is limited."""
    code = (
        "import test_sandbox\n"
        "made = test_sandbox.sandbox()\n"
        "made.call('1', 30)\n"
        "print(*made.pids, flush=True)\n"
        "input()\n"
        "made.call(test_sandbox.ENDLESS, 1)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    pid = int(parent.stdout.readline())
    if busy:
        thread = while_busy(pid, lambda: None)
        parent.stdin.write("\n")
        parent.stdin.flush()
        thread.join()
    parent.kill()
    parent.communicate()
    wait_until(lambda: ended(pid))


def test_fork_starts_its_own_child():
    made = sandbox()
    made.call("1", 30)
    pids = made.pids
    fork = os.fork()
    if fork == 0:
        fine = False
        try:
            fine = made.call("1 + 1", 30) == 2 and made.pids != pids
        finally:
            os._exit(0 if fine else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert made.call("1", 30) == 1 and made.pids == pids


def test_start_failure_is_reported_by_call(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    made = sandbox()
    made.start()  # This call must not raise an error.
    made.wait()
    with pytest.raises(SandboxError, match="no process can be started for it .No such file"):
        made.call("1", 30)
    monkeypatch.undo()
    assert made.call("1", 30) == 1
