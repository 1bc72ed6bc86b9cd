"""What speculation brings: tokens of a pass on texts of this repository, and what a pass of several rows costs.

    python benchmarks/speculation.py                       # texts, on any machine
    python benchmarks/speculation.py --preset qwen3-4b     # on a GPU: also passes of that shape, and the speed-up

A text is played through the operations that guess and verify, as if a model had drawn it: so acceptance is real, and no
checkpoint is needed. Rows of a pass follow what the pass but one before asked for, as on a GPU. --tokenizer takes a
checkpoint's tokenizer in place of the bundled one, whose tokens are shorter than those of large models. The texts are
files of this repository, under its licence. The last line is one JSON object.
"""

import argparse
import json
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import torch

from tridecode import layout
from tridecode.engine import Engine
from tridecode.kernels.draft import DRAFT
from tridecode.kernels.sampling.accept import ACCEPT
from tridecode.loading import BUNDLED
from tridecode.model.presets import PRESETS
from tridecode.step.dispatch import QUERIES, Dispatcher, most_queries
from tridecode.step.graphs import StepGraphs
from tridecode.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
STEPS, RUNS, CONTEXT, LONG = 32, 7, 1024, 32_000


def texts() -> dict[str, tuple[str, str]]:
    """Name -> what was there before, and what is drawn."""
    code, page = (ROOT / "tridecode/serve/slots.py").read_text(), (ROOT / "docs/sharing.md").read_text()
    rows = (ROOT / "benchmarks/h200-batch.json").read_text()
    lines = (ROOT / "training/content/advice.txt").read_text().splitlines()
    advice = [line.split("=>") for line in lines if "=>" in line]
    turns = "\n".join(f"{ask.split('|')[0].strip()}\n{answer.strip()}" for ask, answer, *_ in advice[:60])
    return {
        "code edit": (f"Call held kept, everywhere in this file:\n{code}\n", code.replace("held", "kept")[:8000]),
        "quotation": (f"{page}\nQuote the part about equal prefixes.\n", page[page.index("## Equal") :][:3000]),
        "json": (f"Add a row to these measurements:\n{rows[:2000]}\n", rows[:6000]),
        "prose": ("Describe the first minutes with it.\n", (ROOT / "docs/first-minutes.md").read_text()),
        "chat": ("A conversation with short answers.\n", turns),
    }


def play(before: list[int], drawn: list[int]) -> Counter:
    """Passes by their rows in which one request draws these tokens."""
    text = before + drawn
    meta = torch.zeros(1, layout.META_WIDTH, dtype=torch.int32)
    meta[0, layout.POSITION], meta[0, layout.N_KNOWN] = len(before) - 1, len(before)
    meta[0, layout.LIMIT] = meta[0, layout.ROOM] = len(text)
    meta[0, layout.GENERATION] = 1
    tokens = torch.zeros(1, len(text) + layout.MAX_QUERIES, dtype=torch.int32)
    tokens[0, : len(before)] = torch.tensor(before, dtype=torch.int32)
    keys, counter = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    out, passes, asked = torch.zeros(1, layout.RING, dtype=torch.int64), Counter(), deque([1, 1])
    while int(meta[0, layout.STATUS]) == layout.RUN:
        queries = most_queries(1, asked.popleft())
        position, step = int(meta[0, layout.POSITION]), int(meta[0, layout.STEP])
        DRAFT.ref(meta, tokens, keys, counter, max(queries - 1, 1))
        next_ones = text[position + 1 : position + 1 + queries]
        rows = torch.tensor(next_ones + [0] * (queries - len(next_ones)), dtype=torch.int32)
        ACCEPT.ref(rows, meta, tokens, None, out, None)
        asked.append(layout.entry_of(int(out[0, step % layout.RING]), 1, step).wanted + 1)
        passes[queries] += 1
    assert tokens[0, : len(text)].tolist() == text, "another text was drawn"
    return passes


def passes_of(preset: str, slots: int) -> dict:
    """µs of a pass of that shape, by requests and rows of each: without speculation, and with."""
    from tridecode.commands.bench.measure import GREEDY, preset_engine, spread

    capacity = CONTEXT + (STEPS + 4) * 8 + 64
    engine = preset_engine(preset, -(-max(capacity, LONG + 64) // 64) * 64, slots=slots, speculate="ngram",
                           kv_tokens=-(-(slots * capacity + LONG + 4096) // 64) * 64)  # fmt: skip
    while engine.steps.capture_next():
        pass
    plain = StepGraphs(replace(engine.model, verify=None), kinds=("greedy",),
                       dispatcher=Dispatcher("full", engine.graphs.sizes))  # fmt: skip

    def us(requests: int, queries: int, run) -> float:
        found = []
        for _ in range(RUNS):
            engine.rewind(CONTEXT, GREEDY, requests, given=queries * (STEPS + 2) if queries > 1 else 0)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run(requests, queries)
            start.record()
            for _ in range(STEPS):
                run(requests, queries)
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / STEPS)
        return round(spread(found, 1e3)[0], 1)

    rows = {}
    for requests in (size for size in (1, 2, 4, 8) if size <= slots):
        found = {"off": us(requests, 1, lambda rows, _: plain.replay("greedy", rows))}
        for queries in QUERIES:
            if queries <= most_queries(requests):
                found[queries] = us(requests, queries, lambda rows, each: engine.enqueue(GREEDY, rows, each))
        rows[requests] = found
    return {"us": rows, "draft_us_at_32000": draft_us(engine, LONG)}


def draft_us(engine: Engine, position: int) -> float:
    """µs in which drafts are found in a text of that length, launched many times in one graph."""
    ws, times = engine.model.of_queries(1, 1).workspace, 20
    ws.meta[0, layout.POSITION], ws.meta[0, layout.STATUS] = position, layout.RUN
    ws.meta[0, [layout.LIMIT, layout.ROOM]] = position + 32
    ws.meta[0, layout.N_KNOWN] = 1
    ws.tokens[0, : position + 1] = torch.randint(0, 150_000, (position + 1,), device=ws.tokens.device)
    args = ws.meta, ws.tokens, ws.draft_keys, ws.draft_counter, 7
    DRAFT.launch(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            DRAFT.launch(*args)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    return round(1e3 * start.elapsed_time(end) / (10 * times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), help="of the passes that are timed")
    parser.add_argument("--slots", type=int, default=8, help="requests at most, of these (8)")
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED, metavar="DIR")
    args = parser.parse_args()
    found = passes_of(args.preset, args.slots) if args.preset else {}
    for requests, row in found.get("us", {}).items():
        ratios = ", ".join(f"{rows}: {us} ({us / row['off']:.3f})" for rows, us in row.items())
        print(f"{requests} requests, µs by rows of each (over the pass without speculation): {ratios}")
    tokenizer, alone = Tokenizer.load(args.tokenizer), found.get("us", {}).get(1)
    for name, (before, drawn) in texts().items():
        ids = tokenizer.encode(drawn)
        passes = play(tokenizer.encode(before), ids)
        row = {"tokens": len(ids), "tokens_per_pass": round(len(ids) / passes.total(), 2)}
        row["passes"] = {rows: passes[rows] for rows in sorted(passes)}
        if alone:
            row["speed_up"] = round(len(ids) * alone["off"] / sum(alone[rows] * n for rows, n in passes.items()), 2)
        found[name] = row
        print(f"{name}: {row}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
