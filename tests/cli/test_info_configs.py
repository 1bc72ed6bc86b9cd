"""`info` reports the sources of launch configs, for GPUs that this machine does not have."""

import json
from dataclasses import replace

import pytest
import torch
from gpus import GPUS

from tridecode.checkpoint.quantization.quantize import rules
from tridecode.cli import doctor
from tridecode.cli.info import config_facts, describe_configs, kernel_choices
from tridecode.kernels.linear.matvec import MatvecConfig
from tridecode.kernels.linear.registry import kernel_named
from tridecode.models.presets import PRESETS
from tridecode.step.model import Case
from tridecode.tuning import tables
from tridecode.tuning.configs import Choice, PassConfigs

RULES = "rules (no table for this GPU)"
SUGGESTION = "; `tridecode tune` searches better ones"
HOPPER = ["NVIDIA H100", "NVIDIA H200"]  # GPUs whose tables an H100 uses.


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache directory, empty."""
    monkeypatch.setattr(tables.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))


def facts_of(model: str, gpu: str, dtype=torch.bfloat16, batch_invariant=False) -> dict:
    rows = kernel_choices(PRESETS[model], dtype, GPUS[gpu], batch_invariant)
    assert len(rows) >= 10
    return config_facts(rows, GPUS[gpu], batch_invariant)


@pytest.mark.parametrize("gpu", [name for name in GPUS if name != "h100"])
def test_gpus_without_a_table_have_rules_and_a_suggestion(gpu):
    """The GPUs include Hopper GPUs with fewer multiprocessors than the H200."""
    facts = facts_of("qwen3-4b", gpu)
    assert (facts["tables"], facts["user_table"], facts["tune"]) == ([], None, True)
    assert facts["choices"]["rule"] == 30 and sum(facts["choices"].values()) == 30
    assert describe_configs(facts) == RULES + SUGGESTION


def test_info_names_the_package_table():
    table = f"table of {' and '.join(HOPPER)}"
    facts = facts_of("qwen3-4b", "h100")
    assert (facts["tables"], facts["tune"]) == (HOPPER, False)
    assert describe_configs(facts).startswith(table) and facts["choices"]["table"] > 0
    assert describe_configs(facts | {"choices": {"user table": 0, "table": 30, "rule": 0}}) == table
    facts = facts_of("qwen3-14b", "h100")
    assert facts["choices"] == {"user table": 0, "table": 0, "rule": 30} and facts["tune"]
    assert describe_configs(facts) == f"rules (the {table} has no entry for this model)" + SUGGESTION
    facts = facts_of("qwen3-4b", "l4", batch_invariant=True)
    assert not facts["tune"] and describe_configs(facts) == RULES


def test_info_names_the_user_table():
    gpu, part = GPUS["rtx-4090"], Case(6144, 2560, torch.bfloat16, "normed")
    path = tables.table_path(gpu.name)
    path.parent.mkdir(parents=True)
    configs = PassConfigs({part: Choice(kernel_named("matvec"), MatvecConfig(2, 2))}, {})
    path.write_text(tables.merged_text(path, gpu, 1, configs))
    facts = facts_of("qwen3-4b", "rtx-4090")
    assert facts["choices"] == {"user table": 1, "table": 0, "rule": 29} and not facts["tune"]
    assert facts["user_table"] == str(path)
    assert describe_configs(facts) == f"your table {path} for 1, rules for 29 of 30 choices"


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_kernels_of_experts_have_one_line_for_each_config(quantize):
    spec = replace(PRESETS["qwen3-30b-a3b"], load_quantization=quantize and rules(quantize, "fp8"))
    rows = kernel_choices(spec, torch.bfloat16, GPUS["h100"], experts=True)
    own = [row for row in rows if row not in kernel_choices(spec, torch.bfloat16, GPUS["h100"])]
    roles = {row.role: (row.n, row.k) for row in own}
    sizes = {"route": (128, 2048), "experts_gate_up": (1536, 2048), "experts_down": (2048, 768)}
    assert roles == sizes | {f"prompt {role}": size for role, size in sizes.items()}
    for role in roles:
        same = [row for row in own if row.role == role]
        assert same[-1].rows == (2048 if role.startswith("prompt ") else 64)
        assert [row.rows for row in same] == sorted({row.rows for row in same})
        assert all(one[5:7] != other[5:7] for one, other in zip(same, same[1:])), "two lines have the same config"
        assert {row.format for row in same} == {"int4/128" if quantize and "experts" in role else "bfloat16"}
    assert all(row.config for row in own)


@pytest.fixture
def info(run, tiny, monkeypatch):
    """Run `info` with options as if the machine had a GPU. Return what it prints."""

    def info(gpu: str, *options: str) -> str:
        for module in ("plan.memory", "plan.graphs", "plan.resolve", "step.model", "cli.info"):
            monkeypatch.setattr(f"tridecode.{module}.device_of", lambda device: GPUS[gpu])
        monkeypatch.setattr("tridecode.cli.info.find_device", lambda options: torch.device("cuda", 0))
        monkeypatch.setattr("tridecode.plan.memory.free_memory", lambda device: 2**34)
        monkeypatch.setattr(doctor, "gpu_facts", lambda: [])
        code, out, _ = run("info", "--model", tiny, *options)
        assert code == 0
        return out

    return info


def test_info_reports_launch_configs(info):
    assert f"\nconfigs      launch configs: {RULES}{SUGGESTION}\n" in info("rtx-4090")
    report = json.loads(info("rtx-4090", "--json"))
    assert report["launch_configs"]["tune"] and report["launch_configs"]["tables"] == [] and "kernels" not in report
    assert report["prompts"]["attention"] == "flash" and report["run"]["pdl"] is False
    report = json.loads(info("h100", "--json", "--kernels"))
    assert report["launch_configs"]["tables"] == HOPPER and {row["source"] for row in report["kernels"]}
    assert "launch configs" not in info("rtx-4090", "--backend", "torch")
