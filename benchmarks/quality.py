"""The error of quantization: a quantized model compared with itself in fp32, on held-out chats or a text file.

    python -m benchmarks.quality                                   the bundled model, on the CPU
    python -m benchmarks.quality --model DIR --text FILE           another one

Prints rows for docs/quantization.md: the KL divergence of the next token's distribution from that in fp32 (nats, mean
over positions), the share of positions with the same most likely token, and perplexity. On the CPU all other tensors
are fp32, so
the differences come from quantization alone. The chats are generated with a seed that the training did not use.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "training")]
from tridecode import Engine  # noqa: E402

SEED = 20_261_122
CASES = {  # Name of a case -> options of Engine.load.
    "fp32": {},
    "fp8": {"quantize": "fp8", "quantize_head": "keep"},
    "fp8, head fp8": {"quantize": "fp8"},
    "int8, head fp8": {"quantize": "int8"},
    "int4, head fp8": {"quantize": "int4"},
    "int4, head int4": {"quantize": "int4", "quantize_head": "int4"},
    "K/V fp8": {"kv_dtype": "fp8"},
    "int4, head fp8, K/V fp8": {"quantize": "int4", "kv_dtype": "fp8"},
}


def texts(engine: Engine, args) -> list[list[int]]:
    """Return texts as token ids, at least `args.tokens` in total."""
    if args.text:
        ids = engine.encode(args.text.read_text())[: args.tokens]
        return [ids[at : at + args.length] for at in range(0, len(ids) - 1, args.length)]
    from generator import generate

    found = []
    for chat in generate(args.tokens, SEED):
        found.append(engine.encode(chat))
        if sum(map(len, found)) >= args.tokens:
            return found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", help="(bundled)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="held-out text, which --model requires")
    parser.add_argument("--tokens", type=int, default=4000, help="number of tokens to score (4000)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each part of the text (512)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.model and not args.text:
        parser.error("--model needs --text")
    exact, ids = [], []
    print("| quantization | KL | same likeliest token | perplexity |\n| --- | --- | --- | --- |")
    for name, options in CASES.items():
        with Engine.load(args.model, device=args.device, max_seq_len=2048, **options) as engine:
            ids = ids or texts(engine, args)
            logs = [engine.score(each)[:-1].double().log_softmax(-1).cpu() for each in ids]
        exact = exact or logs
        pairs = list(zip(exact, logs))
        kl = torch.cat([(ref.exp() * (ref - log)).sum(-1) for ref, log in pairs]).mean()
        same = torch.cat([ref.argmax(-1) == log.argmax(-1) for ref, log in pairs]).double().mean()
        logprobs = torch.cat([log[range(len(log)), each[1:]] for log, each in zip(logs, ids)])
        print(f"| {name} | {kl:.5f} | {same:.2%} | {(-logprobs.mean()).exp():.4f} |", flush=True)


if __name__ == "__main__":
    main()
