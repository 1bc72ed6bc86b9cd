"""What a chat needs of its model, whichever process runs it."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ...results import Piece
from ...sampling import SamplingParams
from .settings import NAMES

Prompt = str | list[dict]


class Thinking(NamedTuple):
    """How a model handles thinking in the mode on, off or hide."""

    possible: bool = False
    opened: bool = False  # the template begins the think block, so that answers start inside it
    variables: dict[str, bool] | None = None  # of the chat template
    refusal: str = ""  # why it cannot be switched off
    advice: str = ""  # for errors that name the variable


class Model:
    """A model in this process (local.LocalModel) or of a server (remote.RemoteModel)."""

    name: str
    device: object
    capacity: int | None = None  # tokens of the context, None if they are unknown
    largest = 0  # the largest context that the model supports, 0 if it is unknown
    unit = "token"  # what a stream consists of
    options: Collection[str] = NAMES  # the sampling options that it takes
    defaults: str | None = None  # what is shown as the value of those that are not set, None: the value itself
    models: Sequence[str] | None = None  # the names that `switch` takes, None: what is on this machine
    counts = True  # whether `count` works
    continues = True  # whether `stream` takes an answer that is begun
    seeds = True  # whether an answer gets a seed if none is set, so that it can be had again
    loaded = True  # `switch` may have lost the model

    def default_params(self, **given) -> SamplingParams:
        return SamplingParams(**given)

    def check(self, option: str) -> None:
        """Raise ParameterError if the model does not take a sampling option."""

    def thinking(self, mode: str, raw: bool) -> Thinking:
        raise NotImplementedError

    def stream(
        self, prompt: Prompt, params: SamplingParams, given: Collection[str], thinking: Thinking, begun: str = ""
    ) -> Iterator[Piece]:
        """Return the pieces of an answer as they come, or of its rest after `begun`. given: options that were set."""
        raise NotImplementedError

    def count(self, prompt: Prompt, thinking: Thinking, begun: str = "") -> int:
        """Return the tokens of a prompt. Raises TooLong, without counting, if it far exceeds the context."""
        raise NotImplementedError

    def reading(self) -> tuple[int, int, int] | None:
        """Return the progress of the prompt as Scheduler.reading does. Another thread calls it."""
        return None

    def facts(self, last: Piece | None) -> list[str]:
        """Return lines of /stats. last: the last piece of the latest answer."""
        raise NotImplementedError

    def switch(self, name: str, given: Collection[str], raw: bool) -> None:
        """Go on with another model, which takes the options `given`. After an error it is the one before, or none."""
        raise NotImplementedError

    def lost(self, error: Exception) -> bool:
        """Return whether `error` says that the device takes no calls any more."""
        return False

    def use_idle_time(self) -> None:
        """Start the work that can be done while no answer is generated."""

    def close(self) -> None:
        """End that work."""
