"""Tests of options: one declaration serves the command line, environment, configuration file, Python and docs."""

import re
import runpy
from dataclasses import dataclass

import pytest
import torch
from checkpoints import write_tiny
from models import tiny_config

from tridecode import Engine
from tridecode.arguments import Choice, Flag, Integer, Number, Pair, Several, Text, option, options_of
from tridecode.checkpoint.hub import BUNDLED
from tridecode.cli import options as declared
from tridecode.cli.configuration import config_path
from tridecode.cli.options import CONFIGURED, engine_options, options_for
from tridecode.cli.parser import make_parser
from tridecode.errors import DeviceError, ParameterError
from tridecode.models.presets import PRESETS
from tridecode.options import CHUNK, GRAPHS, MAX_SLOTS, OPTIONS, PAGE, EngineOptions
from tridecode.plan import memory
from tridecode.plan.resolve import resolve
from tridecode.state import kv
from tridecode.step import dispatch, prompt

ROOT = BUNDLED.parents[1]
GIB = 2**30


@dataclass(frozen=True)
class More(EngineOptions):
    """The engine's options with an additional one."""

    warm: int = option(3, Integer(1, 9), "passes before the first", group="memory", commands=("chat",), metavar="N")


@pytest.fixture
def more(monkeypatch, tmp_path):
    """Add the options of the class More to the commands; returns a function that writes config.toml."""
    monkeypatch.setattr(declared, "OPTIONS", options_of(More))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config_path().parent.mkdir()
    return config_path().write_text


def test_a_new_field_is_an_option_everywhere(more, monkeypatch, capsys):
    def warm(*argv):
        args = make_parser().parse_args(["chat", *argv])
        return More(**engine_options(args)).warm

    assert warm() == 3 and warm("--warm", "5") == 5
    more("warm = 6\n")
    assert warm() == 6
    monkeypatch.setenv("TRIDECODE_WARM", "7")
    assert warm() == 7 and warm("--warm", "5") == 5
    assert More(warm=8).warm == 8
    with pytest.raises(ParameterError, match="^warm must be an integer from 1 to 9, got 10$") as refused:
        More(warm=10)
    assert (refused.value.argument, refused.value.code) == ("warm", "range")
    for argv in (["chat", "--warm", "10"], ["chat", "--help-all"]):
        with pytest.raises(SystemExit):
            make_parser().parse_args(argv)
    out, err = capsys.readouterr()
    assert "argument --warm: expected an integer from 1 to 9, got '10'" in err and "--warm N" in out
    row = runpy.run_path(str(ROOT / "docs" / "record_options.py"))["row"]
    assert row(options_of(More)["warm"]) == "| `--warm N` | passes before the first | 3 |\n"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_option_tables_match_declarations(page):
    text = page.read_text(encoding="utf-8")
    recorded = runpy.run_path(str(ROOT / "docs" / "record_options.py"))["recorded"]
    assert recorded(text) == text, "run python docs/record_options.py"


def test_every_option_is_in_the_docs():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for command in CONFIGURED:
        for each in options_for(command).values():
            assert f"`{each.flag}" in text


KEYWORDS = (
    "device", "backend", "dtype", "max_seq_len", "slots", "kv_tokens", "kv_offload", "kv_ring", "weights_offload",
    "graph", "graph_sizes", "attention", "chunk_tokens", "max_queue", "prompt_graph_max_tokens", "prompt_graph_sizes",
    "prompt_attention", "prompt_ms", "prefix_sharing", "batch_invariant", "quantize", "quantize_head", "kv_dtype",
    "speculate", "speculate_ngram",
)  # fmt: skip
FLAGS = {
    "chat": """--model --device --backend --dtype --quantize --quantize-head --kv-dtype --max-seq-len --slots
        --kv-tokens --kv-offload --kv-ring --weights-offload --chunk-tokens --graph --attention --graph-sizes
        --prompt-graph-max-tokens --prompt-graph-sizes --no-prompt-graphs --prompt-attention --no-prefix-sharing
        --batch-invariant --speculate --speculate-ngram --prompt-ms --graph-stats --quiet --temperature --top-k --top-p
        --min-p --repetition-penalty --presence-penalty --frequency-penalty --logit-bias --seed --max-tokens --stop
        --stop-token-ids --ignore-eos --raw --url --api-key-file --resume --session --system --plain --think --stats
        --overflow""",
    "generate": """--prompt --prompt-ids --messages --jsonl --unordered --max-queue --system --allow-special --n
        --output --json --logprobs --json-schema --regex --choice --grammar --no-reuse-prefix --raw --quiet
        --graph-stats --seed --slots""",
    "serve": """--host --port --served-model-name --any-model --max-queue --timeout --grace --api-key-file
        --ssl-certfile --ssl-keyfile --cors --log-prompts --slots --model --allow-host --max-connections
        --timeout-keep-alive""",
    "info": "--json --kernels --model --slots --speculate",
}


def test_published_keywords_exist():
    assert set(KEYWORDS) <= OPTIONS.keys()


@pytest.mark.parametrize("command", FLAGS)
def test_published_flags_exist(command, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help-all"])
    assert set(FLAGS[command].split()) <= set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


def test_constants_match_their_modules():
    """options.py does not import torch, and therefore repeats constants of modules that do."""
    assert (*GRAPHS,) == (*dispatch.MODES,) and MAX_SLOTS == dispatch.SIZES[-1]
    assert PAGE == kv.PAGE and CHUNK == prompt.CHUNK
    assert OPTIONS["prompt_attention"].constraint.choices == ("auto", *dispatch.PROMPT_ATTENTION)
    assert OPTIONS["attention"].constraint.choices == (*dispatch.ATTENTION,)


@pytest.mark.parametrize(
    "constraint, good, wrong",
    [
        (Choice(("a", "b")), {"a": "a"}, [("c", "choice"), (5, "choice")]),
        (
            Integer(1, 9),
            {"9": 9, " 1 ": 1},
            [(0, "range"), (10, "range"), (True, "type"), ("5", "type"), (1.0, "type")],
        ),
        (Number(0, 1, above=True), {"0.5": 0.5, "1": 1.0}, [(0, "range"), (float("nan"), "range"), ("1", "type")]),
        (Number(1, 2, words=("auto",)), {"auto": "auto", "2": 2.0}, [("none", "type"), (3, "range")]),
        (Flag(), {"on": True, "false": False}, [(1, "type"), ("yes", "type")]),
        (Text("a name", "[a-z]+"), {"ab": "ab"}, [("A", "choice"), (5, "type")]),
        (
            Several(Integer(1, 9), "ascending", ascending=True),
            {"1,3": (1, 3)},
            [([3, 1], "range"), ([], "type"), (5, "type"), ([0], "range"), ({1, 2}, "type"), (bytearray(b"1"), "type")],
        ),
        (Pair(9, (4, 2)), {"4:2": (4, 2), "4,2": (4, 2)}, [((2, 4), "range"), ((4, 2, 1), "type"), ("4:2", "type")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_constraints(constraint, good, wrong):
    for text, value in good.items():
        assert constraint.parse(text) == value == constraint.check("x", value)
    for value, code in wrong:
        with pytest.raises(ParameterError, match="^x(: every entry)? must be ") as refused:
            constraint.check("x", value)
        assert (refused.value.argument, refused.value.code) == ("x", code)
    with pytest.raises(ParameterError, match="(^expected|must be) .*, got '%'$"):
        constraint.parse("%")


def test_an_engine_is_planned_once(monkeypatch, tmp_path):
    calls = []

    def counted(name, real):
        return lambda *args, **options: calls.append(name) or real(*args, **options)

    from tridecode import engine
    from tridecode.plan import resolve as module

    monkeypatch.setattr(engine, "resolve", counted("resolve", engine.resolve))
    for name in ("plan_graphs", "plan_drafts", "plan_kv"):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    Engine.load(write_tiny(tmp_path, "qwen3"), device="cpu").close()
    assert calls == ["resolve", "plan_graphs", "plan_drafts", "plan_kv"]


def test_plan_that_does_not_fit_suggests_options(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 8 * GIB)
    plan = resolve(EngineOptions(dtype="bfloat16"), PRESETS["llama-3.1-8b"], torch.device("cuda"))
    assert (
        plan.capacity == 0 and "choose a smaller model or free memory; with quantize=int4 the weights" in plan.problem
    )
    with pytest.raises(DeviceError, match="and fit$"):
        plan.check()
    fitting = resolve(EngineOptions(dtype="bfloat16", quantize="int4"), PRESETS["llama-3.1-8b"], torch.device("cuda"))
    assert fitting.problem is None and fitting.capacity > 0
    assert sum(fitting.pools.values()) <= fitting.memory.usable


def test_pools_add_up_to_required_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    plan = resolve(EngineOptions(slots=4), tiny_config(), torch.device("cpu"))
    assert sum(plan.pools.values()) == plan.memory.needed(plan.capacity, plan.kv_tokens)
    assert plan.pools["kv"] == plan.kv_tokens * plan.memory.kv_per_token and min(plan.pools.values()) > 0
