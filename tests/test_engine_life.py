"""The life of engines: what close, errors and interrupts leave behind, forks, and requests of other engines."""

import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from models import tiny_engine

import tridecode
from tridecode import Engine, SamplingParams
from tridecode.errors import EngineClosed, ParameterError, TooLong, TridecodeError

CHAT = [{"role": "user", "content": "a <|im_end|> b"}]


def children() -> set[str]:
    """Return the ids of the child processes of this process."""
    pids: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # The thread has ended.
            pids.update((task / "children").read_text().split())
    return pids


LOADS = """
import gc, os, sys, threading, time
from test_engine_life import CHAT, children
from tridecode import Engine, SamplingParams

def counts():
    gc.collect()
    until = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < until:  # Threads of a freed pool end a little later.
        time.sleep(0.1)
    memory = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(children()), len(os.listdir("/proc/self/fd")), threading.active_count(), memory

for i in range(36):
    if i == 6:  # The first engines fill caches.
        before = counts()
    with Engine.load(slots=2, device="cpu", max_seq_len=128) as engine:
        engine.generate(CHAT, SamplingParams(regex="[a-z]{3}"))
after = counts()
print(*(new - old for new, old in zip(after, before)))
"""


def test_closed_engines_leave_nothing():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", LOADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=True)
    processes, files, threads, memory = map(int, done.stdout.split())
    assert (processes, files, threads) == (0, 0, 0)
    # A vocabulary that stays takes 4.5 MB, in each of the 30 engines. The allocator keeps some memory.
    assert memory < 70 << 20


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("late", [False, True])
def test_failed_load_leaves_no_child(monkeypatch, error, late):
    def fails(*args):
        started.update(children() - before)
        raise error

    before, started = children(), set()
    if late:
        monkeypatch.setattr(Engine, "warm_up", fails)
    else:
        monkeypatch.setattr(tridecode.engine, "load_weights", fails)
    with pytest.raises(error) as caught:
        Engine.load(slots=4, device="cpu")
    until = time.monotonic() + 20
    while children() - before and time.monotonic() < until:  # The thread that uses a child ends it.
        time.sleep(0.05)
    assert caught.value.__traceback__ and not children() - before and (started or not late)


def test_wait_refuses_requests_of_other_engines():
    with tiny_engine() as one, tiny_engine() as other:
        mine, foreign = one.submit([1, 2], SamplingParams(max_tokens=2)), other.submit([1, 2])
        for requests in ([foreign], [mine, foreign]):
            with pytest.raises(ParameterError) as refused:
                one.wait(requests)
            assert (refused.value.argument, refused.value.code) == ("requests", "conflict")
        foreign.cancel()
        with pytest.raises(ParameterError):  # It has ended.
            one.wait([foreign])
        one.wait([mine])
        assert mine.finish_reason == "length"


FORK = """
import os, signal, sys, threading
from models import tiny_engine
from tridecode import SamplingParams
from tridecode.errors import EngineClosed

engine = tiny_engine()
long = SamplingParams(max_tokens=200, ignore_eos=True)
stream = engine.stream([1, 2], long)
next(stream)  # Its iterator is dropped in each child process.
endless = [engine.submit([1, 2], long) for _ in range(50)]
threading.Thread(target=engine.wait, args=(endless[-1:],), daemon=True).start()
for _ in range(10):  # At some of these forks the other thread holds the lock.
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    signal.alarm(20)  # A child that hangs ends with this signal.
    calls = [
        lambda: engine.generate([1, 2]), lambda: engine.submit([1]), engine.step, lambda: engine.wait(endless[-1:]),
        lambda: engine.encode([1]), lambda: engine.generate_many([[1]]), endless[-1].result,
        lambda: engine.score([1, 2]), lambda: engine.scheduler, engine.capture_next,
    ]
    for call in calls:
        try:
            call()
        except EngineClosed as error:
            assert "parent process" in str(error)
        else:
            os._exit(1)
    engine.close()
    assert "closed" in repr(engine)
    del stream, endless, engine
    os._exit(0)
for request in endless:
    request.cancel()
assert engine.generate([1, 2], SamplingParams(max_tokens=2)).token_ids  # The engine still works in this process.
print("done", flush=True)
os._exit(0)
"""


def test_engine_in_forked_process_is_refused():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout == "done\n", done.stderr


def errors() -> list[TridecodeError]:
    """Return an error of each class of the package."""
    import tridecode.cli.chat.command
    import tridecode.cli.profile.records
    import tridecode.server.errors
    import tridecode.state.pages  # noqa: F401

    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    made = [TooLong(7, 5, True, "; shorten it"), EngineClosed(), ParameterError("wrong", "seed", "range")]
    for kind in sorted(below(TridecodeError), key=lambda kind: kind.__name__):
        error = kind.__new__(kind, "message")
        error.detail = [1]
        made.append(error)
    return made


def test_errors_can_be_pickled():
    for error in errors():
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and (again.args, vars(again)) == (error.args, vars(error))
        assert str(again) == str(error)
