"""RemoteChat: the same chat with the model of a server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import ParameterError, TridecodeError
from ...options import OPTIONS
from ...results import Piece
from ...sampling import SamplingParams
from ...text.prompt import Prompt
from ...text.thinking import SWITCH
from ..api_key import api_key
from ..options import sampling_overrides
from ..terminal import Output, joined
from .completion import Offer
from .conversation import Conversation
from .settings import CHOICES
from .talk import Chat

if TYPE_CHECKING:  # it needs httpx
    from .remote import RemoteModel

COUNTING = "needs a server that counts tokens, as tridecode's and vLLM's do"


class RemoteChat(Chat):
    """A conversation with a remote.RemoteModel. Sampling options that were not given are the server's own."""

    engine: "RemoteModel"
    unit = "piece"  # a server may put several tokens into one

    def pieces(self, prompt: Prompt, params: SamplingParams) -> Iterator[Piece]:
        return self.engine.stream(prompt, params, self.given, self.variables)

    def facts(self) -> list[str]:
        return [f"model {self.engine.name} at {self.engine.device}, a server of {self.engine.owner}"]

    def set_think(self, mode: str) -> None:
        """on, off or hide; on leaves it to the server's default. Thinking comes apart from the answer."""
        raw = self.conversation.raw
        if mode == "off" and (raw or not self.engine.switches):
            known = f"no chat template can be told through a server of {self.engine.owner}"
            why = "with --raw there is no chat template" if raw else known
            self.output.note(f"thinking cannot be switched off: {why}; /think hide shows only its length")
            mode = self.think if self.think != "off" else "on"
        self.think, self.used, self.opens_thinking = mode, None, False
        self.thinks = not raw  # nobody can tell
        self.variables = {SWITCH: False} if mode == "off" else None

    def settings(self) -> list[str]:
        return [name for name in super().settings() if name in self.engine.options]

    def offer(self) -> Offer:
        fixed: dict[str, tuple[str, ...]] = {} if self.engine.counts else {"overflow": ("error",)}
        return Offer(self.settings(), CHOICES | fixed, [name for name in self.engine.names if name.isprintable()])

    def setting(self, name: str) -> str:
        return super().setting(name) if name in self.given else "as the server has it"

    def change(self, name: str, text: str) -> str:
        before = self.params, dict(self.given)
        try:
            name = super().change(name, text)
            if name in self.given:
                self.engine.check(name)
        except TridecodeError:
            self.params, self.given = before
            raise
        return name

    def choose(self, name: str, value: str) -> None:
        if name == "overflow" and value in ("drop-oldest", "stop") and not self.engine.counts:
            raise ParameterError(f"overflow {value} {COUNTING}")
        super().choose(name, value)

    def go_on(self) -> bool:
        self.output.note("through a server an answer cannot be continued; ask the model to go on")
        return True

    def switch(self, name: str) -> None:
        self.engine.use(name, self.given)
        self.last, self.used = None, None
        self.set_think(self.think)
        if self.store:
            self.store.model = self.engine.name

    def make_room(self, base: Conversation, line: str, begun: str = "") -> Conversation:
        return self.fitted(base, line) if self.engine.counts else base

    def fail(self, what: str, begun: str = "") -> None:
        switched = self.variables is not None and SWITCH in what
        super().fail(joined(what, "/think on leaves thinking to the server") if switched else what, begun)

    def count(self, prompt: str | list[dict]) -> int:
        return self.engine.count(prompt, self.variables)

    def cut(self, last: Piece) -> str:
        reason, usage, limit = last.finish_reason, last.usage, self.params.max_tokens
        if reason == "length":
            reached = limit is not None and (usage is None or usage.completion_tokens >= limit)
            why = f"max_tokens ({limit:,}) was reached" if reached else "the context is full, or the server has a limit"
            return f"the answer was cut: {why}"
        return "" if reason == "stop" else f"the server ended the answer: {reason}"


def connect(args, output: Output) -> "tuple[RemoteModel, SamplingParams]":
    """Return the remote.RemoteModel that the options name. Raises TridecodeError.

    Engine options from the configuration file or the environment are meant for other chats and do not count here.
    """
    local = {*OPTIONS, "graph_stats"}
    for name, word in args.typed.items():
        if name in local:
            args.refuse(f"{word} is of an engine in this process; a server (--url) has its own")
    try:
        from .remote import RemoteModel
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise TridecodeError("chat --url needs the package httpx; install it: pip install 'tridecode[serve]'") from None
    given = sampling_overrides(args)
    params = SamplingParams(**given)  # a wrong value fails here
    name = None if "model" in args.origins else args.model
    model = RemoteModel(args.url, api_key(args.api_key_file, output), name, given)
    if not model.counts:
        if args.overflow not in (None, "error") and "overflow" not in args.origins:
            args.refuse(f"--overflow {args.overflow} {COUNTING}")
        args.overflow = "error"
    return model, params
