"""EngineOptions: the options of Engine.load, each declared once.

The command line, config.toml, environment variables, `tridecode config`, shell completion and the tables in docs are
generated from the fields below. This module must not import torch, so that `--help` is fast.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .arguments import (
    Choice,
    Constraint,
    Flag,
    Integer,
    Number,
    Pair,
    Rejected,
    Several,
    Text,
    check_fields,
    documented,
    listed,
    option,
    options_of,
)
from .errors import ParameterError, conflict
from .layout import MAX_NGRAM, NGRAM

MAX_SLOTS = 64
BATCH_SLOTS = 16  # Default number of slots of `serve` and of `generate --jsonl`.
PAGE = 64  # Number of K/V positions of a page.
CHUNK = 2048
FIXED_CHUNK = 256  # Chunk size of batch-invariant mode, in which a prompt pass reads one prompt.
PROMPT_MS = 15.0
DTYPES = ("bfloat16", "float16", "float32")
GRAPHS = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
QUANTIZE = ("fp8", "int8", "int4")
ENGINE = ("chat", "generate", "serve", "info", "precompile")  # Commands that load or describe an engine.

NO_PROMPT_GRAPHS = ("none", "full_decode_only"), ': no prompt pass is captured with graph="{}"; leave one of them out'
SIZES = Several(Integer(1), "ascending integers from {0.each.low:,} to {0.each.high:,}, like 1, 2, 4", ascending=True)
SLOTS = replace(SIZES, each=Integer(1, MAX_SLOTS))
DEVICE = Text("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:[0-9]{1,4})?")
MAX_RANK = 256  # Largest rank of an adapter.
DEFAULT_RANK = 16  # Default of max_rank without adapters.
ADAPTER = Text("a name of letters, digits and ._:/-, at most 100, like sql", r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")


@dataclass(frozen=True)
class AdapterItem(Constraint):
    """The name of an adapter and its source, NAME=PATH on the command line."""

    expects = "NAME=PATH, like sql=./sql-adapter"

    def accept(self, value: Any) -> tuple[str, str]:
        """Return the pair of name and source. Raises Rejected."""
        if not isinstance(value, tuple):
            raise Rejected("type")
        ((name, source),) = Adapters().accept([value]).items()
        return name, source

    def read(self, text: str) -> tuple[str, str] | str:
        """Return the pair of a text such as sql=./sql-adapter, or the text itself."""
        name, equals, source = text.partition("=")
        return (name.strip(), source) if equals else text


@dataclass(frozen=True)
class Adapters(Constraint):
    """A mapping of names of adapters to directories or Hugging Face ids."""

    expects = "a mapping of names to directories or Hugging Face ids"

    @property
    def item(self) -> Constraint:
        """The constraint of one pair of name and source."""
        return AdapterItem()

    def accept(self, value: Any) -> dict[str, str]:
        """Return a dict from name to source. Raises Rejected for wrong types and names, and for a repeated name."""
        try:
            pairs = [*(value or {}).items()] if isinstance(value, Mapping | None) else [*value]
            adapters = dict(pairs)
        except (TypeError, ValueError):
            raise Rejected("type") from None
        if not all(isinstance(pair, tuple) for pair in pairs):
            raise Rejected("type")
        if len(adapters) < len(pairs):
            raise Rejected("range", "every name must be different", [name for name, _ in pairs])
        for name, source in adapters.items():
            if not isinstance(name, str) or not re.fullmatch(ADAPTER.pattern, name):
                raise Rejected("type", f"every name must be {ADAPTER.expected}", name)
            if not str(source).strip() or isinstance(source, bool | int | float | list | dict | None):
                raise Rejected("type", f"{name} must have a directory or a Hugging Face id", source)
        return {name: str(source) for name, source in adapters.items()}


def _option(group: str, default: Any, constraint: Constraint, help: str, **more: Any) -> Any:
    return option(default, constraint, help, group=group, **{"commands": ENGINE} | more)


@documented
@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs a model. Values are checked on construction.

    Raises:
        ParameterError: a value is wrong, or two contradict each other; `.argument` names the option.
    """

    # fmt: off
    device: str = _option("model", "auto", DEVICE, "auto, cpu, cuda or cuda:N", metavar="DEVICE",
        brief="auto, cpu, cuda or cuda:N")
    backend: str = _option("model", "auto", Choice(("auto", "triton", "torch")), "run the kernels in Triton or in "
        "PyTorch")
    dtype: str = _option("model", "auto", Choice(("auto", *DTYPES)), "dtype of activations and unquantized weights; "
        "auto is float32 on a CPU, and on a GPU the dtype of the checkpoint, or bfloat16 for a float32 checkpoint")
    quantize: str | None = _option("model", None, Choice(QUANTIZE), "quantize the linears of an unquantized checkpoint "
        "while it is loaded; see docs/quantization.md", brief="store the weights in fewer bits, to save memory")
    quantize_head: str | None = _option("model", None, Choice(("keep", *QUANTIZE)), "scheme of the LM head with "
        "--quantize; keep does not quantize it", default_text="fp8", needs=("quantize",
        ': nothing is quantized; use it with quantize="int4"'))
    kv_dtype: str = _option("memory", "auto", Choice(("auto", "fp8")), "dtype of K/V; auto is the model's dtype; with "
        "fp8 twice as many positions fit")
    state_dtype: str = _option("memory", "auto", Choice(("auto", "float16")), "dtype of recurrent state; auto is "
        "float32. With float16 it needs half the memory, see docs/hybrid.md")
    max_seq_len: int | None = _option("memory", None, Integer(1), "maximum positions of one request (prompt and "
        "output together)", metavar="N", default_text="the maximum that fits, up to the limit of the model, or 8192 "
        "on a CPU", brief="longest conversation, in tokens")
    slots: int = _option("memory", 1, Integer(1, MAX_SLOTS), "maximum number of requests that run at the same time",
        metavar="N",
        defaults={"serve": BATCH_SLOTS, "jsonl": BATCH_SLOTS},
        default_text=f"1; with --jsonl, and for serve, {BATCH_SLOTS}",
        brief="how many requests run at the same time")
    kv_tokens: int | None = _option("memory", None, Integer(1), "number of K/V positions on the device, which all "
        "slots share",
        metavar="N", default_text="the maximum that fits, up to the context for each slot")
    kv_offload: float | str | None = _option("memory", None, Number(1e-3, 1e6, words=("auto",)), "GiB of host "
        "memory for additional K/V; auto is half of the free memory; see docs/offload.md", metavar="GIB",
        default_text="none",
        excludes={"kv_dtype": (("fp8",), ": K/V in kv_dtype fp8 are kept on the device; use kv_dtype auto")})
    kv_ring: int | None = _option("memory", None, Integer(0, 16), "number of device buffers through which running "
        "requests read K/V from the host; with 0, only K/V of waiting requests are on the host", metavar="N",
        default_text="2", needs=("kv_offload", ": no K/V are on the host; use it with kv_offload"))
    weights_offload: float | None = _option("memory", None, Number(1e-3, 1e6), "GiB of host memory for the weights "
        "of the last layers, which every pass copies to the device", metavar="GIB", default_text="none")
    snapshot_memory: float | None = _option("memory", None, Number(0, 1e6), "GiB on the device for snapshots of "
        "recurrent state, from which later requests with the same prefix resume; see docs/sharing.md", metavar="GIB",
        default_text="an eighth of the free memory, at most 32 snapshots for each slot",
        excludes={"prefix_sharing": ((False,), ": no prefixes are shared; leave it out")})
    adapters: Mapping[str, str] | None = _option("adapters", None, Adapters(), "LoRA adapter that requests select by "
        "its name. PATH is a directory that peft has saved, or a Hugging Face id; repeatable; see docs/adapters.md",
        metavar="NAME=PATH", singular="adapter", repeated=True, default_text="none", brief="LoRA adapter; repeatable")
    adapter_memory: float | None = _option("adapters", None, Number(1e-4, 1e6), "GiB on the device for adapters; if "
        "it holds fewer than are loaded, the least recently used ones leave it", metavar="GIB",
        default_text="room for the adapters of --adapter")
    max_rank: int | None = _option("adapters", None, Integer(1, MAX_RANK), "largest rank of an adapter", metavar="N",
        default_text=f"that of the adapters of --adapter, or {DEFAULT_RANK}")
    graph: str = _option("graphs", "full", Choice(GRAPHS),
        "how passes are captured as CUDA graphs (docs/graphs.md)",
        aliases={"--no-prompt-graphs": ("full_decode_only", "the same as --graph full_decode_only")})
    graph_sizes: Sequence[int] | None = _option("graphs", None, SLOTS, "numbers of rows of the captured decode "
        "passes; other passes are padded to the next size", metavar="N,N",
        default_text="1,2,4,8,16,32,64 up to the slots")
    attention: str = _option("graphs", "triton", Choice(("triton", "torch")), "attention backend of decode passes; "
        "torch cannot be captured in a CUDA graph")
    chunk_tokens: int | None = _option("prompts", None, Integer(1), "maximum prompt tokens of one pass",
        metavar="N", default_text=f"{CHUNK}, with --batch-invariant {FIXED_CHUNK}")
    prompt_graph_max_tokens: int | None = _option("prompts", None, Integer(1), "maximum tokens of a captured prompt "
        "pass", metavar="N", default_text="2048", excludes={"graph": NO_PROMPT_GRAPHS})
    prompt_graph_sizes: Sequence[int] | None = _option("prompts", None, SIZES, "numbers of tokens of the captured "
        "prompt passes; other passes are padded to the next size", metavar="N,N",
        default_text="22 sizes up to 2048",
        excludes={
            "prompt_graph_max_tokens": ((), ": cannot be used with prompt_graph_max_tokens; leave one of them out"),
            "graph": NO_PROMPT_GRAPHS,
            "batch_invariant": ((True,), ": with batch_invariant the only size is chunk_tokens")})
    prompt_attention: str = _option("prompts", "auto", Choice(("auto", "triton", "flash", "cudnn")),
        "attention backend of prompt passes; flash and cudnn cannot be captured; see docs/prompts.md")
    prompt_ms: float = _option("prompts", PROMPT_MS, Number(0.1, 1e6), "time limit in milliseconds of a pass that "
        "reads prompts while other requests decode", metavar="MS",
        excludes={"batch_invariant": ((True,), ": with batch_invariant all prompt passes are alike; use chunk_tokens"),
            "graph": NO_PROMPT_GRAPHS})
    prefix_sharing: bool = _option("prompts", True, Flag(), "compute K/V of equal prefixes once, and keep them for "
        "later requests")
    batch_invariant: bool = _option("prompts", False, Flag(), "make results bit-equal with and without other "
        "requests; see docs/sharing.md",
        excludes={"prompt_attention": (("flash", "cudnn"), " needs prompt_attention triton, got {}")})
    max_queue: int | None = _option("requests", None, Integer(0), "maximum number of requests that wait for a slot; "
        "the engine refuses further requests", metavar="N", commands=("serve", "generate"), unsaved=("generate",),
        defaults={"serve": 256},
        default_text="256 (`generate --jsonl`: 3 for each slot)")
    open_objects: bool = _option("requests", False, Flag(), "objects in the answers to JSON schemas and in required "
        "tool calls may have properties that the schema does not name, unless it sets additionalProperties",
        commands=("serve", "generate"))
    speculate: str = _option("speculation", "auto", Choice(("auto", "ngram", "off")), "draft tokens that a pass "
        "verifies: ngram takes them from the text itself, auto is ngram on a GPU if drafts save time; see "
        "docs/speculation.md")
    speculate_ngram: tuple[int, int] | None = _option("speculation", None, Pair(MAX_NGRAM, NGRAM), "maximum and "
        "minimum number of tokens that must match for a draft", metavar="N:M", default_text="8:2",
        excludes={"speculate": (("off",), ': nothing is drafted with speculate="off"; leave one of them out')})
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batch_invariant and self.chunk % PAGE:
            why = f" must be a multiple of {PAGE} with batch_invariant, got {self.chunk_tokens:,}"
            raise conflict("chunk_tokens", why)
        if self.requests_drafts and self.why_no_drafts:
            raise self.no_drafts(self.why_no_drafts)

    @property
    def why_no_drafts(self) -> str:
        """The reason why these options exclude drafts, as the end of a sentence. Empty if they allow drafts."""
        conflicts = {
            'kv_dtype="fp8"': self.kv_dtype == "fp8",
            "kv_offload": self.kv_offload is not None,
            "weights_offload": self.weights_offload is not None,
        }
        names = [name for name, is_set in conflicts.items() if is_set]
        return f"does not work beside {listed(names)}" if names else ""

    @property
    def requests_drafts(self) -> bool:
        """Whether the options request drafts, instead of leaving the choice to the engine."""
        return self.speculate == "ngram" or self.speculate_ngram is not None

    def no_drafts(self, why: str) -> ParameterError:
        """Return the error for requested drafts that the engine cannot verify.

        why: the reason. In the message, it comes after the name of the option.
        """
        if self.speculate == "ngram":
            return conflict("speculate", f'="ngram" {why}; use speculate="off"')
        return conflict("speculate_ngram", f" {why}; leave it out")

    @property
    def ngram(self) -> tuple[int, int]:
        """The maximum and the minimum length of the n-grams that the drafter looks up."""
        return self.speculate_ngram or NGRAM

    @property
    def chunk(self) -> int:
        """The maximum prompt tokens of one pass."""
        return self.chunk_tokens or (FIXED_CHUNK if self.batch_invariant else CHUNK)


OPTIONS = options_of(EngineOptions)
