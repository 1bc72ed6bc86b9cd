"""Tests of invalid arguments from Python, whose errors name the argument, and of short reprs."""

from dataclasses import is_dataclass

import numpy as np
import pytest
import torch
from models import CUDA, tiny_engine

from tridecode import Engine, SamplingParams
from tridecode.arguments import shown
from tridecode.errors import ParameterError, PromptError
from tridecode.step.decode import decode_pass
from tridecode.step.run import Recorder

BIG = 10**5000  # Python refuses to write a number with this many digits.


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


LOAD = [
    dict(model=5), dict(model=b"dir"), dict(model="x" * 300), dict(model=["dir"]), dict(model=False),
    dict(device=5), dict(device=None), dict(device=b"cpu"), dict(device="cpu:0"), dict(device="cuda:" + "9" * 5000),
    dict(backend=5), dict(backend=["torch"]), dict(backend=torch.ones(2)),
    dict(dtype=5), dict(dtype=["float32"]), dict(dtype=torch.int8), dict(dtype=None),
    dict(max_seq_len="5"), dict(max_seq_len=1.5), dict(max_seq_len=True), dict(max_seq_len=BIG), dict(max_seq_len=0),
    dict(graph=None), dict(graph=["full"]), dict(progress=5), dict(progress="bar"),
    dict(slots=0), dict(slots=65), dict(slots=True), dict(slots="2"), dict(chunk_tokens=0), dict(max_queue=-1),
    dict(kv_tokens=0), dict(kv_tokens=100, max_seq_len=200), dict(kv_tokens=500, max_seq_len=200, slots=2),
    dict(batch_invariant=1), dict(chunk_tokens=100, batch_invariant=True), dict(prompt_ms=3.0, batch_invariant=True),
    dict(batch_invariant=True, prompt_attention="flash"), dict(prompt_graph_sizes=[64], batch_invariant=True),
    dict(speculate="draft"), dict(speculate_ngram=(2, 8)), dict(speculate_ngram=(4, 2), speculate="off"),
    dict(kv_dtype="fp4"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", LOAD, ids=lambda arguments: shown(arguments))
def test_load_refuses_by_name(arguments, monkeypatch):
    monkeypatch.setattr("tridecode.engine.load_weights", None)
    name = next(iter(arguments))
    with pytest.raises(ParameterError, match=f"^{name}(:| )") as caught:
        Engine.load(**{"device": "cpu"} | arguments)
    assert len(str(caught.value)) < 200


def test_device_and_dtype_accept_torch_objects():
    engine = Engine.load(device=torch.device("cpu"), dtype=torch.bfloat16, max_seq_len=torch.tensor(64))
    assert (engine.device.type, engine.model.weights.dtype, engine.capacity) == ("cpu", torch.bfloat16, 64)


GENERATE = [
    dict(params={}), dict(params="greedy"), dict(params=5), dict(reuse_prefix=1), dict(reuse_prefix="no"),
    dict(template_variables=[1]), dict(template_variables=[]), dict(template_variables={1: 2}),
]  # fmt: skip


@pytest.mark.parametrize("arguments", GENERATE, ids=str)
def test_generate_and_stream_refuse_by_name(engine, arguments):
    (name,) = arguments
    for call in (engine.generate, engine.stream):
        with pytest.raises(ParameterError, match=f"^{name} "):
            call([5, 6], **arguments)


NO_IDS = [[], [331], [-1], [True], [1.0], [2**40], [BIG], [[1]], [None]]
PROMPTS = [
    *NO_IDS, *map(np.array, NO_IDS[:5]), *map(torch.tensor, NO_IDS[:5]), torch.tensor(3), torch.tensor([[1, 2]]),
    torch.tensor([1.5]), 5, None, [1] * 257, {"role": "user"}, b"ab", bytearray(b"ab"), memoryview(b"ab"), {1, 2},
    frozenset({1}),
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_invalid_prompts_are_refused(engine, prompt):
    for call in (engine.generate, engine.encode, engine.score):
        with pytest.raises(PromptError, match="prompt|token.id") as caught:
            call(prompt)
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
    with pytest.raises(PromptError, match="no tokenizer"):
        engine.encode("text")


@pytest.mark.parametrize("field", [dict(seed=BIG), dict(top_k=BIG), dict(ignore_eos="no"), dict(stop_token_ids=[-BIG])])
def test_sampling_parameters_of_any_size(field):
    with pytest.raises(ParameterError, match=next(iter(field))):
        SamplingParams(**field)


def holders(engine: Engine) -> list:
    model = engine.model
    layer, state = model.layers[0], (model.workspace, model.workspace.sampler, model.prompt)
    recorder = Recorder()
    decode_pass(recorder, model, "sample")
    objects = [engine, model, model.weights, layer, layer.linears["qkv"], model.kv, *state]
    objects += [engine.steps, engine.tokenizer]
    return objects + recorder.launches


def test_repr_of_objects_with_tensors_is_one_short_line(engine):
    engine.name = "a name as long as a path can be\n" * 100
    for holder in holders(engine):
        assert len(repr(holder)) <= 200 and "\n" not in repr(holder), type(holder)
    shows = ("name='a name", "family=qwen3", f"graph={'full' if CUDA else 'none'}", "capacity=256", "device=c")
    assert all(word in repr(engine) for word in shows)


def test_no_repr_contains_tensors(engine):
    """No dataclass in the engine has a tensor in its repr."""
    found, waiting = [], [engine]
    assert engine.model.layers  # The first access computes and caches the layers.
    while waiting:
        holder = waiting.pop()
        found.append(holder)
        for value in vars(holder).values():
            value = tuple(value.values()) if isinstance(value, dict) else value
            for part in value if isinstance(value, tuple) else (value,):
                if is_dataclass(part) and not any(part is seen for seen in found):
                    waiting.append(part)
    assert len(found) > 8 and not [type(holder) for holder in found if "tensor(" in repr(holder)]
