"use strict";
// The chat of the page with its own server.

const $ = id => document.getElementById(id), OPTIONS = ["system", "temperature", "max_tokens"];
let turns = [], model = null, context = null, running = null, failed = "";  // failed: the message that Retry sends again

function store(name, value) {
  try { sessionStorage.setItem(`tridecode.${name}`, value); } catch { /* The storage is full or disabled. */ }
}
function stored(name) { try { return sessionStorage.getItem(`tridecode.${name}`); } catch { return null; } }

function save() {
  const options = Object.fromEntries(OPTIONS.map(name => [name, $(name).value]));
  store("chat", JSON.stringify({turns: turns.filter(turn => turn.answer || turn.thought), options}));
}

function restore() {
  $("key").value = stored("key") ?? "";
  try {
    const saved = JSON.parse(stored("chat"));
    for (const name of OPTIONS) $(name).value = saved.options[name];
    for (const turn of saved.turns) {
      turn.stats ||= "stopped";  // the reload interrupted the answer
      turns.push(turn);
      draw(turn);
    }
  } catch { /* The storage is empty or has another format. */ }
}

/** Append the nodes of a turn, {question, answer, thought, stats}, to the log and return them. */
function draw(turn) {
  const thought = make("div", [], {className: "thought"});
  const nodes = {
    question: make("div", turn.question, {className: "user"}), thought,
    thinking: make("details", [make("summary", "Thinking"), thought]),
    answer: make("div", [], {className: "assistant"}), stats: make("p", [], {className: "stats"}),
  };
  $("log").append(nodes.question, nodes.thinking, nodes.answer, nodes.stats);
  update(turn, nodes);
  return nodes;
}

function update(turn, nodes) {
  const bottom = document.documentElement, low = bottom.scrollHeight - scrollY - innerHeight < 60;
  nodes.thinking.hidden = !turn.thought;
  nodes.thought.textContent = turn.thought;
  show(nodes.answer, turn.answer);
  nodes.stats.textContent = turn.stats;
  if (low) scrollTo(0, bottom.scrollHeight);
}

function request(path, body, signal) {
  const headers = $("key").value ? {Authorization: `Bearer ${$("key").value}`} : {};
  if (body) headers["Content-Type"] = "application/json";
  return fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal});
}

async function checked(response) {
  if (response.ok) return response;
  const message = (await response.json().catch(() => null))?.error?.message || response.statusText || "an error";
  const wait = response.headers.get("Retry-After");
  if (response.status === 401) { $("keyed").hidden = false; $("key").focus(); }
  throw new Error(`${message}${wait ? `; retry after ${wait} s` : ""} (${response.status})`);
}

function fail(error) {
  const lost = "the server is not reachable, or the connection was lost";
  const unreadable = "the answer of the server is not valid";
  $("error").textContent = {TypeError: lost, SyntaxError: unreadable}[error.name] ?? error.message;  // from fetch, from JSON.parse
  $("failed").hidden = false;
}

/** Request the models' names and return whether one is known. The first one is used until another one is selected. */
async function connect() {
  $("failed").hidden = true;
  try {
    const cards = (await (await checked(await request("v1/models"))).json()).data;
    const card = cards.find(each => each.id === $("models").value) ?? cards[0];
    [model, context] = [card.id, card.max_model_len];
    $("models").replaceChildren(...cards.map(each => new Option(each.id, each.id, false, each === card)));
    $("several").hidden = cards.length < 2;
    $("model").textContent = context ? `${model} · context of ${context.toLocaleString("en")}` : model;
    $("keyed").hidden = !$("key").value;
    $("input").focus();
  } catch (error) { fail(error); }
  return model !== null;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("the answer is incomplete: its stream ended early");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: [DONE]")) return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

/** Return the body of a request with the turns so far and a new question. */
function requestOf(question) {
  const value = name => $(name).value.trim(), messages = [];
  if (value("system")) messages.push({role: "system", content: value("system")});
  for (const turn of turns) {
    messages.push({role: "user", content: turn.question}, {role: "assistant", content: turn.answer});
  }
  messages.push({role: "user", content: question});
  const body = {model, messages, stream: true, stream_options: {include_usage: true}};
  for (const name of ["temperature", "max_tokens"]) {
    // A value that is not a number is sent unchanged, and the server reports the error.
    if (value(name)) body[name] = isFinite(value(name)) ? Number(value(name)) : value(name);
  }
  return body;
}

async function ask(question) {
  const turn = {question, answer: "", thought: "", stats: ""}, body = requestOf(question);
  const nodes = draw(turn), started = performance.now();
  let first = null, last = null, usage = null, reason = null, drawing = 0, pause = 40, problem = null;
  const redraw = () => {
    const begin = performance.now();
    drawing = 0;
    update(turn, nodes);
    pause = Math.max(40, 4 * (performance.now() - begin));  // ms; at most a fifth of the time is spent on drawing
  };
  running = new AbortController();
  failed = "";
  $("log").setAttribute("aria-busy", "true");
  $("stop").hidden = false; $("send").hidden = true; $("failed").hidden = true;
  scrollTo(0, document.documentElement.scrollHeight);
  turns.push(turn);
  try {
    const response = await checked(await request("v1/chat/completions", body, running.signal));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const {delta, finish_reason} of event.choices ?? []) {
        if (delta.reasoning_content && !turn.thought) nodes.thinking.open = true;
        if (delta.content && !turn.answer) nodes.thinking.open = false;
        turn.thought += delta.reasoning_content ?? "";
        turn.answer += delta.content ?? "";
        reason = finish_reason ?? reason;
        if (delta.content || delta.reasoning_content) { last = performance.now(); first ??= last; }
      }
      drawing ||= setTimeout(redraw, pause);
    }
  } catch (error) { problem = error; }
  clearTimeout(drawing);
  const stopped = running.signal.aborted;
  running = null;
  turn.stats = statistics({first, last, started, usage, reason, stopped});
  if (problem && !stopped || stopped && !turn.answer) {  // drop the turn
    turns = turns.filter(other => other !== turn);
    for (const node of [nodes.question, nodes.thinking, nodes.answer, nodes.stats]) node.remove();
    $("input").value ||= question;
    if (!stopped) { failed = question; fail(problem); }
  } else update(turn, nodes);
  $("log").removeAttribute("aria-busy");
  $("stop").hidden = true; $("send").hidden = false;
  save();
  $("input").focus();
}

function statistics({first, last, started, usage, reason, stopped}) {
  const parts = stopped ? ["stopped"] : [], count = n => n.toLocaleString("en");
  if (usage) {
    const tokens = usage.completion_tokens, rate = (tokens - 1) / (last - first) * 1000;
    parts.push(`${count(tokens)} token${tokens === 1 ? "" : "s"}`);
    if (isFinite(rate) && rate > 0) parts.push(`${rate >= 100 ? count(Math.round(rate)) : rate.toFixed(1)} tok/s`);
  }
  if (first !== null) parts.push(`first token ${((first - started) / 1000).toFixed(2)} s`);
  if (usage) {
    const used = Math.min(usage.prompt_tokens + usage.completion_tokens, context ?? Infinity);
    parts.push(`${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${count(usage.prompt_tokens)} reused`);
    parts.push(`context ${count(used)}${context ? ` / ${count(context)}` : ""}`);
  }
  if (reason === "length") parts.push("truncated at the maximum length or the end of the context");
  return parts.join(" · ");
}

async function send() {
  const question = $("input").value;
  if (running || !question.trim() || model === null && !await connect()) return;
  $("input").value = "";
  await ask(question.trim());
}

$("form").onsubmit = event => { event.preventDefault(); send(); };
$("input").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
$("key").onkeydown = event => { if (event.key === "Enter") { event.preventDefault(); connect(); } };
$("models").onchange = connect;
$("key").oninput = () => store("key", $("key").value);
$("stop").onclick = () => running?.abort();
$("retry").onclick = async () => {
  if (running || model === null && !await connect() || !failed) return;
  if ($("input").value === failed) $("input").value = "";
  ask(failed);
};
$("new").onclick = () => {
  running?.abort();
  turns = [];
  $("log").replaceChildren();
  $("failed").hidden = true;
  save();
  $("input").focus();
};
addEventListener("keydown", event => { if (event.key === "Escape" && !event.isComposing) running?.abort(); });
addEventListener("pagehide", save);
restore();
connect();
