"""Random LoRA adapters in peft's layout, and checkpoints that they are merged into."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DENSE = (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
DELTA = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_z", "linear_attn.out_proj")


def modules_of(checkpoint: Path, names: Sequence[str] = (*DENSE, *DELTA)) -> dict[str, torch.Size]:
    """Return the modules of a checkpoint with these names, and the shapes of their weights."""
    tensors = load_file(checkpoint / "model.safetensors")
    ends = tuple(f".{name}.weight" for name in names)
    return {name.removesuffix(".weight"): tensor.shape for name, tensor in tensors.items() if name.endswith(ends)}


def random_matrices(
    modules: Mapping[str, Sequence[int]], rank: int = 8, seed: int = 0, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return random matrices of an adapter by their names in peft's files. `scale`: magnitude of B A x."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (n, k) in modules.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * k**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * scale * rank**-0.5
    return tensors


def write_lora(
    path: Path, tensors: Mapping[str, torch.Tensor] | None, rank: int = 8, dtype=torch.float32, **config
) -> Path:
    """Write an adapter. `config` replaces entries of adapter_config.json; the value None removes one.

    Args:
        tensors: None writes no file of tensors.
    """
    path.mkdir(parents=True, exist_ok=True)
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors or ()})
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank,
        "lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": names, "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "layers_to_transform": None, "layers_pattern": None, "fan_in_fan_out": False, "init_lora_weights": True,
        "inference_mode": True,
    } | config  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(values))
    if tensors is not None:
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def merge(checkpoint: Path, out: Path, tensors: Mapping[str, torch.Tensor], factor: float = 2.0) -> Path:
    """Write a checkpoint whose weights contain an adapter: W + factor * B A, in fp32.

    factor: the factor of all modules, or a mapping from a module to its factor.
    """
    shutil.copytree(checkpoint, out)
    weights = load_file(checkpoint / "model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            own = factor[module] if isinstance(factor, Mapping) else factor
            change = own * tensors[name.replace(".lora_A.", ".lora_B.")].double() @ a.double()
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight.double() + change).to(weight.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def add_lora(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], factor: float = 2.0) -> list:
    """Add an adapter to a model of transformers, and return handles that remove it.

    As in peft, the adapter is fp32, and its product is added to the output of each module.
    """

    def hook(module, args, out, a, b):
        return (out.float() + factor * args[0].float() @ a.T @ b.T).to(out.dtype)

    handles = []
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            matrices = (each.to(module.weight.device).float() for each in (a, tensors[name.replace("_A.", "_B.")]))
            handles.append(module.register_forward_hook(partial(hook, **dict(zip("ab", matrices)))))
    return handles
