"""A checkpoint whose answer to a long prompt is right only if attention finds one token among all of them, twice.

Its vocabulary are facts (a key and its value), questions (ask of a key), ends (answer what was asked of a key) and
answers (a value). A prompt is a haystack of facts about other keys, one fact about the key somewhere, a question about
it somewhere behind, and an end. The answer must be the fact's value:

- In the first layer the question looks for the fact: its query is the key's code, as the key of that fact is. Its
  values bring the code of the fact's value, of which each head carries a part of its own.
- In the second layer the end looks for the question in the same way and takes what this has found.

So a prompt pass must attend from the question's row to the fact wherever both are, and the pass that draws the token
from the last row to the question. Codes are rows of a Hadamard matrix: those of different keys are orthogonal. They
stand where RoPE turns slowest: next to not at all with the base that is the default, and by a sixth of a radian within
128,000 positions in the slowest 8 of 64 pairs of Llama 3.1's. A match is MATCH above all else, so that it outweighs
e ** MATCH others, and the logits are 1 for the right answer and 0 for each other one, but for rounding.
"""

import random
from pathlib import Path

import torch
from checkpoints import TOKENIZER_VOCAB_SIZE, write_tokenizer

MATCH = 24.0  # of the scores
KEY, VALUE, ASKED, ENDED, FOUND, ANSWER = range(6)  # the parts of the residual stream, and two that stay empty
STILL = {"rope_type": "default", "rope_theta": 1e12}
LLAMA = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def hadamard(n: int) -> torch.Tensor:
    """fp32 [n, n] of 1 and -1, its rows orthogonal; n: a power of two."""
    found = torch.ones(1, 1)
    while len(found) < n:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found


class Needles:
    """The tokens of a checkpoint with `codes` keys and as many values; see the module."""

    def __init__(self, codes: int):
        self.codes = codes
        self.vocab = max(codes * codes + 3 * codes, TOKENIZER_VOCAB_SIZE)

    def fact(self, key: int, value: int) -> int:
        return self.codes * key + value

    def question(self, key: int) -> int:
        return self.codes**2 + key

    def end(self, key: int) -> int:
        return self.codes**2 + self.codes + key

    @property
    def answers(self) -> slice:
        """The token of each value."""
        first = self.codes**2 + 2 * self.codes
        return slice(first, first + self.codes)

    def prompt(self, tokens: int, fact: int | None, question: int, key: int, value: int, seed: int = 0) -> list[int]:
        """Of `tokens` tokens, with the fact (None: nowhere) and the question at these positions."""
        draw, half = random.Random(seed), self.codes // 2
        ids = [self.fact(draw.randrange(half, self.codes), draw.randrange(self.codes)) for _ in range(tokens)]
        ids[tokens // 3] = self.fact((key + 1) % half, (value + 1) % self.codes)  # another one, asked for too
        ids[tokens * 2 // 3] = self.question((key + 1) % half)
        if fact is not None:
            ids[fact] = self.fact(key, value)
        ids[question], ids[-1] = self.question(key), self.end(key)
        return ids

    @torch.no_grad()
    def write(
        self, path, dtype: torch.dtype, positions: int, heads: int, kv_heads: int, size: int | None = None, rope=STILL
    ) -> Path:
        """Write the checkpoint into directory `path`, for prompts of up to `positions` tokens; heads divide the codes.
        size: dimensions of a head, by default twice as many as codes; the residual stream has eight times as many."""
        import transformers

        codes, size = self.codes, size or 2 * self.codes
        config = transformers.LlamaConfig(
            vocab_size=self.vocab, hidden_size=8 * codes, intermediate_size=2 * codes, num_hidden_layers=2,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, max_position_embeddings=positions,
            rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            rope_parameters=rope,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

        def part(number: int) -> slice:
            return slice(number * codes, (number + 1) * codes)

        code, one, embed = hadamard(codes), torch.eye(codes), model.model.embed_tokens.weight
        for key in range(codes):
            embed[codes * key : codes * (key + 1), part(KEY)] = code[key]
            embed[codes * key : codes * (key + 1), part(VALUE)] = code
        embed[self.question(0) : self.question(codes), part(ASKED)] = code
        embed[self.end(0) : self.end(codes), part(ENDED)] = code
        # What a norm makes of the ones in a row with one part filled, and with two.
        alone, pair = 8**0.5, 2.0
        gain = (MATCH * size**0.5 / (codes * alone * pair)) ** 0.5
        slow = [*range(size // 2 - codes // 2, size // 2), *range(size - codes // 2, size)]  # each with its partner
        for layer, asks, is_asked, brings, into in (
            (model.model.layers[0].self_attn, ASKED, KEY, VALUE, FOUND),
            (model.model.layers[1].self_attn, ENDED, ASKED, FOUND, ANSWER),
        ):
            for head in range(heads):
                own = range(head * codes // heads, (head + 1) * codes // heads)  # of the value's code
                layer.q_proj.weight[[head * size + d for d in slow], part(asks)] = gain * one
                for i in own:
                    layer.o_proj.weight[into * codes + i, head * size + i] = 1 / pair
            for head in range(kv_heads):
                layer.k_proj.weight[[head * size + d for d in slow], part(is_asked)] = gain * one
                layer.v_proj.weight[head * size : head * size + codes, part(brings)] = one
        model.lm_head.weight[self.answers, part(ANSWER)] = code / (codes * pair)
        path = Path(path)
        model.to(dtype).save_pretrained(path)
        write_tokenizer(path)
        return path
