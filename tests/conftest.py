"""Settings and fixtures of all tests.

Without a GPU the kernels run in Triton's interpreter, which must be selected before a kernel is imported.
"""

import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import tokenizers
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Tests do not read the user's settings. Processes that tests start inherit the variable.
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), "tridecode-tests-without-settings")
for name in [name for name in os.environ if name.startswith("TRIDECODE_")]:
    del os.environ[name]
# A parent such as nohup ignores these signals. Processes that tests start must not inherit that; a handler is not
# inherited. This process still survives a terminal that is closed.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for signum in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, lambda signum, frame: None)
TESTS = Path(__file__).parent
# Each folder may contain helper modules.
sys.path[:0] = [str(TESTS), *(str(path) for path in TESTS.iterdir() if path.is_dir())]
sys.path.append(str(TESTS.parent))  # This folder contains benchmarks/.
if not torch.cuda.is_available():
    from interpreter import quicken

    quicken()


# Files that take more than about two seconds. All others are the tests of `pytest -m quick`.
SLOW = """
    blocks/test_blocks blocks/test_declarations checkpoint/test_adapter_files checkpoint/test_bundled
    checkpoint/test_checkpoint checkpoint/test_files checkpoint/test_gguf_models checkpoint/test_host_layers
    checkpoint/test_hub checkpoint/test_methods cli/test_adapter_options cli/test_bench cli/test_bench_agents
    cli/test_bench_serve cli/test_cli cli/test_configuration cli/test_failed_turns cli/test_keyboard cli/test_looks
    cli/test_markdown cli/test_overflow cli/test_remote_chat cli/test_sessions cli/test_signals cli/test_terminal
    cli/test_waiting cli/test_windows fleet/test_fleet fleet/test_gateway kernels/attention/test_attention
    kernels/attention/test_attention_queries kernels/attention/test_fp8_kv kernels/attention/test_prompt_attention
    kernels/linear/test_adapter_kernels kernels/linear/test_matmul kernels/linear/test_matvec
    kernels/linear/test_packed kernels/sampling/test_greedy kernels/sampling/test_sample kernels/test_prefill_ops
    plan/test_model_switch plan/test_threads serve/test_adapter_requests serve/test_batch_slots serve/test_requests
    serve/test_scheduler serve/test_streams server/test_adapter_models server/test_page server/test_page_markdown
    server/test_server server/test_server_life server/test_tool_calls state/test_offload step/test_adapter_passes
    step/test_batch_invariant step/test_compile step/test_long_prompts step/test_rows step/test_runners
    step/test_speculation step/test_step test_agents test_bad_input test_documents text/test_encoder
    text/test_gguf_tokenizer text/test_ready text/test_sandbox text/test_structured text/test_templates
    text/test_text text/test_thinking text/test_tokenizer
""".split()


def pytest_collection_modifyitems(items):
    for item in items:
        slow = item.path.relative_to(TESTS).with_suffix("").as_posix() in SLOW or item.get_closest_marker("download")
        if not slow:
            item.add_marker("quick")


def pytest_sessionstart(session):
    """If pytest-xdist runs several test processes, share the CPUs: fewer threads, and no processes that compile."""
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
        from tridecode.plan import threads
        from tridecode.step import compiling

        threads.use(max(len(os.sched_getaffinity(0)) // workers, 1))
        if torch.cuda.is_available():
            compiling.MAX_WORKERS, compiling.MAX_IN_PROCESS = 2, sys.maxsize


def pytest_addoption(parser):
    parser.addoption("--template-dir", metavar="DIR", help="chat templates of public models (*.jinja) for the tests")


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    """A directory that contains only the tiny tokenizer. Tests only read it."""
    from checkpoints import write_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(path):
    from tridecode.text.tokenizer import Tokenizer

    return Tokenizer.load(path)


@pytest.fixture(scope="session")
def plain(path):
    """The same tokenizer as an object of the tokenizers library."""
    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The directory of this test's history and sessions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tridecode"


@pytest.fixture
def session(capsys, state):
    """A Chat on a chats.Script; its read() returns what it wrote to stdout and stderr."""
    from chats import Script

    from tridecode import SamplingParams
    from tridecode.cli.chat.conversation import Conversation
    from tridecode.cli.chat.local import LocalModel
    from tridecode.cli.chat.talk import Chat
    from tridecode.cli.terminal import Output

    def make(*answers, raw=False, params=None, **options):
        script = Script(*answers)
        chat = Chat(LocalModel(script), Output(), Conversation(raw), **options)
        chat.params, chat.engine = params or SamplingParams(), script
        chat.read = lambda: tuple(capsys.readouterr())
        return chat

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny model with random weights; tests only read it."""
    from checkpoints import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")


@pytest.fixture
def run(capsys):
    """Run the program in this process; returns exit code, stdout, stderr."""
    from tridecode import cli as commands

    def run(*argv):
        try:
            code = commands.main([str(arg) for arg in argv])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def piped(run, monkeypatch, state):
    """Run `chat` on lines from a pipe; returns exit code, stdout, stderr."""

    def piped(text, *argv):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return run("chat", *(() if "--url" in argv else ("--device", "cpu")), *argv)

    return piped


@pytest.fixture(scope="session")
def engine(tiny):
    """A tiny model with random weights on the CPU, for the fixture `generate`."""
    from tridecode import Engine

    return Engine.load(tiny, device="cpu")


@pytest.fixture
def generate(run, engine, monkeypatch):
    """Run `generate` in this process on one engine; returns exit code, stdout, stderr. stdin: bytes, or a stream."""
    from tridecode import Engine

    monkeypatch.setattr(Engine, "load", lambda *args, **kwargs: engine)

    def generate(*argv, stdin=b""):
        stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8") if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr("sys.stdin", stream)
        return run("generate", *argv)

    return generate


@pytest.fixture
def seen(engine, monkeypatch):
    """The prompts and parameters that reach the engine."""
    found, submit = [], engine.submit

    def spy(prompt, params=None, **options):
        found.append((prompt, params, options))
        return submit(prompt, params, **options)

    monkeypatch.setattr(engine, "submit", spy)
    return found


@pytest.fixture(scope="session")
def endless(tmp_path_factory):
    """A model with a long context and without stop tokens, whose answers end only when they are stopped."""
    from checkpoints import write_tiny

    path = write_tiny(tmp_path_factory.mktemp("chat") / "endless", "qwen3", max_position_embeddings=60_000)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    return path


@pytest.fixture
def terminal(state):
    """Start a chat in a pseudo-terminal; `child.screen` contains its whole output.

    `early` is typed while the chat starts; the fixture then returns without waiting for the prompt.
    """
    from chats import ENVIRONMENT, READY, ROOT

    pexpect = pytest.importorskip("pexpect")
    children = []

    def terminal(*argv, early=None, **environment):
        child = pexpect.spawn(
            sys.executable,
            ["cli.py", "chat", *(() if "--url" in argv else ("--device", "cpu")), *map(str, argv)],
            cwd=str(ROOT),
            env=ENVIRONMENT | {"XDG_STATE_HOME": str(state.parent)} | environment,
            encoding="utf-8",
            codec_errors="replace",  # A read may end within a multi-byte character.
            timeout=120,  # Only a chat that hangs reaches this limit.
            dimensions=(50, 200),
        )
        children.append(child)
        child.screen = child.logfile_read = io.StringIO()
        if early is not None:
            child.expect_exact("2004h")  # The terminal is in bracketed paste mode.
            child.send(early)
            return child
        child.expect_exact("/help lists the commands")
        child.expect_exact(READY)
        return child

    yield terminal
    for child in children:
        child.close(force=True)
        assert "Traceback" not in child.screen.getvalue() and "Exception" not in child.screen.getvalue()
