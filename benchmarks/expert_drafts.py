"""Compute the cost of passes that verify drafts from the bytes of distinct experts, and the speed-up of fixed texts.

    python -m benchmarks.expert_drafts qwen3-30b-a3b qwen3.6-35b-a3b

It needs no GPU. A text is played back twice, as in `bench speculate`: with the costs of the shape, and with the costs
of a model without experts. Both speed-ups are relative to passes of one row, and use the costs of the shape.
"""

import sys
from functools import partial

import torch

from tridecode.blocks.weights import bytes_read
from tridecode.checkpoint.hub import BUNDLED
from tridecode.checkpoint.load import empty_weights
from tridecode.cli.bench.rows import markdown_table
from tridecode.cli.bench.speculate_texts import simulate, texts
from tridecode.layout import NGRAM
from tridecode.models.presets import PRESETS
from tridecode.step.dispatch import QUERIES, SIZES, typical_costs
from tridecode.text.tokenizer import Tokenizer


def main() -> None:
    """Print a table of the passes of each shape, and one of the texts."""
    reads = {}
    for name in sys.argv[1:]:
        spec = PRESETS[name]
        reads[name] = partial(bytes_read, spec, empty_weights(spec, "meta", torch.bfloat16))
        linear = next(each for each in spec.linears() if each.experts)
        cells = [[f"{linear.experts_of(rows):.1f}" for rows in SIZES]]
        cells += [[f"{reads[name](rows) / 1e9:.1f}" for rows in SIZES]]
        names = [f"{name}, distinct experts of {linear.experts}", "GB of weights"]
        lines = [[first, *line] for first, line in zip(names, cells)]
        print(markdown_table(["rows", *map(str, SIZES)], lines))
    tokenizer, dense = Tokenizer.load(BUNDLED), typical_costs(1)
    costs = {name: typical_costs(1, read) for name, read in reads.items()}
    print(
        markdown_table(
            ["rows of a request", *map(str, QUERIES)],
            [[n, *map("{:.2f}".format, c.values())] for n, c in costs.items()],
        )
    )
    lines = []
    for text in texts():
        before, sampled = tokenizer.encode(text.before), tokenizer.encode(text.sampled)
        line = [text.name]
        for own in costs.values():
            for used in (own, dense):
                passes = simulate(before, sampled, NGRAM, used)
                line.append(f"{len(sampled) / sum(own[rows] * count for rows, count in passes.items()):.2f}")
        lines.append(line)
    headers = [f"{name}, {how}" for name in costs for how in ("its costs", "costs without experts")]
    print(markdown_table(["text", *headers], lines))


if __name__ == "__main__":
    main()
