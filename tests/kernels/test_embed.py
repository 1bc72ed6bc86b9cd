import pytest
import torch
from util import BF16_ROUNDING, DEVICE, Case, assert_close, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.embed import embed, embed_partials, embed_ref

CASES = cases(
    Case("hidden_896", gpu=dict(hidden=896, vocab=151936), small=dict(hidden=896, vocab=50)),
    Case("hidden_2560", gpu=dict(hidden=2560, vocab=151936), small=dict(hidden=2560, vocab=50)),
    Case("hidden_1030", gpu=dict(hidden=1030, vocab=1001), small=dict(hidden=1030, vocab=50)),
)


def run(hidden, vocab, dtype, act, status=layout.RUN):
    table, norm = random(vocab, hidden, dtype=dtype), norm_weight(hidden, dtype)
    state = meta_rows(3, 0, status=status)
    state[:, layout.SLOT] = state[:, layout.SLOT].flip(0)
    tokens = torch.randint(0, vocab, (2, 8), generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    tokens[1, 3] = vocab - 1
    out = [poisoned(2, hidden), poisoned(2, hidden, dtype=act), poisoned(2, 16)]
    embed(state, tokens, table, norm, *out)
    ref = [poisoned(2, hidden), poisoned(2, hidden, dtype=act), poisoned(2, 16)]
    embed_ref(state, tokens, table, norm, *ref)
    return out, ref


@CASES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_embed_matches_reference(case, dtype):
    act = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    (hidden, normed, sumsq), (ref_hidden, ref_normed, ref_sumsq) = run(**case.sizes, dtype=dtype, act=act)
    assert torch.equal(hidden, ref_hidden) and not torch.equal(hidden[0], hidden[1])
    assert_close(normed, ref_normed, BF16_ROUNDING if act == torch.bfloat16 else 1e-6, "normed")
    n = embed_partials(case.sizes["hidden"])
    assert_close(sumsq[:, :n].sum(1), ref_sumsq[:, :n].sum(1), 1e-6, "sumsq")


def test_embed_writes_nothing_in_a_dead_step():
    out, _ = run(96, 20, torch.bfloat16, torch.bfloat16, status=layout.STOP)
    assert all(t.isnan().all() for t in out)
