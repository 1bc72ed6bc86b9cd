"""Fixed texts for `bench speculate`, and their playback through the drafter.

Playback treats the tokens of a text as if a model had sampled them, so that acceptance rates are measured without a
checkpoint. The texts are excerpts of earlier versions of this repository, stored in files, so that figures of
different versions are comparable.
"""

from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ... import layout
from ...errors import ParameterError
from ...kernels.sampling.accept import ACCEPT
from ...kernels.sampling.draft import DRAFT
from ...state.acceptance import Acceptance
from ...step.dispatch import best_queries, typical_costs

ROOT = Path(__file__).parents[3]
TEXTS, NAMES = "benchmarks/texts", ("code", "page", "records", "prose", "chat")
LICENSE = "Apache-2.0"  # License of the repository, and therefore of the texts.
LAG = 2  # Number of passes that are enqueued before the host knows the result of a pass, as on a GPU.


class Text(NamedTuple):
    """A text that is played back.

    Attributes:
        name: title of the text in tables
        source: file that contains the text
        before: the prompt
        sampled: the continuation, which playback treats as sampled
    """

    name: str
    source: str
    before: str
    sampled: str


def texts() -> list[Text]:
    """Return the texts. Raises ParameterError if a file is missing, as in an installed package."""

    def read(name: str) -> tuple[str, str]:
        source = f"{TEXTS}/{name}.txt"
        try:
            return source, (ROOT / source).read_text(encoding="utf-8")
        except OSError:
            raise ParameterError(f"bench speculate: {ROOT / source} is missing; run this bench in a checkout") from None

    (at_code, code), (at_page, page), (at_rows, rows), (at_prose, prose), (at_chat, chat) = map(read, NAMES)
    edit = f"Call held kept, everywhere in this file:\n{code}\n"
    quoted = page[page.index("## Equal") :][:3000]
    return [
        Text("code edit: a name changed everywhere", at_code, edit, code.replace("held", "kept")),
        Text("quotation of a part of a page", at_page, f"{page}\nQuote the part about equal prefixes.\n", quoted),
        Text("JSON: a list of records", at_rows, f"Go on with these rows:\n{rows[:2000]}", rows[2000:]),
        Text("prose that was not there before", at_prose, "Describe what fails how.\n", prose),
        Text("chat: sixty short answers", at_chat, "A conversation with short answers.\n", chat),
    ]


def simulate(
    before: list[int], sampled: list[int], ngram: tuple[int, int], costs: Mapping[int, float] | None = None
) -> Counter:
    """Return how many passes one request needs to sample the tokens `sampled`, by number of rows per pass.

    Args:
        before: token ids of the prompt
        sampled: token ids that the request samples
        ngram: range of n-gram lengths that the drafter compares, as in `EngineOptions`
        costs: costs of passes by their number of rows, by default those of a model without experts
    """
    text = before + sampled
    meta = torch.zeros(1, layout.META_WIDTH, dtype=torch.int32)
    meta[0, layout.POSITION], meta[0, layout.N_KNOWN] = len(before) - 1, len(before)
    meta[0, layout.LIMIT] = meta[0, layout.ALLOCATED] = len(text)
    meta[0, layout.GENERATION] = 1
    tokens = torch.zeros(1, len(text) + layout.MAX_QUERIES, dtype=torch.int32)
    tokens[0, : len(before)] = torch.tensor(before, dtype=torch.int32)
    keys, counter = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    out, unread = torch.zeros(1, layout.RING, dtype=torch.int64), deque[tuple[int, layout.Entry]]()
    drafts, passes = Acceptance(), Counter[int]()
    while int(meta[0, layout.STATUS]) == layout.RUN:
        while len(unread) >= LAG:
            decided, entry = unread.popleft()
            drafts.learn(decided, entry.drafted, entry.following, entry.requested_drafts)
        queries = best_queries(costs or typical_costs(1), [drafts])
        position, step = int(meta[0, layout.POSITION]), int(meta[0, layout.STEP])
        DRAFT.ref(meta, tokens, keys, counter, max(queries - 1, 1), ngram)
        following = text[position + 1 : position + 1 + queries]
        rows = torch.tensor(following + [0] * (queries - len(following)), dtype=torch.int32)
        ACCEPT.ref(rows, meta, tokens, None, out, None)
        entry_now = layout.entry_of(int(out[0, step % layout.RING]), 1, step)
        assert entry_now is not None
        unread.append((drafts.requested_drafts, entry_now))
        passes[queries] += 1
    assert tokens[0, : len(text)].tolist() == text, "the playback sampled a different text"
    return passes
