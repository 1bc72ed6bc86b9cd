"""The structure of a Markdown text in the chat page and in the terminal chat, in one form that can be compared.

A node is a list [kind, child, ...] or a text. Adjacent texts are joined.
"""

from itertools import groupby

from tridecode.cli.chat.blocks import MAX_NESTING
from tridecode.cli.chat.markup import PARSER, split
from tridecode.cli.terminal import visible

TAGS = {"paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li", "blockquote": "blockquote",
        "table": "table", "thead": "thead", "tbody": "tbody", "tr": "tr", "th": "th", "td": "td", "strong": "strong",
        "em": "em", "s": "s", "heading": "h"}  # fmt: skip

# A function of the page's nodes, which `tests/server` runs in the browser.
STRUCTURE_OF_NODE = r"""
function structure(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  const of = nodes => [...nodes].map(structure), name = node.localName, all = of(node.childNodes);
  if (node.matches(".block")) {
    return ["code", node.querySelector(".language").textContent, node.querySelector("code").textContent];
  }
  if (node.matches("div.tex")) return ["tex", node.title];
  if (node.matches("span.tex")) return node.title;
  if (node.matches(".plain")) return ["plain", node.textContent];
  if (node.matches(".table")) return all[0];
  if (name === "br") return "\n";
  if (name === "input") return node.checked ? "[x]" : "[ ]";
  if (name === "a") return URL.parse(node.textContent)?.href === node.href
    ? node.textContent : ["link", ...all];  // The page also links addresses without markup.
  if (node.matches(".link")) return ["link", ...all[0].slice(1)];
  if (/h\d/.test(name)) return [`h${(node.ariaLevel ?? name[1]) - 2}`, ...all];
  if (name === "li" && node.parentNode.localName === "ol") return [`li ${node.value}`, ...all];
  return [[name, node.matches("td, th") && node.className].filter(Boolean).join(" "), ...all];
}
"""


def joined(nodes: list) -> list:
    """Return nodes with adjacent texts joined and empty ones removed, at all levels."""
    made: list = []
    for is_text, group in groupby(nodes, lambda node: isinstance(node, str)):
        if is_text:
            made += [text] if (text := "".join(group)) else []
        else:
            made += [[node[0], *joined(node[1:])] for node in group]
    return made


def terminal_structure(text: str) -> list:
    """Return the structure that the terminal chat shows."""
    blocks, _, _ = split(visible(text), final=True)
    return joined([node for block in blocks for node in block_structure(block)])


def block_structure(source: str) -> list:
    tokens = PARSER.parse(source)
    if max((token.level for token in tokens), default=0) > MAX_NESTING:
        return [["plain", source]]
    open_nodes: list[list] = [["root"]]
    for token in (
        each for parent in tokens for each in (parent.children or [] if parent.type == "inline" else [parent])
    ):
        if token.hidden:
            continue
        kind = token.type.removesuffix("_open")
        if token.nesting < 0:
            closed = open_nodes.pop()
            if token.type == "link_close" and closed[0] == "link":
                continue
        elif token.nesting > 0:
            open_nodes.append([name_of(token, kind)])
            open_nodes[-2].append(open_nodes[-1])
            continue
        elif kind in ("text", "math_inline", "math_inline_double"):
            is_task = open_nodes[-1] == ["li"] or open_nodes[-1] == ["p"] and open_nodes[-2][0] == "li"
            open_nodes[-1].append(token.content.replace("[X] ", "[x] ") if is_task else token.content)
        elif kind == "hardbreak":
            open_nodes[-1].append("\n")
        elif kind == "code_inline":
            open_nodes[-1].append(["code", token.content])
        elif kind in ("fence", "code_block"):
            open_nodes[-1].append(["code", token.info.strip(), token.content.removesuffix("\n")])
        elif kind == "tex":
            open_nodes[-1].append(["tex", token.content])
        else:
            open_nodes[-1].append([kind])
    return open_nodes[0][1:]


def name_of(token, kind: str) -> str:
    if kind == "heading":
        return token.tag
    if kind == "list_item" and token.info:
        return f"li {int(token.info)}"
    align = str(token.attrs.get("style", "")).removeprefix("text-align:")
    return " ".join(filter(None, [TAGS.get(kind, kind), align]))
