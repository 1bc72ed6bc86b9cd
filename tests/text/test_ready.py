"""An engine for several callers, and a server, are ready: first requests start no process and build nothing."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import CHAT, GREEDY, Running

from tridecode import Engine, SamplingParams
from tridecode.errors import ParameterError
from tridecode.text.tokenizer import Tokenizer


@pytest.fixture
def nothing_starts(monkeypatch):
    """Call it; from then on no child process can start and no vocabulary can be read."""

    def stop():
        monkeypatch.setattr(sys, "executable", "/no/python")
        monkeypatch.setattr(Tokenizer, "token_bytes", None)

    return stop


def test_an_engine_of_several_slots_is_ready_for_concurrent_requests(nothing_starts):
    with Engine.load(slots=4, device="cpu") as engine:
        nothing_starts()
        with ThreadPoolExecutor(8) as pool:
            prompts = list(pool.map(engine.encode, [CHAT] * 40))
        assert all(prompt == prompts[0] for prompt in prompts)
        assert engine.generate(CHAT, SamplingParams(regex="a")).text == "a"


def test_a_server_of_one_slot_is_ready_for_forms(nothing_starts):
    with Engine.load(device="cpu") as engine, Running(engine) as server:
        nothing_starts()
        answer = server.post("/v1/chat/completions", GREEDY | {"structured_outputs": {"regex": "a"}})
    assert answer.json()["choices"][0]["message"]["content"] == "a"


ONE_CALLER = """
import sys
from tridecode import Engine
starts = []
sys.addaudithook(lambda event, args: starts.append(args) if event == "subprocess.Popen" else None)
with Engine.load(slots=4, callers=1, device="cpu") as engine:
    engine.generate([{"role": "user", "content": "Hello"}])
print(sum("tridecode.text.rendering:renderer" in args[1] for args in starts), "llguidance" in sys.modules)
"""


def test_one_caller_has_one_child_and_no_grammar():
    done = subprocess.run([sys.executable, "-c", ONE_CALLER], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_the_number_of_callers_is_checked():
    with pytest.raises(ParameterError) as refused:
        Engine.load(callers=0)
    assert (refused.value.argument, refused.value.code) == ("callers", "range")
