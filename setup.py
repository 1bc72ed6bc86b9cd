"""What pyproject.toml cannot say: the README for a package index, which shows it without the files beside it.

There a link or picture of this repository would lead nowhere, so it becomes the file's name. README.md itself stays as
it is, for a checkout.
"""

import re
from pathlib import Path

from setuptools import setup

FENCE = re.compile(r"(?ms)^```.*?^```$")
LINK = re.compile(r"!?\[([^]]*)\]\((?!https?://|#)([^)#]*)[^)]*\)")
NOTE = "Files that are named here are in the source distribution.\n\n## Start"


def without_relative_links(text: str) -> str:
    """Markdown in which [label](docs/x.md#y) and ![label](docs/x.svg) are "label (`docs/x.md`)"; code stays."""

    def named(link: re.Match) -> str:
        label, path = link.groups()
        return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"

    texts, fences = FENCE.split(text), FENCE.findall(text)
    return "".join(LINK.sub(named, part) + fence for part, fence in zip(texts, [*fences, ""]))


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(
    long_description=without_relative_links(readme).replace("## Start", NOTE, 1),
    long_description_content_type="text/markdown",
)
