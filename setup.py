"""Long description of the package: the README with relative links replaced by file names.

A package index shows the README without the other files of the repository, so relative links would be broken there.
pyproject.toml cannot express the replacement. README.md itself is unchanged.
"""

import re
from pathlib import Path

from setuptools import setup

FENCE = re.compile(r"(?ms)^```.*?^```$")
LINK = re.compile(r"!?\[([^]]*)\]\((?!https?://|#)([^)#]*)[^)]*\)")
NOTE = "Files that are named here are in the source distribution.\n\n## Start"


def without_relative_links(text: str) -> str:
    """Replace relative links and pictures by "label (`docs/x.md`)" in Markdown. Code blocks are unchanged."""

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
