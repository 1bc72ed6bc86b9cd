"""benchmarks/agents.py: a recorded agent whose prompts end with a note that the next prompt omits."""

import json
from dataclasses import replace

import pytest
import torch
from block_check import weights_of
from hybrid import SPEC
from models import CUDA, build_engine

from benchmarks import agents
from tridecode.checkpoint.hub import BUNDLED
from tridecode.layout import SCAN
from tridecode.text.tokenizer import Tokenizer

CAPACITY, TURNS = 1024, 4
TOOL = {"name": "shell", "description": "Run a command.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def traces(tmp_path):
    """A folder with the trace of one task, and a file that is not a trace."""
    messages = [
        {"role": "system", "content": "Use the shell to repair the program. " * 4},
        {"role": "user", "content": "The tests of the parser fail. " * 3},
    ]
    with open(tmp_path / "repair.jsonl", "w", encoding="utf-8") as file:
        for turn in range(TURNS):
            note = {"role": "user", "content": f"Turn {turn + 1} of {TURNS}."}
            line = {"messages": [*messages, note], "tools": [{"type": "function", "function": TOOL}]}
            file.write(json.dumps(line) + "\n")
            call = {"index": 0, "id": f"c{turn}", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
            output = " ".join(f"line {turn}{i}" for i in range(12))
            messages.append({"role": "tool", "content": output, "tool_call_id": f"c{turn}"})
    (tmp_path / "README.md").write_text("a trace")
    return tmp_path


@pytest.fixture
def task(traces):
    [task] = agents.read_tasks(traces, Tokenizer.load(BUNDLED))
    return task


def beginning_of_note(tokens) -> int:
    """Return where the last message of the user begins, before the beginning of the answer."""
    return [i for i, token in enumerate(tokens) if token == tokens[0]][-2]


def reused(engine, task, **options) -> list[int]:
    [results] = agents.replay(engine, [task], **options)
    engine.scheduler.assert_consistent()
    return [result.usage.reused_tokens for result in results]


def test_next_prompt_resumes_before_the_note_of_the_last_one(task):
    spec = replace(SPEC, vocab_size=4096, max_position=CAPACITY)
    weights = weights_of(spec, torch.bfloat16 if CUDA else torch.float32)
    engine = build_engine(spec, weights, CAPACITY, slots=2)
    expected = [beginning_of_note(prompt.tokens) // SCAN * SCAN for prompt in task.prompts[:-1]]
    assert sorted({*expected}) == expected and expected[0] > 0, "each turn adds more than a snapshot's rounding"
    assert reused(engine, task) == [0, *expected]
    assert reused(engine, task, reuse=False) == [0] * TURNS
    dry = agents.dry_engine("hybrid", 4096, CAPACITY, slots=2)
    assert reused(dry, task) == [0, *expected]


def test_dense_model_reuses_all_common_tokens(task):
    dry = agents.dry_engine("dense", 4096, CAPACITY, slots=2)
    assert 0 < sum(reused(dry, task)) == task.possible < sum(len(prompt.tokens) for prompt in task.prompts)


def test_tasks_run_in_turn_and_share_nothing(task):
    other = replace(task, name="other")
    dry = agents.dry_engine("hybrid", 4096, CAPACITY, slots=2)
    one, two = agents.replay(dry, [task, other], together=True)
    alone = reused(agents.dry_engine("hybrid", 4096, CAPACITY, slots=2), task)
    assert [[result.usage.reused_tokens for result in results] for results in (one, two)] == [alone, alone]


def test_rows_and_command(traces, tmp_path, capsys):
    output = tmp_path / "rows.json"
    assert agents.main(["--traces", str(traces), "--dry", "hybrid", "--snapshots", "9", "--output", str(output)]) == 0
    task, every = json.loads(output.read_text())
    assert (task["task"], every["task"], every["turns"]) == ("repair", "all tasks", TURNS)
    assert 0 < task["share"] == every["share"] < task["possible"] and "ttft" not in task
    assert task["command"] == f"python -m benchmarks.agents --traces {traces} --dry hybrid --slots 2 --snapshots 9"


def test_folder_without_traces_is_refused(tmp_path, capsys):
    assert agents.main(["--traces", str(tmp_path), "--dry", "dense"]) == 1
    assert "no *.jsonl files" in capsys.readouterr().err
