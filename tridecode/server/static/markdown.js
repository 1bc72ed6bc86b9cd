"use strict";
// Conversion of Markdown into DOM nodes. Text of the model becomes text nodes and the few elements that this file makes,
// never markup. Every search is bounded, so that no text takes long.

function make(tag, children = [], properties = {}) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...[].concat(children));
  return node;
}

const LOOKAHEAD = 2000, MAX_DEPTH = 8;  // characters that a search covers; nesting of blocks and emphasis
const FENCE = /^ {0,3}(```+|~~~+)(.*)$/, ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])( +|$)/, QUOTE = /^ {0,3}>/;
const HEADING = /^(#{1,6}) (.*)$/, RULE = /^ {0,3}([-*_])( *\1){2,} *$/, COLUMNS = /^[-:| ]+$/;
const INDENTED = /^(?: {2,}|\t)[ \t]*\S/, WORD = /[\p{L}\p{N}]/u, OPENS = /[\p{L}\p{N}"'“(`*_~[]/u;
const LINK = /^\[([^\[\]\n]{1,500})\]\(([^\s()]{1,1000})\)/, ADDRESS = /https?:\/\/[^\s<>"]{1,500}/y;

/** Return the top-level blocks of a text as {kind, lines}. */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i], start = i, fence = FENCE.exec(line);
    let kind = "p";
    if (!line.trim()) { i++; continue; }
    if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) {
      kind = "pre";
      const closes = text => text.trim().startsWith(fence[1]) && !text.trim().replaceAll(fence[1][0], "");
      for (i++; i < lines.length && !closes(lines[i]); i++);
      i++;
    } else if (HEADING.test(line)) { kind = "heading"; i++;
    } else if (RULE.test(line)) { kind = "hr"; i++;
    } else if (QUOTE.test(line)) { kind = "blockquote"; while (i < lines.length && QUOTE.test(lines[i])) i++;
    } else if (line.includes("|") && isColumns(lines[i + 1])) {
      kind = "table"; while (i < lines.length && lines[i].includes("|")) i++;
    } else if (ITEM.test(line)) {
      kind = "list";
      for (i++; i < lines.length; i++) {
        const next = lines[i].trim() ? lines[i] : lines[i + 1] ?? "";  // a list continues after one blank line
        if (INDENTED.test(next) || ITEM.test(next)) continue;
        if (!lines[i].trim() || begins(next)) break;
      }
    } else { for (i++; i < lines.length && lines[i].trim() && !begins(lines[i]); i++); }
    blocks.push({kind, lines: lines.slice(start, i)});
  }
  return blocks;
}

function isColumns(line = "") { return COLUMNS.test(line) && line.includes("|") && line.includes("-"); }

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || ITEM.test(line);
}

function blockNode({kind, lines}, deep) {
  if (deep > MAX_DEPTH) return make("p", lines.join("\n"));
  if (kind === "pre") return codeNode(lines);
  if (kind === "hr") return make("hr");
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return make(`h${Math.min(marks.length + 1, 4)}`, inline(text.replace(/ #+ *$/, "")));
  }
  if (kind === "blockquote") {
    return make("blockquote", nodes(lines.map(line => line.replace(/^ {0,3}> ?/, "")), deep + 1));
  }
  if (kind === "list") return listNode(lines, deep);
  if (kind === "table") return tableNode(lines);
  return make("p", inline(lines.join("\n")));
}

function nodes(lines, deep = 0) { return blocksOf(lines).map(block => blockNode(block, deep)); }

function codeNode(lines) {
  const [, mark] = FENCE.exec(lines[0]), last = lines.at(-1).trim();
  const closed = lines.length > 1 && last.startsWith(mark) && !last.replaceAll(mark[0], "");
  const code = make("code", lines.slice(1, closed ? -1 : undefined).join("\n"));
  const copy = make("button", "Copy", {type: "button"});
  copy.onclick = async () => {
    copy.textContent = await copied(code) ? "Copied" : "Not copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  };
  return make("div", [make("pre", code), copy], {className: "block"});
}

async function copied(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {  // browsers provide the clipboard only over https and on localhost
    getSelection().selectAllChildren(node);
    return document.execCommand("copy");
  }
}

function listNode(tabbed, deep) {
  const lines = tabbed.map(line => line.replace(/^\t+/, tabs => "    ".repeat(tabs.length)));
  const [, indent, mark] = ITEM.exec(lines[0]), ordered = /\d/.test(mark), items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) {
      items.push({cut: item[0].length, lines: [line.slice(item[0].length)]});
    } else {
      const last = items.at(-1), spaces = line.length - line.trimStart().length;
      last.lines.push(line.slice(Math.min(spaces, last.cut)));
    }
  }
  const made = items.map(({lines: own}) => {
    const [first, ...rest] = blocksOf(own);
    if (!first || first.kind !== "p") return make("li", nodes(own, deep + 1));
    return make("li", [...inline(first.lines.join("\n")), ...rest.map(block => blockNode(block, deep + 1))]);
  });
  return make(ordered ? "ol" : "ul", made, ordered ? {start: parseInt(mark, 10)} : {});
}

function tableNode(lines) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => inline(cell.trim()));
  const row = (line, tag) => make("tr", cells(line).map(cell => make(tag, cell)));
  const [head, , ...rows] = lines;
  const body = make("tbody", rows.map(line => row(line, "td")));
  return make("div", make("table", [make("thead", row(head, "th")), body]), {className: "table"});
}

/** Convert text with code, emphasis and links into nodes. */
function inline(text, deep = 0) {
  const made = [];
  let plain = "";
  const add = node => { if (plain) made.push(plain); plain = ""; made.push(node); };
  for (let i = 0; i < text.length;) {
    const char = text[i], before = text[i - 1] ?? " ", end = i + LOOKAHEAD;
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) {
      plain += text[i + 1]; i += 2; continue;
    }
    if (char === "`") {
      const mark = /^`+/.exec(text.slice(i, end))[0], close = text.slice(i + mark.length, end).indexOf(mark);
      if (close > 0) {
        add(make("code", text.substr(i + mark.length, close)));
        i += close + 2 * mark.length; continue;
      }
      plain += mark; i += mark.length; continue;
    }
    if ((char === "*" || char === "_" || char === "~") && deep < MAX_DEPTH) {
      const double = text[i + 1] === char, mark = double ? char + char : char;
      const inWord = WORD.test(before) && mark !== "**", close = inWord ? -1 : closing(text, i + mark.length, mark);
      if (close > 0 && mark !== "~") {
        const tag = char === "~" ? "s" : double ? "strong" : "em";
        add(make(tag, inline(text.slice(i + mark.length, close), deep + 1)));
        i = close + mark.length; continue;
      }
      plain += mark; i += mark.length; continue;
    }
    if (char === "[") {
      const link = LINK.exec(text.slice(i, end)), to = link && address(link[2]);
      if (to) { add(anchor(to, inline(link[1], MAX_DEPTH))); i += link[0].length; continue; }
    }
    if (char === "h" && !/\w/.test(before)) {
      ADDRESS.lastIndex = i;
      const url = ADDRESS.exec(text)?.[0].replace(/[.,;:!?'")\]*_]+$/, ""), to = url && address(url);
      if (to && deep < MAX_DEPTH) { add(anchor(to, url)); i += url.length; continue; }
    }
    plain += char; i++;
  }
  if (plain) made.push(plain);
  return made;
}

/** Return the end of emphasis that begins at `from`, -1 if it does not end. */
function closing(text, from, mark) {
  if (!OPENS.test(text[from] ?? "")) return -1;
  const near = text.slice(from, from + LOOKAHEAD);
  for (let at = near.indexOf(mark, 1); at > 0; at = near.indexOf(mark, at + 1)) {
    const before = near[at - 1], next = text[from + at + mark.length] ?? " ";
    if (mark.length === 2 && text[from] === mark[0] && next === mark[0]) at++;  // in *** the outer two characters match
    const alone = mark.length === 2 || next !== mark && before !== mark;  // a single *, not a part of **
    if (alone && !/\s/.test(before) && (mark[0] === "*" || !WORD.test(next))) return from + at;
    if (!alone) at++;
  }
  return -1;
}

function address(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

function anchor(href, children) {
  return make("a", children, {href, title: href, target: "_blank", rel: "noopener noreferrer nofollow"});
}

/** Show `text` in `target`; keep the nodes of blocks that have not changed since the previous call. */
function show(target, text) {
  // Characters that change the direction of text can disguise it, so they are replaced.
  const blocks = blocksOf(text.replace(/\r\n?/g, "\n").replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd").split("\n"));
  const sources = blocks.map(block => block.lines.join("\n")), before = target.sources ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same++;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...blocks.slice(same).map(block => blockNode(block, 0)));
  target.sources = sources;
}
