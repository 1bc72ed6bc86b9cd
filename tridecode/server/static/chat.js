// The page: the shown conversation, running answers, and what the buttons do.

import {explained, key, models} from "./api.js";
import {answer} from "./answer.js";
import * as composer from "./composer.js";
import {addTurn, newConversation, newId, showVersion} from "./conversation.js";
import {$, count, visible} from "./dom.js";
import * as panel from "./panel.js";
import * as sidebar from "./sidebar.js";
import {announce, coalesced, list, listen, load, loadDraft, remove, save} from "./store.js";
import {drawAll, drawTurn} from "./view.js";

const FRAME = 40;  // ms between frames of a running answer
const BUSY = "an answer of this conversation is running: wait for its end, or stop it";
let current = null;  // the shown conversation
let cards = [];  // the models
let connects = 0;  // number of calls of connect
const unsaved = new Map();  // id of a conversation -> its turns that are not saved yet, by their id
const failing = new Set();  // ids of the conversations that could not be saved
const runs = new Map();  // id of a turn that runs in this tab -> {conversation, controller}

const card = () => cards.find(each => each.id === current.model) ?? cards[0];
const isRunning = turn => runs.has(turn.id);
const runsOf = id => [...runs.values()].filter(run => run.conversation.id === id);

// ---- the server

function fail(message) {
  $("error").textContent = visible(message);
  $("retry").hidden = cards.length > 0;
  $("failed").hidden = false;
}

/** Request the models and return whether one is known. The errors of earlier calls are not shown after a later call. */
async function connect() {
  const call = ++connects;
  $("failed").hidden = true;
  try {
    cards = await models();
    $("keyed").hidden = !key.get();
  } catch (error) { if (call === connects) fail(explained(error)); }
  drawModel();
  return cards.length > 0;
}

function drawModel() {
  $("models").replaceChildren(...cards.map(({id}) => new Option(visible(id), id, false, id === card().id)));
  $("models").hidden = cards.length < 2;
  const context = cards.length && card().max_model_len ? `context of ${count(card().max_model_len)}` : "";
  $("model").textContent = [cards.length === 1 && visible(card().id), context].filter(Boolean).join(" · ");
}

// ---- conversations

/** Show the conversation whose id is in the address of the page. */
async function open() {
  let id = location.hash.slice(1);
  if (!/^[0-9a-f]{24}$/.test(id)) {
    id = newId();
    history.replaceState(null, "", `#${id}`);
  }
  let [saved, draft] = [runsOf(id)[0]?.conversation, null];
  try { [saved, draft] = await Promise.all([saved ?? load(id), loadDraft(id)]); } catch (error) { failStorage(error); }
  if (id !== location.hash.slice(1)) return;  // Another conversation was opened meanwhile.
  current = saved ?? newConversation(id, latest().settings, latest().model);
  panel.fill(current.settings);
  composer.open(id, draft);
  redraw();
  drawModel();
  sidebar.close();
  scrollTo(0, document.documentElement.scrollHeight);
  focusInput();
  await drawList();
}

const failStorage = error => fail(`the storage of the browser fails: ${error.message}`);

/** Focus the field for a message, except where this shows the keyboard of a phone. */
function focusInput() {
  if (!matchMedia("(pointer: coarse)").matches) $("input").focus();
}

/** The settings and the model that were chosen last, for new conversations. */
function latest() {
  try { return JSON.parse(localStorage.getItem("tridecode.latest")) ?? {}; } catch { return {}; }
}

function redraw() {
  drawAll(current, isRunning, actions);
  drawState();
}

function drawState() {
  const runs = runsOf(current.id).length > 0, title = visible(current.title) || "New chat";
  $("title").textContent = title;
  document.title = `${title} · tridecode`;
  $("stop").hidden = !runs;
  $("send").hidden = runs;
  runs ? $("log").setAttribute("aria-busy", "true") : $("log").removeAttribute("aria-busy");
}

const drawList = coalesced(async () => {
  try {
    const loaded = id => id === current.id ? current : load(id);
    sidebar.draw(await list(), current.id, {load: loaded, rename, remove: discard});
  } catch (error) { failStorage(error); }
});

/** Save a conversation, the turns that changed and those that an earlier call could not save. An error is shown. */
async function keep(conversation, changed) {
  const {id} = conversation, waiting = unsaved.get(id) ?? new Map();
  unsaved.set(id, waiting);
  for (const turn of changed) waiting.set(turn.id, turn);
  const all = [...waiting.values()];
  try {
    await save(conversation, all);
    for (const turn of all) if (waiting.get(turn.id) === turn) waiting.delete(turn.id);
    if (failing.delete(id) && !failing.size) $("failed").hidden = true;
  } catch (error) {
    for (const turn of all) if (!waiting.has(turn.id)) waiting.set(turn.id, turn);
    failing.add(id);
    fail(`this conversation is not saved: ${error.message}`);
  }
}

async function saved(conversation, changed = []) {
  await keep(conversation, changed);
  announce(conversation.id);
  await drawList();
}

async function rename(id, title) {
  const conversation = id === current.id ? current : runsOf(id)[0]?.conversation ?? await load(id);
  if (!conversation) return;
  Object.assign(conversation, {title, isNamed: true});
  drawState();
  await saved(conversation);
}

async function discard(id) {
  for (const run of runsOf(id)) { run.discarded = true; run.controller.abort(); }
  await remove(id).catch(failStorage);
  announce(id);
  if (id === current.id) location.hash = newId(); else await drawList();
}

/** Take over the turns that another tab has saved. */
async function merge(id) {
  await drawList();
  if (id !== current.id) return;
  const other = await load(id).catch(() => null);
  if (!other || id !== current.id) return;
  const turns = other.turns.map(turn => isRunning(turn) ? current.turns.find(each => each.id === turn.id) : turn);
  const ids = new Set(turns.map(turn => turn.id)), own = current.turns.filter(turn => !ids.has(turn.id));
  const {title, isNamed} = other;
  let leaf = current.leaf ?? other.leaf;
  const following = id => turns.findLast(turn => turn.parent === id && turn.state !== "running");
  for (let next = following(leaf); next; next = following(next.id)) leaf = next.id;
  Object.assign(current, {turns: [...turns, ...own], title, isNamed, leaf});
  composer.keep();
  redraw();
}

// ---- answers

/** Receive the answer of a turn. Each frame is saved before it is drawn, so nothing on the screen is lost. */
async function run(conversation, turn) {
  const controller = new AbortController(), entry = {conversation, controller, discarded: false};
  const live = {...turn}, model = card(), isNamed = cards.length > 1;
  let pause = FRAME, timer = 0;
  runs.set(turn.id, entry);
  conversation.updated = Date.now();
  conversation.model = model.id;
  const frame = coalesced(async () => {
    const begin = performance.now(), snapshot = {...live};
    if (!entry.discarded) await keep(conversation, [snapshot]);
    Object.assign(turn, snapshot);
    if (conversation === current) drawTurn(conversation, turn, isRunning, actions);
    pause = Math.max(FRAME, 4 * (performance.now() - begin));  // At most a fifth of the time is spent on frames.
  });
  if (conversation === current) redraw();
  scrollTo(0, document.documentElement.scrollHeight);
  await saved(conversation, [turn]);
  await answer(conversation, live, model, controller.signal, () => {
    timer ||= setTimeout(() => { timer = 0; frame(); }, pause);
  });
  clearTimeout(timer);
  if (isNamed && live.stats) live.stats = `${model.id} · ${live.stats}`;
  await frame();
  runs.delete(turn.id);
  conversation.updated = Date.now();
  if (!entry.discarded) await saved(conversation, [turn]);
  if (conversation === current) {
    drawTurn(conversation, turn, isRunning, actions);
    drawState();
    if ($("error").textContent === BUSY) $("failed").hidden = true;
    if (document.activeElement === document.body) focusInput();  // The focused button is no longer there.
  }
  if (turn.state === "failed") refresh();
}

/** Request the models again, because a server that was started again may have another one. */
async function refresh() {
  try { cards = await models(); } catch { return; }
  drawModel();
}

async function send() {
  const message = composer.message(), conversation = current;
  if (!message || !await canRun(conversation)) return;
  const {edits, ...fields} = message, edited = conversation.turns.find(turn => turn.id === edits);
  const turn = addTurn(conversation, edited ? edited.parent : conversation.leaf, fields);
  const running = run(conversation, turn);  // This saves the turn before the draft is deleted.
  composer.clear(conversation.id);
  $("failed").hidden = true;
  await running;
}

/** Return whether an answer of the shown conversation can begin. */
async function canRun(conversation) {
  if (runsOf(conversation.id).length) {
    fail(BUSY);
    return false;
  }
  if (!panel.isValid(conversation.settings)) return false;
  if (!cards.length && !await connect()) return false;
  return conversation === current && !runsOf(conversation.id).length;
}

const actions = {
  edit: composer.edit,
  showVersion(turn) {
    showVersion(current, turn);
    redraw();
    saved(current);
  },
  /** Answer a message again, as a new version unless there is no answer yet. */
  regenerate: turn => again(turn, turn.answer || turn.thought || turn.state === "running" ? {} : null),
  /** Continue an answer, as a new version that hides the old one. */
  resume: turn => again(turn, {answer: turn.answer, thought: turn.thought, dropped: turn.dropped, continues: turn.id}),
};

async function again(turn, fields) {
  const {parent, question, files} = turn, conversation = current;
  if (!await canRun(conversation)) return;
  await run(conversation, fields ? addTurn(conversation, parent, {question, files, ...fields}) : turn);
}

// ---- events

const stop = () => { for (const run of runsOf(current.id)) run.controller.abort(); };

composer.setUp(send, fail);
sidebar.setUp();
panel.setUp((name, value) => {
  current.settings[name] = value;
  remember();
});
$("models").onchange = () => {
  current.model = $("models").value;
  drawModel();
  remember();
};

/** Store the settings for new conversations, and with the conversation if it has turns. */
function remember() {
  try {
    localStorage.setItem("tridecode.latest", JSON.stringify({settings: current.settings, model: current.model}));
  } catch { /* The storage is disabled. */ }
  if (current.turns.length) keep(current, []);
}

document.addEventListener("unauthorized", () => {
  $("keyed").hidden = false;
  $("key").focus();
});
$("key").value = key.get();
$("key").oninput = () => key.set($("key").value);
$("key").onkeydown = async event => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  await connect();
  if ($("failed").hidden) $("input").focus();
};
$("retry").onclick = connect;
$("stop").onclick = stop;
$("new").onclick = () => { location.hash = newId(); };
addEventListener("keydown", event => {
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) stop();
});
addEventListener("hashchange", open);
listen(merge);
await open();
await connect();
