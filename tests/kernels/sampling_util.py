"""Shared by the sampling tests: one step's state with poisoned outputs, and how kernels and references run on it."""

from dataclasses import dataclass, fields, replace

import torch
from util import CUDA, DEVICE

from tridecode import layout as m
from tridecode.kernels.sampling.greedy import greedy, greedy_ref
from tridecode.kernels.sampling.logprobs import logprobs, logprobs_ref
from tridecode.kernels.sampling.mask import mask, mask_ref
from tridecode.kernels.sampling.mass import WEIGHT_BITS, distance_ref, weight_ref
from tridecode.kernels.sampling.sample import THRESHOLD, SamplerBuffers, make_buffers, sample, sample_ref
from tridecode.sampling import SamplingParams
from tridecode.state.slots import fill_meta, fill_samp

PDL = CUDA and torch.cuda.get_device_capability() >= (9, 0)
CAPACITY = 40
UNTOUCHED = -7  # in tokens
POSITION, STEP, GENERATION = 9, 3, 5
RINGS = ("out", "logprobs", "ids", "mask", "stamp")  # in host memory


@dataclass
class Step:
    """The state that sampling reads and writes; on a GPU the rings are pinned host memory, as in the engine."""

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

    def copy(self, device=None) -> "Step":
        def clone(t):
            return t.clone() if device is None else t.to(device, copy=True)

        def ring(t):
            return t.clone().pin_memory() if device is None and t.is_pinned() else t.clone()

        buffers = SamplerBuffers(**{f.name: clone(getattr(self.sampler, f.name)) for f in fields(SamplerBuffers)})
        rings = {name: ring(getattr(self, name)) for name in RINGS}
        plain = ("logits", "meta", "samp", "tokens", "counts", "bias")
        return Step(sampler=buffers, **rings, **{name: clone(getattr(self, name)) for name in plain})

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sampler"}
        return own | {f"sampler.{f.name}": getattr(self.sampler, f.name) for f in fields(SamplerBuffers)}

    def set(self, **state) -> "Step":
        for name, value in state.items():
            self.meta[:, getattr(m, name)] = value
        return self

    def state(self, slot: int = 0) -> dict[str, int]:
        row = self.meta[slot].tolist()
        return {name: row[getattr(m, name)] for name in ("STATUS", "POSITION", "STEP")}

    def entry(self, slot: int = 0, step: int = STEP) -> tuple[int, int]:
        """Step and token of the output ring's entry for `step`."""
        value = int(self.out[slot, step % m.RING])
        assert value >> m.GENERATION_SHIFT == GENERATION
        return value >> m.STEP_SHIFT & m.STEP_MASK, value & m.NO_TOKEN


def make_step(logits: torch.Tensor, *params: SamplingParams, stop_ids=(), seed: int = 1) -> Step:
    """A step in mid-generation, one row of logits and one SamplingParams a slot; scratch and outputs are garbage."""
    rows, vocab = logits.shape
    params = params or (SamplingParams(),) * rows
    assert len(params) == rows
    meta, samp = torch.zeros(rows, m.META_WIDTH, dtype=torch.int32), torch.zeros(rows, m.SAMP_WIDTH)
    for slot, p in enumerate(replace(p, seed=seed) for p in params):
        fill_meta(meta[slot].numpy(), p, slot, GENERATION, POSITION, POSITION + 1, CAPACITY + 1, stop_ids)
        fill_samp(samp[slot].numpy(), p)
    generator = torch.Generator().manual_seed(vocab)
    buffers = make_buffers(vocab, rows, "cpu")
    for f in fields(SamplerBuffers):
        if f.name != "counter":
            t = getattr(buffers, f.name)
            t.fill_(float("nan")) if t.is_floating_point() else t.random_(1, 1 << 30, generator=generator)
    bias = torch.zeros(rows, vocab)
    for row, p in enumerate(params):
        for token, value in p.logit_bias.items():
            bias[row, token] = value
    step = Step(
        logits=logits.float().cpu(),
        meta=meta,
        samp=samp,
        tokens=torch.full((rows, CAPACITY + 1), UNTOUCHED, dtype=torch.int32),
        counts=torch.randint(0, 4, (rows, vocab), generator=generator).int(),
        bias=bias,
        out=torch.full((rows, m.RING), -1, dtype=torch.int64),
        logprobs=torch.full((rows, m.RING, 21), float("nan")),
        ids=torch.full((rows, m.RING, 20), UNTOUCHED, dtype=torch.int32),
        mask=torch.zeros(rows, m.mask_words(vocab), dtype=torch.int32),
        stamp=torch.zeros(rows, dtype=torch.int64),
        sampler=buffers,
    ).set(STEP=STEP)
    if not CUDA:
        return step
    rings = {name: getattr(step, name).pin_memory() for name in RINGS}
    return replace(step.copy(DEVICE), **rings)


def run(kind: str, step: Step, with_logprobs: bool = False, masked: bool = False) -> Step:
    """One step by the kernels, in place; waits, since successive steps are fenced by the kernels before sampling."""
    s = step
    ring = s.logprobs if with_logprobs else None
    if masked:
        mask(s.logits, s.meta, s.mask, s.stamp, s.sampler, pdl=PDL)
    if kind == "greedy":
        greedy(s.logits, s.meta, s.tokens, s.out, s.sampler, masked, pdl=PDL)
    elif kind == "sample":
        sample(s.logits, s.meta, s.samp, s.tokens, s.counts, s.bias, s.out, s.sampler, ring, masked, pdl=PDL)
    else:
        logprobs(s.logits, s.meta, s.logprobs, s.ids, s.sampler, pdl=PDL)
    if CUDA:
        torch.cuda.synchronize()
    return s


def run_ref(kind: str, step: Step, with_logprobs: bool = False, masked: bool = False) -> Step:
    """One step by the references, on a copy in host memory."""
    s = step.copy("cpu")
    ring = s.logprobs if with_logprobs else None
    if masked:
        mask_ref(s.logits, s.meta, s.mask, s.stamp, s.sampler)
    if kind == "greedy":
        greedy_ref(s.logits, s.meta, s.tokens, s.out, s.sampler, masked)
    elif kind == "sample":
        sample_ref(s.logits, s.meta, s.samp, s.tokens, s.counts, s.bias, s.out, s.sampler, ring, masked)
    else:
        logprobs_ref(s.logits, s.meta, s.logprobs, s.ids, s.sampler)
    return s


RUNNERS = {
    "greedy": lambda step: run("greedy", step),
    "greedy_ref": lambda step: run_ref("greedy", step),
    "sample": lambda step: run("sample", step),
    "sample_ref": lambda step: run_ref("sample", step),
}


def assert_same(out: Step, ref: Step, *names: str) -> None:
    """Bit for bit, NaN poison included."""
    a, b = out.tensors(), ref.tensors()
    for name in names or a:
        x, y = a[name].cpu().contiguous(), b[name].cpu().contiguous()
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), f"{name} differs"


def kept(step: Step, slot: int = 0) -> set[int]:
    """The tokens that the filters left, from the sampler's buffers after a step."""
    y = step.sampler.processed[slot].cpu()
    temperature, _, min_p = step.samp[slot, :3].cpu()
    d = distance_ref(y, y.max(), temperature)
    keep = (d <= step.sampler.state[slot, THRESHOLD].cpu()) & (weight_ref(d) >= float(min_p) * 2**WEIGHT_BITS)
    return set(keep.nonzero().flatten().tolist())
