import torch
from check import check_op
from util import BF16_ROUNDING, DEVICE, Case, covering, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.embed import EMBED, embed_partials

CASES = [
    Case("hidden_896", gpu=dict(hidden=896, vocab=151936), small=dict(hidden=896, vocab=50)),
    Case("hidden_2560", gpu=dict(hidden=2560, vocab=151936), small=dict(hidden=2560, vocab=50)),
    Case("hidden_1030", gpu=dict(hidden=1030, vocab=1001), small=dict(hidden=1030, vocab=50)),
]


@covering(2, case=CASES, dtype=[torch.bfloat16, torch.float16])
def test_embed_matches_reference(case, dtype):
    hidden, vocab = case.sizes["hidden"], case.sizes["vocab"]
    act = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    meta = meta_rows(3, 0)
    meta[:, layout.SLOT] = meta[:, layout.SLOT].flip(0)
    tokens = torch.randint(0, vocab, (2, 8), generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    tokens[1, 3] = vocab - 1
    table, norm = random(vocab, hidden, dtype=dtype), norm_weight(hidden, dtype)
    n = embed_partials(hidden)
    launched, _ = check_op(
        EMBED,
        (meta, tokens, table, norm, poisoned(2, hidden), poisoned(2, hidden, dtype=act), poisoned(2, 16)),
        tolerance={"normed": BF16_ROUNDING if act == torch.bfloat16 else 1e-6, "sumsq": 1e-6},
        views={"sumsq": lambda sumsq: sumsq[:, :n].sum(1)},
    )
    assert torch.equal(launched["hidden"], table[[vocab - 1, int(tokens[0, 0])]].float())
    assert launched["sumsq"][:, n:].isnan().all()
