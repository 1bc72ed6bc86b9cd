"""Fill-in-the-middle: prompts from which a code model writes the text between a prefix and a suffix."""

from ..errors import ParameterError
from .tokenizer import Tokenizer

# The control tokens of model families, in their order in the prompt. {0} is the text before the gap, {1} the text
# after it.
FORMS = (
    ("<|fim_prefix|>", "{0}", "<|fim_suffix|>", "{1}", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "{0}", "<fim_suffix>", "{1}", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "{0}", "<fim-suffix>", "{1}", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "{0}", "<|code_suffix|>", "{1}", "<|code_middle|>"),  # GLM
    ("<｜fim▁begin｜>", "{0}", "<｜fim▁hole｜>", "{1}", "<｜fim▁end｜>"),  # DeepSeek
    ("[SUFFIX]", "{1}", "[PREFIX]", "{0}"),  # Codestral
    ("▁<PRE>", "{0}", "▁<SUF>", "{1}", "▁<MID>"),  # CodeLlama
)
# Control tokens with which such models end the text in the gap, in addition to the end of a text.
ENDS = ("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "▁<EOT>", "<|endoftext|>")


def fill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """Return the text, with control tokens, from which the model writes the text between `prefix` and `suffix`.

    Raises:
        ParameterError: the model has no tokens for this.
    """
    for form in FORMS:
        if all(tokenizer.token_id(part) is not None for part in form if part[0] != "{"):
            return "".join({"{0}": prefix, "{1}": suffix}.get(part, part) for part in form)
    message = "suffix: this model has no tokens for fill-in-the-middle, such as <|fim_prefix|>; leave it out"
    raise ParameterError(message, "suffix")


def fill_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end the text in a gap."""
    return [token for name in ENDS if (token := tokenizer.token_id(name)) is not None]
