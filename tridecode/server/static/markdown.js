// Conversion of Markdown into DOM nodes. markdown-it parses it, configured like the parser of the terminal chat
// (tridecode/cli/chat/markup.py). This file creates the elements. Text of the model becomes text nodes, never markup.

import {codeBlock} from "./code.js";
import {make, visible} from "./dom.js";
import {addMath, mathNode} from "./math.js";

const MAX_NESTING = 15;  // Nesting of blocks, as in the terminal. Deeper blocks are plain text.
const TAGS = {
  paragraph_open: "p", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li",
  blockquote_open: "blockquote", table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr",
  th_open: "th", td_open: "td", strong_open: "strong", em_open: "em", s_open: "s",
};
const parser = makeParser();

function makeParser() {
  const made = markdownit("commonmark", {html: false, maxNesting: 100, linkify: true});
  const rule = (ruler, name) => ruler.__rules__.find(each => each.name === name).fn;
  made.enable(["table", "strikethrough", "linkify"]).disable(["reference", "autolink", "image"]);
  made.linkify.set({fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false}).add("//", null).add("ftp:", null);
  const emphasis = rule(made.inline.ruler, "emphasis"), table = rule(made.block.ruler, "table");
  made.inline.ruler.at("emphasis", (state, silent) => state.src[state.pos] !== "_" && emphasis(state, silent));
  made.block.ruler.at("table", (...args) => wholeTable(table, ...args), {alt: ["paragraph", "reference"]});
  addMath(made);
  return made;
}

/** Parse a table. Cells beyond those of the heading are kept in the last column. */
function wholeTable(table, state, start, end, silent) {
  const first = state.tokens.length;
  if (!table(state, start, end, silent)) return false;
  const columns = state.tokens.slice(first).filter(token => token.type === "th_open").length;
  let line = start;
  state.tokens.slice(first).forEach((token, i, tokens) => {
    if (token.type === "tr_open" && token.map) line = token.map[0];
    if (token.type !== "tr_close") return;
    const source = state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
    let cells = source.split(/(?<!\\)\|/).map(cell => cell.replaceAll("\\|", "|"));
    cells = cells.slice(cells[0] === "" ? 1 : 0, cells.at(-1) === "" && cells.length > 1 ? -1 : undefined);
    if (cells.length > columns) tokens[i - 2].content = cells.slice(columns - 1).map(cell => cell.trim()).join(" | ");
  });
  return true;
}

/** Return the sources of the top-level blocks of a text. */
export function blocksOf(text) {
  const tokens = [], lines = text.split("\n");
  parser.block.parse(text, parser, {}, tokens);
  const tops = tokens.filter(token => token.level === 0 && token.nesting >= 0 && token.map);
  const starts = tops.map(token => token.map[0]);
  return starts.map((start, i) => {
    const block = lines.slice(start, starts[i + 1]);
    while (block.length > 1 && !block.at(-1).trim()) block.pop();
    return block.join("\n");
  });
}

/** Return the nodes of a block. If it is nested too deeply or cannot be parsed, it is shown as plain text. */
function blockNodes(source) {
  try { return nodesOf(parser.parse(source, {})); } catch { return [make("p", {className: "plain"}, source)]; }
}

function nodesOf(tokens) {
  if (tokens.some(token => token.level > MAX_NESTING)) throw new RangeError("nested too deeply");
  const root = document.createDocumentFragment(), open = [root];
  for (const token of tokens.flatMap(each => each.type === "inline" ? each.children : [each])) {
    const parent = open.at(-1);
    if (token.hidden) continue;
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) open.push(opened(token, parent));
    else parent.append(...leaves(token, parent));
  }
  return root.childNodes;
}

/** Append the element that a token opens to its parent, and return the element for its content. */
function opened(token, parent) {
  if (token.type === "link_open") return link(token, parent);
  const level = token.type === "heading_open" ? Number(token.tag[1]) + 2 : 0;  // h1 and h2 belong to the page.
  const node = make(level ? `h${Math.min(level, 6)}` : TAGS[token.type]);
  if (level > 6) node.ariaLevel = String(level);
  if (token.type === "list_item_open" && token.info) node.value = Number(token.info);
  const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
  if (align) node.className = align[1];
  if (token.type === "table_open") parent.append(make("div", {className: "table", tabIndex: 0}, node));
  else parent.append(node);
  return node;
}

/** Append a link with its address as title. An address that a browser must not open is shown after the text. */
function link(token, parent) {
  const href = address(token.attrGet("href"));
  if (href) {
    const node = make("a", {href, title: href, target: "_blank", rel: "noopener noreferrer nofollow"});
    parent.append(node);
    return node;
  }
  const text = make("span");
  parent.append(make("span", {className: "link"}, text, ` (${visible(token.attrGet("href"))})`));
  return text;
}

function address(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

function leaves(token, parent) {
  switch (token.type) {
    case "text": return textNodes(visible(token.content), parent);
    case "code_inline": return [make("code", {}, token.content)];
    case "softbreak": case "hardbreak": return [make("br")];
    case "hr": return [make("hr")];
    case "fence": case "code_block": return [codeBlock(token.content, token.info)];
    case "tex": case "math": return [mathNode(token)];
    default: return [token.content];
  }
}

/** Return a text, with a checkbox if it is the beginning of an item of a task list. */
function textNodes(text, parent) {
  const item = parent.tagName === "P" ? parent.parentNode : parent, task = /^\[([ xX])\](?= )/.exec(text);
  const isFirst = !parent.childNodes.length && item.childNodes.length === Number(item !== parent);
  if (!task || item.tagName !== "LI" || !isFirst) return [text];
  item.className = "task";
  const box = make("input", {type: "checkbox", disabled: true, checked: task[1] !== " "});
  box.ariaLabel = box.checked ? "done" : "open";
  return [box, text.slice(3)];
}

/** Show `text` in `target`; keep the nodes of blocks that have not changed since the previous call. */
export function show(target, text) {
  const sources = blocksOf(visible(text)), shown = target.shown ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === shown[same]?.source) same++;
  for (const {nodes} of shown.splice(same)) for (const node of nodes) node.remove();
  for (const source of sources.slice(same)) {
    const nodes = [...blockNodes(source)];
    shown.push({source, nodes});
    target.append(...nodes);
  }
  target.shown = shown;
}
