"""The interface between a chat and its model."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ...results import OutputChunk
from ...sampling import SamplingParams
from .settings import NAMES

Prompt = str | list[dict]


class Thinking(NamedTuple):
    """The way in which a model handles thinking in the mode on, off or hide."""

    possible: bool = False
    opened: bool = False  # Whether the template begins the think block, so that answers start inside it.
    variables: dict[str, bool] | None = None  # Variables of the chat template.
    refusal: str = ""  # The reason why thinking cannot be disabled.
    advice: str = ""  # Advice that is appended to errors that name the variable.


class Model:
    """The interface of a model in this process (local.LocalModel) or on a server (remote.RemoteModel)."""

    name: str
    device: object
    capacity: int | None = None  # Number of tokens of the context, or None if it is unknown.
    largest = 0  # The largest context that the model supports, or 0 if it is unknown.
    unit = "token"  # Name of the unit that a stream yields.
    options: Collection[str] = NAMES  # Sampling options that the model supports.
    defaults: str | None = None  # Text that replaces the value of an option that is not set. None shows the value.
    models: Sequence[str] | None = None  # Names that `switch` accepts. None means the models of this machine.
    counts = True  # Whether the model supports `count`.
    continues = True  # Whether `stream` supports a prefix.
    seeds = True  # Whether an answer without a seed gets a random seed, which is shown.
    adapters: Sequence[str] = ()  # Names of the adapters that `adapter` may be.
    no_adapters = "no adapter is loaded; begin the chat with --adapter NAME=PATH"  # The error without adapters.
    adapter: str | None = None  # The adapter that answers use.
    loaded = True  # False if `switch` failed and could not load the old model again.

    def default_params(self, **overrides) -> SamplingParams:
        """Return the default sampling parameters with `overrides` applied."""
        return SamplingParams(**overrides)

    def can_switch_to(self, name: str) -> bool:
        """Return whether `name` is another model that `switch` may accept."""
        return name != self.name and (self.models is None or name in self.models)

    def check(self, option: str) -> None:
        """Raise ParameterError if the model does not support a sampling option."""

    def thinking(self, mode: str, raw: bool) -> Thinking:
        """Return how the model handles thinking in `mode`: on, off or hide.

        Args:
            raw: No chat template is used.
        """
        raise NotImplementedError

    def stream(
        self, prompt: Prompt, params: SamplingParams, overrides: Collection[str], thinking: Thinking, prefix: str = ""
    ) -> Iterator[OutputChunk]:
        """Yield the chunks of an answer, or of the rest of an answer that begins with `prefix`.

        overrides: names of the set options.
        """
        raise NotImplementedError

    def count(self, prompt: Prompt, thinking: Thinking, prefix: str = "") -> int:
        """Return the number of tokens of a prompt. Raises TooLong, without counting, if it far exceeds the context."""
        raise NotImplementedError

    def reading(self) -> tuple[int, int, int] | None:
        """Return the progress of the prompt in the form of Scheduler.reading. Another thread calls this."""
        return None

    def facts(self, last: OutputChunk | None) -> list[str]:
        """Return lines of /stats. last: the last output chunk of the latest answer."""
        raise NotImplementedError

    def switch(self, name: str, overrides: Collection[str], raw: bool) -> None:
        """Load another model, which must support the options `overrides`. After an error the old one is loaded."""
        raise NotImplementedError

    def lost(self, error: Exception) -> bool:
        """Return whether `error` means that the device is unusable."""
        return False

    def close(self) -> None:
        """End the background work."""
