// TeX in Markdown: the rules of the terminal chat (the dollarmath, texmath and amsmath plugins of markdown-it-py), and
// Temml, which converts TeX into MathML. TeX that Temml does not know is shown as its source.

import {make} from "./dom.js";

const ENDS = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"};
const ENVIRONMENT = /^\\begin\{((?:equation|multline|gather|align|alignat|flalign|[pbBvV]?matrix|eqnarray)\*?)\}/;
const MAX_LINES = 500, MAX_LENGTH = 4000;  // Lines that a block may have, and characters that are converted.

/** Add the rules for TeX to a parser. Their tokens are "tex" (a block) and "math", with the source as content. */
export function addMath(parser) {
  const {inline, block} = parser;
  inline.ruler.before("escape", "dollars", dollars);
  inline.ruler.before("escape", "brackets", brackets);
  block.ruler.before("fence", "tex", texBlock, {alt: ["paragraph", "blockquote", "list"]});
}

function pushMath(state, end, mark, silent) {
  if (!silent) Object.assign(state.push("math", "", 0), {content: state.src.slice(state.pos, end), markup: mark});
  state.pos = end;
  return true;
}

/** Return the position of a mark, -1 if there is none. A part of a text is searched only once without success. */
function find(state, mark, from) {
  const missing = state.missing ??= {};  // mark -> a position after which it does not occur
  if (from >= missing[mark]) return -1;
  const at = state.src.indexOf(mark, from);
  if (at < 0) missing[mark] = from;
  return at;
}

function dollars(state, silent) {
  const {src, pos} = state, escaped = at => /(^|[^\\])(\\\\)*\\$/.test(src.slice(Math.max(0, at - 100), at));
  if (src[pos] !== "$" || !/\S/.test(src[pos + 1] ?? "") || /\d/.test(src[pos - 1] ?? "") || escaped(pos)) return false;
  const mark = src[pos + 1] === "$" ? "$$" : "$";
  let end = pos + mark.length;
  for (; ; end++) {
    end = find(state, mark, end);
    if (end < 0) return false;
    if (!escaped(end)) break;
  }
  const empty = end === pos + mark.length, spaced = mark === "$" && /\s/.test(src[end - 1]);
  if (empty || spaced || /\d/.test(src[end + mark.length] ?? "")) return false;
  return pushMath(state, end + mark.length, mark, silent);
}

function brackets(state, silent) {
  const mark = state.src.substr(state.pos, 2);
  if (mark !== "\\(" && mark !== "\\[") return false;
  const end = find(state, ENDS[mark], state.pos + 3);
  return end > 0 && pushMath(state, end + 2, mark, silent);
}

/** A block of TeX. It has no blank lines and ends with a line that ends with its closing mark. */
function texBlock(state, start, limit, silent) {
  const line = n => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]).trimEnd();
  const first = line(start), environment = ENVIRONMENT.exec(first)?.[1];
  const mark = environment ? `\\begin{${environment}}` : first.slice(0, 2);
  const close = environment ? `\\end{${environment}}` : mark === "$$" || mark === "\\[" ? ENDS[mark] : null;
  const indent = state.sCount[start] - state.blkIndent;
  if (!close || indent >= 4 || indent < 0 && environment) return false;
  let last = start;
  if (!(first.endsWith(close) && first.length >= mark.length + close.length + (mark === "\\["))) {
    if (mark === "$$" && first.length > 3 && first.includes("$$", 2)) return false;
    do {
      if (++last >= limit || last - start > MAX_LINES || state.isEmpty(last)) return false;
    } while (!line(last).endsWith(close));
  }
  if (silent) return true;
  const content = state.getLines(start, last + 1, state.sCount[start], false).replace(/\n$/, "");
  const fields = {block: true, map: [start, last + 1], content, markup: environment ? "" : mark};
  Object.assign(state.push("tex", "", 0), fields);
  state.line = last + 1;
  return true;
}

/** Return the MathML of a token, or its source. */
export function mathNode({type, content, markup}) {
  const block = type === "tex", tex = markup ? content.slice(markup.length, -markup.length) : content;
  let math = content;
  try {
    if (tex.length > MAX_LENGTH) throw new Error("too long");
    const options = {displayMode: block || markup === "$$" || markup === "\\[", throwOnError: true, maxSize: [20, 200]};
    math = converted(temml.__renderToMathMLTree(tex, options));
  } catch { /* The source is shown. */ }
  return make(block ? "div" : "span", {className: "tex", title: content}, math);
}

const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(("math mrow mi mo mn ms mtext mspace msup msub msubsup mfrac msqrt mroot mover munder "
  + "munderover mtable mtr mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts none").split(" "));
const ATTRIBUTES = new Set(("width height depth voffset lspace rspace stretchy scriptlevel mathvariant displaystyle "
  + "fence form minsize maxsize mathsize mathcolor mathbackground linethickness symmetric separator rowspacing "
  + "movablelimits largeop columnalign rowlines columnlines notation accent accentunder display columnspan"
).split(" "));

/** Return the DOM node of a node of Temml's tree. Raises an error for elements that are not MathML, such as links. */
function converted(node) {
  if (typeof node.text === "string") return document.createTextNode(node.text);
  const isFragment = !node.type && node.children && !node.href;
  if (!isFragment && !ELEMENTS.has(node.type)) throw new Error("not MathML");
  const made = isFragment ? document.createDocumentFragment() : document.createElementNS(MATHML, node.type);
  made.append(...node.children.map(converted));
  if (isFragment) return made;
  for (const [name, value] of Object.entries(node.attributes)) {
    if (ATTRIBUTES.has(name)) made.setAttribute(name, value);
  }
  Object.assign(made.style, node.style);
  if (node.classes.length) made.setAttribute("class", node.classes.filter(Boolean).join(" "));
  return made;
}
