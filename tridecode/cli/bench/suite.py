"""bench suite: every row of a file of benchmarks/ in one process; each row names the command that makes it alone."""

import shlex

from ..explain import explain
from ..parser import make_parser
from ..terminal import counted
from .measure import need_gpu
from .report import COMPARED

SUITES = {
    "targets": """
        decode --preset llama-3.2-1b --context 32 --steps 127 --capacity 16384
        decode --preset qwen3-0.6b --context 64
        decode --preset qwen3-4b --context 64
        decode --preset llama-3.1-8b --context 64
        decode --preset qwen3-8b --context 64
        decode --preset qwen3-4b --context 1024
        decode --preset llama-3.2-1b --context 1024
        decode --preset qwen3-4b --context 4096
        decode --preset qwen3-4b --context 32000
        decode --preset qwen3-4b --context 64 --sampling all
        stream --preset qwen3-4b --context 64
        stream --preset qwen3-0.6b --context 64
        prefill --preset qwen3-4b --prompt-tokens 2048
        prefill --preset qwen3-4b --prompt-tokens 64
        start --preset qwen3-4b
    """,
    "batch": """
        batch --preset qwen3-4b --rows 1,2,4,8,16,32,64 --context 64
        batch --preset qwen3-4b --rows 8 --context 64 --sampling all
        batch --preset qwen3-4b --rows 32 --context 1024
        batch --preset qwen3-4b --context 32000x1+64x31
        batch --preset qwen3-0.6b --rows 1,2,4,8,16,32,64 --context 64
        batch --preset qwen3-0.6b --rows 8 --context 64 --sampling all
    """,
    "few-bits": """
        batch --preset qwen3-0.6b --quantize fp8 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset qwen3-0.6b --quantize int4 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset qwen3-4b --quantize fp8 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset qwen3-4b --quantize int4 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset llama-3.1-8b --quantize fp8 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset llama-3.1-8b --quantize int4 --rows 1,8,16,32,64 --context 64 --runs 5
    """,
    "prompts": """
        prefill --preset qwen3-4b --prompt-tokens 64,512,2048,8192,32000 --graph MODES
        prefill --preset qwen3-4b --prompt-tokens 64 --cached 2000 --graph MODES
        prefill --preset qwen3-0.6b --prompt-tokens 64,512,2048 --graph MODES
        prefill --preset qwen3-0.6b --prompt-tokens 64 --cached 2000 --graph MODES
        serve-mix --preset qwen3-4b --graph MODES
    """.replace("MODES", "full,full_and_piecewise,full_decode_only"),
    "ladder": """
        decode --preset qwen3-0.6b --ablate
        decode --preset qwen3-4b --ablate
    """,
    "peers": """
        peers --preset qwen3-0.6b --runs 3
        peers --preset qwen3-4b --runs 3
    """,
    "offload": """
        offload --preset qwen3-4b --context 32000 --runs 3 --steps 8
        offload --preset llama-3.1-8b --prompt-tokens 128000 --kv-gib 4
        offload --preset qwen3-4b --context 64 --weights 4 --runs 3 --steps 8
        offload --preset qwen3-4b --context 32000 --swap --runs 3
    """,
}
UNSAID = ("command", "what", "verbose", "format", "output", "compare", "api_key_file")


def suite_args(suite: str) -> list:
    """The parsed options of each line of a suite."""
    parser = make_parser()
    return [parser.parse_args(["bench", *shlex.split(line)]) for line in SUITES[suite].strip().split("\n")]


def command_of(args, **changes) -> str:
    """The command line that makes a row alone, every option that counts named."""
    words = ["python", "cli.py", "bench", args.what]
    for name, value in (vars(args) | changes).items():
        if name in UNSAID or value is None or value is False or (name == "preset" and getattr(args, "model", None)):
            continue
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, value if isinstance(value, str) else numbers(value)]
    return shlex.join(words)


def numbers(value: float | list | tuple) -> str:
    """As its option reads it: numbers of a list are separated by commas, those of a pair like 4:2 by a colon."""
    if isinstance(value, list | tuple):
        return (":" if isinstance(value, tuple) else ",").join(map(str, value))
    return str(value)


def suite(args, output, measure) -> tuple[list[dict], list[str]]:
    """The rows that `measure(args)` gives for each command, and those commands that failed; each is told as it ends."""
    need_gpu()
    rows, failed = [], []
    commands = suite_args(args.suite)
    for number, row_args in enumerate(commands, 1):
        command = command_of(row_args)
        output.note(f"[{number}/{len(commands)}] {command}")
        try:
            found = measure(row_args)
            rows += found
            for row in found:
                figures = ", ".join(f"{key} {row[key]}" for key in COMPARED[row["bench"]])
                named = row.get("variant") or row.get("graph") or counted(row.get("rows", 1), "row")
                output.note(f"{named}: {figures}")
        except Exception as error:  # the other rows are worth having
            failed.append(command)
            output.error(f"{command}: {explain(error)}")
    return rows, failed
