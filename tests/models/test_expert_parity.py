"""The numerical contract of models with experts, where the reference uses the experts that the engine has chosen.

A rounding error can change the choice of a router, and a changed choice changes all later numbers. Therefore
transformers in fp32 first repeats the choices of the engine, and then those of transformers in bf16. The errors of the
engine, of its logits and of its routers, are at most those of transformers in bf16. A different choice is allowed where
the error of a router exceeds the distance of two experts.
"""

import pytest
import torch
from checkpoints import EXPERTS, HYBRID, write_tiny
from models import CUDA, DEVICE
from quantized import write_quantized
from safetensors.torch import load_file, save_file
from test_parity import errors

from tridecode import Engine, SamplingParams
from tridecode.cli.bench.measure import running
from tridecode.kernels.moe.route import ROUTE
from tridecode.layout import POSITION, RUN, SLOT, STATUS, packed
from tridecode.serve.request import scoring
from tridecode.step.graphs import DecodePasses
from tridecode.step.prompt_graphs import PromptPasses
from tridecode.step.run import launch, run_reference

transformers = pytest.importorskip("transformers")
TOKENS = 64
OPTIONS = dict(
    device=str(DEVICE), dtype="bfloat16" if CUDA else "float32", max_seq_len=2 * TOKENS, graph="none", speculate="off"
)
WIDE = dict(
    hidden_size=1024, intermediate_size=512, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4,
    vocab_size=4096,
)  # fmt: skip
SMALL = dict(hidden_size=192, moe_intermediate_size=64, intermediate_size=128, shared_expert_intermediate_size=64)
MODELS = {  # Name -> (family, changes of config.json, None or (method, options, further words of `skip`...)).
    **{name: (name, {}, None) for name in EXPERTS},
    "qwen3-moe in fp8": ("qwen3-moe", SMALL, ("fp8", {})),
    "qwen3-moe in int4": ("qwen3-moe", SMALL, ("pack-quantized", dict(group=32))),
    "qwen2-moe in int4": ("qwen2-moe", SMALL, ("awq", dict(group=32))),
    "qwen3.5-moe in int4 with a shared expert in 16 bits": (
        "qwen3.5-moe",
        SMALL,
        ("pack-quantized", dict(group=32), "attn", "shared_expert"),
    ),  # fmt: skip
    "qwen3-next in fp8": ("qwen3-next", {}, ("float-quantized", dict(shared="channel"))),
}
if CUDA:
    SHARED = {"shared_expert_intermediate_size": 256}
    MODELS |= {
        "qwen3-moe of larger widths": ("qwen3-moe", WIDE, None),
        "qwen3.5-moe of larger widths": ("qwen3.5-moe", WIDE | SHARED, None),
        "qwen3-moe of larger widths in fp8": ("qwen3-moe", WIDE, ("fp8", {})),
        "qwen3-moe of larger widths in int4": ("qwen3-moe", WIDE, ("pack-quantized", dict(group=64))),
    }


class Recorder:
    """A line runner that copies the results of routers.

    `ids` and `logits` have the experts and the logits of each launch. `places` has slot and position of its rows, or
    None in a prompt pass.
    """

    def __init__(self, engine):
        self._run = launch if engine.backend == "triton" else run_reference
        self.ids, self.logits, self.places = [], [], []

    def __call__(self, role, op, *args, **options):
        self._run(role, op, *args, **options)
        if op is ROUTE:
            meta, _, x, _, _, routes, _, sizes = args
            rows, place = slice(len(x)), None
            if meta is not None:
                rows = meta[:, STATUS] == RUN
                place = meta[rows][:, [SLOT, POSITION]].tolist()
            self.ids.append(routes.ids[rows, : sizes.top_k].long().clone())
            self.logits.append(routes.logits[rows, : sizes.experts].clone())
            self.places.append(place)

    def slot_routes(self, slot, layers):
        """Return the ids and the logits of a slot's positions, [tokens, ...] of each layer."""
        found = [[(ids[row], logits[row])
                  for ids, logits, place in list(zip(self.ids, self.logits, self.places))[layer::layers]
                  for row, (own, _) in enumerate(place) if own == slot] for layer in range(layers)]  # fmt: skip
        return [[torch.stack(parts) for parts in zip(*layer)] for layer in found]


class Reference:
    """A model of transformers whose routers choose given experts.

    After a call, `chosen` and `logits` have the routers' own choices and their logits, [tokens, ...] of each layer.
    """

    def __init__(self, path, dtype):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).eval()
        routers = [module for module in self.model.modules() if type(module).__name__.endswith("TopKRouter")]
        for layer, module in enumerate(routers):
            module.register_forward_hook(lambda module, args, out, layer=layer: self._route(layer, *out))
        self.layers, self.ids, self.chosen, self.logits = len(routers), None, [], []

    def _route(self, layer, logits, weights, ids):
        self.chosen.append(ids)
        self.logits.append(logits.float())
        if self.ids is None:
            return logits, weights, ids
        normalized = (weights.float().sum(1) - 1).abs().max() < 1e-2
        ids = self.ids[layer]
        weights = logits.float().softmax(1).gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True) if normalized else weights
        return logits, weights.to(logits.dtype), ids

    def __call__(self, text, ids=None):
        """Return the logits of a text. ids: the experts to use, [tokens, top_k] of each layer, or None for its own."""
        self.ids, self.chosen, self.logits = ids, [], []
        with torch.no_grad():
            return self.model(torch.tensor([text], device=DEVICE)).logits[0].float()


def all_errors(logits, routers, exact: Reference, expected, median) -> tuple[float, ...]:
    """Return the errors of logits against `expected`, and of router logits against those of the last call of exact.

    median: see `check_contract` of test_parity. Routers read the same activations. On the CPU, in fp32, their errors of
        all tokens are compared.
    """
    _, router_error = errors(torch.cat(list(routers)), torch.cat(exact.logits), median and CUDA)
    return *errors(logits, expected, median), router_error


def check_choices(ids, logits, exact, name):
    """Check that other choices than those of the reference are explained by the errors of the routers.

    Return the share of choices that differ.
    """
    different = 0
    for own, own_logits, exact_logits in zip(ids, logits, exact):
        error = (own_logits - exact_logits).abs().amax(1)
        best = exact_logits.topk(own.shape[1], 1).indices
        least = exact_logits.gather(1, best).amin(1)
        lost = (least - exact_logits.gather(1, own).amin(1)).clamp(min=0)
        assert (lost <= 2 * error + 1e-6).all(), f"{name}: a router chose an expert that is {lost.max():.2e} worse"
        different += int((own.sort(1).values != best.sort(1).values).any(1).sum())
    return different / sum(len(each) for each in ids)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Return a path, its references in fp32 and bf16, and whether medians of errors are compared, as in test_parity."""
    (family, changes, method), folder = MODELS[request.param], tmp_path_factory.mktemp("experts")
    if method is None:
        path = dense = write_tiny(folder / family, family, dtype=torch.bfloat16 if CUDA else torch.float32, **changes)
    else:  # The references read a checkpoint with the numbers that the quantized one represents.
        path, dense = folder / "quantized", write_tiny(folder / "dense", family, **changes)
        truth = write_quantized(path, method[0], ("lm_head", *method[2:]), family, changes, **method[1])
        tensors, stored = (load_file(checkpoint / "model.safetensors") for checkpoint in (dense, path))
        # bf16 represents all other numbers exactly, as those of published checkpoints.
        others = {
            name: x.bfloat16().float() for name, x in tensors.items() if name.removesuffix(".weight") not in truth
        }
        tensors = others | {f"{name}.weight": weight.contiguous() for name, weight in truth.items()}
        save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
        save_file(stored | others, path / "model.safetensors", metadata={"format": "pt"})
    return path, Reference(dense, torch.float32), Reference(dense, torch.bfloat16), family in HYBRID


def texts_of(count):
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, 380, (TOKENS,), generator=generator).tolist() for _ in range(count)]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 8] if CUDA else [1, 3])
def test_decode_passes_keep_the_contract(model, rows, batch_invariant):
    path, exact, bf16, median = model
    texts = texts_of(rows)
    with Engine.load(path, slots=rows, batch_invariant=batch_invariant, **OPTIONS) as engine:
        recorder, shape = Recorder(engine), (TOKENS, engine.config.vocab_size)
        requests = [scoring(packed(text), 0.0, logits=torch.empty(shape, device=DEVICE)) for text in texts]
        with running(engine, DecodePasses(engine.model, recorder)):
            for request in [engine._driver.submit(request) for request in requests]:
                assert request.result().error is None
        engine.synchronize()
    for slot in sorted({0, rows // 2, rows - 1}):
        name = f"text {slot} of {rows}"
        ids, routers = zip(*recorder.slot_routes(slot, exact.layers))
        expected = exact(texts[slot], ids)
        share = check_choices(ids, routers, exact.logits, name)
        assert share <= (0.1 if CUDA else 0), f"{name}: {share:.1%} of the choices differ"
        found, limits = all_errors(requests[slot].logits, routers, exact, expected, median), (1e-9, 1e-5, 1e-5)
        if CUDA:
            logits = bf16(texts[slot])
            limits = all_errors(logits, bf16.logits, exact, exact(texts[slot], bf16.chosen), median)
        for kind, error, limit in zip(("KL divergence", "RMS of logits", "RMS of routers"), found, limits):
            assert error <= limit, f"{name}: the error is {error:.2e} ({kind}), but the limit is {limit:.2e}"


def test_prompt_passes_keep_the_contract(model):
    """Each text is a prompt, whose last logits are compared. In the last layer, other tokens may have no experts."""
    path, exact, bf16, median = model
    found, expected, bounds, exact_bounds, shares = [], [], [], [], []
    with Engine.load(path, **OPTIONS) as engine:
        for text in texts_of(32 if CUDA else 2):
            recorder = Recorder(engine)
            steps = DecodePasses(engine.model, recorder)
            with running(engine, steps, PromptPasses(engine.model, steps, recorder)):
                engine.generate(text, SamplingParams(temperature=0.0, max_tokens=1), reuse_prefix=False)
            found.append(engine.model.workspace.logits[0].clone())
            exact(text)
            routes = [(ids[:TOKENS], logits[:TOKENS]) for ids, logits in zip(recorder.ids, recorder.logits)]
            counts = [TOKENS if len(ids) == TOKENS else 1 for ids, _ in routes[: exact.layers]]
            ids, routers = zip(*([part[:count] for part in each] for each, count in zip(routes, counts)))
            filled = [torch.cat((chosen[: -len(own)], own)) for chosen, own in zip(exact.chosen, ids)]
            expected.append(exact(text, filled)[-1])
            own_logits = [logits[-len(own) :] for logits, own in zip(exact.logits, ids)]
            shares.append(check_choices(ids, routers, own_logits, "prompt"))
            if CUDA:
                bounds.append(bf16(text)[-1])
                exact_bounds.append(exact(text, bf16.chosen)[-1])
    assert max(shares) <= (0.1 if CUDA else 0), f"{max(shares):.1%} of the choices differ"
    limits = errors(torch.stack(bounds), torch.stack(exact_bounds), median) if CUDA else (1e-9, 1e-5)
    for error, limit in zip(errors(torch.stack(found), torch.stack(expected), median), limits):
        assert error <= limit, f"the error is {error:.2e}, but the limit is {limit:.2e}"
