"""Replay of recorded agents: the share of their prompts that is reused, and the time to the first token.

    python -m benchmarks.agents --traces FOLDER --preset qwen3.5-4b --tokenizer FOLDER    # GPU only
    python -m benchmarks.agents --traces FOLDER --model FOLDER                            # any machine
    python -m benchmarks.agents --traces FOLDER --dry hybrid --tokenizer FOLDER           # counts of tokens only

Each turn of a task is a request with the messages and tools of its trace, rendered as a server renders them. The
answer is the one of the trace, which the next turn contains, so a request generates only one token. Each task has a
salt of its own, so no task reuses the prompts of another one. --no-reuse computes all prompts.

--dry runs the scheduler, the pages, the prefix tree and the snapshots of an engine whose prompt passes compute nothing.

A trace is a file of JSON lines, one a turn, with "messages" and "tools" as in OpenAI's chat API. The wheel of
agentperf-local contains traces in agentperf_local/data/replays/agentperf-default-v1/traces. This gets the wheel:

    pip download --no-deps --python-version 3.12 --only-binary=:all: agentperf-local && unzip agentperf_local-*.whl
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tridecode import Engine, SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.checkpoint.hub import resolve_model
from tridecode.checkpoint.load import load_config, random_weights
from tridecode.cli.bench.measure import preset_engine, run_facts
from tridecode.cli.bench.run import with_commands
from tridecode.cli.inputs import loads
from tridecode.errors import GenerationError, ParameterError, counted
from tridecode.layout import packed
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan.memory import GIB
from tridecode.plan.resolve import resolve
from tridecode.results import Result
from tridecode.server.messages import chat_messages
from tridecode.server.tools.toolset import openai_tools
from tridecode.state.records import snapshot_bytes
from tridecode.state.slots import common_prefix
from tridecode.step.workspace import named_tensors
from tridecode.text.prompt import Encoded
from tridecode.text.tokenizer import Tokenizer
from tridecode.version import __version__

from .rows import AgentsRow, options, run

ONE_TOKEN = SamplingParams(temperature=0.0, seed=1, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Task:
    """A recorded task: the prompts of its turns."""

    name: str
    prompts: list[Encoded]

    @property
    def possible(self) -> int:
        """Number of tokens that a prompt has in common with the prompt before it, of all prompts."""
        tokens = [prompt.tokens for prompt in self.prompts]
        return sum(min(common_prefix(one, other), len(other) - 1) for one, other in zip(tokens, tokens[1:]))


def row_of(name: str, tasks: Sequence[Task], results: Sequence[Result], timed: bool, **facts) -> AgentsRow:
    """Return the figures of these tasks, whose turns have the `results`."""
    prompts = sum(result.usage.prompt_tokens for result in results)
    reused = sum(result.usage.reused_tokens for result in results)
    seconds = np.array([result.timings.ttft for result in results])
    return AgentsRow(
        task=name,
        turns=len(results),
        prompt_tokens=prompts,
        reused_tokens=reused,
        share=reused / prompts,
        possible=sum(task.possible for task in tasks) / prompts,
        ttft=float(np.median(seconds)) if timed else None,
        ttft_p99=float(np.percentile(seconds, 99)) if timed else None,
        **facts,
    )


def read_tasks(folder: Path, tokenizer: Tokenizer) -> list[Task]:
    """Read the traces of a folder. Raises ParameterError, or the error of a server for an invalid trace."""
    tasks = []
    for path in sorted(folder.glob("*.jsonl")):
        turns = [loads(line) for line in path.read_bytes().splitlines()]
        tasks.append(Task(path.stem, [encode(turn, tokenizer) for turn in turns]))
    if not tasks:
        raise ParameterError(f"--traces {folder}: no *.jsonl files; see python -m benchmarks.agents --help")
    return tasks


def encode(turn: dict, tokenizer: Tokenizer) -> Encoded:
    """Return the prompt of a turn, as a server encodes it."""
    tools = openai_tools(turn["tools"], None, None)
    messages, variables = tools.render(chat_messages(turn["messages"]), tokenizer)
    return Encoded(packed(tokenizer.encode_chat(messages, **variables)), chat=True)


def replay(engine: Engine, tasks: Sequence[Task], reuse: bool = True, together: bool = False) -> list[list[Result]]:
    """Run the turns of each task in order; return their results.

    Args:
        reuse: whether requests reuse prefixes.
        together: all tasks run their first turn, then their second one, instead of one task after the other.
    """
    turns = [(number, turn) for number, task in enumerate(tasks) for turn in range(len(task.prompts))]
    if together:
        turns.sort(key=lambda each: each[1])
    results: list[list[Result]] = [[] for _ in tasks]
    for number, turn in turns:
        task = tasks[number]
        request = engine.submit(task.prompts[turn], ONE_TOKEN, reuse_prefix=reuse, cache_salt=task.name)
        result = request.result()
        if result.finish_reason != "length":
            raise GenerationError(f"{task.name}, turn {turn + 1}: {result.error or result.finish_reason}")
        results[number].append(result)
    return results


def dry_spec(kind: str, vocab_size: int, capacity: int) -> ModelSpec:
    """Return a tiny model, with recurrent state if `kind` is hybrid."""
    mlp = MLP(hidden=16, intermediate=16)
    attention = Layer(Attention(hidden=16, heads=1, kv_heads=1, head_dim=16), mlp)
    delta = Layer(GatedDelta(hidden=16, key_heads=1, value_heads=1, key_dim=16, value_dim=16), mlp)
    layers = {"dense": (attention,), "hybrid": (delta, attention)}[kind]
    return ModelSpec("dry", 16, vocab_size, capacity, layers, tie_word_embeddings=True)


def dry_engine(kind: str, vocab_size: int, capacity: int, **chosen) -> Engine:
    """Build an engine on the CPU whose prompt passes compute nothing: it only schedules and counts."""
    spec, device = dry_spec(kind, vocab_size, capacity), torch.device("cpu")
    requested = EngineOptions(max_seq_len=capacity, speculate="off", dtype="float32", backend="torch", **chosen)
    plan = resolve(requested, spec, device)
    plan.check()
    engine = Engine.build(plan, random_weights(spec, device, plan.dtype), name=f"dry {kind}")
    for tensor in named_tensors(engine.model.prompt).values():
        tensor.zero_()  # the end of a pass reads them, and NaN would end the request
    engine.prompts.enqueue = lambda mode, key: None  # type: ignore[method-assign]
    return engine


def spec_of(args, vocab_size: int, longest: int) -> ModelSpec:
    """Return the model that the arguments select; a dry one has positions for the longest prompt."""
    if args.dry:
        return dry_spec(args.dry, vocab_size, longest + 1)
    return PRESETS[args.preset] if args.preset else load_config(resolve_model(args.model, weights=False))


def make_engine(args, spec: ModelSpec, capacity: int) -> Engine:
    """Return the engine that the arguments select."""
    chosen = {"slots": args.slots, "kv_tokens": args.kv_tokens}
    if args.snapshots is not None:
        dtype = torch.bfloat16 if torch.cuda.is_available() and not args.dry else torch.float32
        chosen["snapshot_memory"] = (args.snapshots + 0.5) * snapshot_bytes(spec, dtype) / GIB
    if args.dry:
        return dry_engine(args.dry, spec.vocab_size, capacity, **chosen)
    if args.preset:
        return preset_engine(args.preset, capacity, **chosen)
    return Engine.load(args.model, max_seq_len=capacity, speculate="off", **chosen)


def fitting(tasks: Sequence[Task], capacity: int, output) -> list[Task]:
    """Return the tasks without the turns whose prompts do not fit into a context."""
    fit = [Task(task.name, [each for each in task.prompts if len(each.tokens) < capacity]) for task in tasks]
    if omitted := sum(len(task.prompts) for task in tasks) - sum(len(task.prompts) for task in fit):
        output.note(f"{counted(omitted, 'turn')} of {capacity:,} tokens or more omitted: the model's limit")
    if not (left := [task for task in fit if task.prompts]):
        raise ParameterError(f"no prompt fits into the {capacity:,} positions of the model")
    return left


def measure(args, output) -> list[AgentsRow]:
    """Replay the traces; return a row for each task, and one for all of them."""
    source = args.tokenizer or args.model
    tokenizer = Tokenizer.load(resolve_model(source, weights=False))
    output.note(f"tokens are those of {source or 'the bundled model'}")
    tasks = read_tasks(Path(args.traces), tokenizer)
    longest = max(len(prompt.tokens) for task in tasks for prompt in task.prompts)
    spec = spec_of(args, tokenizer.vocab_size, longest)
    capacity = min(longest + 1, spec.max_position)
    tasks = fitting(tasks, capacity, output)
    with make_engine(args, spec, capacity) as engine:
        for size in (64, 512, 2048, 2048):  # the first passes of their sizes take longer
            ids = [token % spec.vocab_size for token in range(min(size, capacity - 1))]
            engine.submit(ids, ONE_TOKEN, reuse_prefix=False, cache_salt="warm-up").result()
        results = replay(engine, tasks, not args.no_reuse, args.together)
        facts = run_facts(engine.device) if engine.device.type == "cuda" else {"tridecode": __version__}
    facts |= {"preset": args.preset, "model": f"dry {args.dry}" if args.dry else args.model, "timed": not args.dry}
    rows = [row_of(task.name, [task], own, **facts) for task, own in zip(tasks, results)]
    rows.append(row_of("all tasks", tasks, [result for own in results for result in own], **facts))
    return with_commands("python -m benchmarks.agents", args, rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = options("agents", __doc__)
    add = parser.add_argument
    add("--traces", required=True, metavar="FOLDER", help="folder of *.jsonl files, one a task")
    add("--tokenizer", metavar="FOLDER", help="tokenizer and chat template (the model's, or the bundled one)")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--preset", choices=list(PRESETS), metavar="NAME", help="shape of a public model, random weights"
    )
    model.add_argument("--model", metavar="FOLDER", help="a checkpoint")
    model.add_argument("--dry", choices=["dense", "hybrid"], help="compute no prompts, only count tokens")
    add("--no-reuse", action="store_true", help="compute all prompts")
    add("--together", action="store_true", help="all tasks run their first turn, then their second one, and so on")
    add("--slots", type=int, default=2, metavar="N", help="slots of the engine (2)")
    add("--kv-tokens", type=int, metavar="N", help="K/V positions of all requests")
    add("--snapshots", type=int, metavar="N", help="number of snapshots of recurrent state (the engine's default)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return run(args, lambda output: measure(args, output))


if __name__ == "__main__":
    sys.exit(main())
