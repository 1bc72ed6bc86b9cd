// Code blocks with syntax colors and a copy button. The tokenizer reports parts of the code, which become text nodes.

import {button, copy, make} from "./dom.js";
import {tokenizer} from "./vendor/tokenize.js";

// Code that is longer, or has longer lines, is not colored, because some patterns need quadratic time.
const MAX_LENGTH = 30_000, LONG_LINE = /[^\n]{1000}/;
const FILES = new Set(("asm bash c css csv diff docker git go html ini java js jsdoc json lua make pl plain py regex "
  + "rs sql todo toml ts uri xml yaml").split(" "));
const ALIASES = {
  "c++": "c", cc: "c", console: "bash", cpp: "c", cs: "c", csharp: "c", dockerfile: "docker", golang: "go", h: "c",
  hpp: "c", javascript: "js", jsonc: "json", jsx: "js", kotlin: "java", makefile: "make", markup: "html", patch: "diff",
  perl: "pl", python: "py", python3: "py", rust: "rs", scala: "java", sh: "bash", shell: "bash", svg: "xml", tsx: "ts",
  typescript: "ts", yml: "yaml", zsh: "bash",
};
const grammars = new Map();  // file of a language -> grammar

/** Color the text of a code element, at once if its language is loaded. */
async function color(code, language) {
  const text = code.textContent, parts = [];
  const steps = tokenizer(text, language, (part, type) => {
    parts.push(type ? make("span", {className: `syntax-${type}`}, part) : part);
  });
  for (let step = steps.next(); !step.done;) step = steps.next(grammars.get(step.value) ?? await load(step.value));
  if (code.textContent === text) code.replaceChildren(...parts);
}

/** Load a language. A name that is not a file of the page, such as one from the code itself, has no grammar. */
async function load(name) {
  if (!FILES.has(name)) return undefined;
  grammars.set(name, (await import(`./vendor/languages/${name}.js`)).default);
  return grammars.get(name);
}

/** Return a code block. `info` is the text after its fence: the language, and perhaps a title. */
export function codeBlock(text, info) {
  const code = make("code", {}, text.replace(/\n$/, "")), word = info.trim().split(/[\s{]/)[0].toLowerCase();
  const language = Object.hasOwn(ALIASES, word) ? ALIASES[word] : word;
  const isShort = text.length <= MAX_LENGTH && !LONG_LINE.test(text);
  if (FILES.has(language) && isShort) color(code, language).catch(() => { /* It stays without colors. */ });
  const label = make("span", {className: "language"}, info.trim());
  const copies = button("Copy", event => copy(code.textContent, event.target));
  copies.ariaLabel = "Copy code";
  const pre = make("pre", {tabIndex: 0}, code);  // A block that scrolls must be reachable by keyboard.
  return make("div", {className: "block"}, make("div", {className: "bar"}, label, copies), pre);
}
