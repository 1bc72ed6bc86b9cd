"""The training code: its hybrid model computes what transformers computes."""

from pathlib import Path

import pytest
import torch

from tridecode.checkpoint.quantization.quantize import SCHEMES, quantize

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture
def hybrid(monkeypatch):
    monkeypatch.syspath_prepend(TRAINING)
    import hybrid

    return hybrid


def recurrent(q, k, v, g, beta):
    """The gated delta rule, one position after the other."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    state, out = torch.zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3], dtype=v.dtype), []
    for i in range(v.shape[1]):
        state = state * g[:, i, :, None, None].exp()
        delta = (v[:, i] - (state * k[:, i, :, :, None]).sum(2)) * beta[:, i, :, None]
        state = state + k[:, i, :, :, None] * delta[:, :, None]
        out.append((state * q[:, i, :, :, None]).sum(2) * k.shape[3] ** -0.5)
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [64, 192])
def test_chunks_equal_the_recurrence(hybrid, length):
    """Outputs and gradients, with decays from none to complete and keys that repeat."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, length, 2, 16, generator=generator) for _ in range(2))
    k[:, 1::3] = k[:, :1]
    v = torch.randn(2, length, 4, 32, generator=generator)
    g = -torch.rand(2, length, 4, generator=generator) * torch.tensor([0.0, 0.01, 1.0, 20.0])
    beta = torch.rand(2, length, 4, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weights = torch.randn(2, length, 4, 32, generator=generator)
    out = hybrid.delta_rule(*inputs)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = recurrent(*exact)
    expected_grads = torch.autograd.grad((expected * weights).sum(), exact)
    assert (out - expected).abs().max() <= 2e-5
    for grad, right in zip(grads, expected_grads):
        assert (grad - right).norm() <= 2e-5 * right.norm()


def test_hybrid_model_computes_what_transformers_computes(hybrid, tmp_path, monkeypatch):
    """Log probabilities and gradients of a saved checkpoint."""
    transformers = pytest.importorskip("transformers")
    from model import IGNORE, LanguageModel
    from train import save_model

    torch.manual_seed(1)
    config = hybrid.HybridConfig(vocab_size=320, hidden_size=128, intermediate_size=128, linear_key_head_dim=32)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                scale = 0.08 if parameter.dim() == 2 else 0.3
                parameter.add_(scale * torch.randn(parameter.shape))
            if not name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight")):
                parameter.copy_(parameter.bfloat16())
    save_model(model, config, tmp_path, "model")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(1, 320, (2, 128))  # transformers computes no gradient of the padding token, 0
    targets = tokens.roll(-1, 1)
    targets[:, 100:] = IGNORE
    logits = peer(tokens).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = model(tokens, targets)
    assert abs(loss - expected) <= 1e-5 * expected
    loss.backward(), expected.backward()
    others = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        right = others[name].grad
        assert (parameter.grad - right).norm() <= 1e-3 * right.norm(), name


def test_weights_in_training_are_those_that_quantize_stores(hybrid):
    from model import LanguageModel
    from train import quantized_weights, rounded_to_int4

    torch.manual_seed(1)
    model = LanguageModel(hybrid.HybridConfig(num_hidden_layers=4, vocab_size=128))
    weights = quantized_weights(model)
    assert len(weights) == 3 * 6 + 7
    exact = [weight.detach().clone() for weight in weights]
    with rounded_to_int4(weights):
        for weight, before in zip(weights, exact):
            stored = quantize(before, SCHEMES["int4"])
            codes = (stored.codes.float() - 8).view(len(before), -1, stored.group)
            expected = (codes * stored.scale.float()[:, :, None]).view_as(before)
            assert torch.equal(weight, expected) and not torch.equal(weight, before)
    assert all(torch.equal(weight, before) for weight, before in zip(weights, exact))
