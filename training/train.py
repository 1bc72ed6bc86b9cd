"""Train the bundled chat model from scratch: pretraining on all texts, then fine-tuning on assistant messages.

    python training/train.py pretrain --data DATA --out OUT --minutes 3
    python training/train.py finetune --data DATA --out OUT --minutes 6

DATA is the output of prepare.py. Each stage writes OUT/<stage>.pt and resumes from it when it is started again. Its
best weights are in OUT/<stage>.safetensors, from which fine-tuning starts. They have the names of a Hugging Face
checkpoint, so no conversion is needed. --model qwen3.5 trains a model with recurrent layers (hybrid_model.py), and
--model qwen3-moe one with mixtures of experts (moe_model.py).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from hybrid_model import HybridConfig
from model import IGNORE, Config, LanguageModel
from moe_model import MoEConfig, imbalance
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LEARN = 0x8000
MODELS = {"qwen3": Config, "qwen3.5": HybridConfig, "qwen3-moe": MoEConfig}
BALANCE = 0.01  # factor of the load balancing loss of experts
MULTIPLE = 64  # padded rows have a multiple of this length, which the chunks of a recurrent layer need
GROUP = 128  # columns that share a scale in int4
# Fine-tuning pads documents of similar length to the same length. These are the maximum lengths.
WIDTHS = (64, 128, 192, 256, 384, 512, 1024)

# Share of the tokens by source. Pretraining uses all sources. Fine-tuning uses only sources that suit an assistant.
PRETRAIN = {
    "generated": 0.45,
    "selfdialogue": 0.16,
    "tinystories": 0.09,
    "tinystories-off-topic": 0.01,
    "fairytaleqa-qa": 0.06,
    "fairytaleqa-story": 0.05,
    "spc": 0.07,
    "topical": 0.04,
    "storybook-asp": 0.015,
    "storybook-pb": 0.025,
    "taskmaster3": 0.01,
    "taskmaster4": 0.01,
    "oewn": 0.005,
    "personality": 0.005,
}
FINETUNE = {
    "generated": 0.9865,
    "fairytaleqa-qa": 0.01,
    "oewn": 0.003,
    "personality": 0.0005,
}


class Documents:
    """The tokens of all sources, and the start and end of each document."""

    def __init__(self, folder: Path, shares: dict[str, float], end_of_text: int):
        self.shares = {source: share for source, share in shares.items() if (folder / f"{source}.npy").exists()}
        arrays = [np.load(folder / f"{source}.npy") for source in self.shares]
        self.tokens = np.concatenate([*arrays, np.zeros(4096, np.uint16)])
        self.spans, offset = [], 0
        for array in arrays:
            ends = np.flatnonzero((array & ~np.uint16(LEARN)) == end_of_text) + 1
            self.spans.append(np.stack((np.concatenate(([0], ends[:-1])), ends), axis=1) + offset)
            offset += len(array)

    def sample(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        """Sample documents with about `tokens` tokens in all, by the shares of the sources.

        Returns (start, end) of each document, int64 [documents, 2].
        """
        sampled = []
        for spans, share in zip(self.spans, self.shares.values()):
            expected = tokens * share / sum(self.shares.values()) / np.diff(spans).mean()
            sampled.append(spans[rng.integers(len(spans), size=int(expected) + int(rng.random() < expected % 1))])
        return rng.permutation(np.concatenate(sampled))

    def packed(self, rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and targets of concatenated documents, cut into rows; every token is a target."""
        size = rows * (length + 1)
        spans = self.sample(rng, int(size * 1.1) + 4 * length)
        stream = np.concatenate([self.tokens[start:end] for start, end in spans]) & ~np.uint16(LEARN)
        block = np.resize(stream, size).reshape(rows, length + 1).astype(np.int64)
        return block[:, :-1], block[:, 1:]

    def padded(self, spans: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and targets with one document per row. Only marked tokens are targets."""
        width = min(length, -(-int(np.diff(spans).max()) // MULTIPLE) * MULTIPLE)
        index = spans[:, :1] + np.arange(width + 1)
        block = self.tokens[np.minimum(index, len(self.tokens) - 1)].astype(np.int64)
        tokens, inside = block & ~LEARN, index < spans[:, 1:]
        targets = np.where(inside & (block & LEARN > 0), tokens, IGNORE)
        return np.where(inside, tokens, 0)[:, :-1], targets[:, 1:]

    def batches(self, stage: str, step: int, options: argparse.Namespace) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the micro-batches of a step. They depend only on the seed and the step, so a run can be resumed."""
        rng = np.random.default_rng((options.seed, step))
        if stage == "pretrain":
            rows = options.batch_tokens // options.length
            return split(*self.packed(rng, rows, options.length), options.micro_tokens)
        spans = self.sample(rng, options.batch_tokens)
        spans = spans[np.argsort(spans[:, 1] - spans[:, 0], kind="stable")]
        cuts = np.searchsorted(spans[:, 1] - spans[:, 0], WIDTHS, side="right")
        batches = [self.padded(part, options.length) for part in np.split(spans, cuts) if len(part)]
        return [part for batch in batches for part in split(*batch, options.micro_tokens)]


def split(tokens: np.ndarray, targets: np.ndarray, limit: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split a batch into micro-batches of at most `limit` tokens."""
    parts = -(-tokens.size // limit)
    return list(zip(np.array_split(tokens, parts), np.array_split(targets, parts)))


def to_device(array: np.ndarray, device: str) -> Tensor:
    """Copy an array to the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def held_out_bits(model: nn.Module, folder: Path, end_of_text: int, device: str, length: int) -> dict[str, float]:
    """Return the bits per byte of each source's held-out text: assistant messages, or the whole plain text."""
    model.eval()
    bits = {}
    for source, size in json.loads((folder / "bytes.json").read_text()).items():
        documents = Documents(folder, {source: 1.0}, end_of_text)
        loss, spans = 0.0, documents.spans[0]
        pieces = [(start, min(start + length, stop)) for low, stop in spans for start in range(low, stop, length)]
        for start in range(0, len(pieces), 64):
            tokens, targets = documents.padded(np.array(pieces[start : start + 64]), length)
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss += model(to_device(tokens, device), to_device(targets, device)).item()
        bits[source] = round(loss / math.log(2) / size, 4)
    model.train()
    return bits


def quantized_weights(model: LanguageModel) -> list[nn.Parameter]:
    """Return the weights that `tridecode quantize` quantizes: the linears of the layers."""
    gates = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight")
    layers = model.model["layers"].named_parameters()
    return [weight for name, weight in layers if weight.dim() == 2 and not name.endswith(gates)]


@contextmanager
def rounded_to_int4(weights: list[nn.Parameter]) -> Iterator[None]:
    """Replace the weights by those that `tridecode quantize --to int4` stores, and restore them at the end.

    Gradients that are computed inside are then applied to the weights that are not rounded.
    """
    if not weights:
        yield
        return
    with torch.no_grad():
        exact = torch.cat([weight.view(-1, GROUP) for weight in weights])
        write_groups(weights, int4_values(exact))
    yield
    with torch.no_grad():
        write_groups(weights, exact)


def write_groups(weights: list[nn.Parameter], groups: Tensor) -> None:
    """Copy groups of columns [n, GROUP] to the weights."""
    for weight, part in zip(weights, groups.split([weight.numel() // GROUP for weight in weights])):
        weight.copy_(part.view_as(weight))


def int4_values(groups: Tensor) -> Tensor:
    """Return the groups [n, GROUP] rounded to int4, each with the best of nine scales."""
    peak = groups.abs().amax(1, keepdim=True).clamp(min=1e-30)
    best, least = None, None
    for step in range(9):
        scale = (peak * ((1 - step / 20) / 7)).bfloat16().float()
        values = (groups / scale).round().clamp(-8, 7) * scale
        error = (values - groups).square().sum(1, keepdim=True)
        best, least = (
            (values, error) if best is None else (torch.where(error < least, values, best), torch.minimum(error, least))
        )
    return best


def save_model(model: LanguageModel, config: Config, out: Path, name: str) -> None:
    """Write the weights in bf16, the constants of recurrent layers in fp32, and config.json."""
    exact = ("A_log", "dt_bias", "linear_attn.norm.weight")
    tensors = {
        name: tensor.to(torch.float32 if name.endswith(exact) else torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, out / f"{name}.safetensors", metadata={"format": "pt"})
    described = config.described() | {
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, with the defaults of the stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["pretrain", "finetune"])
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="duration in minutes, which determines the learning rate schedule"
    )
    parser.add_argument("--init", type=Path, help="weights to start from; default: the weights of the previous stage")
    parser.add_argument(
        "--batch-tokens", type=int, help="tokens of an optimizer step; default: 131072 to pretrain, 262144 to fine-tune"
    )
    parser.add_argument("--micro-tokens", type=int, default=131_072, help="most tokens of a forward pass")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--learning-rate", type=float, help="learning rate; default: 2e-3 to pretrain, 1.5e-3 to fine-tune"
    )
    parser.add_argument("--dropout", type=float, help="dropout probability; default: 0.1 to pretrain, 0 to fine-tune")
    parser.add_argument("--evaluations", type=int, default=6, help="number of evaluations on the held-out text")
    parser.add_argument("--patience", type=int, default=3, help="stop after N evaluations without an improvement")
    parser.add_argument("--int4", action="store_true", help="train the weights that int4 quantization will give")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pretrain = options.stage == "pretrain"
    if options.learning_rate is None:
        options.learning_rate = 2e-3 if pretrain else 1.5e-3
    if options.batch_tokens is None:
        options.batch_tokens = 131_072 if pretrain else 262_144
    if options.init is None and not pretrain:
        options.init = options.out / "pretrain.safetensors"
    if options.dropout is None:
        options.dropout = 0.1 if pretrain else 0.0
    return options


def make_optimizer(model: nn.Module, learning_rate: float, device: str) -> torch.optim.AdamW:
    """Return AdamW, with weight decay on matrices only."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device == "cuda")


def rate_at(progress: float) -> float:
    """Return the share of the peak learning rate: a short warm-up, a plateau, and a linear decay in the second half."""
    return max(0.0, min(1.0, progress / 0.02 + 0.01, (1.0 - progress) / 0.5))


def train(options: argparse.Namespace) -> None:
    """Run one stage."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = MODELS[options.model]()
    model = LanguageModel(config, options.dropout).to(device)
    quantized = quantized_weights(model) if options.int4 else []
    optimizer = make_optimizer(model, options.learning_rate, device)
    stage, checkpoint = options.stage, options.out / f"{options.stage}.pt"
    state = {"step": 0, "seconds": 0.0, "tokens": 0, "log": [], "best_score": math.inf, "misses": 0}
    options.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    elif options.init:
        model.load_state_dict(load_file(options.init, device))
    shares = PRETRAIN if stage == "pretrain" else FINETUNE
    end_of_text = 0
    documents = Documents(options.data / "train", shares, end_of_text)
    started, budget = time.monotonic() - state["seconds"], options.minutes * 60
    evaluate_at = [(i + 1) / options.evaluations for i in range(options.evaluations)]
    evaluate_at = [share for share in evaluate_at if share > state["seconds"] / budget]
    window: list[Tensor] = []
    while evaluate_at:
        progress = (time.monotonic() - started) / budget
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate_at(progress)
        batches = documents.batches(stage, state["step"], options)
        marked = sum(int((targets != IGNORE).sum()) for _, targets in batches)
        total = sum(tokens.size for tokens, _ in batches)
        step_loss = torch.zeros((), device=device)
        with rounded_to_int4(quantized):
            for tokens, targets in batches:
                tokens, targets = to_device(tokens, device), to_device(targets, device)
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    loss = model(tokens, targets) / marked
                (loss + BALANCE * tokens.numel() / total * imbalance(model)).backward()
                step_loss += loss.detach()
                state["tokens"] += tokens.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.append(step_loss)
        state["step"] += 1
        if len(window) == 50 or progress >= evaluate_at[0]:
            mean = torch.stack(window).mean().item()
            window.clear()
            state["seconds"] = time.monotonic() - started
            state["log"].append(
                {
                    "stage": stage,
                    "step": state["step"],
                    "seconds": round(state["seconds"], 1),
                    "tokens": state["tokens"],
                    "train_loss": round(mean, 4),
                }
            )
        if progress < evaluate_at[0]:
            continue
        evaluate_at = [share for share in evaluate_at if share > progress]
        with rounded_to_int4(quantized):
            bits = held_out_bits(model, options.data / "held_out", end_of_text, device, options.length)
        score = sum(bits[source] * share for source, share in shares.items() if source in bits)
        state["log"][-1]["held_out_bits_per_byte"] = bits
        print(json.dumps(state["log"][-1]), flush=True)
        state["misses"] = 0 if score < state["best_score"] else state["misses"] + 1
        if score < state["best_score"]:
            state["best_score"] = score
            save_model(model, config, options.out, stage)
        (options.out / f"{stage}.json").write_text(json.dumps(state["log"], indent=1))
        state["seconds"] = time.monotonic() - started
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}, checkpoint)
        if state["misses"] >= options.patience:
            break


if __name__ == "__main__":
    train(parse_arguments())
