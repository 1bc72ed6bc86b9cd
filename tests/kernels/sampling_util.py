"""The state of one pass for the sampling tests, and ways to run the sampling ops and their references on it."""

import inspect
from dataclasses import dataclass, replace

import torch
from check import check_op
from util import CUDA, DEVICE, PDL

from tridecode import layout as m
from tridecode.kernels.sampling.accept import ACCEPT
from tridecode.kernels.sampling.greedy import GREEDY
from tridecode.kernels.sampling.logprobs import LOGPROBS
from tridecode.kernels.sampling.mask import MASK
from tridecode.kernels.sampling.mass import WEIGHT_BITS, distance_ref, weight_ref
from tridecode.kernels.sampling.sample import SAMPLE, THRESHOLD, SamplerBuffers, make_buffers
from tridecode.sampling import SamplingParams
from tridecode.state.slots import fill_meta, fill_samp

CAPACITY = 40
UNTOUCHED = -7  # Initial value of tokens, logprobs and ids, which shows whether a kernel wrote them.
POSITION, STEP, GENERATION = 9, 3, 5  # Initial values of all rows.
RINGS = ("out", "logprobs", "ids", "mask", "stamp")  # Tensors in pinned host memory.

OPS = {"mask": MASK, "greedy": GREEDY, "sample": SAMPLE, "logprobs": LOGPROBS, "accept": ACCEPT}
# parameter: field of State, if the names differ
FIELDS = {"logprobs_ring": "logprobs", "out_logprobs": "logprobs", "out_top_ids": "ids", "sampled": "sampled"}
ENDS_A_PASS = ("meta", "tokens", "counts", "out", "logprobs_ring")
ACCUMULATES = {
    "mask": ("logits", "meta", "sampler.mask"),
    "greedy": ("meta", "tokens", "out"),
    "sample": ENDS_A_PASS,
    "logprobs": ("out_logprobs", "out_top_ids"),
    "accept": ENDS_A_PASS,
}
SCRATCH = {
    "greedy": ("keys",),
    "sample": ("keys", "tops", "bins", "bin_mass", "state", "near", "ranks", "mass", "candidates"),
    "logprobs": ("top_keys", "block_lse"),
}
# Outputs that are compared only if the logits of a row are finite.
OF_FINITE_ROWS = {"sample": "sampler.processed", "logprobs": "sampler.lse"}


@dataclass
class State:
    """The tensors that sampling reads and writes. On a GPU the rings are pinned host memory, as in the engine."""

    logits: torch.Tensor
    meta: torch.Tensor
    samp: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor
    logprobs: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    stamp: torch.Tensor
    sampler: SamplerBuffers
    sampled: torch.Tensor | None = None  # Sampled token of each row, if `accept` ends the pass.

    def copy(self, device=None) -> "State":
        """Return a copy on `device`. By default each tensor stays on its device."""

        def clone(t):
            if t is None or device is not None:
                return t if t is None else t.to(device, copy=True)
            return t.clone().pin_memory() if t.is_pinned() else t.clone()

        buffers = SamplerBuffers(**{name: clone(t) for name, t in vars(self.sampler).items()})
        return State(sampler=buffers, **{name: clone(t) for name, t in vars(self).items() if name != "sampler"})

    def set(self, **values) -> "State":
        """Set fields of meta in all rows."""
        for name, value in values.items():
            self.meta[:, getattr(m, name)] = value
        return self

    def progress(self, row: int = 0) -> dict[str, int]:
        values = self.meta[row].tolist()
        return {name: values[getattr(m, name)] for name in ("STATUS", "POSITION", "STEP")}

    def entry(self, slot: int = 0, step: int = STEP) -> tuple[int, int]:
        """Return step and token of the output ring's entry for `step`."""
        value = int(self.out[slot, step % m.RING])
        assert value >> m.GENERATION_SHIFT == GENERATION
        return value >> m.STEP_SHIFT & m.STEP_MASK, value & m.NO_TOKEN


def make_state(logits: torch.Tensor, *params: SamplingParams, stop_ids=(), seed: int = 1) -> State:
    """Return a state in mid-generation with a row of logits for each slot. Scratch and outputs contain garbage.

    params: the parameters of each slot. The default is SamplingParams() for all.
    """
    rows, vocab = logits.shape
    params = params or (SamplingParams(),) * rows
    assert len(params) == rows
    meta, samp = torch.zeros(rows, m.META_WIDTH, dtype=torch.int32), torch.zeros(rows, m.SAMP_WIDTH)
    for slot, p in enumerate(replace(p, seed=seed) for p in params):
        fill_meta(meta[slot].numpy(), p, slot, GENERATION, POSITION, POSITION + 1, CAPACITY + 1, stop_ids)
        fill_samp(samp[slot].numpy(), p)
    generator = torch.Generator().manual_seed(vocab)
    buffers = make_buffers(vocab, rows, "cpu")
    for name, t in vars(buffers).items():
        if name != "counter":
            t.fill_(float("nan")) if t.is_floating_point() else t.random_(1, 1 << 30, generator=generator)
    bias = torch.zeros(rows, vocab)
    for row, p in enumerate(params):
        for token, value in p.logit_bias.items():
            bias[row, token] = value
    state = State(
        logits=logits.float().cpu(),
        meta=meta,
        samp=samp,
        tokens=torch.full((rows, CAPACITY + 1), UNTOUCHED, dtype=torch.int32),
        counts=torch.randint(0, 4, (rows, vocab), generator=generator).int(),
        bias=bias,
        out=torch.full((rows, m.RING), -1, dtype=torch.int64),
        logprobs=torch.full((rows, m.RING, 21), float(UNTOUCHED)),
        ids=torch.full((rows, m.RING, 20), UNTOUCHED, dtype=torch.int32),
        mask=torch.zeros(rows, m.mask_words(vocab), dtype=torch.int32),
        stamp=torch.zeros(rows, dtype=torch.int64),
        sampler=buffers,
    ).set(STEP=STEP)
    if not CUDA:
        return state
    rings = {name: getattr(state, name).pin_memory() for name in RINGS}
    return replace(state.copy(DEVICE), **rings)


def arguments(kind: str, state: State, with_logprobs: bool = False, **others) -> dict:
    """Return the arguments of a launch by name. `others` adds or replaces arguments."""
    parameters = inspect.signature(OPS[kind].ref).parameters
    values = {name: getattr(state, FIELDS.get(name, name), p.default) for name, p in parameters.items()}
    if "lse" in parameters:
        values["lse"] = state.sampler.lse
    if "logprobs_ring" in parameters and not with_logprobs:
        values["logprobs_ring"] = None
    return values | others


def run(kind: str, state: State, masked: bool = False) -> State:
    """Launch the op `kind` in place. If `masked`, launch the op `mask` before it.

    The function waits for the launch. In the engine, the kernels before sampling keep passes in order.
    """
    if masked:
        run("mask", state)
    others = {"masked": True} if masked else {}
    OPS[kind].launch(**arguments(kind, state, **others), pdl=PDL)
    if CUDA:
        torch.cuda.synchronize()
    return state


def run_ref(kind: str, state: State) -> State:
    """Run the reference of one op on a copy in host memory."""
    state = state.copy("cpu")
    OPS[kind].ref(**arguments(kind, state))
    return state


def check(kind: str, state: State, with_logprobs: bool = False, masked: bool = False, **others) -> tuple[State, State]:
    """Check the op `kind` with check_op. Return the states after the launch and after the reference.

    If `masked`, the op `mask` is checked and applied first.

    others: see `arguments`. If `state.sampled` is set, the ops `greedy` and `sample` write it and nothing else.
    """
    if masked:
        state, _ = check("mask", state)
        others["masked"] = True
    args = arguments(kind, state, with_logprobs, **others)
    draws = kind in ("greedy", "sample") and state.sampled is not None
    outputs, scratch, views = ["sampled"] if draws else [], [f"sampler.{name}" for name in SCRATCH.get(kind, ())], {}
    if name := OF_FINITE_ROWS.get(kind):
        finite = state.logits.isfinite().all(1) & (state.meta[:, m.STATUS] == m.RUN)
        (outputs if finite.any() else scratch).append(name)
        if finite.any():
            views[name] = lambda t: t[finite.to(t.device)]
    tolerance = {"out_logprobs": 1e-6, "sampler.lse": 1e-6} if kind == "logprobs" else {}
    checked = check_op(
        OPS[kind],
        args,
        tolerance={name: error for name, error in tolerance.items() if name not in scratch},
        outputs=outputs,
        accumulates=() if draws else ACCUMULATES[kind],
        scratch=scratch,
        views=views,
        on_host=True,
    )
    return _updated(state, checked.launched), _updated(state, checked.reference)


def _updated(state: State, args: dict) -> State:
    fields = {FIELDS.get(name, name): value for name, value in args.items() if value is not None}
    return replace(state, **{name: value for name, value in fields.items() if name in vars(state)})


def assert_same(state: State, expected: State, *names: str) -> None:
    """Compare fields of two states bit by bit, NaN included."""
    for name in names:
        x, y = (getattr(s, name).cpu().contiguous() for s in (state, expected))
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), f"{name} differs"


def kept(state: State, slot: int = 0) -> set[int]:
    """Return the tokens that the filters kept, according to the sampler's buffers."""
    y = state.sampler.processed[slot].cpu()
    temperature, _, min_p = state.samp[slot, :3].cpu()
    d = distance_ref(y, y.max(), temperature)
    keep = (d <= state.sampler.state[slot, THRESHOLD].cpu()) & (weight_ref(d) >= float(min_p) * 2**WEIGHT_BITS)
    return set(keep.nonzero().flatten().tolist())
