"""The cost of Markdown in `chat`: tokens per second of `chat` in a terminal against `generate --output FILE`.

    python -m benchmarks.chat_speed                       # the bundled model
    python -m benchmarks.chat_speed --preset qwen3-0.6b   # a checkpoint of that shape, with random weights

Each run is a separate process, and the two commands alternate. The last line is one JSON object. The script needs
pexpect. With --preset it also needs transformers, which writes the checkpoint (1.2 GB for qwen3-0.6b) into a temporary
directory.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pexpect

from benchmarks.checkpoint import PRESETS, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SPEED = re.compile(r"([\d,]+) tokens · ([\d,.]+) tok/s")
PROMPT = "Tell me a long story about a snail."


def command(kind: str, args, *more: str) -> list[str]:
    options = ["--max-tokens", str(args.tokens), "--ignore-eos", "--seed", "1", "--speculate", "off", *more]
    return [sys.executable, str(ROOT / "cli.py"), kind, *options, *(["--model", args.model] if args.model else [])]


def chat(args) -> float:
    program, *argv = command("chat", args)
    child = pexpect.spawn(program, argv, encoding="utf-8", dimensions=(40, 100), timeout=600)
    child.expect_exact("\x1b[?2004h")  # The prompt reads keys.
    child.send(f"{PROMPT}\r")
    child.expect(SPEED)
    measured = figures(child.match)
    child.expect_exact("\x1b[?2004h")
    child.sendeof()
    child.expect(pexpect.EOF)
    return checked(measured, args)


def generate(args) -> float:
    with tempfile.NamedTemporaryFile() as file:
        done = subprocess.run(
            command("generate", args, "--prompt", PROMPT, "--output", file.name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    match = SPEED.search(done.stderr)
    if match is None:
        sys.exit(done.stderr)
    return checked(figures(match), args)


def figures(match: re.Match) -> tuple[int, float]:
    """Return the tokens and the tokens per second of a line that SPEED matches."""
    return int(match[1].replace(",", "")), float(match[2].replace(",", ""))


def checked(measured: tuple[int, float], args) -> float:
    """Return the tokens per second. Exits if the answer has another length than --tokens."""
    tokens, rate = measured
    if tokens != args.tokens:
        sys.exit(f"the answer has {tokens} tokens; expected {args.tokens}")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"XDG_STATE_HOME": f"{directory}/state", "XDG_CONFIG_HOME": f"{directory}/config"}
        args.model = None
        if args.preset:
            args.model = f"{directory}/{args.preset}"
            write_checkpoint(args.model, args.preset)
        rates = {"generate": [], "chat": []}
        for _ in range(args.runs):
            rates["generate"].append(generate(args))
            rates["chat"].append(chat(args))
            print(f"generate {rates['generate'][-1]:.0f}, chat {rates['chat'][-1]:.0f} tok/s", flush=True)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    slower = 100 * (1 - medians["chat"] / medians["generate"])
    row = {"model": args.preset or "bundled", "tokens": args.tokens, "runs": args.runs}
    row |= {f"{kind}_tokens_per_second": rate for kind, rate in medians.items()}
    print(json.dumps(row | {"chat_slower_percent": round(slower, 1)}))


if __name__ == "__main__":
    main()
