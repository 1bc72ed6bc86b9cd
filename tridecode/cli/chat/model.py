"""What a chat needs of its model, whichever process runs it."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from ...results import Piece
from ...sampling import SamplingParams

Prompt = str | list[dict]


class Thinking(NamedTuple):
    """How a model handles thinking in the mode on, off or hide."""

    possible: bool = False
    opened: bool = False  # the template begins the think block, so that answers start inside it
    variables: dict[str, bool] | None = None  # of the chat template
    refusal: str = ""  # why it cannot be switched off
    advice: str = ""  # for errors that name the variable


class Model(Protocol):
    """A model in this process (local.LocalModel) or of a server (remote.RemoteModel)."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> object: ...

    @property
    def unit(self) -> str:
        """What a stream consists of: token, or piece, where a server may put several tokens into one."""

    @property
    def capacity(self) -> int | None:
        """The tokens of the context; None if they are unknown."""

    @property
    def largest(self) -> int:
        """The largest context that the model supports, 0 if it is unknown."""

    @property
    def options(self) -> Collection[str]:
        """The sampling options that it takes."""

    @property
    def defaults(self) -> str | None:
        """What is shown as the value of those that are not set; None: the value itself."""

    @property
    def models(self) -> Sequence[str] | None:
        """The names that `switch` takes; None: what is on this machine."""

    @property
    def counts(self) -> bool:
        """Whether `count` works."""

    @property
    def continues(self) -> bool:
        """Whether `stream` takes an answer that is begun."""

    @property
    def seeds(self) -> bool:
        """Whether an answer gets a seed if none is set, so that it can be had again."""

    @property
    def loaded(self) -> bool:
        """Whether there is a model; `switch` may have lost it."""

    def default_params(self, **given) -> SamplingParams: ...

    def check(self, option: str) -> None:
        """Raise ParameterError if the model does not take a sampling option."""

    def thinking(self, mode: str, raw: bool) -> Thinking: ...

    def stream(
        self, prompt: Prompt, params: SamplingParams, given: Collection[str], thinking: Thinking, begun: str = ""
    ) -> Iterator[Piece]:
        """Return the pieces of an answer as they come, or of its rest after `begun`. given: options that were set."""

    def count(self, prompt: Prompt, thinking: Thinking, begun: str = "") -> int:
        """Return the tokens of a prompt. Raises TooLong, without counting, if it far exceeds the context."""

    def reading(self) -> tuple[int, int, int] | None:
        """Return the progress of the prompt as Scheduler.reading does. Another thread calls it."""

    def facts(self, last: Piece | None) -> list[str]:
        """Return lines of /stats. last: the last piece of the latest answer."""

    def switch(self, name: str, given: dict, raw: bool) -> None:
        """Go on with another model. After an error it is the one before, or none."""

    def lost(self, error: Exception) -> bool:
        """Return whether `error` says that the device takes no calls any more."""

    def use_idle_time(self) -> None:
        """Start the work that can be done while no answer is generated."""

    def close(self) -> None:
        """End that work."""
