"""A checkpoint that answers a long prompt correctly only if attention finds one token among all others, twice.

Its vocabulary consists of facts (a key and its value), questions (about a key), ends (request the answer for a key) and
answers (a value). A prompt is a haystack of facts about other keys, with one fact about the key, a later question about
the key, and an end as its last token. The answer must be the fact's value:

- In the first layer the question attends to the fact: its query is the code of the key, and so is the key of the fact.
  Its values carry the code of the fact's value. Each head carries one part of this code.
- In the second layer the end attends to the question in the same way, and reads the code that the question found.

Therefore a prompt pass must attend from the question's row to the fact at any distance, and the pass that samples from
the last row must attend to the question. Codes are rows of a Hadamard matrix, so codes of different keys are
orthogonal. They use the dimensions that RoPE rotates most slowly: almost no rotation with the default base here, and a
sixth of a radian within 128,000 positions in the slowest 8 of the 64 pairs of Llama 3.1. The score of a match is MATCH
above all other scores, so it outweighs e ** MATCH other tokens. Except for rounding, the logits are 1 for the right
answer and 0 for all others.
"""

import random
from pathlib import Path

import torch
from checkpoints import TOKENIZER_VOCAB_SIZE, write_tokenizer

MATCH = 24.0  # Attention score of a key that matches the query.
KEY, VALUE, QUERY, ENDED, RETRIEVED, ANSWER = range(6)  # Parts of the residual stream. Two more parts stay empty.
STILL = {"rope_type": "default", "rope_theta": 1e12}
LLAMA = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def hadamard(n: int) -> torch.Tensor:
    """Return a Hadamard matrix, fp32 [n, n] of 1 and -1 with orthogonal rows. n must be a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


class Needles:
    """The tokens of a checkpoint with `codes` keys and `codes` values; see the module."""

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
        """Token ids of the answers, one for each value."""
        first = self.codes**2 + 2 * self.codes
        return slice(first, first + self.codes)

    def prompt(self, tokens: int, fact: int | None, question: int, key: int, value: int, seed: int = 0) -> list[int]:
        """Return a prompt of `tokens` tokens, with the fact and the question at these positions.

        If `fact` is None, there is no fact.
        """
        draw, half = random.Random(seed), self.codes // 2
        ids = [self.fact(draw.randrange(half, self.codes), draw.randrange(self.codes)) for _ in range(tokens)]
        # The text contains another fact, whose key and value differ.
        ids[tokens // 3] = self.fact((key + 1) % half, (value + 1) % self.codes)
        ids[tokens * 2 // 3] = self.question((key + 1) % half)
        if fact is not None:
            ids[fact] = self.fact(key, value)
        ids[question], ids[-1] = self.question(key), self.end(key)
        return ids

    @torch.no_grad()
    def write(
        self, path, dtype: torch.dtype, positions: int, heads: int, kv_heads: int, size: int | None = None, rope=STILL
    ) -> Path:
        """Write the checkpoint to directory `path`.

        Args:
            positions: maximum length of prompts.
            heads: number of heads. It must divide the number of codes (columns that identify a token).
            size: size of a head, by default twice the number of codes. The hidden size is eight times that number.
        """
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
        embed[self.question(0) : self.question(codes), part(QUERY)] = code
        embed[self.end(0) : self.end(codes), part(ENDED)] = code
        # Values that a norm gives to the ones of a row in which one part is filled, and in which two parts are filled.
        single, pair = 8**0.5, 2.0
        gain = (MATCH * size**0.5 / (codes * single * pair)) ** 0.5
        # Pairs of dimensions that RoPE rotates slowly.
        slow = [*range(size // 2 - codes // 2, size // 2), *range(size - codes // 2, size)]
        for layer, query_part, key_part, brings, into in (
            (model.model.layers[0].self_attn, QUERY, KEY, VALUE, RETRIEVED),
            (model.model.layers[1].self_attn, ENDED, QUERY, RETRIEVED, ANSWER),
        ):
            for head in range(heads):
                # The part of the value's code that this head carries.
                own = range(head * codes // heads, (head + 1) * codes // heads)
                layer.q_proj.weight[[head * size + d for d in slow], part(query_part)] = gain * one
                for i in own:
                    layer.o_proj.weight[into * codes + i, head * size + i] = 1 / pair
            for head in range(kv_heads):
                layer.k_proj.weight[[head * size + d for d in slow], part(key_part)] = gain * one
                layer.v_proj.weight[head * size : head * size + codes, part(brings)] = one
        model.lm_head.weight[self.answers, part(ANSWER)] = code / (codes * pair)
        path = Path(path)
        model.to(dtype).save_pretrained(path)
        write_tokenizer(path)
        return path
