"""tune: the search, the table it leaves, and what an engine takes from it."""

import json
import logging
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from models import tiny_config, tiny_engine

from tridecode import cli as commands
from tridecode.checkpoint.formats.quantize import rules
from tridecode.checkpoint.load import empty_weights
from tridecode.cli import candidates, tune
from tridecode.errors import DeviceError
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_ring import RingConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.models.presets import PRESETS
from tridecode.step import graphs
from tridecode.step.compiling import missing
from tridecode.step.dispatch import BatchDescriptor
from tridecode.step.model import shapes_of
from tridecode.tuning import choose, tuned
from tridecode.tuning.choose import choose_shapes, matvec_shape
from tridecode.tuning.few_bits import packings
from tridecode.tuning.shapes import MAX_SPLITS
from tridecode.version import __version__

CUDA = torch.cuda.is_available()
GPU = "NVIDIA Test 1 (80GB)"
CONFIG, BF16 = PRESETS["qwen3-4b"], torch.bfloat16


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache directory, empty."""
    monkeypatch.setattr(tuned.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(found: dict[str, dict], gpu: str = GPU) -> None:
    path = tuned.table_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tuned.merged_table(path, gpu, found))


def with_table(config, dtype, capability: int, gpu: str):
    """What an engine on that GPU has of 16-bit weights."""
    return tuned.with_table(choose_shapes(config, dtype, capability), config, dtype, gpu)


def changed(shape, entry: dict, key: str):
    return tuned.changed(shape, entry, key, tuned.forms_of(shape, None, 8))


# The search


@dataclass(frozen=True)
class Part:
    n: int = 1
    w: int = 1
    other: str = "kept"


@dataclass(frozen=True)
class Step:
    a: Part = Part()
    b: Part = Part()


CHOICES = [(op, [{"n": n, "w": w} for n in (1, 2, 4) for w in (1, 2, 4)]) for op in "ab"]
BEST = Step(Part(4, 2), Part(2, 4))


def distance(step: Step) -> float:
    """Seconds: least at BEST."""
    return 1 + sum(
        abs(getattr(getattr(step, op), name) - getattr(getattr(BEST, op), name)) for op in "ab" for name in "nw"
    )


def test_the_search_finds_the_best_and_ends_when_a_round_changes_nothing():
    timed = []
    found = tune.search(Step(), CHOICES, lambda step: timed.append(step) or distance(step), deadline=1, clock=lambda: 0)
    assert found.shapes == BEST and found.seconds == 1 and found.finished
    assert len(timed) == len(set(timed)) == found.tried + 1, "a step was timed twice"


def test_parts_that_depend_on_each_other_need_a_second_round():
    # a = 4 pays only once b = 4
    seconds = {(1, 1): 9, (1, 4): 8, (4, 4): 1, (4, 1): 10}
    found = tune.search(
        Step(), [(op, [{"n": 1}, {"n": 4}]) for op in "ab"], lambda s: seconds[s.a.n, s.b.n], 1, clock=lambda: 0
    )
    assert (found.shapes.a.n, found.shapes.b.n, found.seconds) == (4, 4, 1)


def test_the_search_stops_when_the_time_is_up():
    now = iter(range(100))
    timed = []

    def measure(step):
        timed.append(step)
        return distance(step)

    found = tune.search(Step(), CHOICES, measure, deadline=5, clock=lambda: next(now))
    assert found.tried == 5 and len(timed) == 6 and not found.finished
    assert found.seconds == min(map(distance, timed)) and distance(found.shapes) == found.seconds


def test_shapes_that_do_not_run_are_skipped():
    def measure(step):
        return None if step.a.n == 4 else distance(step)

    found = tune.search(Step(), CHOICES, measure, deadline=1, clock=lambda: 0)
    assert found.shapes == Step(Part(2, 2), Part(2, 4)) and found.finished
    assert found.skipped >= 3
    with pytest.raises(DeviceError, match="does not run with the shapes"):
        tune.search(Step(Part(4)), CHOICES, measure, deadline=1, clock=lambda: 0)


def test_what_is_faster_by_less_than_the_noise_changes_nothing():
    found = tune.search(
        Step(), CHOICES, lambda step: 1 if step == Step() else 1 - tune.MARGIN / 2, deadline=1, clock=lambda: 0
    )
    assert found.shapes == Step() and found.tried == 16


def test_candidates_are_compiled_before_they_are_timed_and_so_many_at_a_time(monkeypatch):
    monkeypatch.setattr(tune, "AT_ONCE", 5)
    compiled, timed = [], []

    def measure(step):
        assert not timed or step in compiled[-1], "not compiled with those that came last"
        timed.append(step)
        return distance(step)

    tune.search(Step(), CHOICES, measure, deadline=1, prepare=compiled.append, clock=lambda: 0)
    assert [step for several in compiled for step in several] == timed[1:]
    assert [len(several) for several in compiled[:4]] == [5, 3, 5, 3], "eight of each part are new"


def test_fields_that_are_not_searched_stay():
    start = Step(Part(other="x"), Part(other="y"))
    found = tune.search(start, CHOICES, distance, deadline=1, clock=lambda: 0)
    assert (found.shapes.a.other, found.shapes.b.other) == ("x", "y")


def test_candidates_are_what_registers_hold_and_a_table_may_say():
    start = choose_shapes(CONFIG, BF16, 90)[1]
    found = candidates.candidates(CONFIG, 2, start, 132)
    assert {op for op, _ in found} == set(tune.ORDER) == set(vars(start))
    for op, tried in found:
        assert tried
        for values in tried:
            allowed = tuned.VALUES[type(getattr(start, op))]
            assert all(value in allowed[name] for name, value in values.items())
            replace(getattr(start, op), **values)
    down = [(t["block_n"], t["num_warps"]) for op, tried in found if op == "down" for t in tried if "block_n" in t]
    assert {(1, 2), (2, 4), (4, 8), (8, 16)} <= set(down)
    assert not {(1, 1), (8, 8), (1, 16)} & set(down)  # too many bytes a thread, or too few
    tiles = [{"block_n": 2, "num_warps": 1}, {"block_n": 2, "num_warps": 4}]
    bounded = candidates.with_registers(tiles, 2 * 9728, bounded=True)
    assert bounded == [{"block_n": 2, "num_warps": 4, "registers": 80 + 40}]
    assert candidates.with_registers(tiles, 2 * 9728, bounded=True, shared=True)[0]["registers"] == 0
    for programs in (0, 132):  # where the search begins decides; a bound that two turns do not fit in is never tried
        begin = replace(start, down=replace(start.down, programs=programs))
        tiles = [t for op, tried in candidates.candidates(CONFIG, 2, begin, 132) if op == "down" for t in tried]
        assert all((t["registers"] == 0) == (programs > 0) for t in tiles if "block_n" in t)
    names = set().union(*(values for op, tried in found if op == "attention" for values in tried))
    assert names >= {"block_t", "num_warps", "splits"}


# The table


def test_a_table_comes_back_and_is_kept_for_other_models(cache):
    write({"qkv 8x4 bfloat16": {"block_n": 2, "num_warps": 4}})
    write({"down 4x8 bfloat16": {"block_n": 1, "num_warps": 8}})
    path = tuned.table_path(GPU)
    assert path == cache / "shapes" / "nvidia-test-1-80gb.json"
    assert tuned.read_table(path, GPU) == {
        "qkv 8x4 bfloat16": {"block_n": 2, "num_warps": 4}, "down 4x8 bfloat16": {"block_n": 1, "num_warps": 8}
    }  # fmt: skip
    assert json.loads(path.read_text())["tridecode"] == __version__


def fields(op: str, **values) -> dict:
    """A table's entry for a part of CONFIG's step."""
    return tuned.searched(getattr(choose_shapes(CONFIG, BF16, 90)[1], op)) | values


def test_the_users_table_comes_first_then_the_shipped_one_then_the_rule(cache, monkeypatch):
    monkeypatch.setitem(choose.TUNED, (6144, 2560), replace(matvec_shape(1, 1), block_n=8, num_warps=1))
    keys = tuned.table_keys(CONFIG, BF16)
    assert keys["qkv"] == "qkv 6144x2560 bfloat16" and keys["gate_up"] == "gate_up 9728x2560 bfloat16"
    assert keys["attention"] == "attention 32/8x128 bfloat16"
    shipped = choose_shapes(CONFIG, BF16, 90)
    assert shipped[1].qkv == choose.TUNED[6144, 2560]
    assert with_table(CONFIG, BF16, 90, GPU) == shipped, "no table, no change"
    write({
        keys["qkv"]: fields("qkv", block_n=4, num_warps=8),
        keys["attention"]: fields("attention", block_t=32, splits=64, num_warps=2),
        "down 1x1 bfloat16": fields("down", block_n=4, num_warps=1),
    })  # fmt: skip
    mine = with_table(CONFIG, BF16, 90, GPU)[1]
    assert (mine.qkv.block_n, mine.qkv.num_warps) == (4, 8)
    assert (mine.attention.block_t, mine.attention.splits, mine.attention.num_warps) == (32, 64, 2)
    assert replace(mine, qkv=shipped[1].qkv, attention=shipped[1].attention) == shipped[1]
    assert with_table(CONFIG, BF16, 90, "Another GPU") == shipped
    assert with_table(CONFIG, torch.float16, 90, GPU) == choose_shapes(CONFIG, torch.float16, 90)
    weights = empty_weights(CONFIG, "meta", BF16)
    assert shapes_of(CONFIG, weights, 90, GPU)[1].qkv == mine.qkv
    assert shapes_of(CONFIG, weights, 90) == shipped, "without a GPU's name no table is read"


@pytest.mark.parametrize("block_t", [32, 64, 128])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_attention_to_kv_in_8_bits_has_room_for_the_splits_of_any_table(cache, block_t, capability):
    key = tuned.table_keys(CONFIG, BF16)["attention"]
    write({key: fields("attention", block_t=block_t, splits=64)})
    weights = empty_weights(CONFIG, "meta", BF16)
    attention = shapes_of(replace(CONFIG, fp8_kv=True), weights, capability, GPU)[1].attention
    assert attention.splits == MAX_SPLITS


def test_a_table_has_shapes_for_several_rows_in_either_form(cache):
    shipped = choose_shapes(CONFIG, BF16, 90)
    keys = tuned.table_keys(CONFIG, BF16, 16)
    assert keys["qkv"] == "qkv 6144x2560 bfloat16 for 16 rows"
    mine = {"qkv": TilesConfig(16, 64, 5), "o_proj": WideConfig(64, 64, 3, split=4), "down": MatmulConfig(32, 4, 3, 2)}
    mine |= {"attention": AttentionRowsConfig(16, 7)}
    write({keys[op]: tuned.searched(shape) for op, shape in mine.items()})
    found = with_table(CONFIG, BF16, 90, GPU)
    assert found == shipped | {16: replace(shipped[16], **mine)}
    assert type(shipped[16].qkv) is MatmulConfig, "the other form"


def test_no_table_may_share_the_columns_of_the_lm_head():
    entry = tuned.searched(WideConfig(split=2))
    assert changed(WideConfig(), entry, "qkv 8x8 bfloat16 for 8 rows") == WideConfig(split=2)
    with pytest.raises(tuned.TableError, match="split of 'lm_head 8x8 bfloat16 for 8 rows' must be 1"):
        changed(WideConfig(), entry, "lm_head 8x8 bfloat16 for 8 rows")


def test_no_table_may_share_columns_where_the_kernel_for_hopper_does_not():
    entry, both = (tuned.searched(HopperConfig(split=2, programs=programs)) for programs in (0, 132))
    assert changed(TilesConfig(), entry, "down 8x8 bfloat16 for 32 rows") == HopperConfig(split=2)
    for wrong, op in ((entry, "lm_head"), (entry, "gate_up"), (both, "down")):
        with pytest.raises(tuned.TableError, match=f"split of '{op} 8x8 bfloat16 for 32 rows' must be 1"):
            changed(TilesConfig(), wrong, f"{op} 8x8 bfloat16 for 32 rows")


@pytest.mark.parametrize("rows", [2, 16, 33, 64])
def test_candidates_of_several_rows_are_what_the_gpu_holds_and_a_table_may_say(rows):
    gpu = SimpleNamespace(major=9, multi_processor_count=132, shared_memory_per_block_optin=232448)
    start = next(step for most, step in choose_shapes(CONFIG, BF16, 90).items() if most > 1 and most >= rows)
    found = candidates.candidates_of_several(CONFIG, rows, start, gpu)
    assert {op for op, _ in found} == set(tune.ORDER)
    for op, tried in found:
        assert tried
        for values in tried:
            shape = replace(getattr(start, op), **values) if isinstance(values, dict) else values
            assert changed(getattr(start, op), tuned.searched(shape), "key") == shape
            if isinstance(shape, TilesConfig):
                weights = shape.block_n * (2 if op == "gate_up" else 1)
                assert 2 * shape.stages * shape.block_k * (max(shape.block_m, rows) + weights) < 232448
            if isinstance(shape, WideConfig | HopperConfig):
                assert op != "lm_head" or shape.split == 1, "whose sums have no room"
    forms = {type(values) for op, tried in found if op == "o_proj" for values in tried}
    assert forms >= {MatmulConfig if rows <= 16 else HopperConfig, TilesConfig, WideConfig}


HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)


def packed_weights(kind: str, preset: str = "qwen3-4b"):
    config = replace(PRESETS[preset], quantise=rules(kind, "fp8"), num_layers=2)
    return config, empty_weights(config, "meta", BF16, packs=True)


def test_a_table_has_shapes_for_weights_in_fewer_bits(cache):
    config, weights = packed_weights("int4")
    packed = packings(weights, 90)
    keys, of_16 = (tuned.table_keys(config, BF16, rows, packed) for rows in (1, 16))
    assert keys["qkv"] == "qkv 6144x2560 int4/128" and keys["lm_head"] == "lm_head 151936x2560 e4m3/row"
    assert of_16["down"] == "down 2560x9728 int4/128 for 16 rows"
    shipped, mine = shapes_of(config, weights, 90), RingConfig(8, 1, 2, x_shared=True, copier=1, registers=64)
    other = MatmulConfig(32, 4, 3, 2, fetch=2)
    found = {keys["down"]: mine, keys["qkv"]: other, of_16["down"]: other, "o_proj 2560x4096 bfloat16": mine}
    write({key: tuned.searched(shape) for key, shape in found.items()})
    assert shapes_of(config, weights, 90, GPU) == shipped | {
        1: replace(shipped[1], down=mine, qkv=other), 16: replace(shipped[16], down=other)
    }  # fmt: skip
    assert shapes_of(config, weights, 90, GPU, batch_invariant=True) == shapes_of(config, weights, 90, None, True)


@pytest.mark.parametrize("capability, kind, rows", [(90, "int4", 8), (89, "int4", 1), (90, "int8", 1)])
def test_no_table_has_the_ring_where_its_kernel_does_not_run(cache, caplog, capability, kind, rows):
    config, weights = packed_weights(kind)
    key = tuned.table_keys(config, BF16, rows, packings(weights, capability))["qkv"]
    write({key: tuned.searched(RingConfig(4, 5, 1))})
    with caplog.at_level(logging.WARNING, "tridecode"):
        assert shapes_of(config, weights, capability, GPU) == shapes_of(config, weights, capability)
    (record,) = caplog.records
    assert "expected form matmul with block_n, num_warps" in record.getMessage()


def test_what_weights_in_fewer_bits_are_is_in_the_key():
    config, weights = packed_weights("int4")
    layer, packed = weights.layers[0], weights.layers[0].qkv.packed
    for change, said in ((dict(group=64), "int4/64"), (dict(zeros=True), "int4/128 zeros"),
                         (dict(ordered=True), "int4/128 ordered"), (dict(group=2560), "int4/row")):  # fmt: skip
        other = replace(layer.qkv, packed=replace(packed, **change))
        found = packings(replace(weights, layers=[replace(layer, qkv=other)]), 90)["qkv"]
        assert found == tuned.Packing(said, ring=False, hopper="ordered" not in said)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_candidates_for_fewer_bits_are_what_the_gpu_holds_and_a_table_may_say(kind, rows):
    config, weights = packed_weights(kind)
    packed, start = packings(weights, 90), shapes_of(config, weights, 90)[rows]
    tried = candidates.packed_candidates(weights, packed, rows, HOPPER)
    if rows == 1:
        found = candidates.candidates(config, 2, start, 132, tried)
    else:
        found = candidates.candidates_of_several(config, rows, start, HOPPER, tried)
    assert {op for op, _ in found} == set(candidates.ORDER)
    assert [shapes for op, shapes in found if op == "down"] == [tried["down"]]
    keys = tuned.table_keys(config, torch.bfloat16, rows, packed)
    for op, shapes in tried.items():
        assert len(shapes) > 4 and len(set(shapes)) == len(shapes)
        for shape in shapes:
            forms = tuned.forms_of(getattr(start, op), packed[op], rows)
            assert tuned.changed(getattr(start, op), tuned.searched(shape), keys[op], forms) == shape
            if isinstance(shape, RingConfig):
                assert 1024 * shape.num_warps * shape.tiles * shape.stages < 232448
        rings = [shape for shape in shapes if isinstance(shape, RingConfig)]
        assert bool(rings) == (rows == 1 and (op == "lm_head" or kind != "int8"))
        wide = [shape for shape in shapes if isinstance(shape, HopperConfig)]
        assert bool(wide) == (rows > 8)
        assert not wide or isinstance(shapes[0], HopperConfig) or rows == 16, "what is in use first"


def test_a_table_says_no_tiles_of_columns_that_are_not_whole_lines():
    entry, own = tuned.searched(HopperConfig()), (HopperConfig,)
    for key, block_k in (("qkv 4096x1024 int4/128 for 64 rows", 128), ("qkv 4096x1024 e4m3/row for 64 rows", 64),
                         ("qkv 4096x1024 bfloat16 for 64 rows", 256)):  # fmt: skip
        with pytest.raises(tuned.TableError, match="^block_k of 'qkv"):
            tuned.changed(HopperConfig(), entry | {"block_k": block_k}, key, own)
    entry |= {"block_k": 256}
    assert tuned.changed(HopperConfig(), entry, "qkv 4096x1024 int4/128 for 64 rows", own).block_k == 256


def test_the_shapes_that_are_in_use_are_among_what_is_tried_for_fewer_bits():
    """But for registers and the like."""
    for kind in ("int4", "fp8"):
        config, weights = packed_weights(kind)
        tried = candidates.packed_candidates(weights, packings(weights, 90), 1, HOPPER)
        for op, shape in vars(shapes_of(config, weights, 90)[1]).items():
            if isinstance(shape, RingConfig):
                known = [each for each in tried[op] if isinstance(each, RingConfig)]
                assert shape in [replace(each, registers=shape.registers) for each in known], (kind, op)


def test_the_shipped_table_is_for_its_own_gpus_only(monkeypatch):
    rule = matvec_shape(6144, 2560, capability=89)
    monkeypatch.setitem(choose.TUNED, (6144, 2560), replace(rule, block_n=2 * rule.block_n))
    assert matvec_shape(6144, 2560, capability=90).block_n == 2 * rule.block_n
    assert matvec_shape(6144, 2560, capability=89) == matvec_shape(6144, 2560, capability=100) == rule
    assert choose_shapes(CONFIG, BF16, 89)[1].qkv == rule != choose_shapes(CONFIG, BF16, 90)[1].qkv


GOOD = {"format": tuned.FORMAT, "tridecode": __version__, "gpu": GPU, "shapes": {}}
QKV = tuned.table_keys(CONFIG, BF16)["qkv"]


def entry(**values) -> str:
    return json.dumps(GOOD | {"shapes": {QKV: fields("qkv") | values}})


@pytest.mark.parametrize("text, reason", [
    ("", "Expecting value"),
    ("{", "Expecting property name"),
    ("\ufffd\x00", "Expecting value"),
    ("[" * 100_000, "recursion"),
    ("[]", "no table of launch shapes"),
    (json.dumps(GOOD | {"shapes": []}), "no table of launch shapes"),
    (json.dumps(GOOD | {"format": 0}), "expected format"),
    (json.dumps(GOOD | {"tridecode": "0.0.1\nx"}), "expected tridecode"),
    (json.dumps(GOOD | {"gpu": "Another"}), "expected gpu"),
    (json.dumps(GOOD | {"shapes": {QKV: {"block_n": 2}}}), "expected form matvec with block_n, num_warps"),
    (entry(more=1), "expected form matvec with block_n, num_warps"),
    (entry(form="tiles"), "expected form matvec with block_n, num_warps"),
    (entry(block_n=3), "block_n of .* must be one of 1, 2"),
    (entry(block_n=True), "block_n of .* must be one of"),
    (entry(block_n="2"), "block_n of .* must be one of"),
    (entry(num_warps=10**400), "num_warps of .* must be one of"),
], ids=range(16))  # fmt: skip
def test_a_table_that_cannot_be_used_is_ignored_with_one_warning(cache, caplog, text, reason):
    write({})
    tuned.table_path(GPU).write_text(text)
    with caplog.at_level(logging.WARNING, "tridecode"):
        assert with_table(CONFIG, BF16, 90, GPU) == choose_shapes(CONFIG, BF16, 90)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(str(tuned.table_path(GPU))) and "\n" not in message
    assert re.search(reason, message), message
    write({QKV: fields("qkv", num_warps=1)})  # a new search replaces what it cannot read
    assert with_table(CONFIG, BF16, 90, GPU)[1].qkv.num_warps == 1


def test_a_table_that_cannot_be_opened_is_ignored(cache, caplog):
    tuned.table_path(GPU).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "tridecode"):
        assert with_table(CONFIG, BF16, 90, GPU) == choose_shapes(CONFIG, BF16, 90)
    assert len(caplog.records) == 1


def test_each_part_of_the_step_has_fields_to_search():
    start = choose_shapes(tiny_config(), torch.float32, 0)[1]
    assert all({"num_warps"} < set(tuned.searched(getattr(start, op))) for op in tune.ORDER)


# The command


@pytest.fixture
def fake(cache, monkeypatch):
    """The command on an engine of the CPU, with a timer that prefers many warps."""
    engine = tiny_engine()
    now = engine.model.shapes
    engine.model = replace(
        engine.model,
        shapes_by_rows={1: replace(now, **{op: replace(getattr(now, op), num_warps=4) for op in tune.ORDER})},
    )
    monkeypatch.setattr(tune, "StepTimer", lambda engine, contexts: Timer())
    monkeypatch.setattr(tune, "bench_engine", lambda args, capacity, slots: engine)
    monkeypatch.setattr(tune, "run_facts", lambda device: {"gpu": GPU})
    names = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda device: GPU,
        get_device_properties=lambda device: HOPPER,
    )
    monkeypatch.setattr(tune, "torch", SimpleNamespace(cuda=names))
    return engine


class Timer:
    contexts = [128]

    def __call__(self, shapes) -> float:
        return 1e-3 / sum(getattr(shapes, op).num_warps for op in tune.ORDER)

    def compile(self, several) -> None:
        assert several


def test_the_command_writes_what_the_next_engine_reads(fake, capsys):
    assert commands.main(["tune", "--preset", "qwen3-4b", "--minutes", "1"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["us_after"] < report["us_before"] and report["finished"] and report["preset"] == "qwen3-4b"
    assert report["table"] == str(tuned.table_path(GPU))
    found = tuned.with_table({1: fake.model.shapes}, fake.config, fake.model.weights.dtype, GPU)[1]
    assert {op: tuned.searched(getattr(found, op)) for op in tune.ORDER} == report["shapes"]
    assert found.attention.num_warps == max(tuned.VALUES[type(found.attention)]["num_warps"])


def test_without_a_gain_no_table_is_written(fake, capsys, monkeypatch):
    monkeypatch.setattr(Timer, "__call__", lambda self, shapes: 1e-3)
    assert commands.main(["tune"]) == 0
    out = capsys.readouterr().out
    assert "nothing faster" in out and json.loads(out.splitlines()[-1])["table"] is None
    assert not tuned.table_path(GPU).exists()


def test_a_gain_that_does_not_come_again_is_no_gain(fake, capsys, monkeypatch):
    lucky = iter([1e-3, *[1e-4] * 200])
    start = fake.model.shapes
    monkeypatch.setattr(Timer, "__call__", lambda self, shapes: 1e-4 if shapes == start else next(lucky))
    monkeypatch.setattr(tune, "search", lambda start, *rest: tune.Search(replace(start, qkv=start.down), 1e-5))
    assert commands.main(["tune"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["table"] is None


def test_a_step_that_runs_no_more_is_one_line(fake, capsys, monkeypatch):
    monkeypatch.setattr(Timer, "__call__", lambda self, shapes: None)
    monkeypatch.setattr(tune, "search", lambda start, *rest: tune.Search(start, 1e-3))
    assert commands.main(["tune"]) == 1
    assert capsys.readouterr().err.startswith("tridecode: error: the step gave other results")
    assert not tuned.table_path(GPU).exists()


def test_shapes_are_compared_over_the_same_cache():
    engine = tiny_engine()
    timer = tune.StepTimer(engine)
    assert timer._same()
    engine.rewind(timer.contexts[-1] - 40, tune.GREEDY)  # what a timing leaves
    for _ in range(39):
        engine.enqueue(tune.GREEDY)
    assert timer._same()
    pool = engine.model.kv.pool
    assert timer._tolerance == 0.05, "for weights of 16 bits and more"
    timer._logits = -timer._logits
    assert not timer._same() and pool.count_nonzero() == pool.numel()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x", "1441"])
def test_wrong_minutes(capsys, value):
    with pytest.raises(SystemExit) as end:
        commands.main(["tune", "--minutes", value])
    assert end.value.code == 2 and "expected minutes" in capsys.readouterr().err


@pytest.mark.skipif(CUDA, reason="what is said without a GPU")
def test_no_gpu_is_one_line(capsys):
    assert commands.main(["tune"]) == 1
    said = "needs an NVIDIA GPU and none is usable here; see tridecode doctor"
    assert capsys.readouterr().err == f"tridecode: error: tune {said}\n"


@pytest.mark.skipif(not CUDA, reason="captures and times steps on an NVIDIA GPU")
def test_a_real_step_is_timed_and_shapes_that_do_not_compile_are_skipped():
    engine = tiny_engine()
    timer, start = tune.StepTimer(engine), engine.model.shapes
    assert 0 < timer(start) < 0.1
    assert timer(replace(start, qkv=replace(start.qkv, block_n=3))) is None  # no power of two
    assert 0 < timer(replace(start, attention=replace(start.attention, splits=1))) < 0.1
    assert 0 < timer(start) < 0.1


@pytest.mark.skipif(not CUDA, reason="compiles and launches on an NVIDIA GPU")
def test_shapes_are_compiled_ahead_whatever_fails_beside_them():
    timer = tune.StepTimer(tiny_engine())
    start = timer.engine.model.shapes
    wrong, right = replace(start.qkv, block_n=3), replace(start.qkv, num_warps=2 * start.qkv.num_warps)
    lines = graphs.list_of(timer._model(replace(start, qkv=right)), BatchDescriptor("greedy", 1))
    run = graphs.launcher(timer.engine.model)
    timer(start)
    assert missing(lambda: lines(run))
    timer.compile([replace(start, qkv=wrong), replace(start, qkv=right)])
    assert not missing(lambda: lines(run))


@pytest.mark.skipif(not CUDA, reason="captures and times steps on an NVIDIA GPU")
def test_a_real_step_of_weights_in_fewer_bits_is_tuned(cache, capsys):
    args = ["tune", "--preset", "qwen3-0.6b", "--quantize", "int4", "--minutes", "0.2"]
    assert commands.main(args) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["quantize"] == "int4" and report["tried"] > report["skipped"]
    assert {shape["form"] for shape in report["shapes"].values()} >= {"attention", "ring"}
