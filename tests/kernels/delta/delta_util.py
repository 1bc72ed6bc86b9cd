"""Arguments of the ops of gated delta net layers for tests."""

from typing import NamedTuple

import pytest
import torch
from util import Case, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.delta.arguments import RING, DeltaHeads, DeltaWeights, DraftRows, RecordLayer
from tridecode.kernels.delta.delta_chunks import DELTA_CHUNKS
from tridecode.kernels.delta.delta_conv import DELTA_CONV
from tridecode.kernels.delta.delta_scan import DELTA_SCAN
from tridecode.kernels.delta.gated_norm import GATED_NORM
from tridecode.kernels.delta.prompt_tables import PromptTables
from tridecode.kernels.linear.project import Normed

SIZES = cases(
    Case(
        "qwen3.5-4b", gpu=dict(key=16, value=32, key_dim=128, value_dim=128, hidden=2560),
        small=dict(key=2, value=4, key_dim=32, value_dim=16, hidden=96),
    ),
    Case(
        "qwen3.5-27b_g3", gpu=dict(key=16, value=48, key_dim=128, value_dim=128, hidden=5120),
        small=dict(key=1, value=3, key_dim=16, value_dim=32, hidden=60),
    ),
    Case(
        "qwen3.5-0.8b_g1", gpu=dict(key=16, value=16, key_dim=128, value_dim=128, hidden=1024),
        small=dict(key=2, value=2, key_dim=32, value_dim=32, hidden=33),
    ),
    Case(
        "qwen3.5-4b_gguf", gpu=dict(key=16, value=32, key_dim=128, value_dim=128, hidden=2560, tiled=True),
        small=dict(key=2, value=6, key_dim=16, value_dim=16, hidden=48, tiled=True),
    ),
)  # fmt: skip
TINY = dict(key=2, value=4, key_dim=16, value_dim=32, hidden=40)
WIDTH = 4


class Args(NamedTuple):
    """Arguments of delta_decode."""

    meta: torch.Tensor
    qkvz: torch.Tensor
    x: torch.Tensor
    norm: Normed | None
    out: torch.Tensor
    weights: DeltaWeights
    records: RecordLayer
    drafts: DraftRows | None
    heads: DeltaHeads


def sizes_of(sigmoid=False, tiled=False, *, key, value, key_dim, value_dim, hidden) -> DeltaHeads:
    """Return the sizes of a layer. hidden is not among them."""
    return DeltaHeads(key, value, key_dim, value_dim, 1e-6, sigmoid, tiled)


def weights_of(heads: DeltaHeads, hidden: int, dtype=torch.float32) -> DeltaWeights:
    """Return random weights. Some heads forget slowly and some fast."""
    return DeltaWeights(
        random(1, WIDTH, heads.channels, dtype=dtype, scale=0.5, seed=1).movedim(-1, 0),
        random(heads.value, hidden, dtype=dtype, scale=hidden**-0.5, seed=2),
        random(heads.value, hidden, dtype=dtype, scale=hidden**-0.5, seed=3),
        random(heads.value, seed=4),
        random(heads.value, scale=2.0, seed=5) - 3.0,
        norm_weight(heads.value_dim),
    )


def records_of(heads: DeltaHeads, count: int, dtype=torch.float32, state_dtype=torch.float32) -> RecordLayer:
    """Return records with random contents that cover no position."""
    state = random(count, heads.value, heads.key_dim, heads.value_dim, scale=0.3, seed=6).to(state_dtype)
    window = random(count, RING, heads.channels, dtype=dtype, seed=7)
    return RecordLayer(state, window, torch.zeros(count, heads.value, dtype=torch.int32, device=state.device))


def drafts_of(heads: DeltaHeads, slots: int) -> DraftRows:
    """Return the updates of drafts, all NaN."""
    return DraftRows(
        poisoned(slots, RING, heads.key, heads.key_dim),
        poisoned(slots, RING, heads.value, heads.value_dim),
        poisoned(slots, RING, heads.value),
    )


def decode_args(
    positions, covered=None, *, queries=1, dtype=torch.float32, normed=True, drafts=False, sigmoid=False, tiled=False,
    counts=None, state_dtype=torch.float32, **sizes,
) -> Args:  # fmt: skip
    """Return the arguments for requests at these positions, whose records cover `covered` positions.

    The records of the requests are in reverse order. The first `counts[i]` rows of request i are active.
    """
    heads, hidden, requests = sizes_of(sigmoid, tiled, **sizes), sizes["hidden"], len(positions)
    rows = requests * queries
    meta = meta_rows(*(position + query for position in positions for query in range(queries)))
    meta[:, layout.SLOT] //= queries
    meta[:, layout.RECORD] = requests + 1 - meta[:, layout.SLOT]
    for request, count in enumerate(counts or ()):
        meta[request * queries + count : (request + 1) * queries, layout.STATUS] = layout.WAIT
    records = records_of(heads, requests + 2, dtype, state_dtype)
    for request, position in enumerate(positions if covered is None else covered):
        records.covered[requests + 1 - request] = position
    weight = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    x = random(rows, hidden, dtype=weight, seed=8)
    norm = Normed(random(rows, hidden, seed=9).abs(), 3, 1e-6) if normed else None
    qkvz = random(rows, heads.channels + heads.value_size, dtype=torch.float32 if normed else dtype, seed=10)
    return Args(
        meta, qkvz, x, norm, poisoned(rows, heads.value_size, dtype=weight), weights_of(heads, hidden, dtype), records,
        drafts_of(heads, requests) if drafts else None, heads,
    )  # fmt: skip


def recurrent(args: Args, rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the last state of a text from its beginning, by transformers' functions in fp32.

    Args:
        rows: [tokens, channels + value_size], q, k and v before the convolution, and z.
        x: [tokens, hidden], normalized.
    """
    return transformers_form("torch_recurrent_gated_delta_rule", args.weights, args.heads, rows, x)


def transformers_form(name: str, weights: DeltaWeights, heads: DeltaHeads, rows, x):
    """Return the outputs and the last state of a text by a function of transformers, with its convolution and norm."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    mixed, z = rows.float().split((heads.channels, heads.value_size), 1)
    conv = weights.conv.float().squeeze(1)
    mixed = modeling.causal_conv1d_fn(mixed.T[None], conv, activation="silu")[0].T
    q, k, v = mixed.split((heads.key_size, heads.key_size, heads.value_size), 1)
    q, k = (heads.of_values(part.view(1, -1, heads.key, heads.key_dim), 2) for part in (q, k))
    b, a = x.float() @ weights.b.float().T, x.float() @ weights.a.float().T
    g = -weights.a_log.exp() * torch.nn.functional.softplus(a + weights.dt_bias)
    out, state = getattr(modeling, name)(
        q, k, v.view(1, -1, heads.value, heads.value_dim), g=g[None], beta=b.sigmoid()[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    norm = modeling.Qwen3_5RMSNormGated(heads.value_dim, heads.eps).to(rows.device)
    norm.weight.data = weights.norm.float()
    out = norm(out.reshape(-1, heads.value_dim), z.reshape(-1, heads.value_dim))
    return out.reshape(len(rows), heads.value_size), state[0]


def clone(value):
    """Copy all tensors of a tuple."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(*map(clone, value)) if isinstance(value, tuple) else value


class PromptArgs(NamedTuple):
    """Tensors of a prompt pass of one layer."""

    tables: PromptTables
    qkvz: torch.Tensor
    x: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    mixed: torch.Tensor
    rates: torch.Tensor
    u: torch.Tensor
    w: torch.Tensor
    p: torch.Tensor
    weights: DeltaWeights
    records: RecordLayer
    heads: DeltaHeads

    @property
    def conv(self) -> tuple:
        return self.tables, self.qkvz, self.b, self.a, self.mixed, self.rates, self.weights, self.records, self.heads

    @property
    def chunks(self) -> tuple:
        return self.tables.chunks, self.mixed, self.rates, self.u, self.w, self.p, self.heads

    @property
    def scan(self) -> tuple:
        return self.tables, self.mixed, self.rates, self.u, self.w, self.p, self.records, self.heads


def prompt_args(
    chunks, snapshots=(), *, dtype=torch.float32, sigmoid=False, tiled=False, full=None, records=None, source=0,
    target=1, state_dtype=torch.float32, **sizes
) -> PromptArgs:  # fmt: skip
    """Return the tensors of a pass over these chunks. Chunk i goes from record 2 i (source) to 2 i + 1 (target).

    Args:
        snapshots: slot, position and record of each.
        full: the pass of a full prompt. The only chunk is a part of it.
    """
    device = meta_rows(0).device
    rows = max(chunk.rows.stop for chunk in chunks)
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32)
    table[: len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
    pairs = torch.zeros(layout.MAX_CHUNKS, layout.RECORDS_WIDTH, dtype=torch.int32)
    pairs[: len(chunks)] = torch.tensor([(2 * i + source, 2 * i + target) for i in range(len(chunks))])
    kept = torch.zeros(layout.MAX_SNAPSHOTS, layout.SNAPSHOT_WIDTH, dtype=torch.int32)
    if snapshots:
        kept[: len(snapshots)] = torch.tensor(snapshots, dtype=torch.int32)
    tables = PromptTables(*(each.to(device) for each in (table, pairs, kept)))
    if full is None:
        heads, hidden = sizes_of(sigmoid, tiled, **sizes), sizes["hidden"]
        weights = weights_of(heads, hidden, dtype)
        qkvz = random(rows, heads.channels + heads.value_size, dtype=dtype, seed=10)
        x = random(rows, hidden, dtype=dtype, seed=8)
        b, a = ((x.float() @ each.float().T).to(dtype) for each in (weights.b, weights.a))
    else:
        heads, weights, dtype = full.heads, full.weights, full.qkvz.dtype
        [part] = chunks
        qkvz, x, b, a = (each[part.start : part.end] for each in (full.qkvz, full.x, full.b, full.a))
    return PromptArgs(
        tables, qkvz, x, b, a, poisoned(rows, heads.channels, dtype=dtype), poisoned(rows, 2, heads.value),
        poisoned(rows, heads.value_size, dtype=dtype), poisoned(rows, heads.value * heads.key_dim, dtype=dtype),
        poisoned(rows, heads.value * layout.SCAN, dtype=dtype), weights,
        records or records_of(heads, 2 * len(chunks) + 5, dtype, state_dtype), heads,
    )  # fmt: skip


def read_prompt(args: PromptArgs, config) -> torch.Tensor:
    """Run the ops of a prompt pass, or their references if config is None; return the outputs."""
    out = torch.zeros_like(args.u)
    last = args.tables.chunks, args.u, args.qkvz, out, args.weights.norm, args.heads
    if config is None:
        for op, given in ((DELTA_CONV, args.conv), (DELTA_CHUNKS, args.chunks), (DELTA_SCAN, args.scan)):
            op.ref(*given)
        GATED_NORM.ref(*last)
    else:
        DELTA_CONV.launch(*args.conv)
        DELTA_CHUNKS.launch(*args.chunks, config=config)
        DELTA_SCAN.launch(*args.scan, config=config)
        GATED_NORM.launch(*last)
    return out
