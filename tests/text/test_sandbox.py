"""Child processes have limits, are replaced after their end, and end with their owner."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tridecode.text.sandbox import Program, Sandbox, SandboxError

ENDLESS = "sum(iter(int, 1))"


def sandbox(setup: str = "lambda code: eval(code)", seconds: float = 30, longest: int = 1 << 20) -> Sandbox:
    """A sandbox whose messages are Python expressions: nothing but the limits of the process stops them."""
    return Sandbox(Program("builtins:eval", lambda: setup, 256 << 20, seconds, longest))


def wait_until(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def while_busy(pid: int, action) -> threading.Thread:
    """Call `action` in a thread, once the process loops."""
    before = cpu_seconds(pid)

    def act():
        wait_until(lambda: cpu_seconds(pid) > before + 0.1)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


# ---- messages


@pytest.mark.parametrize(
    "code, result", [("1 + 1", 2), ("'é\\ud800\\n' * 2", "é\ud800\n" * 2), ("{'a': [None]}", {"a": [None]})]
)
def test_result(code, result):
    assert sandbox().ask(code, 30) == result


def test_large_messages():
    made = sandbox("lambda message: message", longest=10 << 20)
    assert made.ask("x" * (4 << 20), 30) == "x" * (4 << 20)


ERRORS = {
    # name: (code, kind, words, whether the child stays)
    "an error": ("1 // 0", "ZeroDivisionError", "modulo by zero", True),
    "an error without words": ("next(iter(()))", "StopIteration", "StopIteration", True),
    "a long error": ("exec('raise ValueError(chr(10).join(99999 * [chr(120)]))')", "ValueError", "^x x.{296}…$", True),
    "no JSON": ("object()", "TypeError", "not JSON serializable", True),
    "an exit": ("exit()", "SystemExit", "None", False),
    "memory": ("'x' * 10**9", "MemoryError", "MemoryError", False),
    "a file": ("open('/etc/passwd')", "OSError", "Too many open files", True),
    "a new file": ("open('new', 'w')", "OSError", "Too many open files", True),
    "a socket": ("__import__('_socket').socket()", "OSError", "Too many open files", True),
    "time": (f"[{ENDLESS}]", None, "its process was stopped after 0.5 s", False),
    "a wait": ("__import__('time').sleep(60)", None, "its process was stopped after 0.5 s", False),
    "a crash": ("__import__('os').abort()", None, "its process ended with code -6", False),
    "its end": ("__import__('os')._exit(3)", None, "its process ended with code 3", False),
    "a long answer": ("'x' * (1 << 20)", None, "its process ended with code -9", False),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_error(case):
    code, kind, words, stays = ERRORS[case]
    made = sandbox()
    assert made.ask("1", 30) == 1
    (pid,) = made.pids
    for _ in range(2):
        with pytest.raises(SandboxError, match=words) as caught:
            made.ask(code, 0.5 if "stopped" in words else 30)
        assert caught.value.kind == kind and "\n" not in str(caught.value)
        assert made.ask("1 + 1", 30) == 2
    assert (made.pids == [pid]) == stays


@pytest.mark.skipif(os.getuid() == 0, reason="the system does not limit the processes of root")
def test_no_process_can_be_started():
    with pytest.raises(SandboxError, match="Resource temporarily unavailable"):
        sandbox().ask("__import__('os').fork()", 30)


SETUPS = {"an error": ("1 // 0", "ZeroDivisionError", "zero"), "time": (ENDLESS, None, "was stopped after 0.5 s")}


@pytest.mark.parametrize("case", SETUPS)
def test_a_setup_that_fails_is_an_error_of_each_message(case):
    setup, kind, words = SETUPS[case]
    made = sandbox(setup, seconds=0.5 if kind is None else 30)
    made.start()
    made.wait()
    for _ in range(2):
        with pytest.raises(SandboxError, match=words) as caught:
            made.ask("1", 30)
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
    assert made.pids == pids, "no other child was started"
    made.close()
    assert made.pids == [] and all(map(ended, pids))
    assert made.ask("1", 30) == 1


def test_callers_share_one_child():
    made = sandbox()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: made.ask(str(n), 30), range(200))) == [*range(200)]
    assert len(made.pids) == 1


def test_a_busy_child_delays_its_caller_only():
    made = sandbox()
    made.start(2)
    made.wait()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(made.ask, ENDLESS, 3)
        while_busy(made.pids[0], lambda: None).join()
        assert [made.ask(str(n), 30) for n in range(20)] == [*range(20)] and not busy.done()
        with pytest.raises(SandboxError, match="stopped"):
            busy.result()


def test_a_child_that_is_gone_is_replaced():
    made = sandbox()
    made.start()
    made.wait()
    for _ in range(2):
        os.kill(made.pids[0], signal.SIGKILL)
        wait_until(lambda: made.pids == [])
        assert made.ask("1", 30) == 1


def test_a_child_that_is_killed_while_it_answers():
    made = sandbox()
    made.ask("1", 30)
    thread = while_busy(made.pids[0], lambda pid=made.pids[0]: os.kill(pid, signal.SIGKILL))
    with pytest.raises(SandboxError, match="its process ended with code -9"):
        made.ask(ENDLESS, 60)
    thread.join()
    assert made.ask("1", 30) == 1


def test_an_interrupt_ends_the_child():
    made = sandbox()
    made.ask("1", 30)
    (pid,) = made.pids
    thread = while_busy(pid, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        made.ask(ENDLESS, 60)
    thread.join()
    assert ended(pid) and made.ask("1", 30) == 1


def test_an_interrupt_of_the_terminal_reaches_the_parent_only():
    """Ctrl-C goes to a whole process group."""
    made = sandbox()
    made.ask("1", 30)
    assert os.getpgid(made.pids[0]) == made.pids[0] != os.getpgrp()


def test_children_end_with_their_owner():
    made = sandbox()
    made.start(2)
    made.wait()
    pids = made.pids
    del made
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "no zombie is left"


@pytest.mark.parametrize("busy", [False, True])
def test_a_child_ends_with_its_process(busy):
    """Even if that is killed while the child loops: the child's CPU time is bounded."""
    code = (
        "import test_sandbox\n"
        "made = test_sandbox.sandbox()\n"
        "made.ask('1', 30)\n"
        "print(*made.pids, flush=True)\n"
        "input()\n"
        "made.ask(test_sandbox.ENDLESS, 1)\n"
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


def test_a_fork_has_a_child_of_its_own():
    made = sandbox()
    made.ask("1", 30)
    pids = made.pids
    fork = os.fork()
    if fork == 0:
        fine = False
        try:
            fine = made.ask("1 + 1", 30) == 2 and made.pids != pids
        finally:
            os._exit(0 if fine else 1)
    assert os.waitpid(fork, 0)[1] == 0
    assert made.ask("1", 30) == 1 and made.pids == pids


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    made = sandbox()
    made.start()  # raises nothing
    made.wait()
    with pytest.raises(SandboxError, match="no process can be started for it .No such file"):
        made.ask("1", 30)
    monkeypatch.undo()
    assert made.ask("1", 30) == 1
