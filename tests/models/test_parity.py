"""The numerical contract: errors are at most those of transformers in bf16, and greedy tokens agree with fp32."""

import pytest
import torch
from checkpoints import FAMILIES, write_tiny
from models import CUDA, DEVICE

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.hub import BUNDLED
from tridecode.layout import packed
from tridecode.serve.request import scoring

transformers = pytest.importorskip("transformers")
TOKENS = 96

# Real widths with two layers each. Rope and norm settings of the tiny models stay; they change no shape.
REAL_WIDTHS = {
    "qwen3-4b": ("qwen3-tied", dict(
        hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936,
    )),
    "llama-3.1-8b": ("llama", dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=128256,
    )),
    "qwen2.5-0.5b": ("qwen2", dict(
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
    )),
    "mistral-7b": ("mistral", dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=32768, sliding_window=40,
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    dtype = torch.bfloat16 if CUDA else torch.float32
    return lambda family: root / family if (root / family).exists() else write_tiny(root / family, family, dtype=dtype)


def transformers_logits(path, ids, dtype):
    """Return logits, fp32 [tokens, vocab]. Each call loads the model, because a cast also rounds rotary frequencies."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).eval()
    with torch.no_grad():
        return model(torch.tensor([ids], device=DEVICE)).logits[0].float()


def errors(logits, exact):
    """Return (mean KL of the next-token distribution in nats, relative RMS of the logits) against `exact`."""
    log_p, log_q = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    return kl, ((logits.double() - exact.double()).norm() / exact.double().norm()).item()


def check_contract(path):
    engine = Engine.load(path, device=str(DEVICE))
    ids = torch.randint(0, 380, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    logits = engine.score(ids)
    assert logits.dtype == torch.float32 and logits.shape == (TOKENS, engine.config.vocab_size)
    exact = transformers_logits(path, ids, torch.float32)
    kl, rms = errors(logits, exact)
    bf16_kl, bf16_rms = errors(transformers_logits(path, ids, torch.bfloat16), exact)
    print(f"\n{path.name}: KL {kl:.2e} (transformers bf16 {bf16_kl:.2e}), relative RMS {rms:.2e} ({bf16_rms:.2e})")
    assert kl <= bf16_kl and rms <= bf16_rms
    if not CUDA:
        assert rms <= 1e-5, "the fp32 reference must agree with fp32 transformers"


def check_contract_of_rows(path, rows):
    """Score `rows` texts at once, and check the first, the middle and the last one."""
    generator = torch.Generator().manual_seed(6)
    texts = [torch.randint(0, 380, (TOKENS,), generator=generator).tolist() for _ in range(rows)]
    with Engine.load(path, device=str(DEVICE), slots=rows, max_seq_len=2 * TOKENS) as engine:
        shape = TOKENS, engine.config.vocab_size
        requests = [scoring(packed(ids), 0.0, logits=torch.empty(shape, device=DEVICE)) for ids in texts]
        for request in [engine._driver.submit(request) for request in requests]:  # submit all before the first pass
            assert request.result().error is None
        logits = [request.logits for request in requests]
        assert max(stat.rows for stat in engine.graph_stats()) == rows, "the texts were not scored in one pass"
    for i in (0, rows // 2, rows - 1):
        exact = transformers_logits(path, texts[i], torch.float32)
        kl, rms = errors(logits[i], exact)
        bf16_kl, bf16_rms = errors(transformers_logits(path, texts[i], torch.bfloat16), exact)
        assert kl <= bf16_kl, f"row {i} of {rows}: KL {kl:.2e}, of transformers' bf16 {bf16_kl:.2e}"
        assert rms <= bf16_rms, f"row {i} of {rows}: relative RMS {rms:.2e}, of transformers' bf16 {bf16_rms:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_score_is_no_worse_than_transformers_bf16(tiny, family):
    check_contract(tiny(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_score_of_several_rows_is_no_worse_than_transformers_bf16(tiny, family):
    check_contract_of_rows(tiny(family), 8 if CUDA else 3)


@pytest.mark.skipif(not CUDA, reason="real widths run on a GPU only")
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name", REAL_WIDTHS)
def test_score_of_several_rows_at_real_widths(name, rows, tmp_path):
    family, widths = REAL_WIDTHS[name]
    check_contract_of_rows(write_tiny(tmp_path / name, family, dtype=torch.bfloat16, **widths), rows)


@pytest.mark.skipif(not CUDA, reason="real widths run on a GPU only")
@pytest.mark.parametrize("name", REAL_WIDTHS)
def test_score_is_no_worse_than_transformers_bf16_at_real_widths(name, tmp_path):
    family, widths = REAL_WIDTHS[name]
    check_contract(write_tiny(tmp_path / name, family, dtype=torch.bfloat16, **widths))


@pytest.mark.parametrize("family", [*FAMILIES, "bundled"])
def test_greedy_tokens_agree_with_transformers(tiny, family):
    """Tokens may differ only if the gap of the best two fp32 logits is below the bf16 noise (none in fp32)."""
    path = BUNDLED if family == "bundled" else tiny(family)
    engine = Engine.load(path, device=str(DEVICE))
    prompt = torch.randint(0, 380, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    ids = prompt + list(engine.generate(prompt, params).token_ids)
    exact = transformers_logits(path, ids, torch.float32)
    noise = 2 * (transformers_logits(path, ids, torch.bfloat16) - exact).abs().max().item() if CUDA else 1e-4
    for position in range(len(prompt) - 1, len(ids) - 1):
        gap = (exact[position].max() - exact[position, ids[position + 1]]).item()
        assert gap <= noise, f"position {position}: token {ids[position + 1]} is {gap:.2e} below the best"


def test_prefill_and_decode_passes_write_the_same_kv(tiny):
    """Compare K/V of a prompt pass with torch matmuls to K/V of decode passes."""
    for family in FAMILIES:
        engine = Engine.load(tiny(family), device=str(DEVICE))
        ids = torch.randint(0, 380, (90,), generator=torch.Generator().manual_seed(3)).tolist()
        engine.score(ids)
        stepped = engine.model.kv.held(0, 90).double()
        engine.model.kv.pool.fill_(float("nan"))
        from tridecode.step.prompt import prefill

        prefill(engine.model, 0, len(ids), chunk=32)  # score has written the tokens to the slot
        prefilled = engine.model.kv.held(0, 90).double()
        for layer, (a, b) in enumerate(zip(prefilled.flatten(0, 1), stepped.flatten(0, 1))):  # K, V of each layer
            assert ((a - b).norm() / b.norm()).item() < (2e-2 if CUDA else 1e-5), f"{family}, {layer}"
