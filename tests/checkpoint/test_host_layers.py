"""Weights of the last layers in host memory: equal tokens, order of fetches, plans and pinned memory."""

import gc
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from checkpoints import write_tiny
from models import BOTH, CUDA, DEVICE, build_engine, planned, slowed, tiny_config, tiny_engine, use_h100
from util import assert_close, covering

from tridecode import Engine, SamplingParams
from tridecode import tensors as pinned
from tridecode.checkpoint.load import load_config, load_weights, random_weights
from tridecode.checkpoint.slices import host_layer_bytes, parameter_count, weight_bytes
from tridecode.cli.bench.passes import rewind
from tridecode.errors import DeviceError, ParameterError
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.models.presets import PRESETS
from tridecode.plan import memory
from tridecode.plan.memory import plan_memory
from tridecode.state.offload import Offload
from tridecode.step import decode
from tridecode.step.dispatch import BatchDescriptor, Dispatcher
from tridecode.step.graphs import DecodePasses, launcher
from tridecode.step.prompt import finish, read
from tridecode.step.run import Forked, Recorder, launch, run_reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
PAGE = 64 if CUDA else 16
PROMPT = [(11 * i + i // 7) % 300 for i in range(9 * PAGE + 5)]
LAYERS = 6
LINEARS = ("qkv", "o_proj", "gate_up", "down")


def engine_of(on_host=0, offload=None, pages=None, family="qwen3", **more):
    build = dict(page=PAGE, pages=pages, offload=offload, chunk_tokens=5 * PAGE) | more
    fields = dict(num_layers=LAYERS, max_position=16 * PAGE, capacity=16 * PAGE, on_host=on_host) | BOTH[family]
    if CUDA:
        fields |= dict(head_dim=128, num_heads=8, num_kv_heads=2)
    else:
        fields |= dict(dtype=torch.float32)
    engine = tiny_engine(graph=build.pop("graph", "full"), build=build, **fields)
    engine.threads = 1
    return engine


def tokens_and_logprobs(engine, params, prompt=PROMPT):
    result = engine.generate(prompt, params, reuse_prefix=False)
    return result.token_ids, [each.logprob for each in result.logprobs or ()]


@pytest.fixture(scope="module")
def on_device(request):
    return engine_of(family=getattr(request, "param", "qwen3"))


WITH_EXPERTS = pytest.mark.parametrize("family, on_device", [*zip(BOTH, BOTH)], indirect=["on_device"], ids=BOTH)


@WITH_EXPERTS
@covering(1, graph=["full", "piecewise", "none"] if CUDA else ["none"], on_host=[3, 4, 5, LAYERS])
def test_tokens_do_not_depend_on_the_location_of_weights(graph, on_host, family, on_device):
    """The same kernels read the same numbers, so results are bit-equal."""
    engine = engine_of(on_host, graph=graph, family=family)
    for params in (GREEDY, SAMPLED):
        for prompt in (PROMPT, PROMPT[:5]):
            assert tokens_and_logprobs(engine, params, prompt) == tokens_and_logprobs(on_device, params, prompt)


@WITH_EXPERTS
def test_weights_and_pages_on_the_host_together(family, on_device):
    engine = engine_of(4, Offload(host=40, ring=16), pages=8, chunk_tokens=5 * PAGE, family=family)
    assert tokens_and_logprobs(engine, GREEDY) == tokens_and_logprobs(on_device, GREEDY)
    assert tokens_and_logprobs(engine, SAMPLED) == tokens_and_logprobs(on_device, SAMPLED)


def test_concurrent_requests_with_weights_on_the_host():
    plain, engine = (engine_of(layers, slots=3, prompt_ms=1e6) for layers in (0, 4))
    prompts = [PROMPT[: 3 + 50 * i] for i in range(5)]
    found = [[result.token_ids for result in e.generate_many(prompts, GREEDY)] for e in (plain, engine)]
    assert found[0] == found[1]


def test_host_layers_may_have_different_sizes():
    spec = tiny_config(num_layers=LAYERS, max_position=16 * PAGE)
    sizes = [160, 96, 224, 160, 96, 224]
    layers = [replace(each, ffn=replace(each.ffn, intermediate=size)) for each, size in zip(spec.layers, sizes)]
    spec, dtype = replace(spec, layers=tuple(layers)), torch.bfloat16 if CUDA else torch.float32
    texts = []
    for on_host in (0, 5):
        weights = random_weights(spec, DEVICE, dtype, on_host=on_host)
        engine = build_engine(spec, weights, 16 * PAGE, page=PAGE)
        texts.append(tokens_and_logprobs(engine, GREEDY))
    assert texts[0] == texts[1]
    pieces = {source.nbytes for source in weights.host.source}
    assert len(pieces) == 3 and max(pieces) == host_layer_bytes(spec, dtype)


# ---- launches


def lists(kind):
    """Return a function that lists the launches of a pass."""
    if kind == "decode":
        return lambda run, model: decode.decode_pass(run, model, "greedy")

    def prompt(run, model):
        read(run, model, 5, decoding=1)
        finish(run, model, "greedy")

    return prompt


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("kind", ["decode", "prompt"])
@pytest.mark.parametrize("on_host", [3, LAYERS])
def test_fetch_order_of_weights(on_host, kind, family):
    model = engine_of(on_host, family=family).model
    host, recorder = model.weights.host, Recorder()
    lists(kind)(recorder, model)
    buffers = {target.data_ptr(): None for target in host.target}
    assert len(buffers) == 2
    waited, reads = set(), []
    for line in recorder.launches:
        if line.role == "fetch":
            layer = next(i for i, source in enumerate(host.source) if source.data_ptr() == line.args[2].data_ptr())
            address = line.args[3].data_ptr()
            before = buffers[address]
            down = (before, "down") in reads or (before, "experts_down") in reads
            assert before is None or down, "a buffer was refilled before its last reader ran"
            buffers[address] = layer
            waited.discard(address)
        elif line.role == "fetched":
            waited.add(line.args[0].data_ptr())
        elif line.role.removeprefix("experts_") in LINEARS:
            linear = next(arg for arg in line.args if isinstance(arg, LoadedLinear))
            own = line.role.removeprefix("experts_")
            layer = sum(role.removeprefix("experts_") == own for _, role in reads) - (LAYERS - on_host)
            if layer >= 0:
                address = host.target[layer].data_ptr()
                assert address <= linear.weight.data_ptr() < address + host.target[layer].nbytes
                assert buffers[address] == layer and address in waited
            reads.append((layer, line.role))
    assert [role.removeprefix("experts_") for _, role in reads] == [*LINEARS] * LAYERS


class Stream:
    """A stream that logs its operations to a common log."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self._log.append(f"{self.name} is marked")
        return f"mark {len(self._log)}"

    def wait_event(self, mark):
        self._log.append(f"{self.name} waits for {mark}")


@pytest.mark.parametrize("capturing", [False, True])
def test_fetches_run_on_a_second_stream(capturing, monkeypatch):
    """A launch after a wait has two predecessors, so it is a plain launch."""
    log = []
    main, side, captured = (Stream(name, log) for name in ("main", "side", "captured"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    run = Forked(lambda role, *_: log.append(role), lambda role, *_: log.append(f"plain {role}"), side, captured)
    rings = torch.zeros(2, 8)
    for role, *args in [
        ("fetch", 0, rings[0]), ("fetch", 1, rings[1]), ("embed",), ("fetched", rings[1]), ("qkv",),
        ("fetched", rings[0]), ("attention",), ("o_proj",), ("fetched", rings[0]), ("down",),
    ]:  # fmt: skip
        run(role, None, *args)
    name = "captured" if capturing else "side"
    assert log == [
        f"{name} waits for main", "plain fetch", f"{name} is marked", f"{name} waits for main", "plain fetch",
        f"{name} is marked", "embed", "main waits for mark 6", "plain qkv", "main waits for mark 3", "plain attention",
        "o_proj", "down",
    ]  # fmt: skip


def test_kernels_and_references_agree_with_host_layers():
    found = []
    for run in (launch, run_reference):
        engine = engine_of(3)
        rewind(engine, 7, replace(GREEDY, seed=1))
        DecodePasses(engine.model, run).replay("greedy")
        engine.synchronize()
        found.append(engine.model.workspace.logits[0].cpu().clone())
    assert_close(*found, 2e-2 if CUDA else 1e-4)


# ---- loading, and memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_is_loaded_into_host_memory(dtype, tmp_path):
    path = write_tiny(tmp_path, "qwen2", num_hidden_layers=5)
    config = load_config(path)
    plain, weights = (load_weights(path, config, DEVICE, dtype, on_host=layers) for layers in (0, 4))
    stored, host = plain.tensors(), weights.host
    assert len(host.stored) == 4 * len(LINEARS) and host.first == 1 and host.end == 5
    for name, tensor in weights.tensors().items():
        held = host.stored.get(name, tensor)
        assert torch.equal(held.cpu(), stored[name].cpu()), name
        if name in host.stored:
            assert tensor.shape == held.shape and tensor.data_ptr() % 64 == 0 and held.device.type == "cpu"


def test_counted_device_bytes_match_the_allocation():
    config, dtype = tiny_config(num_layers=7), torch.bfloat16
    weights = random_weights(config, DEVICE, dtype, on_host=5)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights.tensors().values()}
    padding = 4096 * 7
    assert 0 <= sum(held.values()) - weight_bytes(config, dtype, on_host=5) <= padding
    assert weights.host.source[0].nbytes == host_layer_bytes(config, dtype)
    assert weight_bytes(config, dtype) == 2 * parameter_count(config)


GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    free = {"cuda": 5 * GIB, "cpu": 20 * GIB}
    monkeypatch.setattr(memory, "free_memory", lambda device: free[device.type])
    use_h100(monkeypatch)
    return free


def test_model_larger_than_the_device_is_planned(machine):
    """Qwen3-4B has 7.5 GiB of weights, the device has 5 GiB."""
    config, dtype = PRESETS["qwen3-4b"], torch.bfloat16
    with pytest.raises(DeviceError, match="not enough memory"):
        planned(config, max_seq_len=1000)
    assert planned(config, max_seq_len=1000, weights_offload=19).host_layers == 36, (
        "the plan puts more layers on the host than the model has"
    )
    plan = planned(config, max_seq_len=1000, weights_offload=6)
    layers = plan.host_layers
    assert layers == int(6 * GIB / host_layer_bytes(config, dtype)) and 28 < layers < 36
    assert plan.capacity == 1000 and plan.memory.needed(1000) < 5 * GIB
    kv = planned(config, max_seq_len=40_000, kv_offload="auto", weights_offload=6)
    assert kv.offload.ring > 0 and kv.memory.needed(40_000, kv.kv_tokens) <= kv.memory.usable
    assert kv.offload.host <= (20 * GIB - layers * host_layer_bytes(config, dtype)) / 2 / (64 * 147_456) + 1
    on_cpu = plan_memory(config, dtype, torch.device("cpu"), on_host=layers)
    assert on_cpu.weights > weight_bytes(config, dtype)


@pytest.mark.parametrize(
    "gib, words",
    [
        ("much", "weights_offload must be a number"),
        (0, "weights_offload must be a number"),
        (0.3, "weights_offload: at least 3 layers (0.564 GiB) must be offloaded"),
    ],
    ids=str,
)
def test_impossible_weights_offload_is_one_line(machine, gib, words):
    with pytest.raises((ParameterError, DeviceError)) as raised:
        planned(PRESETS["qwen3-4b"], weights_offload=gib)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_too_small_host_is_one_line(machine):
    machine["cpu"] = 4 * GIB
    with pytest.raises(DeviceError, match=r"31 layers take 5\.8 GiB of the host's memory, but only 4\.0 are free"):
        planned(PRESETS["qwen3-4b"], weights_offload=6)


def test_quantized_weights_cannot_be_offloaded(machine):
    with pytest.raises(ParameterError, match=r"^weights_offload: quantized weights \(int4\) are kept on the"):
        planned(PRESETS["qwen3-4b"], quantize="int4", weights_offload=6)
    assert planned(PRESETS["qwen3-4b"], quantize="int4").host_layers == 0
    with pytest.raises(ParameterError, match="quantized weights"):
        Engine.load(device=str(DEVICE), quantize="int8", weights_offload=0.02)


def test_engine_loads_with_weights_on_the_host():
    options = dict(device=str(DEVICE), max_seq_len=64)
    with Engine.load(speculate="off", **options) as plain, Engine.load(weights_offload=0.02, **options) as engine:
        assert engine.model.weights.host.end == engine.config.num_layers and engine.plan.ngram is None
        assert tokens_and_logprobs(engine, SAMPLED, "Hello") == tokens_and_logprobs(plain, SAMPLED, "Hello")


# ---- on a GPU: one graph, two streams

needs_gpu = pytest.mark.skipif(not CUDA, reason="streams and graphs need a GPU")


def logits_of(engine, run) -> torch.Tensor:
    """Return the logits of one pass, whose buffers contain NaN before."""
    steps = DecodePasses(engine.model, run, Dispatcher("full", (1,)), batches=[BatchDescriptor("greedy", 1)])
    rewind(engine, 7, replace(GREEDY, seed=1))
    for buffer in engine.model.weights.host.target:
        buffer.fill_(-1)  # These bytes are NaN in every number format.
    steps.replay("greedy", 1)
    engine.synchronize()
    return engine.model.workspace.logits[0].clone()


@needs_gpu
@pytest.mark.parametrize("late", ["fetch", "qkv", "down"])
def test_streams_wait_for_each_other(late):
    engine = engine_of(4)
    expected = logits_of(engine, launch)
    assert expected.isfinite().all() and torch.equal(logits_of(engine, slowed(late)), expected)
    assert torch.equal(logits_of(engine, launcher(engine.model)), expected), "the logits differ with dependent launches"


@needs_gpu
def test_graph_is_captured_once():
    engine = engine_of(4)
    engine.steps.check_addresses = True
    captures = engine.steps.captures
    tokens_and_logprobs(engine, GREEDY)
    tokens_and_logprobs(engine, SAMPLED)
    # Each kind of sampling is captured with and without masks.
    assert engine.steps.captures == captures == 2 * len(decode.KINDS)
    assert {stat.mode for stat in engine.graph_stats() if stat.kind in decode.KINDS} == {"full"}


# ---- pinned host memory


class Driver:
    """A fake CUDA driver that registers memory. After `limit` calls it returns an error."""

    def __init__(self, limit):
        self.limit, self.pieces = limit, {}

    def cudaHostRegister(self, address, length, flags):
        if len(self.pieces) == self.limit:
            return 2
        self.pieces[address] = length
        return 0

    def cudaHostUnregister(self, address):
        del self.pieces[address]


@pytest.fixture
def driver(monkeypatch):
    made = Driver(9)
    monkeypatch.setattr(pinned, "REGISTERED_BYTES", 5 * 4096)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_host_memory_is_registered_in_pieces_and_unregistered(driver):
    memory = pinned.host_memory(7, 2 * 4096, torch.device("cuda"), "weights_offload")
    first = memory.data_ptr()
    assert memory.shape == (7, 8192) and not memory.any() and first % 4096 == 0
    assert driver.pieces == {first: 16_384, first + 16_384: 16_384, first + 32_768: 16_384, first + 49_152: 8192}
    part = memory[3, :8]
    del memory
    gc.collect()
    assert len(driver.pieces) == 4, "memory was unpinned although a tensor still refers to it"
    del part
    gc.collect()
    assert driver.pieces == {}


def test_driver_that_refuses_to_pin_is_one_line(driver):
    driver.limit = 2
    with pytest.raises(DeviceError) as raised:
        pinned.host_memory(7, 2 * 4096, torch.device("cuda"), "kv_offload")
    assert str(raised.value).startswith("kv_offload: the driver refuses to pin more than 0.0 of 0.0 GiB (CUDA error 2)")
    del raised
    gc.collect()
    assert driver.pieces == {}, "some host memory stayed pinned"
