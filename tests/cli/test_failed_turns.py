"""Failed turns: error messages, the conversation, and exit codes."""

import json
import subprocess
import sys
import time

import pytest
import torch
from chats import ROOT, as_messages
from checkpoints import write_tiny
from safetensors.torch import load_file, save_file

from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.command import DEVICE_LOST
from tridecode.errors import TridecodeError
from tridecode.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model whose logits are NaN for prompts with an exclamation mark."""
    path = write_tiny(tmp_path_factory.mktemp("failed") / "poisoned", "qwen3")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][Tokenizer.load(path).encode("!")] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("error, words", [
    (RuntimeError("CUDA out of memory"), "CUDA out of memory"),
    (KeyError("layers"), "KeyError: 'layers' (--verbose shows the traceback); the turn is not kept"),
])  # fmt: skip
def test_out_of_memory_or_unexpected_error_fails_one_turn(session, caplog, error, words):
    chat = session([error], ["fine"])
    with caplog.at_level("DEBUG", logger="tridecode"):
        assert chat.handle("one") and chat.handle("two")
    assert chat.engine.prompts[1] == as_messages("two") and words in chat.read()[1]
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("words, line", [
    ("no such file", "no such file; the turn is not kept"),
    ("refused; is a server there?", "refused; is a server there? The turn is not kept"),
    ("You have no quota left.", "You have no quota left. The turn is not kept"),
])  # fmt: skip
def test_error_and_consequence_are_joined(session, words, line):
    chat = session([TridecodeError(words)])
    assert chat.handle("one") and chat.read()[1] == f"tridecode: error: {line}\n"


@pytest.mark.parametrize("texts, shown", [([], ""), ([""], ""), (["", "Half"], "Half\n")])
def test_failed_turn_shows_only_error(session, texts, shown):
    chat = session((texts, "error"), ["fine"])
    assert chat.handle("one") and chat.handle("two")
    out, err = chat.read()
    assert out == f"{shown}fine\n"
    assert err.splitlines()[0] == "tridecode: error: step 2 gave NaN; the turn is not kept"


def test_nan_fails_one_line(poisoned, tmp_path, run):
    """The next request does not reuse the prefix that it shares with the failed one."""
    lines = [json.dumps({"prompt": text}) for text in ("Hello, world!", "Hello", "Hello, world!")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ("generate", "--model", poisoned, "--device", "cpu", "--max-tokens", "3", "--temperature", "0")
    code, out, err = run(*options, "--jsonl", tmp_path / "in.jsonl")
    errors = ["error" in json.loads(line) for line in out.splitlines()]
    assert code == 1 and errors == [True, False, True] and err.count("NaN or Inf") == 2
    (target := tmp_path / "answer.txt").write_text("before")
    for output in ((), ("--output", target)):
        code, out, err = run(*options, "--temperature", "1", "--prompt", "Hello, world!", *output)
        assert (code, out, err.count("\n")) == (1, "", 1) and err.endswith("download it again\n")
    assert target.read_text() == "before"


def test_chat_continues_after_nan(poisoned, piped):
    options = ["--model", poisoned, "--max-tokens", "3", "--temperature", "0"]
    code, out, err = piped("Hello, world!\nHello\nHello, world!\n/clear\nHello\n", *options)
    assert code == 1 and err.count("NaN or Inf") == 2
    assert out and out == 2 * out[: len(out) // 2]


def test_closed_terminal_ends_chat(session):
    with pytest.raises(OSError, match="Input/output"):
        session([OSError(5, "Input/output error")]).handle("one")


@pytest.fixture
def lost(monkeypatch):
    """Simulate a GPU on which all calls fail."""

    def fail(device):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)


@pytest.mark.parametrize("command", ["two", "/retry"])
def test_lost_gpu_ends_chat_and_keeps_turns(session, lost, state, command):
    store = sessions.Store(sessions.named("work"))
    chat = session(["fine"], [RuntimeError("CUDA error: device-side assert triggered")], store=store)
    chat.engine.device = chat.model.device = torch.device("cuda", 0)
    assert chat.handle("one") and not chat.handle(command)
    assert chat.exit_code == 3 == DEVICE_LOST
    assert chat.read()[1].endswith("tridecode: error: cuda:0 can no longer be used by this program; the chat ends\n")
    assert sessions.read(store.path).turns == (("one", "fine"),)


def test_gpu_out_of_memory_is_not_lost(session, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    chat = session([torch.OutOfMemoryError("CUDA out of memory")], ["fine"])
    chat.engine.device = chat.model.device = torch.device("cuda", 0)
    assert chat.handle("one") and chat.handle("two")
    assert "error: out of memory; choose a smaller" in chat.read()[1] and len(chat.conversation.turns) == 1


def test_closed_pipe_ends_chat_and_keeps_turns(tiny, state):
    """In `chat | head`, the turns before the unwritten one are saved."""
    argv = ["cli.py", "chat", "--model", tiny, "--device", "cpu", "--max-tokens", "3", "--session", "work"]
    chat = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True, bufsize=1)
    chat.stdin.write("one\n")
    assert chat.stdout.readline()
    saved = sessions.named("work")
    while not saved.exists():
        assert chat.poll() is None
        time.sleep(0.01)
    chat.stdout.close()
    err = chat.communicate("two\n")[1]
    assert chat.returncode == 141 and "Traceback" not in err
    assert [user for user, _ in sessions.read(saved).turns][0] == "one"


CHAT_ON_A_BROKEN_GPU = """
import sys, torch
from tridecode import cli as commands
from tridecode.step.prompt_graphs import PromptPasses

def read(self, chunks, tokens, *others):
    if tokens > 40:  # the second turn
        torch.zeros(1, device=self.model.device)[torch.tensor([9], device=self.model.device)]

PromptPasses.read = read
sys.exit(commands.main(sys.argv[1:]))
"""


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the test makes a CUDA context fail, so it needs an NVIDIA GPU"
)
def test_device_side_assert(tiny, state):
    argv = ["chat", "--model", tiny, "--device", "cuda", "--max-tokens", "3", "--session", "work"]
    program = [sys.executable, "-c", CHAT_ON_A_BROKEN_GPU, *map(str, argv)]
    done = subprocess.run(program, cwd=ROOT, input=f"one\n{'two ' * 40}\nthree\n", capture_output=True, text=True)
    assert done.returncode == DEVICE_LOST, done.stderr
    assert "cuda:0 can no longer be used by this program" in done.stderr
    assert [user for user, _ in sessions.read(sessions.named("work")).turns] == ["one"]
