"""Run the benches of a suite in one process. Each row names the command that measures only this row.

    python -m benchmarks.suite targets --output rows.json --compare benchmarks/h200.json

A failed row is reported, the other rows are written, and the exit code is 1.
"""

import shlex
import sys

from benchmarks import offload, peers
from benchmarks.rows import options, run
from tridecode.cli.bench.measure import need_gpu
from tridecode.cli.bench.rows import Row
from tridecode.cli.bench.run import measure
from tridecode.cli.explain import explain
from tridecode.cli.parser import make_parser
from tridecode.cli.terminal import counted

# A line contains the options of `bench`, or of a script in SCRIPTS.
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
    "adapters": """
        batch --preset qwen3-4b --rows 1,8,32,64 --context 64 --random-adapters 1,16,64
        batch --preset qwen3-4b --rows 1 --context 64 --random-adapters 1 --rank 64
        batch --preset llama-3.1-8b --rows 1,8,32,64 --context 64 --random-adapters 1
    """,
    "few-bits": """
        batch --preset qwen3-0.6b --quantize fp8 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset qwen3-0.6b --quantize int4 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset qwen3-4b --quantize fp8 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset qwen3-4b --quantize int4 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset llama-3.1-8b --quantize fp8 --rows 1,8,16,32,64 --context 64 --runs 5
        batch --preset llama-3.1-8b --quantize int4 --rows 1,8,16,32,64 --context 64 --runs 5
    """,
    "gguf": """
        decode --preset qwen3-8b --gguf q4_k_m --context 64 --runs 5
        decode --preset qwen3-8b --gguf q4_k_m --context 4096 --runs 3
        decode --preset qwen3-8b --gguf q4_k_m --context 32000 --runs 3
        decode --preset qwen3-8b --gguf q8_0 --context 64 --runs 5
        decode --preset qwen3-4b --gguf q4_k_m --context 64 --runs 5
        decode --preset llama-3.1-8b --gguf q4_k_m --context 64 --runs 5
        batch --preset qwen3-8b --gguf q4_k_m --rows 1,8,32,64 --context 64 --runs 5
        batch --preset qwen3-8b --gguf q8_0 --rows 8,32,64 --context 64 --runs 5
        batch --preset qwen3-4b --gguf q4_k_m --rows 8,32,64 --context 64 --runs 5
        prefill --preset qwen3-8b --gguf q4_k_m --prompt-tokens 64,512,2048 --runs 3
        prefill --preset qwen3-4b --gguf q4_k_m --prompt-tokens 64,512,2048 --runs 3
    """,
    "experts": """
        batch --preset qwen3-30b-a3b --rows 1,3,8,32,64 --context 64 --runs 5
        decode --preset qwen3-30b-a3b --context 8000 --runs 3
        decode --preset qwen3-30b-a3b --context 32000 --runs 3
        prefill --preset qwen3-30b-a3b --prompt-tokens 64,512,2048 --runs 5
        prefill --preset qwen3-30b-a3b --prompt-tokens 8192 --runs 3
        batch --preset qwen3-30b-a3b --quantize int4 --rows 1,8,32,64 --context 64 --runs 5
        batch --preset qwen3-30b-a3b --quantize fp8 --rows 1,8,32,64 --context 64 --runs 5
        decode --preset qwen3-30b-a3b --gguf q4_k_m --context 64 --runs 5
        batch --preset qwen3.6-35b-a3b --rows 1,8,32,64 --context 64 --runs 5
        prefill --preset qwen3.6-35b-a3b --prompt-tokens 64,512,2048 --runs 3
        batch --preset qwen3.6-35b-a3b --quantize int4 --rows 1,8,32,64 --context 64 --runs 5
        decode --preset qwen3.6-35b-a3b --quantize fp8 --context 64 --runs 5
        decode --preset qwen3-next-80b-a3b --quantize fp8 --context 64 --runs 5
        decode --preset qwen3-next-80b-a3b --quantize int4 --context 64 --runs 5
    """,
    "hybrid": """
        decode --preset qwen3.5-0.8b --context 64 --runs 5
        batch --preset qwen3.5-4b --rows 1,8,32,64 --context 64 --runs 5
        batch --preset qwen3.5-4b --state-dtype float16 --rows 1,8,32,64 --context 64 --runs 5
        decode --preset qwen3.5-4b --context 32000 --runs 3
        decode --preset qwen3.5-4b --context 128000 --runs 3
        prefill --preset qwen3.5-4b --prompt-tokens 64,512,2048,32000 --runs 3
        decode --preset qwen3.5-27b --context 64 --runs 5
        batch --preset qwen3.5-27b --rows 8,32,64 --context 64 --runs 5
        decode --preset qwen3.5-27b --quantize fp8 --context 64 --runs 5
        decode --preset qwen3.5-27b --quantize int4 --context 64 --runs 5
        batch --preset qwen3.5-27b --quantize int4 --rows 8,32,64 --context 64 --runs 5
    """,
    "prompts": """
        prefill --preset qwen3-4b --prompt-tokens 64,512,2048,8192,32000 --graph MODES
        prefill --preset qwen3-4b --prompt-tokens 64 --cached 2000 --graph MODES
        prefill --preset qwen3-0.6b --prompt-tokens 64,512,2048 --graph MODES
        prefill --preset qwen3-0.6b --prompt-tokens 64 --cached 2000 --graph MODES
        serve --mix --preset qwen3-4b --graph MODES
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
        offload-ways --preset qwen3-4b --context 32000 --runs 3 --steps 8
        offload --preset llama-3.1-8b --prompt-tokens 128000 --kv-gib 4
        offload --preset qwen3-4b --context 64 --weights 4 --runs 3 --steps 8
        offload --preset qwen3-4b --context 32000 --swap --runs 3
    """,
}
SCRIPTS = {"peers": peers, "offload-ways": offload}


def parse(line: str) -> tuple:
    """Return the options of a line, and the function that measures its rows."""
    name, *argv = shlex.split(line)
    if name in SCRIPTS:
        return SCRIPTS[name].parse(argv), SCRIPTS[name].measure
    return make_parser().parse_args(["bench", name, *argv]), measure


def lines_of(suite: str) -> list[str]:
    return [line.strip() for line in SUITES[suite].strip().split("\n")]


def run_suite(lines: list[str], output) -> tuple[list[Row], list[str]]:
    """Run the lines, report each result, and return the rows and the failed lines."""
    rows: list[Row] = []
    failed: list[str] = []
    for number, line in enumerate(lines, 1):
        output.note(f"[{number}/{len(lines)}] {line}")
        try:
            args, measured = parse(line)
            measured_rows = measured(args, output)
        except Exception as error:  # Continue with the other lines.
            failed.append(line)
            output.error(f"{line}: {explain(error)}")
            continue
        rows += measured_rows
        for row in measured_rows:
            figures = ", ".join(f"{name} {value}" for name, value in row.compared().items())
            named = row.variant or getattr(row, "graph", None) or counted(getattr(row, "rows", None) or 1, "row")
            output.note(f"{named}: {figures}")
    return rows, failed


def main(argv: list[str] | None = None) -> int:
    parser = options("suite", __doc__)
    parser.add_argument(
        "suite", nargs="?", choices=list(SUITES), default="targets", help="name of the suite (default: targets)"
    )
    args = parser.parse_args(argv)
    failed: list[str] = []

    def measured(output) -> list[Row]:
        need_gpu()
        rows, failures = run_suite(lines_of(args.suite), output)
        failed.extend(failures)
        return rows

    return run(args, measured) or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
