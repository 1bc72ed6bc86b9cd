"""Trial compilation of grammars. This module runs in a child process of sandbox.py.

Some grammars take time or memory without bound to compile, and nothing can interrupt the library. A grammar that
compiles here within the limits also compiles in the parent process, with about the same time and memory: the cost
depends on the grammar and hardly on the vocabulary. Therefore the vocabulary here is small. It contains the bytes and
the special tokens.
"""

import ctypes
import os
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

NICENESS = 5  # Threads that run requests get more CPU time than a compilation.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)  # Each lexer state takes 1 to 2 kB.


class Vocabulary:
    """A vocabulary in the form that llguidance requires. It must not refer to the LLTokenizer that it is made for.

    An LLTokenizer keeps its vocabulary alive, and the garbage collector cannot detect such a cycle.

    Args:
        tokens: bytes of each token.
        special: ids of the special tokens.
        ends: ids of the tokens that end a text.
        encode: returns the token ids of a text.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int],
        ends: Sequence[int],
        encode: Callable[[bytes], list[int]],
    ):
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, special, ends[0], encode
        self._ends = ends

    def __call__(self, text: bytes) -> list[int]:
        """Return the token ids of a text that the grammar forces."""
        return self._encode(text)

    def converted(self) -> LLTokenizer:
        """Return the vocabulary in llguidance's form."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=[*self._ends])


def compiler(setup: tuple[int, dict[str, str]]) -> Callable[[str], tuple[str, int]]:
    """Return a function that compiles a grammar of llguidance and returns its error ("" for none) and size in bytes.

    Args:
        setup: vocabulary size of the model, and the texts of its special tokens by id.
    """
    vocab_size, special = setup
    os.nice(NICENESS)
    tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)] + [b"<end>"]
    for token, text in special.items():
        tokens[int(token)] = text.encode()
    end = len(tokens) - 1
    encode = lambda text: [vocab_size + byte for byte in text]  # noqa: E731
    vocabulary = Vocabulary(tokens, [*map(int, special), end], [end], encode).converted()

    def compile_grammar(grammar: str) -> tuple[str, int]:
        before = allocated_bytes()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            # The masks of the first two bytes show whether the grammar exceeds the library's limits per token.
            mask = int.from_bytes(matcher.compute_bitmask(), "little") >> vocab_size
            if bytes_allowed := mask & (1 << 256) - 1:
                first = (bytes_allowed & -bytes_allowed).bit_length() - 1
                if matcher.consume_token(vocab_size + first) and not matcher.is_stopped():
                    matcher.compute_bitmask()
        return matcher.get_error(), max(allocated_bytes() - before, 0)

    return compile_grammar


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Return the bytes that this process has allocated; 0 if the C library, unlike glibc, does not report them."""
    if not (mallinfo := getattr(ctypes.CDLL(None), "mallinfo", None)):
        return 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd
