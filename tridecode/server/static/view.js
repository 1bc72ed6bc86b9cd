// The turns of the shown conversation.

import {path, versions} from "./conversation.js";
import {$, button, copy, count, make, visible} from "./dom.js";
import {show} from "./markdown.js";

const INTERRUPTED = "this answer was interrupted, or another tab is receiving it", WAITING = "waiting for the answer";
const LONG = 3000, LONG_LINES = 30;  // Characters and lines of a message that scrolls in its own box.
const drawn = new Map();  // id of a shown turn -> its nodes

/** Draw all turns. `actions` has the functions regenerate, edit, resume and showVersion of a turn. */
export function drawAll(conversation, isRunning, actions) {
  drawn.clear();
  const turns = path(conversation), top = scrollY;
  following(() => {
    $("log").replaceChildren(...turns.map(turn => section(turn)));
    for (const turn of turns) fill(conversation, turn, isRunning, actions);
    scrollTo(0, top);
  });
}

/** Change the log. The window follows the text if it shows the end. */
function following(change) {  // The layout is read once for all turns, because a change makes the browser compute it.
  const bottom = document.documentElement, isLow = bottom.scrollHeight - scrollY - innerHeight < 60;
  change();
  if (isLow) scrollTo(0, bottom.scrollHeight);
}

function section(turn) {
  const thought = make("div", {className: "thought", dir: "auto"});
  const nodes = {
    question: make("div", {className: "user", dir: "auto"}), note: make("p", {className: "stats"}),
    thinking: make("details", {className: "thinking", hidden: true}, make("summary", {}, "Thinking"), thought), thought,
    answer: make("div", {className: "assistant", dir: "auto"}), remark: make("p", {className: "remark"}),
    stats: make("p", {className: "stats"}), actions: make("div", {className: "actions"}),
  };
  nodes.remark.setAttribute("role", "status");
  nodes.question.append(questionText(visible(turn.question)));
  for (const file of turn.files) {
    const size = `, ${count(file.text.length, "character")}`;
    const summary = make("summary", {dir: "ltr"}, make("bdi", {}, visible(file.name)), size);
    const text = make("pre", {tabIndex: 0, dir: "auto"}, visible(file.text));
    nodes.question.append(make("details", {}, summary, text));
  }
  drawn.set(turn.id, nodes);
  return make("section", {className: "turn"}, make("h2", {className: "unseen"}, "You"), nodes.question, nodes.note,
    make("h2", {className: "unseen"}, "Answer"), nodes.thinking, nodes.answer, nodes.remark, nodes.stats,
    nodes.actions);
}

/** Return the text of a message, in a box that scrolls if it is long. */
function questionText(text) {
  const isLong = text.length > LONG || text.split("\n", LONG_LINES).length === LONG_LINES;
  return isLong ? make("div", {className: "long", tabIndex: 0}, text) : text;
}

/** Draw the present text of a turn, if it is shown. */
export function drawTurn(conversation, turn, isRunning, actions) {
  if (drawn.has(turn.id)) following(() => fill(conversation, turn, isRunning, actions));
}

function fill(conversation, turn, isRunning, actions) {
  const nodes = drawn.get(turn.id), runs = isRunning(turn);
  if (runs && turn.thought && !turn.answer && nodes.thinking.hidden) nodes.thinking.open = true;
  if (runs && turn.answer && !nodes.answer.hasChildNodes()) nodes.thinking.open = false;
  nodes.thinking.hidden = !turn.thought;
  nodes.thought.textContent = visible(turn.thought);
  show(nodes.answer, turn.answer);
  nodes.note.textContent = visible(turn.note);
  const waits = runs && !turn.answer && !turn.thought, remark = turn.state === "running" ? INTERRUPTED : turn.remark;
  nodes.remark.textContent = waits ? WAITING : runs ? "" : visible(remark);
  nodes.remark.classList.toggle("error", !runs && turn.state === "failed");
  nodes.stats.textContent = runs ? "" : visible(turn.stats);
  if (runs !== nodes.runs) nodes.actions.replaceChildren(...runs ? [] : buttons(conversation, turn, actions));
  nodes.runs = runs;
  for (const node of [nodes.note, nodes.remark, nodes.stats, nodes.actions]) node.hidden = !node.hasChildNodes();
}

/** Return the buttons below a turn: its versions, copy, regenerate or retry, edit, continue. */
function buttons(conversation, turn, actions) {
  const all = versions(conversation, turn), at = all.indexOf(turn), made = [];
  const hasText = turn.answer || turn.thought, isLast = turn.id === conversation.leaf;
  if (all.length > 1) {
    const step = (label, ariaLabel, other) =>
      button(label, event => switchTo(other, event.target, actions), {ariaLabel, disabled: !other});
    const number = make("span", {className: "note"}, `${at + 1} / ${all.length}`);
    made.push(step("‹", "Previous version", all[at - 1]), number, step("›", "Next version", all[at + 1]));
  }
  if (isLast && hasText && turn.state !== "done") made.push(button("Continue", () => actions.resume(turn)));
  made.push(button(hasText ? "Regenerate" : "Retry", () => actions.regenerate(turn)));
  if (turn.answer) made.push(button("Copy", event => copy(turn.answer, event.target), {ariaLabel: "Copy answer"}));
  made.push(button("Edit", () => actions.edit(turn), {ariaLabel: "Edit message"}));
  return made;
}

/** Show another version of a turn. The arrow that was pressed keeps its place in the window, and the focus. */
function switchTo(other, pressed, actions) {
  const {top} = pressed.getBoundingClientRect();
  actions.showVersion(other);
  const arrows = [...drawn.get(other.id).actions.querySelectorAll("[aria-label$=' version']")];
  const same = arrows.find(arrow => arrow.ariaLabel === pressed.ariaLabel);
  if (!same) return;  // This version is running.
  scrollBy(0, same.getBoundingClientRect().top - top);
  (same.disabled ? arrows.find(arrow => arrow !== same) : same).focus({preventScroll: true});
}
