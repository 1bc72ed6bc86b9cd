// A conversation: a tree of turns. Regenerating, editing and continuing add a turn beside the old one, so that no text
// is lost. `addTurn` lists the fields of a turn. Its state is running, done, stopped, cut (by a limit) or failed, and
// the remark explains it. The note lists turns that are no longer sent, `dropped` is their number. `used` is the number
// of tokens up to the end of the answer, and `continues` the id of the turn whose answer the turn continues.

import {beginning, visible} from "./dom.js";
import {completed, sampling} from "./settings.js";

const TITLE = 60;  // characters

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), byte => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(id, settings, model) {
  return {id, title: "", isNamed: false, updated: 0, leaf: null, model, settings: completed(settings), turns: []};
}

/** Add a turn after `parent` and show it. */
export function addTurn(conversation, parent, fields) {
  const turn = {
    conversation: conversation.id, id: newId(), parent, created: Date.now(), files: [], answer: "", thought: "",
    state: "running", remark: "", note: "", stats: "", dropped: 0, used: null, continues: null, ...fields,
  };
  turn.created = Math.max(turn.created, 1 + (conversation.turns.at(-1)?.created ?? 0));
  conversation.turns.push(turn);
  conversation.leaf = turn.id;
  if (!conversation.isNamed && parent === null) conversation.title = firstWords(turn);
  return turn;
}

function firstWords({question, files}) {
  const words = visible(question || files[0]?.name || "").trim().split(/\s+/).join(" ");
  return words.length > TITLE ? `${beginning(words, TITLE)}…` : words;
}

/** Return the turns from the first one to the turn with the id `last`. */
export function path(conversation, last = conversation.leaf) {
  const byId = new Map(conversation.turns.map(turn => [turn.id, turn])), turns = [];
  for (let turn = byId.get(last); turn; turn = byId.get(turn.parent)) turns.unshift(turn);
  return turns;
}

/** Return the versions of a turn, without those whose text is also in another one. */
export function versions(conversation, turn) {
  const beside = conversation.turns.filter(other => other.parent === turn.parent);
  const isContinued = one => beside.some(other => other.continues === one.id && other.answer.startsWith(one.answer));
  const isRepeated = one => beside.some(other => other !== one && content(other) === content(one));
  const isEmpty = one => !one.answer && !one.thought && isRepeated(one);
  return beside.filter(other => other === turn || !isContinued(other) && !isEmpty(other));
}

/** Show a version of a turn, with the newest turns after it. */
export function showVersion(conversation, turn) {
  for (let next = turn; next; next = conversation.turns.findLast(other => other.parent === next.id)) {
    conversation.leaf = next.id;
  }
}

/** Return a text under its file's name, between fences that are longer than each fence in it. */
function fenced({name, text}) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(run => run.length)), fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

export const content = ({question, files}) => [question, ...files.map(fenced)].filter(Boolean).join("\n\n");

/** Return the turns before `turn` that have an answer. Only these are sent to the model. */
export const answered = (conversation, turn) => path(conversation, turn.parent).filter(other => other.answer);

/** Return the messages of a request for the answer of `turn`, or for the rest of it, without the first turns. */
export function messages(conversation, turn, dropped) {
  const {system} = conversation.settings, list = system.trim() ? [{role: "system", content: system}] : [];
  for (const each of answered(conversation, turn).slice(dropped)) {
    list.push({role: "user", content: content(each)}, {role: "assistant", content: each.answer});
  }
  list.push({role: "user", content: content(turn)});
  if (turn.answer || turn.thought) {
    const thought = turn.thought ? {reasoning_content: turn.thought} : {};
    list.push({role: "assistant", content: turn.answer, ...thought});
  }
  return list;
}

/** Return the shown turns as Markdown, without the thinking, as the terminal chat exports them. */
export function asMarkdown(conversation) {
  const {system} = conversation.settings, parts = system.trim() ? [`## System\n\n${system}\n`] : [];
  for (const turn of path(conversation)) {
    parts.push(`## User\n\n${content(turn)}\n\n## Assistant\n\n${turn.answer}\n`);
  }
  return ["# Conversation\n", ...parts].join("\n");
}

/** Return the shown turns as a session file of the terminal chat, which can continue it. */
export function asSession(conversation) {
  const {settings, model, title} = conversation, turns = path(conversation).filter(turn => turn.answer);
  const thought = turn => turn.thought ? `<think>\n${turn.thought}\n</think>\n\n` : "";
  return `${JSON.stringify({
    format: "tridecode session", version: 1, model, raw: false, title, settings: sampling(settings),
    system: settings.system.trim() ? settings.system : null,
    turns: turns.map(turn => ({user: content(turn), assistant: thought(turn) + turn.answer})),
  }, null, 1)}\n`;
}
