"""The options of every command that has an engine. Nothing here imports torch: `--help` answers at once."""

import argparse

from .bench_options import add_quantize, add_verbose
from .values import GRAPHS, amount, ascending, gib, ngram, positive, row_count, whole

BATCH_SLOTS = 16  # of generate --jsonl and of serve


def engine_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("engine")
    group.add_argument("--model", metavar="DIR_OR_ID", help="directory or Hugging Face id (default: bundled)")
    group.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--backend", default="auto", choices=["auto", "triton", "torch"], help="default: auto")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="default: auto, the checkpoint's (float32 ones: bfloat16 on a GPU); float32 on the CPU",
    )
    add_quantize(group)
    context = "context to allocate (default: what fits, on a CPU at most 8192)"
    group.add_argument("--max-seq-len", type=int, metavar="N", help=context)
    slots = f"requests at a time (default: 1; with --jsonl, and for serve, {BATCH_SLOTS})"
    group.add_argument("--slots", type=row_count, metavar="N", help=slots)
    pool = "K/V positions that all slots share (default: what fits, at most the context for each)"
    group.add_argument("--kv-tokens", type=positive, metavar="N", help=pool)
    host = "of host memory for K/V beyond those; auto: half of what is free; see docs/offload.md (default: none)"
    group.add_argument("--kv-offload", type=gib, metavar="GIB", help=f"GiB, or auto, {host}")
    ring = "buffers of the device through which they come; 0: only what waits goes to the host (default: 2)"
    group.add_argument("--kv-ring", type=whole, metavar="N", help=ring)
    last = "of host memory for the last layers' weights, read anew in every pass (default: none)"
    group.add_argument("--weights-offload", type=amount, metavar="GIB", help=f"GiB {last}")
    chunk = "of prompts in one pass at most (default: 2048, with --batch-invariant 256)"
    group.add_argument("--chunk-tokens", type=positive, metavar="N", help=chunk)
    group.add_argument(
        "--graph",
        default="full",
        choices=GRAPHS,
        help="how a pass is captured as CUDA graphs: whole, in pieces between which attention runs by itself, or not "
        "at all; see docs/graphs.md (default: full)",
    )
    sizes = "rows of the captured passes; others are padded to the next (default: 1,2,4,8,16,32,64 up to the slots)"
    attention = "of the passes: triton's, or torch's, which no graph can hold (default: triton)"
    group.add_argument("--attention", default="triton", choices=("triton", "torch"), help=attention)
    group.add_argument("--graph-sizes", type=ascending, metavar="N,N", help=sizes)
    most = "largest prompt pass of the usual schedule that is captured (default: 2048)"
    group.add_argument("--prompt-graph-max-tokens", type=positive, metavar="N", help=most)
    sizes = "tokens of the captured prompt passes, in place of that schedule; others are padded to the next"
    group.add_argument("--prompt-graph-sizes", type=ascending, metavar="N,N", help=sizes)
    words = "launch prompt passes line by line: the same as --graph full_decode_only"
    group.add_argument("--no-prompt-graphs", action="store_const", const="full_decode_only", dest="graph", help=words)
    backends = "of prompt passes; torch's flash and cudnn stand between captured pieces (default: auto)"
    named = ("auto", "triton", "flash", "cudnn")
    group.add_argument("--prompt-attention", default="auto", choices=named, help=backends)
    words = "compute the K/V of every prompt for itself alone, and keep none"
    group.add_argument("--no-prefix-sharing", action="store_false", dest="prefix_sharing", help=words)
    words = "the same bits for a request alone and in any company, see docs/sharing.md for what that costs"
    group.add_argument("--batch-invariant", action="store_true", help=words)
    words = "guess from the text what comes next and verify several tokens in a pass: sooner where text repeats; auto: "
    words += "on a GPU, unless it cannot be or does not pay; see docs/speculation.md (default: auto)"
    group.add_argument("--speculate", default="auto", choices=("auto", "ngram", "off"), help=words)
    words = "ngram, looking for the last N tokens where they stood before, or fewer, down to M (default: 8:2)"
    group.add_argument("--speculate-ngram", type=ngram, metavar="N:M", help=words)
    words = "milliseconds that a pass may take which reads prompts while others decode (default: 15)"
    group.add_argument("--prompt-ms", type=amount, default=15.0, metavar="MS", help=words)
    add_verbose(group)
    return options


def graph_stats_option() -> argparse.ArgumentParser:
    """Of the commands that run passes."""
    options = argparse.ArgumentParser(add_help=False)
    words = "at the end show on stderr how many passes of how many rows were run in which way"
    options.add_argument("--graph-stats", action="store_true", help=words)
    words = "no notes on stderr, only errors; in a chat none before the first prompt, and no figures after an answer"
    options.add_argument("--quiet", action="store_true", help=words)
    return options
