"""The memory plan: contexts that fit, refusals, and limits of containers."""

from dataclasses import replace

import pytest
import torch
from models import planned, tiny_config, use_h100
from util import covering

from tridecode import Engine
from tridecode.checkpoint import load as checkpoint
from tridecode.errors import DeviceError
from tridecode.models.presets import PRESETS
from tridecode.plan import cgroup, memory
from tridecode.plan.memory import MemoryPlan, plan_memory
from tridecode.step.model import make_model
from tridecode.step.workspace import make_workspace, named_tensors
from tridecode.tuning.configs import TILE_ROWS

GIB = 2**30


def test_context_is_the_memory_left_by_the_weights():
    plan = MemoryPlan(free=10 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192, headroom=0.1)
    assert plan.max_context == 2048
    assert plan.capacity(None, "x") == 2048 and plan.capacity(1000, "x") == 1000
    with pytest.raises(DeviceError, match=r"3,000 positions need 9\.93 GiB .* at most 2,048 positions fit"):
        plan.capacity(3000, "x")


def test_weights_that_do_not_fit_are_refused():
    plan = MemoryPlan(free=5 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192)
    with pytest.raises(DeviceError, match="choose a smaller model"):
        plan.capacity(None, "x")


def test_default_context_on_a_cpu_is_limited(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 8 * GIB)
    config, cpu = tiny_config(max_position=2**30), torch.device("cpu")
    plan = planned(config, cpu)
    most = plan.memory.max_context
    assert plan.capacity == memory.CPU_CONTEXT and most > 2**20
    (note,) = plan.notes
    assert f"lowered to {plan.capacity:,} of the model's {2**30:,}" in note and f"up to {most:,} " in note
    for spec, requested, capacity in ((config, 2**20, 2**20), (tiny_config(max_position=512), None, 512)):
        plan = planned(spec, cpu, max_seq_len=requested)
        assert (plan.capacity, plan.notes) == (capacity, ())


def test_slots_share_the_positions_that_fit():
    plan = MemoryPlan(
        free=10 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192, kv_per_token=2**19,
        per_slot=2**26, slots=4,
    )  # fmt: skip
    left = 3 * GIB - 3 * 2**26
    assert plan.max_context == left // (2**20 + 3 * 4) < 3072
    for capacity, pool in ((100, 400), (1000, 4000), (2000, 3759)):
        assert plan.capacity(capacity, "x") == capacity and plan.kv_tokens(capacity, None, "x") == pool
        assert plan.needed(capacity, pool) <= plan.free
    assert plan.needed(2000, 3759 + 1) > plan.free, "the plan leaves room for another position"
    assert plan.kv_tokens(1000, 1500, "x") == 1500
    with pytest.raises(DeviceError, match=r"kv_tokens: 5,000 positions need .* at most 4,\d\d\d fit$"):
        plan.kv_tokens(1000, 5000, "x")


def test_too_many_slots_error_gives_the_number_that_fits():
    plan = MemoryPlan(
        free=10 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192, kv_per_token=2**19,
        per_slot=2**26, slots=64,
    )  # fmt: skip
    message = r"^not enough memory on x: 64 slots with 100 positions need 11\.\d\d GiB \(6\.00 GiB of weights\), "
    with pytest.raises(DeviceError, match=message + r"10\.00 GiB are free; at most 47 slots fit$"):
        plan.capacity(100, "x")
    assert replace(plan, slots=47).capacity(100, "x") == 100
    with pytest.raises(DeviceError, match="at most 46 slots fit"):
        replace(plan, slots=47).capacity(140, "x")
    with pytest.raises(DeviceError, match="choose a smaller model"):
        replace(plan, free=GIB).capacity(100, "x")


def test_plan_counts_the_bytes_of_a_slot():
    config, cpu = tiny_config(), torch.device("cpu")
    assert plan_memory(config, torch.float32, cpu).per_slot == 0

    def total(slots):
        tensors = named_tensors(make_workspace(config, 100, cpu, torch.float32, slots))
        return sum(t.nbytes for name, t in tensors.items() if not name.startswith(("out", "mask")))

    for slots in (2, 16):
        plan = plan_memory(config, torch.float32, cpu, slots)
        allocated = total(slots) - total(1) - 4 * 101 * (slots - 1)
        assert allocated <= (slots - 1) * plan.per_slot <= allocated + 16 * slots


@covering(
    2, preset=["qwen3-0.6b", "qwen3-4b", "llama-3.1-8b", "qwen2.5-7b", "mistral-7b", "qwen3-30b-a3b"],
    sizes=[(1, 8192, 2048), (1, 100, 2048), (16, 4096, 512), (64, 1024, 8192)], dtype=[torch.bfloat16, torch.float32],
)  # fmt: skip
def test_plan_matches_the_allocation(monkeypatch, preset, sizes, dtype):
    """Count all tensors except the weights on the meta device; SCRATCH is separate."""
    slots, capacity, chunk = sizes
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    use_h100(monkeypatch)
    config = replace(PRESETS[preset], max_position=capacity)  # With this limit, the plan reserves exactly this context.
    weights = checkpoint.empty_weights(config, "meta", dtype)
    model = make_model(config, weights, capacity, slots, prompt_rows=chunk)
    tensors = named_tensors(model.workspace) | {f"prompt.{name}": t for name, t in named_tensors(model.prompt).items()}
    tensors |= {"pool": model.kv.pool}
    tensors |= {f"rope.{i}": table for i, table in enumerate(sum(model.ropes.values(), ()))}
    allocated = sum(t.nbytes for t in tensors.values() if t.is_meta)
    plan = plan_memory(config, dtype, torch.device("cuda"), slots, chunk, torch_prompt_attention=False)
    pages = -(-capacity // 64) * 64  # Round up to whole pages.
    planned = plan.needed(capacity, slots * pages) - plan.weights - memory.SCRATCH["cuda"]
    assert allocated == pytest.approx(planned, abs=100 * slots)
    with_torchs = plan_memory(config, dtype, torch.device("cuda"), slots, chunk)
    assert with_torchs.per_token - plan.per_token == 2 * config.pages.width * dtype.itemsize


@pytest.mark.parametrize("slots", [1, 3, 65])
def test_buffers_of_linears_have_the_rows_of_a_tile(slots):
    """A single row is multiplied in tiles too, in batch-invariant mode."""
    workspace = make_workspace(tiny_config(), 100, torch.device("cpu"), torch.bfloat16, slots)
    tensors = named_tensors(workspace)
    for name in ("normed", "attention.attended", "mlp.act"):
        tensor = tensors[name]
        assert len(tensor) == slots
        assert tensor.untyped_storage().nbytes() >= max(slots, TILE_ROWS) * tensor.shape[1] * tensor.itemsize, name


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_plan_counts_rows_that_verify_drafts(monkeypatch, slots):
    config, cpu = tiny_config(), torch.device("cpu")
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    weights = checkpoint.random_weights(config, cpu, torch.float32)

    def allocated(speculate):
        model = make_model(config, weights, 64, slots, page=64, speculate=speculate)
        spaces = [model.workspace, model.verify] if speculate else [model.workspace]
        found = [t.untyped_storage() for ws in spaces for t in named_tensors(ws).values()]
        storages = {storage.data_ptr(): storage for storage in found}
        return sum(storage.nbytes() for storage in storages.values())

    off, ngram = (plan_memory(config, torch.float32, cpu, slots, speculate=each) for each in (False, True))
    more = allocated(True) - allocated(False)
    assert ngram.fixed - off.fixed == pytest.approx(more, rel=0.15, abs=11_000), (
        "speculation by n-grams changed the memory plan by more than the buffers of draft rows"
    )
    assert (more > 11_000) == (slots < 64)


def test_kv_tokens_and_context_limit_each_other(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    config, cpu = tiny_config(max_position=512), torch.device("cpu")
    plan = planned(config, cpu, slots=4, kv_tokens=1000)
    assert (plan.capacity, plan.notes) == (512, ())
    plan = planned(config, cpu, slots=4, kv_tokens=300)
    assert plan.capacity == 300
    assert plan.notes[0].endswith("to 300 of the model's 512 positions: that is what kv_tokens requests")
    needed = plan_memory(config, torch.float32, cpu, 8).needed(512, 2000)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed * 4 // 3 + 9)
    plan = planned(config, cpu, slots=8)
    assert (plan.capacity, plan.memory.kv_tokens(512, None, "cpu")) == (512, 2000)
    assert plan.notes == ("8 slots share 2,000 K/V positions: that is what fits cpu",)


def test_default_context_on_a_gpu_is_the_largest_that_fits(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * GIB)
    use_h100(monkeypatch)
    plan = planned(tiny_config(max_position=2**30), dtype="float32")
    assert plan.capacity == plan.memory.max_context > 2**20 and plan.notes[0].endswith("that is what fits cuda")


def test_model_beyond_the_cgroup_limit_is_refused_before_loading(monkeypatch, tmp_path):
    monkeypatch.setattr("tridecode.engine.load_weights", None)
    (tmp_path / "own").write_text(V2)
    for name, text in (("memory.max", str(50 << 20)), ("memory.current", str(20 << 20))):
        (tmp_path / "app").mkdir(exist_ok=True)
        (tmp_path / "app" / name).write_text(text)
    left = cgroup.free_memory(tmp_path, tmp_path / "own")
    monkeypatch.setattr(cgroup, "free_memory", lambda: left)
    with pytest.raises(DeviceError, match="not enough memory on cpu: .* 0.03 GiB are free; choose a smaller model"):
        Engine.load(device="cpu")


def test_failed_allocation_names_the_context_size(monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr("tridecode.step.model.make_kv_cache", full)
    with pytest.raises(DeviceError, match="context of 64 positions; choose a smaller max_seq_len"):
        Engine.load(device="cpu", max_seq_len=64)


def test_plan_leaves_headroom(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    plan = plan_memory(tiny_config(max_position=2**24), torch.float32, torch.device("cpu"))
    assert plan.needed(plan.max_context) <= 0.75 * GIB < plan.needed(plan.max_context + 1)


V2, V1 = "0::/app\n", "4:memory:/app\n"
CACHE = "anon 100\ninactive_file 200\nactive_file 50\ntotal_inactive_file 300\ntotal_active_file 60\n"


@pytest.mark.parametrize(
    "own, files, expected",
    [
        (V2, {"memory.max": "1000", "memory.current": "400"}, 600),
        (V2, {"memory.max": "1000", "memory.current": "1400"}, 0),
        (V2, {"memory.max": "max", "memory.current": "400"}, float("inf")),
        (V2, {"app/memory.max": "700", "app/memory.current": "400", "memory.max": "999", "memory.current": "9"}, 300),
        (V2, {"app/memory.max": "1000", "app/memory.current": "700", "app/memory.stat": CACHE}, 550),
        (V1, {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 800),
        (V1, {"memory/app/memory.limit_in_bytes": "900", "memory/app/memory.usage_in_bytes": "100"}, 800),
        (V1, {f"memory/{n}": t for n, t in (("memory.limit_in_bytes", "900"), ("memory.usage_in_bytes", "800"),
                                            ("memory.stat", CACHE))}, 460),
        ("", {}, float("inf")),
    ],
    ids=["v2", "over", "unlimited", "own_group", "file_cache", "v1", "v1_own_group", "v1_file_cache", "none"],
)  # fmt: skip
def test_container_memory(own, files, expected, tmp_path):
    for name, text in ({"own": own} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cgroup.free_memory(tmp_path, tmp_path / "own") == expected
