"""Tests of `tridecode profile --experts`: the counts of a text's experts, the table and the picture."""

import json
from argparse import Namespace
from xml.etree import ElementTree

import pytest
import torch
from checkpoints import write_tiny
from models import CUDA

from tridecode import cli as commands
from tridecode.blocks.moe import MoE
from tridecode.cli.profile.experts import distinct, layer_figures, neighbors, routed
from tridecode.text.tokenizer import Tokenizer

TEXT = "A graph is captured once and replayed for ever; the token goes back into memory. " * 3
TOKENS = 64
# Share of the choices that may differ. On a GPU the engine computes in bf16, so a few tokens choose other experts than
# in fp32. A changed choice counts twice: for the old and for the new expert.
FLIPS = 0.05 if CUDA else 0


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen2-moe-equal", "qwen3.5-moe"])
def checkpoint(request, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("mixture"), request.param)


def chosen(path, texts) -> list[torch.Tensor]:
    """Return the experts [tokens, top_k] of each layer, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([text]), output_router_logits=True).router_logits for text in texts]
    top_k = model.config.get_text_config().num_experts_per_tok
    return [torch.cat(layer).topk(top_k, 1).indices for layer in zip(*logits)]


def run(capsys, *argv) -> tuple[int, str, str]:
    code = commands.main(["profile", *map(str, argv)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("rows", [1, 3])
def test_counts_agree_with_transformers(checkpoint, rows, capsys, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    argv = ("--model", checkpoint, "--experts", text, "--rows", rows, "--prompt-tokens", TOKENS, "--output", out)
    code, printed, _ = run(capsys, *argv)
    report = json.loads(printed.splitlines()[-1])
    length = TOKENS // rows // 8 * 8
    assert code == 0 and (report["tokens"], report["passes"], report["rows"]) == (rows * length, length, rows)
    ids = Tokenizer.load(checkpoint).encode(TEXT)
    texts = [ids[first : first + length] for first in range(0, rows * length, length)]
    full = json.loads((out / "experts.json").read_text())
    expected = chosen(checkpoint, texts)
    assert len(full["layers"]) == len(expected)
    for layer, routes in zip(full["layers"], expected):
        counts = torch.bincount(routes.flatten(), minlength=layer["experts"])
        own = torch.tensor(layer["counts"])
        assert own.sum() == counts.sum() and (own - counts).abs().sum() <= FLIPS * counts.sum()
        assert layer["counts"][layer["busiest"]] == max(layer["counts"])
        assert layer["unused"] == int((own == 0).sum())
        assert layer["busiest_share"] == pytest.approx(float(own.max() / own.sum()))
        by_text = routes.view(rows, length, -1)
        used = [distinct(by_text[:, place]) for place in range(length)]
        assert layer["experts_of_pass"] == pytest.approx(sum(used) / length, rel=max(FLIPS, 1e-6))
        pairs = [distinct(pair) for tokens in by_text for pair in tokens.split(2)]
        assert layer["neighbors"]["2"] == pytest.approx(sum(pairs) / len(pairs), rel=max(FLIPS, 1e-6))
    assert "distinct experts of a pass of" in printed and "of 8 neighboring tokens" in printed
    drawn = ElementTree.fromstring((out / "experts.svg").read_text())
    cells = sum(node.get("d", "").count("M") for node in drawn.iter())
    assert cells == sum(layer["experts"] for layer in full["layers"])


def test_figures_of_a_layer():
    block = MoE(hidden=8, experts=4, top_k=2, intermediate=8, shared=True)
    ids = [torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 1], [1, 0]])]
    places = [torch.tensor([[0, 5], [1, 5]]), torch.tensor([[1, 6], [0, 6]])]  # The rows of the slots have moved.
    found = layer_figures(7, block, ids, places)
    assert (found["layer"], found["counts"], found["unused"], found["busiest"]) == (7, [4, 3, 1, 0], 1, 0)
    assert found["busiest_share"] == 0.5 and found["busiest_ratio"] == 2
    assert found["experts_of_pass"] == 2.5 and found["uniform_experts_of_pass"] == 4 * (1 - 0.5**2)
    # Slot 0 has 0, 1 and 1, 0; slot 1 has 0, 2 and 0, 1.
    assert found["neighbors"][2] == 2.5 and neighbors(torch.cat(ids), 2) == 2.5


@pytest.mark.parametrize("family, words", [("qwen3-moe", "it needs at least 16"), ("qwen3", "has no experts")])
def test_a_short_text_and_a_model_without_experts_are_refused(family, words, capsys, tmp_path):
    path, text = write_tiny(tmp_path / family, family), tmp_path / "text.txt"
    text.write_text("Hi.")
    capsys.readouterr()
    code, _, err = run(capsys, "--model", path, "--experts", text, "--rows", 2)
    assert code == 1 and err.count("\n") == 1 and words in err


def test_every_token_runs_in_one_pass(checkpoint):
    args = Namespace(model=str(checkpoint), preset=None, gguf=None)
    passes, facts = routed(args, [[5, 6, 7, 8, 9, 10, 11, 12]], 2)
    assert len(passes) == 8 and [each.places.tolist() for each in passes] == [[[0, place]] for place in range(8)]
    assert facts["model"]
