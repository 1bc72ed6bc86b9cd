"""Prompts longer than a chunk: the numerical contract of prompt passes, and needles that attention must find."""

import pytest
import torch
from checkpoints import EXPERTS, FAMILIES, write_tiny
from models import CUDA, DEVICE
from needles import LLAMA, Needles
from test_parity import REAL_WIDTHS, errors, transformers

from tridecode import Engine, SamplingParams

needs_gpu = pytest.mark.skipif(not CUDA, reason="real widths run on a GPU only")
DTYPE = torch.bfloat16 if CUDA else torch.float32
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
ENDS = 24  # Number of positions at which logits are compared.


def prompt_logits(engine, ids, ends, reuse_prefix):
    """Return the logits that prompt passes compute after ids[:end] for each end, fp32 [len(ends), vocab]."""
    logits = []
    for i, end in enumerate(ends):
        result = engine.generate(ids[:end], ONE, reuse_prefix=reuse_prefix)
        assert result.error is None and result.usage.reused_tokens == (ends[i - 1] if reuse_prefix and i else 0)
        logits.append(engine.model.workspace.logits[0].clone())
    return torch.stack(logits)


def reference_logits(path, ids, ends, dtype):
    """Return the same logits computed by transformers.

    The model is loaded for each dtype, because casting a loaded model also rounds its rotary frequencies.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).eval()
    keep = torch.tensor([end - 1 for end in ends], device=DEVICE)
    with torch.no_grad():
        return model(torch.tensor([ids], device=DEVICE), logits_to_keep=keep).logits[0].float()


def check_contract(path, tokens, chunk_tokens, median=False, noise=1.0):
    """Check the logits of a prompt that is read in one chunk, in many chunks, and after a cached prefix.

    median: see `errors`, and check_contract of test_parity for the reason.
    noise: factor by which the errors of two computations in bf16 may differ.
    """
    ids = torch.randint(0, 380, (tokens,), generator=torch.Generator().manual_seed(8)).tolist()
    step = tokens // (2 * ENDS)
    ends = [tokens - step * i for i in reversed(range(ENDS))]
    exact = reference_logits(path, ids, ends, torch.float32)
    bf16_kl, bf16_rms = errors(reference_logits(path, ids, ends, torch.bfloat16), exact, median)
    for way, chunk, reuse_prefix in (
        ("one chunk", tokens, False),
        ("chunks", chunk_tokens, False),
        ("prefix", chunk_tokens, True),
    ):
        sizes = dict(max_seq_len=tokens + 2, chunk_tokens=chunk, prompt_graph_max_tokens=tokens, speculate="off")
        with Engine.load(path, device=str(DEVICE), **sizes) as engine:
            while engine.capture_next():
                pass
            kl, rms = errors(prompt_logits(engine, ids, ends, reuse_prefix), exact, median)
            stats = engine.graph_stats()
        reads = [stat for stat in stats if stat.kind == "prompt"]
        assert {stat.kind for stat in stats} == {"prompt"}, "a pass of another kind ran"
        assert {stat.mode for stat in reads} == {"full" if CUDA else "none"}
        assert max(stat.rows for stat in reads) == chunk
        print(f"\n{path.name}, {way}: KL {kl:.2e} (transformers bf16 {bf16_kl:.2e}), RMS {rms:.2e} ({bf16_rms:.2e})")
        assert kl <= bf16_kl * noise and rms <= bf16_rms * noise, way
        assert CUDA or rms <= 1e-5, f"{way}: the fp32 reference differs from transformers in fp32"


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_passes_are_as_accurate_as_transformers_bf16(family, tmp_path):
    path, flips = write_tiny(tmp_path / family, family, dtype=DTYPE), CUDA and family in EXPERTS
    check_contract(path, tokens=300, chunk_tokens=48, median=flips, noise=1.1 if flips else 1.0)


@needs_gpu
@pytest.mark.parametrize("name", REAL_WIDTHS)
def test_prompt_passes_are_as_accurate_as_transformers_bf16_at_real_widths(name, tmp_path):
    """The prompt has 4,001 tokens.

    A sliding window covers a quarter of it. No prompt ends one token after a whole chunk.
    """
    family, widths = REAL_WIDTHS[name]
    widths |= {"max_position_embeddings": 8192} | ({"sliding_window": 1024} if "sliding_window" in widths else {})
    # With tied random embeddings and two layers, a model almost always repeats the last token. The divergence would be
    # the error of one logit at one position (0.01 to 1.4 times that of transformers).
    widths["tie_word_embeddings"] = False
    check_contract(write_tiny(tmp_path / name, family, dtype=torch.bfloat16, **widths), tokens=4001, chunk_tokens=512)


# ---- Needles

TOKENS = 32_000 if CUDA else 400
NEEDLES = Needles(64 if CUDA else 32)
PLACES = [  # (position of the fact, position of the question)
    (0, TOKENS - 2), (1, TOKENS // 2), (TOKENS // 2 - 1, TOKENS // 2), (TOKENS - 3, TOKENS - 2), (63, 64),
    *([(2047, 2048), (2048, 31_743), (29_951, 29_952)] if CUDA else [(47, 48), (49, 383)]),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("needles") / "needles"
    return NEEDLES.write(path, DTYPE, TOKENS + 8, heads=16 if CUDA else 4, kv_heads=4 if CUDA else 2)


FINDERS = {"triton": {}, "flash": dict(prompt_attention="flash"), "host": dict(kv_offload=4, kv_tokens=35 * 64)}
if not CUDA:
    FINDERS = {"torch": dict(chunk_tokens=48), "host": dict(chunk_tokens=48, kv_offload=0.1, kv_tokens=4 * 64)}


@pytest.fixture(scope="module", params=FINDERS)
def finder(request, checkpoint):
    options = FINDERS[request.param]
    with Engine.load(checkpoint, device=str(DEVICE), max_seq_len=TOKENS + 2, **options) as engine:
        yield engine


def answer_of(engine, ids, reuse_prefix=False):
    """Return the result with the generated token, and the logits of all answers."""
    result = engine.generate(ids, ONE, reuse_prefix=reuse_prefix)
    assert result.error is None
    return result, engine.model.workspace.logits[0, NEEDLES.answers].clone()


def assert_answer(answer, value):
    result, logits = answer
    assert result.token_ids == (NEEDLES.answers.start + value,)
    expected = torch.zeros_like(logits)
    expected[value] = 1  # The heads contribute equal parts: a 16th each on a GPU, else a quarter.
    assert (logits - expected).abs().max() < 0.03


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_needle_is_found(finder, places):
    for seed in range(3):
        key, value = 3 * seed + places[0] % 5, (7 * seed + places[1]) % NEEDLES.codes
        assert_answer(answer_of(finder, NEEDLES.prompt(TOKENS, *places, key, value, seed)), value)


def test_needle_is_found_in_a_cached_prefix(finder):
    for places in ((5, TOKENS - 2), (5, 90)):
        ids = NEEDLES.prompt(TOKENS, *places, key=2, value=9)
        cached = TOKENS // 2 + 7
        finder.generate(ids[:cached], ONE, reuse_prefix=False)
        answer = answer_of(finder, ids, reuse_prefix=True)
        assert answer[0].usage.reused_tokens == cached
        assert_answer(answer, 9)


@pytest.mark.parametrize("tokens", [32_000, 128_000] if CUDA else [2000])
def test_needle_is_found_at_ten_depths_with_kv_offload(tokens, tmp_path):
    """The model has Llama 3.1's rope, heads and context. Nearly all K/V are in host memory."""
    needles, context = Needles(16), 131_072 if CUDA else 2048
    path = needles.write(tmp_path / "needles", DTYPE, context, heads=16, kv_heads=4, size=128, rope=LLAMA)
    limits = dict(kv_offload=1, kv_tokens=40 * 64) if CUDA else dict(kv_offload=0.1, kv_tokens=5 * 64, chunk_tokens=128)
    with Engine.load(path, device=str(DEVICE), max_seq_len=context, **limits) as engine:
        assert context > 6 * engine.kv_tokens
        for tenth in range(10):
            fact, question = tenth * tokens // 10 + 13, tokens - 2 - 5 * tenth
            ids = needles.prompt(tokens, fact, question, key=tenth % 8, value=tenth, seed=tenth)
            result = engine.generate(ids, ONE, reuse_prefix=False)
            logits = engine.model.workspace.logits[0, needles.answers]
            assert result.token_ids == (needles.answers.start + tenth,), f"{logits}"
            assert logits[tenth] > 0.9 and logits.sort().values[-2] < 0.1


def test_prompt_without_a_needle_has_no_answer(finder):
    _, logits = answer_of(finder, NEEDLES.prompt(TOKENS, None, TOKENS - 2, key=2, value=9))
    assert logits.abs().max() < 0.5


def test_transformers_finds_the_needle(checkpoint):
    """The checkpoint computes the same answers in transformers."""
    tokens = min(TOKENS, 2000)
    ids = NEEDLES.prompt(tokens, 0, tokens - 2, key=4, value=11)
    logits = reference_logits(checkpoint, ids, [tokens], torch.float32)[0]
    assert logits.argmax().item() == NEEDLES.answers.start + 11
    assert logits[NEEDLES.answers].sort().values[-2:].tolist() == pytest.approx([0, 1], abs=0.03)
