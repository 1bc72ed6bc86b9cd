"""Train the LoRA adapter of the bundled model that answers in JSON, on one CPU core.

    python training/adapter.py --out tridecode/bundled/json-adapter

The generator makes the chats. Each reply becomes {"answer": reply}. The adapter changes all linears, and is
written as the peft library saves it.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from generator import generate
from model import IGNORE, Config, LanguageModel
from prepare import LEARN, Encoder
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import rate_at

BUNDLED = Path(__file__).parent.parent / "tridecode" / "bundled"
POOL = 1024  # chats that are sorted by length before they are grouped, so that little is padded
LONGEST = 256  # tokens of a chat


class Adapted(nn.Module):
    """A linear with an adapter: x W.T + alpha / rank * x A.T B.T."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.linear, self.factor = linear, alpha / rank
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b) * self.factor


def adapt(model: nn.Module, rank: int, alpha: int) -> dict[str, Adapted]:
    """Replace all linears of a model, whose own weights stay as they are. Return the new ones by name."""
    model.requires_grad_(False)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    adapted = {}
    for name, linear in linears:
        parent, _, own = name.rpartition(".")
        adapted[name] = Adapted(linear, rank, alpha)
        setattr(model.get_submodule(parent), own, adapted[name])
    return adapted


def as_json(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the chat with every reply as a JSON object."""
    return [
        message | {"content": json.dumps({"answer": message["content"]}, ensure_ascii=False)}
        if message["role"] == "assistant"
        else message
        for message in chat
    ]


def batches(seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets [chats, length] of about `size` tokens. Only replies are targets."""
    encoder, rng = Encoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))), np.random.default_rng(seed)
    chats = generate(2**31, seed)
    while True:
        documents = [{"messages": as_json(next(chats))} for _ in range(POOL)]
        arrays = sorted((each for each in encoder.encode(documents)[0] if len(each) <= LONGEST), key=len)
        groups, group = [], []
        for array in arrays:
            if group and (len(group) + 1) * len(array) > size:
                groups.append(group)
                group = []
            group.append(array)
        for i in rng.permutation(len(groups)):
            block = np.zeros((len(groups[i]), max(map(len, groups[i]))), np.uint16)
            for row, array in zip(block, groups[i]):
                row[: len(array)] = array
            tokens = (block & ~np.uint16(LEARN)).astype(np.int64)
            targets = np.where(block & LEARN > 0, tokens, IGNORE)
            yield torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:])


def save(adapted: dict[str, Adapted], out: Path, rank: int, alpha: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, module in adapted.items():
        for matrix, value in ("A", module.a), ("B", module.b):
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = value.detach().bfloat16().contiguous()
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bundled",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of an optimizer step")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    model, alpha = LanguageModel(Config()), 2 * options.rank
    weights = load_file(BUNDLED / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    adapted = adapt(model, options.rank, alpha)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    started, losses = time.monotonic(), []
    for step, (tokens, targets) in zip(range(options.steps), batches(options.seed, options.tokens)):
        optimizer.param_groups[0]["lr"] = options.learning_rate * rate_at(step / options.steps)
        loss = model(tokens, targets) / (targets != IGNORE).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            mean, seconds = sum(losses[-20:]) / 20, time.monotonic() - started
            print(f"step {len(losses)}, {seconds:.0f} s: loss {mean:.4f}", flush=True)
    save(adapted, options.out, options.rank, alpha)


if __name__ == "__main__":
    main()
