"""Tests that loading starts all child processes and builds all data that first requests need."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import CHAT, GREEDY, Running

from tridecode import Engine, SamplingParams
from tridecode.errors import ParameterError
from tridecode.text.tokenizer import Tokenizer


@pytest.fixture
def prevent_starts(monkeypatch):
    """A function that prevents the start of child processes and the reading of vocabularies."""

    def stop():
        monkeypatch.setattr(sys, "executable", "/no/python")
        monkeypatch.setattr(Tokenizer, "token_bytes", None)

    return stop


def test_engine_with_several_slots_is_ready_for_concurrent_requests(prevent_starts):
    with Engine.load(slots=4, device="cpu") as engine:
        prevent_starts()
        with ThreadPoolExecutor(8) as pool:
            prompts = list(pool.map(engine.encode, [CHAT] * 40))
        assert all(prompt == prompts[0] for prompt in prompts)
        assert engine.generate(CHAT, SamplingParams(regex="a")).text == "a"


def test_server_with_one_slot_is_ready_for_structured_output(prevent_starts):
    with Engine.load(device="cpu") as engine, Running(engine) as server:
        prevent_starts()
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


def test_one_caller_starts_one_child_and_no_grammar():
    done = subprocess.run([sys.executable, "-c", ONE_CALLER], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_invalid_number_of_callers_is_refused():
    with pytest.raises(ParameterError) as refused:
        Engine.load(callers=0)
    assert (refused.value.argument, refused.value.code) == ("callers", "range")
