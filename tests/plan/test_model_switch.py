"""/model: switching models within a conversation, and models that cannot be loaded."""

import gc
import signal
import weakref

import pytest
from chats import Script, as_messages
from checkpoints import write_tiny, write_tokenizer

from tridecode import Engine
from tridecode.cli import loading
from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.local import LocalModel
from tridecode.cli.chat.settings import CHOICES, NAMES
from tridecode.cli.loading import Loader
from tridecode.cli.parser import make_parser
from tridecode.errors import CheckpointError, DeviceError

FEW = ("--max-tokens", 4, "--temperature", 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models and three invalid directories: with short weights, without a chat template, and a missing one."""
    path = tmp_path_factory.mktemp("models")
    found = {name: write_tiny(path / name, family) for name, family in (("qwen", "qwen3"), ("llama", "llama"))}
    found["cut"] = write_tiny(path / "cut", "llama")
    weights = found["cut"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    found["base"] = write_tiny(path / "base", "llama")
    write_tokenizer(found["base"], chat_template=None)
    return found | {"nothing": path / "nothing"}


@pytest.fixture
def crowded(monkeypatch):
    """Two models never fit in memory together."""
    monkeypatch.setattr(Loader, "_fits_with_current", lambda *args: False)


def answers(engine, *turns):
    return engine.generate(as_messages(*turns), engine.default_params(temperature=0, max_tokens=4)).text


@pytest.mark.parametrize("together", [True, False])
def test_conversation_continues_with_the_other_model(piped, models, state, request, together):
    if not together:
        request.getfixturevalue("crowded")
    lines = f"hello\n/model '{models['llama']}'\nagain\n/model\n"
    code, out, err = piped(lines, "--model", models["qwen"], *FEW, "--session", "work")
    assert code == 0, err
    first = answers(Engine.load(models["qwen"], device="cpu"), "hello")
    second = answers(Engine.load(models["llama"], device="cpu"), "hello", first, "again")
    assert out == f"{first}\n{second}\n"
    assert err.count(f"{models['llama']} on cpu: context of 512 tokens") == 2
    assert ("do not fit together" in err) != together
    assert f'"model": "{models["llama"]}"' in sessions.named("work").read_text()


@pytest.mark.parametrize("name, message, together", [
    ("nothing", "no such directory", True),
    ("cut", "model.safetensors", True),
    ("cut", "model.safetensors", False),
    ("base", "no chat template", False),
])  # fmt: skip
def test_failed_load_keeps_the_old_model(piped, models, request, name, message, together):
    if not together:
        request.getfixturevalue("crowded")
    code, out, err = piped(f"hello\n/model {models[name]}\nagain\n", "--model", models["qwen"], *FEW)
    assert code == 0
    (error,) = (line for line in err.splitlines() if line.startswith("tridecode: error"))
    assert message in error
    engine = Engine.load(models["qwen"], device="cpu")
    first = answers(engine, "hello")
    assert out == f"{first}\n{answers(engine, 'hello', first, 'again')}\n"


def test_old_model_is_released_first_if_both_do_not_fit(piped, models, crowded, monkeypatch):
    engines, load = [], loading.load_model

    def counting(*args):
        gc.collect()
        assert not [engine for engine in engines if engine() is not None], "more than one model is in memory"
        engine = load(*args)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(loading, "load_model", counting)
    code, out, err = piped(f"hello\n/model {models['llama']}\nagain\n", "--model", models["qwen"], *FEW)
    assert code == 0 and len(engines) == 2 and out.count("\n") == 2, err


def test_ctrl_c_during_a_load_keeps_the_old_model(models, session, crowded, monkeypatch):
    """A second Ctrl-C, while the old model is loaded again, has no effect."""
    loads, before = [], signal.getsignal(signal.SIGINT)

    def load(args, model, *rest):
        loads.append(model)
        signal.raise_signal(signal.SIGINT)
        return Script(["fine"])

    monkeypatch.setattr(loading, "load_model", load)
    chat = session(interactive=True)
    args = make_parser().parse_args(["chat", "--model", str(models["qwen"])])
    chat.model = LocalModel(Script(), Loader(args, chat.output))
    assert chat.handle(f"/model {models['llama']}") and chat.handle("hello")
    out, err = chat.read()
    assert loads == [models["llama"], models["qwen"]] and out == "fine\n" and "stopped; the model stays" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_ends_without_a_model(piped, models, crowded, monkeypatch, state):
    load = loading.load_model

    def once(args, model, *rest):
        monkeypatch.setattr(loading, "load_model", broken)
        return load(args, model, *rest)

    def broken(*args):
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(loading, "load_model", once)
    lines = f"hello\n/model {models['llama']}\nagain\n"
    code, out, err = piped(lines, "--model", models["qwen"], *FEW, "--session", "work")
    assert code == 1 and out.count("\n") == 1 and "the disk is gone" in err
    assert err.splitlines()[-1] == "tridecode: error: there is no model any more; the chat ends"
    assert [user for user, _ in sessions.read(sessions.named("work")).turns] == ["hello"]


@pytest.mark.parametrize("free, fits", [(2**30, True), (2**24, False)])
def test_two_models_fit_if_the_new_one_has_its_full_context(models, monkeypatch, free, fits):
    old = Engine.load(models["qwen"], device="cpu")
    loader = Loader(make_parser().parse_args(["chat", "--device", "cpu"]), None)
    monkeypatch.setattr("tridecode.plan.memory.free_memory", lambda device: free)
    assert loader._fits_with_current(old, loader._plan(models["llama"])) is fits


def test_model_larger_than_memory_is_refused_before_the_switch(models, monkeypatch):
    old = Engine.load(models["qwen"], device="cpu", max_seq_len=1)
    loader = Loader(make_parser().parse_args(["chat", "--device", "cpu"]), None)
    monkeypatch.setattr("tridecode.plan.memory.free_memory", lambda device: -old.plan.memory.needed(old.capacity))
    with pytest.raises(DeviceError, match="not enough memory"):
        loader._fits_with_current(old, loader._plan(models["llama"]))


def test_requested_sampling_options_survive_a_switch(piped, models, tmp_path):
    warm = tmp_path / "warm"
    warm.mkdir()
    for file in models["llama"].iterdir():
        (warm / file.name).symlink_to(file)
    (warm / "generation_config.json").unlink()
    (warm / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 11, "top_p": 0.8, "min_p": 0.1}')
    lines = f"/set top_k 3\n/set min_p 0.5\n/set min_p default\n/model {warm}\n/set\n"
    code, _, err = piped(lines, "--model", models["qwen"], *FEW)
    assert code == 0 and "top_p 0.8, min_p 0.1 from generation_config.json" in err
    shown = dict(line.split(maxsplit=1) for line in err.splitlines()[-len((*NAMES, *CHOICES)) :])
    names = ("temperature", "top_k", "top_p", "min_p")
    assert [shown[name] for name in names] == ["0.0", "3", "0.8", "0.1"]
