"""The kernels that the linears of prompt passes choose."""

import pytest
import torch

from tridecode.checkpoint.load import empty_weights
from tridecode.engine import model_of
from tridecode.kernels.device import GPUS, simulated
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan.resolve import resolve
from tridecode.step.model import PromptState


def chosen(gpu: str, rows: int, adapting: bool = False, **options) -> list[str]:
    """Return the kernels of qkv, o_proj, gate_up and down of Qwen3-4B in a prompt pass of `rows` rows."""
    with simulated(GPUS[gpu]):
        options = EngineOptions(max_seq_len=2048, dtype="bfloat16", **options)
        plan = resolve(options, PRESETS["qwen3-4b"], torch.device("cuda"))
        model = model_of(plan, empty_weights(plan.spec, torch.device("meta"), plan.dtype, packs=True))
        model = model.with_adapters(adapting)
        state = PromptState(model, model.prompt.first(model.prompt_rows(rows)), None, 0)
        return [state.choice(linear, "plain").kernel.name for linear in model.layers[0].linears.values()]


@pytest.mark.parametrize("rows, kernel", [(1, "matmul"), (8, "matmul"), (9, "hopper"), (64, "hopper"), (65, "torch")])
def test_few_rows_multiply_by_packed_weights(rows, kernel):
    assert chosen("h200", rows, quantize="int4") == [kernel] * 4


def test_other_passes_use_torch():
    assert chosen("h200", 64) == chosen("rtx-4090", 64, quantize="int4") == ["torch"] * 4
    assert chosen("h200", 64, quantize="int4", batch_invariant=True) == ["torch"] * 4
    adapters = dict(adapter_memory=1.0, max_rank=16)
    assert chosen("h200", 64, True, quantize="int4", **adapters) == ["torch"] * 4
    assert chosen("h200", 64, quantize="int4", **adapters) == ["hopper"] * 4
