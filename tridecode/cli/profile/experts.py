"""`tridecode profile --experts`: how often the tokens of a text choose each expert, and how many a pass uses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch

from ...blocks.moe import MoE
from ...blocks.spec import ModelSpec
from ...checkpoint.hub import BUNDLED, resolve_model
from ...checkpoint.load import load_config
from ...engine import Engine
from ...errors import GenerationError, ParameterError
from ...kernels.moe.route import ROUTE
from ...layout import POSITION, RUN, SLOT, STATUS
from ...models.presets import PRESETS
from ...step.graphs import DecodePasses
from ...step.run import Run, launch, run_reference
from ...text.tokenizer import Tokenizer
from ..bench.measure import model_facts, need_gpu, preset_engine, running
from ..bench.rows import print_table
from ..inputs import read_file
from ..options import engine_options
from ..terminal import Output, counted
from . import draw

NEIGHBORS = (2, 4, 8)  # Numbers of neighboring tokens, as in a pass that verifies drafts.


@dataclass
class RoutedPass:
    """The experts that the rows of a decode pass chose.

    Args:
        places: int64 [rows, 2], slot and position of each row.
        ids: [rows, top_k] of each layer with experts.
    """

    places: torch.Tensor
    ids: list[torch.Tensor] = field(default_factory=list)


class RouteRecorder:
    """A line runner that copies the chosen experts after each router.

    Args:
        run: runs the lines.
        layers: number of layers with experts.
    """

    def __init__(self, run: Run, layers: int):
        self._run, self._layers = run, layers
        self.passes: list[RoutedPass] = []

    def __call__(self, role: str, op, *args, **options) -> None:
        """Run a line. If it is the router of a decode pass, record its result."""
        self._run(role, op, *args, **options)
        if op is not ROUTE:
            return
        meta, _, _, _, _, routes, _, sizes = args
        runs = meta[:, STATUS] == RUN
        if not self.passes or len(self.passes[-1].ids) == self._layers:
            self.passes.append(RoutedPass(meta[runs][:, [SLOT, POSITION]].long()))
        self.passes[-1].ids.append(routes.ids[runs, : sizes.top_k].long())


def experts(args, output: Output) -> int:
    """Run `profile --experts`: print a table with a line for each layer with experts, and one JSON line."""
    spec = PRESETS[args.preset] if args.model is None else load_config(resolve_model(args.model, weights=False))
    mixtures = mixtures_of(spec)
    if not mixtures:
        raise ParameterError(f"--experts: {args.model or args.preset} has no experts")
    folder = None if args.output is None else Path(args.output)
    tokenizer = Tokenizer.load(BUNDLED if args.model is None else resolve_model(args.model))
    ids = [token for token in tokenizer.encode(read_file(args.experts, output)) if token < spec.vocab_size]
    step = max(NEIGHBORS)
    length = min(len(ids), args.prompt_tokens) // args.rows // step * step
    if not length:
        least = args.rows * step
        raise ParameterError(f"--experts: the text has {counted(len(ids), 'token')}; it needs at least {least}")
    texts = [ids[first : first + length] for first in range(0, length * args.rows, length)]
    passes, facts = routed(args, texts, len(mixtures))
    report = {
        "command": "profile --experts",
        **facts,
        "text": args.experts,
        "rows": args.rows,
        "tokens": length * args.rows,
        "passes": len(passes),
        "layers": [
            layer_figures(number, block, [each.ids[place] for each in passes], [each.places for each in passes])
            for place, (number, block) in enumerate(mixtures)
        ],
    }
    name = args.model or args.preset
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{name}: experts chosen by {report['tokens']:,} tokens"
        (folder / "experts.svg").write_text(draw.loads(title, report["layers"]), encoding="utf-8")
        (folder / "experts.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
        output.note(f"the picture and all counts are in {folder}")
    show(report, name, output)
    for layer in report["layers"]:
        del layer["counts"]
    output.text(json.dumps(report) + "\n")
    return 0


def mixtures_of(spec: ModelSpec) -> list[tuple[int, MoE]]:
    """Return the number of each layer with experts, from 0, and its block."""
    blocks = ((number, block) for number, layer in enumerate(spec.layers) for block in layer.blocks)
    return [(number, block) for number, block in blocks if isinstance(block, MoE)]


def routed(args, texts: Sequence[list[int]], layers: int) -> tuple[list[RoutedPass], dict]:
    """Run equally long texts through decode passes with a row for each, and return their routes and the model's facts.

    The passes are launched without a graph. Each computes the next token of every text.
    """
    rows, capacity = len(texts), len(texts[0]) + 1
    options = engine_options(args) | dict(
        slots=rows, kv_tokens=rows * capacity, speculate="off", graph="none", prefix_sharing=False
    )
    if args.model is None:
        need_gpu("--preset")
        engine = preset_engine(args.preset, capacity, gguf=args.gguf, **options)
    else:
        engine = Engine.load(args.model, max_seq_len=capacity, **options)
    with engine:
        recorder = RouteRecorder(launch if engine.backend == "triton" else run_reference, layers)
        with running(engine, DecodePasses(engine.model, recorder)):
            requests = [engine.submit_score(text, 0) for text in texts]
            for error in [request.result().error for request in requests]:
                if error:
                    raise GenerationError(error)
        engine.synchronize()
        return recorder.passes, model_facts(engine, args)


def layer_figures(number: int, block: MoE, ids: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> dict:
    """Return the figures of a layer.

    Args:
        number: number of the layer.
        ids: experts of the rows of each pass.
        places: slots and positions of the rows of each pass.
    """
    linear, every = block.linears()[0], torch.cat(list(ids)).cpu()
    counts = torch.bincount(every.flatten(), minlength=block.experts)
    busiest = int(counts.argmax())
    rows = fmean(len(each) for each in ids)
    slot, position = torch.cat(list(places)).cpu().unbind(1)
    in_order = every[(slot * (int(position.max()) + 1) + position).argsort()]
    return {
        "layer": number,
        "experts": block.experts,
        "top_k": block.top_k,
        "unused": int((counts == 0).sum()),
        "busiest": busiest,
        "busiest_share": float(counts[busiest] / counts.sum()),
        "busiest_ratio": float(counts[busiest] / counts.float().mean()),
        "experts_of_pass": fmean(distinct(each) for each in ids),
        "uniform_experts_of_pass": linear.experts_of(round(rows)) - linear.always,
        "neighbors": {count: neighbors(in_order, count) for count in NEIGHBORS},
        "uniform_neighbors": {count: linear.experts_of(count) - linear.always for count in NEIGHBORS},
        "counts": counts.tolist(),
    }


def distinct(ids: torch.Tensor) -> int:
    """Return the number of distinct experts."""
    return len(ids.unique())


def neighbors(ids: torch.Tensor, count: int) -> float:
    """Return the mean number of distinct experts of `count` neighboring tokens.

    ids: [tokens, top_k], in the order of the tokens.
    """
    groups = ids[: len(ids) // count * count].view(-1, count * ids.shape[1]).sort(1).values
    return float((1 + groups.diff(dim=1).ne(0).sum(1)).float().mean())


def show(report: dict, name: str, output: Output) -> None:
    """Print the table and the means over all layers."""
    layers = report["layers"]
    rows = report["rows"]
    output.text(f"{name}: {report['tokens']:,} tokens in passes of {counted(rows, 'row')}\n")
    headers = [
        "layer",
        "experts",
        "used by a token",
        "never chosen",
        "busiest",
        "its share %",
        "times the mean",
        "experts of a pass",
    ]
    cells = [
        [
            str(layer["layer"]), str(layer["experts"]), str(layer["top_k"]), str(layer["unused"]),
            str(layer["busiest"]), f"{100 * layer['busiest_share']:.1f}", f"{layer['busiest_ratio']:.1f}",
            f"{layer['experts_of_pass']:.1f}",
        ]
        for layer in layers
    ]  # fmt: skip
    print_table(headers, cells, output)
    mean = {key: fmean(layer[key] for layer in layers) for key in ("experts_of_pass", "uniform_experts_of_pass")}
    output.text(
        f"distinct experts of a pass of {counted(rows, 'row')}: {mean['experts_of_pass']:.1f}; "
        f"{mean['uniform_experts_of_pass']:.1f} if all were equally likely\n"
    )
    for count in NEIGHBORS:
        measured, uniform = (fmean(layer[key][count] for layer in layers) for key in ("neighbors", "uniform_neighbors"))
        output.text(f"of {count} neighboring tokens: {measured:.1f}; {uniform:.1f} if all were equally likely\n")
