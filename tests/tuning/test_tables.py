"""Tables of launch configs: the tables of the package, the user's table, and their use by engines."""

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from gpus import GPUS
from models_to_tune import BF16, H200, attention_of, case, cases_of, device

from tridecode.kernels.attention.arguments import MAX_SPLITS
from tridecode.kernels.attention.attention import AttentionConfig
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_ring import RingConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.matvec import MatvecConfig
from tridecode.kernels.linear.registry import kernel_named
from tridecode.tuning import tables
from tridecode.tuning.configs import AttentionCase, Choice, PassConfigs
from tridecode.tuning.report import kernel_rows, render
from tridecode.tuning.resolve import resolve_configs
from tridecode.tuning.tables import (
    Table,
    TableError,
    attention_key,
    entry_of,
    header,
    linear_key,
    merged_text,
    package_tables,
    read_user_table,
    table_path,
    table_text,
)
from tridecode.version import __version__

GPU = device(90)
PARTS, ATTENTION = cases_of("qwen3-4b"), attention_of("qwen3-4b")
QKV = PARTS["qkv"]
PACKAGE = tables._package()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty cache directory of the user."""
    monkeypatch.setattr(tables.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(rows: int, changes: dict, gpu=GPU) -> None:
    """Merge configs for passes of `rows` rows into the user's table. changes maps cases to configs."""
    path = table_path(gpu.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    linears = {part: choice_of(config) for part, config in changes.items() if not isinstance(part, AttentionCase)}
    attention = {part: config for part, config in changes.items() if isinstance(part, AttentionCase)}
    path.write_text(merged_text(path, gpu, rows, PassConfigs(linears, attention)))


def choice_of(config) -> Choice:
    """Return the choice of a config and its kernel."""
    return Choice(kernel_named(tables.NAMES[type(config)]), config)


def resolved(parts=PARTS, attention=ATTENTION, gpu=GPU, dtype=BF16, **options) -> dict[int, PassConfigs]:
    return resolve_configs(parts.values(), [attention], dtype, gpu, **{"user_table": True} | options)


def shipped(*args, **options) -> dict[int, PassConfigs]:
    return resolved(*args, **options, user_table=False)


def config_of(part, rows: int, entry: dict, gpu=GPU):
    """Return the config for a case from a user's table with this entry."""
    return Table({linear_key(part, rows): entry}, {}, "user table").linear(part, rows, gpu).config


# The tables of the package


def parse(key: str):
    """Return the case and the rows of a linear's key."""
    epilogue, n, k, scheme, more, rows = re.fullmatch(r"(\w+) (\d+)x(\d+) (\S+)(.*) rows (\d+)", key).groups()
    n, k = int(n), int(k)
    weight_type, _, group = scheme.partition("/")
    options = {word: True for word in more.split()}
    if group:
        weight_type = {"e4m3": "fp8"}.get(weight_type, weight_type)
        options["group"] = k if group == "row" else int(group)
    return case(n, k, weight_type, epilogue, **options), int(rows)


@pytest.mark.parametrize("table", PACKAGE, ids=lambda table: table["gpu"])
def test_every_entry_is_valid_and_supported(table):
    gpu = H200._replace(name=table["gpu"], capability=table["capability"])
    assert table.keys() == {"format", "gpu", "capability", "multiprocessors", "linears", "attention"}
    assert table["format"] == tables.FORMAT
    first_table = package_tables(gpu)[0]
    for key, entry in table["linears"].items():
        part, rows = parse(key)
        assert linear_key(part, rows) == key
        choice = first_table.linear(part, rows, gpu)
        assert choice.kernel.supports(part, rows, gpu), key
        assert (entry_of(choice.config), choice.source) == (entry, "table"), key
        assert 32 * choice.config.num_warps * getattr(choice.config, "registers", 0) <= gpu.registers
    assert len(table["linears"]) > 80 or table["gpu"] != "NVIDIA H200"


def test_tables_are_ordered_by_name_then_by_size(monkeypatch):
    names = ("H100", 90, 0), ("H100 NVL", 90, 1), ("L4", 89, 0)
    known = [
        {"gpu": gpu, "capability": capability, "multiprocessors": 132, "attention": {}}
        | {"linears": {gpu: {}, **dict.fromkeys(range(size))}}
        for gpu, capability, size in names
    ]
    monkeypatch.setattr(tables, "_package", lambda: known)

    def named(name, capability, multiprocessors=132):
        gpu = H200._replace(name=name, capability=capability, multiprocessors=multiprocessors)
        return [next(iter(table.linears)) for table in package_tables(gpu)]

    assert named("NVIDIA H100 80GB HBM3", 90) == ["H100", "H100 NVL"]
    assert named("NVIDIA H100 NVL", 90) == ["H100 NVL", "H100"], "the table with the longer matching name is not first"
    assert named("NVIDIA GH200 480GB", 90) == ["H100 NVL", "H100"], "the larger table is not first"
    assert named("NVIDIA GeForce RTX 4090", 89) == ["L4"]
    assert named("NVIDIA B200", 100) == named("cpu", 0) == named("NVIDIA H100 PCIe", 90, 114) == []


def test_tables_of_other_capabilities_are_not_used():
    assert shipped(gpu=device(90))[1].linears[QKV].source == "table"
    assert shipped(gpu=device(89))[1].linears[QKV].source == "rule"
    for name, gpu in GPUS.items():  # A table is not used for another number of multiprocessors.
        expected = ["NVIDIA H100", "NVIDIA H200"] if name == "h100" else []
        assert [table.gpu for table in package_tables(gpu)] == expected, name


# Keys and entries


def test_keys_contain_the_properties_of_a_case():
    four = cases_of("qwen3-4b", "int4")
    assert linear_key(QKV, 1) == "normed 6144x2560 bfloat16 rows 1"
    assert linear_key(four["gate_up"], 16) == "gated 19456x2560 int4/128 rows 16"
    assert linear_key(four["lm_head"], 64) == "normed 151936x2560 e4m3/row rows 64"
    assert attention_key(ATTENTION, 8) == "attention 32/8x128 bfloat16 rows 8"
    assert attention_key(ATTENTION._replace(fp8=True), 8) == "attention 32/8x128 fp8 rows 8"
    for options, scheme in (
        (dict(group=64), "int4/64"), (dict(zeros=True), "int4/128 zeros"), (dict(group=2560), "int4/row"),
        (dict(ordered=True, zeros=True), "int4/128 zeros ordered"),
    ):  # fmt: skip
        assert linear_key(case(6144, 2560, "int4", "normed", **options), 1) == f"normed 6144x2560 {scheme} rows 1"
    assert len({linear_key(QKV, rows) for rows in (2, 4, 8)}) == 1 < len({linear_key(QKV, rows) for rows in (1, 8, 16)})


def test_tables_may_not_share_columns_if_the_kernel_does_not():
    for config, part in (
        (WideConfig(split=2), PARTS["lm_head"]), (HopperConfig(split=2), PARTS["lm_head"]),
        (HopperConfig(split=2), PARTS["gate_up"]), (HopperConfig(split=2, programs=132), PARTS["down"]),
    ):  # fmt: skip
        with pytest.raises(TableError, match=f"split of '{part.epilogue} .* rows 32' must be 1"):
            config_of(part, 32, entry_of(config))
        assert config_of(part, 32, entry_of(replace(config, split=1))) == replace(config, split=1)
    assert config_of(PARTS["gate_up"], 32, entry_of(WideConfig(split=2))) == WideConfig(split=2)
    assert config_of(PARTS["down"], 32, entry_of(HopperConfig(split=2))) == HopperConfig(split=2)


def test_tiles_of_packed_weights_are_whole_lines():
    entry = entry_of(HopperConfig())
    for weight_type, block_k in (("int4", 128), ("fp8", 64), ("bfloat16", 256)):
        with pytest.raises(TableError, match="^block_k of 'normed"):
            config_of(case(4096, 1024, weight_type, "normed"), 64, entry | {"block_k": block_k})
    assert config_of(case(4096, 1024, "int4", "normed"), 64, entry | {"block_k": 256}).block_k == 256


@pytest.mark.parametrize("capability, weight_type, rows", [(90, "int4", 8), (89, "int4", 1), (90, "int8", 1)])
def test_an_entry_names_a_kernel_that_supports_the_case(capability, weight_type, rows):
    part = case(6144, 2560, weight_type, "normed")
    with pytest.raises(TableError, match="kernel of 'normed .*' must be one of .*matmul"):
        config_of(part, rows, entry_of(RingConfig(4, 5, 1)), device(capability))


# The user's table


def test_table_keeps_the_entries_of_other_models(cache):
    parts = [case(8, 4, "bfloat16", "normed"), case(4, 8, "bfloat16", "residual")]
    write(1, {parts[0]: MatvecConfig(2, 4)})
    write(1, {parts[1]: MatvecConfig(1, 8), ATTENTION: AttentionConfig()})
    path = table_path(GPU.name)
    assert path == cache / "shapes" / "nvidia-test-1-80gb.json"
    table = read_user_table(path, GPU)
    assert set(table.linears) == {"normed 8x4 bfloat16 rows 1", "residual 4x8 bfloat16 rows 1"}
    assert [table.linear(part, 1, GPU).config for part in parts] == [MatvecConfig(2, 4), MatvecConfig(1, 8)]
    assert table.attention_config(ATTENTION, 1, GPU) == AttentionConfig()
    assert json.loads(path.read_text())["tridecode"] == __version__


def test_user_table_has_priority_over_the_package_and_the_rules(cache):
    before = shipped()
    assert resolved() == before, "the configs changed although the user has no table"
    user_config = {
        QKV: MatvecConfig(4, 8), case(1, 1, "bfloat16", "residual"): MatvecConfig(4, 1),
        ATTENTION: AttentionConfig(32, splits=64, num_warps=2),
    }  # fmt: skip
    write(1, user_config)
    configs = resolved()
    assert configs[1].linears[QKV] == Choice(kernel_named("matvec"), MatvecConfig(4, 8), "user table")
    assert configs[1].attention[ATTENTION] == user_config[ATTENTION]
    changed = PassConfigs({**before[1].linears, QKV: configs[1].linears[QKV]}, {ATTENTION: user_config[ATTENTION]})
    assert configs == before | {1: changed}
    assert resolved(gpu=GPU._replace(name="Another GPU")) == before
    assert shipped() == before, "the user's table was read without a request"
    assert resolved(batch_invariant=True) == shipped(batch_invariant=True)
    half = {role: part._replace(weight_type=torch.float16) for role, part in PARTS.items()}
    other = dict(attention=attention_of("qwen3-4b", torch.float16), dtype=torch.float16)
    assert resolved(half, **other) == shipped(half, **other)


def test_a_table_may_name_any_kernel_for_several_rows(cache):
    user_config = {
        QKV: TilesConfig(16, 64, 5), PARTS["o_proj"]: WideConfig(64, 64, 3, split=4),
        PARTS["down"]: MatmulConfig(32, 4, 3, 2), ATTENTION: AttentionRowsConfig(16, 7, programs=264),
    }  # fmt: skip
    write(16, user_config)
    before, configs = shipped(), resolved()
    assert {rows for rows in configs if configs[rows] != before[rows]} == {16}
    for part, config in user_config.items():
        assert (configs[16].attention[part] if part == ATTENTION else configs[16].linears[part].config) == config
    assert before[16].linears[QKV].kernel.name == "matmul"


def test_passes_of_up_to_8_rows_share_the_entries_of_linears(cache):
    write(4, {QKV: MatmulConfig(32, 4, 3, 2), ATTENTION: AttentionRowsConfig(16, 7, programs=264)})
    configs = resolved()
    assert configs[4].linears[QKV] == configs[8].linears[QKV] and configs[4].linears[QKV].source == "user table"
    assert (
        configs[4].attention[ATTENTION] == AttentionRowsConfig(16, 7, programs=264) != configs[8].attention[ATTENTION]
    )


@pytest.mark.parametrize("capability, block_t", [(80, 32), (90, 64), (100, 128)])
def test_attention_to_fp8_has_room_for_the_splits_of_any_table(cache, block_t, capability):
    gpu, fp8 = device(capability), ATTENTION._replace(fp8=True)
    write(1, {ATTENTION: AttentionConfig(block_t, splits=64, num_warps=8)}, gpu)
    assert resolved(attention=fp8, gpu=gpu)[1].attention[fp8].splits == MAX_SPLITS


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_attention_to_fp8_may_have_a_separate_entry(cache, rows):
    fp8 = ATTENTION._replace(fp8=True)
    config = shipped(attention=fp8)[rows].attention[fp8]
    assert config.converts, "the config does not use the conversion instruction of the GPU"
    write(rows, {fp8: config})
    assert resolved(attention=fp8)[rows].attention[fp8] == config
    user_config = replace(config, splits=16)
    write(rows, {fp8: user_config})
    assert resolved(attention=fp8)[rows].attention[fp8] == user_config
    assert resolved()[rows].attention == shipped()[rows].attention


KEY = linear_key(QKV, 1)
GOOD = {**header(GPU), "linears": {}, "attention": {}}


def entry(**values) -> str:
    return json.dumps(GOOD | {"linears": {KEY: entry_of(MatvecConfig(2, 2)) | values}})


@pytest.mark.parametrize("text, reason", [
    ("", "Expecting value"),
    ("{", "Expecting property name"),
    ("\ufffd\x00", "Expecting value"),
    ("[" * 100_000, "recursion"),
    ("[]", "not a table of launch configs"),
    (json.dumps(GOOD | {"linears": []}), "not a table of launch configs"),
    (json.dumps(GOOD | {"attention": 1}), "not a table of launch configs"),
    (json.dumps(GOOD | {"format": 7}), "expected format 8, got '7'"),
    (json.dumps(GOOD | {"tridecode": "0.0.1\nx"}), "expected tridecode"),
    (json.dumps(GOOD | {"gpu": "Another"}), "expected gpu"),
    (json.dumps(GOOD | {"linears": {KEY: {"block_n": 2}}}), "kernel of .* must be one of matvec, hopper, matmul"),
    (json.dumps(GOOD | {"linears": {KEY: [2]}}), "kernel of .* must be one of"),
    (entry(more=1), "must have the fields kernel, block_n, num_warps"),
    (entry(kernel="tiles"), "must have the fields kernel, block_n, block_k"),
    (entry(kernel="torch"), "kernel of .* must be one of"),
    (entry(block_n=3), "block_n of .* must be one of 1, 2"),
    (entry(block_n=True), "block_n of .* must be one of"),
    (entry(block_n="2"), "block_n of .* must be one of"),
    (entry(num_warps=10**400), "num_warps of .* must be one of"),
    (entry(programs=-1), "programs of .* must be one of 0 to 65535"),
], ids=range(20))  # fmt: skip
def test_a_table_that_cannot_be_used_is_ignored_with_one_warning(cache, caplog, text, reason):
    write(1, {})
    table_path(GPU.name).write_text(text)
    with caplog.at_level(logging.WARNING, "tridecode"):
        assert resolved() == shipped()
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(str(table_path(GPU.name))) and "\n" not in message
    assert re.search(reason, message), message
    write(1, {QKV: MatvecConfig(2, 1)})
    if reason != "recursion" and "must" not in reason:  # A new search replaces a table that cannot be read.
        assert resolved()[1].linears[QKV].config == MatvecConfig(2, 1)


def test_a_table_has_a_line_for_each_entry():
    text = table_text({"format": 7}, {"a 16": {"x": 1}, "a 8": {"x": 2}}, {})
    assert text == '{\n "format": 7,\n "linears": {\n  "a 8": {"x": 2},\n  "a 16": {"x": 1}\n },\n "attention": {}\n}\n'


# The report


def test_the_choices_are_reported_by_role_and_rows():
    parts = cases_of("qwen3-4b", "int4")
    rows = kernel_rows(parts, resolve_configs(parts.values(), [ATTENTION], BF16, H200))
    assert [(row.role, row.rows) for row in rows[:6]] == [("qkv", n) for n in (1, 8, 16, 32, 64)] + [("o_proj", 1)]
    first = rows[0]
    assert (first.n, first.k, first.format, first.kernel, first.source) == (6144, 2560, "int4/128", "ring", "table")
    assert first.config == {name: value for name, value in entry_of(RingConfig(4, 5, 1, registers=168)).items()
                            if name != "kernel"}  # fmt: skip
    lines = render(rows).splitlines()
    assert len(lines) == 1 + len(rows) and lines[0].split()[:3] == ["role", "n", "k"]
    assert re.search(r"^qkv +6144 +2560 +int4/128 +1 +ring +num_warps=4 tiles=5 .*registers=168 +table$", lines[1])
