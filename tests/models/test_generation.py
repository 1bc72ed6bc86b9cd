"""Generation defaults and names of tensors as transformers reads them, on tiny checkpoints."""

import json

import pytest
import torch
from checkpoints import write_tiny, write_tokenizer

from tridecode import Engine, SamplingParams
from tridecode.errors import CheckpointError

transformers = pytest.importorskip("transformers")
PROMPT = [5, 17, 300, 42, 8, 8, 99]


@pytest.fixture
def path(tmp_path):
    return write_tiny(tmp_path / "model", "qwen3", num_hidden_layers=2)


def defaults(path, **keys) -> None:
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": [0, 2]} | keys))


def reference(path, **options) -> list[int]:
    """Return the tokens that transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokens = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), pad_token_id=0, **options
    )
    return tokens[0, len(PROMPT) :].tolist()


def test_defaults_give_the_tokens_of_transformers(path):
    defaults(path, max_new_tokens=6)
    free = reference(path)
    defaults(path, max_new_tokens=8, suppress_tokens=free[:1], bad_words_ids=[[free[1]], [free[2]]])
    with Engine.load(path, device="cpu") as engine:
        expected = reference(path)
        assert len(expected) == 8 and expected[0] != free[0]
        assert list(engine.generate(PROMPT).token_ids) == expected
        biased = engine.default_params(logit_bias={expected[0]: -1e30})
        assert engine.generate(PROMPT, biased).token_ids[0] not in (free[0], expected[0]), (
            "a bias of the caller removed the model's excluded tokens"
        )
        assert engine.notes == ()


def test_stop_strings_of_the_model_end_an_answer(path):
    defaults(path, max_new_tokens=8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = tokenizer.decode(reference(path))
    stop = text[3:5]
    defaults(path, max_new_tokens=8, stop_strings=[stop])
    expected = reference(path, tokenizer=tokenizer)
    with Engine.load(path, device="cpu") as engine:
        result = engine.generate(PROMPT)
    assert list(result.token_ids) == expected and result.finish_reason == "stop"
    assert result.text == text[: text.index(stop)]


def test_invalid_default_does_not_block_a_model(path, run):
    defaults(path, do_sample=True, temperature=-1)
    code, out, err = run("generate", "--model", path, "--prompt", "Hi", "--max-tokens", 2, "--device", "cpu",
                         "--temperature", 0)  # fmt: skip
    assert code == 0 and out
    assert f"{path / 'generation_config.json'}: temperature must be" in err and "--temperature" not in err


def without_head(path, tmp_path):
    """Save the model without its LM head: the names of the tensors lack the prefix."""
    base = tmp_path / "base"
    transformers.AutoModel.from_pretrained(path).save_pretrained(base)
    write_tokenizer(base)
    return base


@pytest.mark.parametrize("keys", [{}, {"architectures": None}, {"architectures": ["Qwen3ForCausalLM"]}])
def test_checkpoint_saved_without_lm_head(keys, tmp_path):
    path = write_tiny(tmp_path / "model", "qwen3-tied", num_hidden_layers=2)
    base = without_head(path, tmp_path)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | keys))
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with Engine.load(path, device="cpu") as whole, Engine.load(base, device="cpu") as engine:
        assert torch.equal(engine.score(PROMPT), whole.score(PROMPT))
        assert engine.generate(PROMPT, greedy).token_ids == whole.generate(PROMPT, greedy).token_ids


def test_missing_head_that_is_not_tied_is_refused(path, tmp_path):
    with pytest.raises(CheckpointError, match="lm_head.weight.*missing"):
        Engine.load(without_head(path, tmp_path), device="cpu")


def test_checkpoint_saved_without_lm_head_can_be_quantized(tmp_path, run):
    path = write_tiny(tmp_path / "model", "qwen3-tied", num_hidden_layers=1)
    base = without_head(path, tmp_path)
    for source in (path, base):
        assert run("quantize", source, tmp_path / f"{source.name}-fp8", "--to", "fp8", "--quiet")[0] == 0
    with Engine.load(tmp_path / "model-fp8") as whole, Engine.load(tmp_path / "base-fp8") as engine:
        assert torch.equal(engine.score(PROMPT), whole.score(PROMPT))
