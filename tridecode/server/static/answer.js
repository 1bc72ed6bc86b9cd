// One answer: what is sent for it, and the text that arrives.

import {chat, countTokens, explained} from "./api.js";
import {answered, content, messages} from "./conversation.js";
import {count} from "./dom.js";
import {sampling} from "./settings.js";

/** The message does not fit in the context. */
class Overflow extends Error {}

/**
 * Request the answer of a turn, or the rest of it, and add the text to the turn as it arrives.
 *
 * @param card The model, as /v1/models describes it.
 * @param changed Called after each change of the turn.
 */
export async function answer(conversation, turn, card, signal, changed) {
  const {settings} = conversation, timing = {started: performance.now(), first: null, last: null};
  let usage = null, reason = null;
  Object.assign(turn, {state: "running", remark: ""});
  const thinking = settings.think === "off" ? {chat_template_kwargs: {enable_thinking: false}} : {};
  const continued = turn.answer || turn.thought ? {continue_final_message: true} : {};
  try {
    await makeRoom(conversation, turn, card, {...thinking, ...continued}, signal);
    changed();
    const body = {
      model: card.id, messages: messages(conversation, turn, turn.dropped), stream: true,
      stream_options: {include_usage: true}, ...sampling(settings), ...seed(conversation, turn), ...thinking,
      ...continued,
    };
    for await (const event of chat(body, signal)) {
      usage = event.usage ?? usage;
      for (const {delta, finish_reason} of event.choices ?? []) {
        turn.thought += delta.reasoning_content ?? "";
        turn.answer += delta.content ?? "";
        reason = finish_reason ?? reason;
        if (delta.content || delta.reasoning_content) { timing.last = performance.now(); timing.first ??= timing.last; }
      }
      changed();
    }
    turn.state = reason === "length" ? "cut" : "done";
    turn.remark = reason === "length" ? cutNote(usage, settings, card.max_model_len) : "";
  } catch (error) {
    turn.state = signal.aborted ? "stopped" : "failed";
    turn.remark = signal.aborted ? "" : explained(error);
  }
  turn.used = usage && usage.prompt_tokens + usage.completion_tokens;
  turn.stats = statistics(timing, usage, turn.state === "stopped", card.max_model_len);
}

/** Return the seed of an answer. If a seed is set, each version of an answer has the next one. */
function seed({settings, turns}, turn) {
  if (!settings.seed.trim()) return {};
  const isTry = other => other.parent === turn.parent && other.question === turn.question && !other.continues;
  const tries = turns.filter(other => isTry(other) && other.created < turn.created).length;
  return {seed: Number(settings.seed) + (turn.continues ? 0 : tries)};
}

/**
 * Set `dropped` and `note` of a turn so that its prompt fits in the context, like --overflow of the terminal chat:
 * drop the oldest turns, and reserve an eighth of the context for the answer, or max_tokens if that is less.
 */
async function makeRoom(conversation, turn, card, fields, signal) {
  const {settings} = conversation, capacity = card.max_model_len, earlier = answered(conversation, turn);
  const isNew = !turn.answer && !turn.thought, drops = settings.overflow === "drop-oldest";
  turn.dropped = Math.max(turn.dropped, Math.min(earlier.at(-1)?.dropped ?? 0, earlier.length));
  if (!capacity || isNew && upperBound(settings, turn, earlier) <= capacity - capacity / 8) return;
  const counts = new Map(), tokens = async dropped => {
    const body = {model: card.id, messages: messages(conversation, turn, dropped), ...fields};
    if (!counts.has(dropped)) counts.set(dropped, await countTokens(body, signal));
    return counts.get(dropped);
  };
  const room = drops ? Math.min(Number(settings.max_tokens) || capacity, Math.floor(capacity / 8)) : 0;
  const needed = await tokens(turn.dropped);
  if (needed === null || needed <= capacity - room) return;  // null: the server does not count, and decides.
  const alone = await tokens(earlier.length);
  if (alone > capacity) throw new Overflow(tooLong(settings, isNew, alone, capacity));
  if (!drops) {
    const fix = "start a new chat, or let the settings drop the oldest turns";
    throw new Overflow(`this turn needs ${size(needed, capacity)}, the context holds ${count(capacity)}; ${fix}`);
  }
  let [low, high] = [turn.dropped, earlier.length];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (await tokens(middle) <= capacity - room) high = middle; else low = middle + 1;
  }
  if (low === turn.dropped) return;
  const first = turn.dropped + 1, which = first === low ? `turn ${first} is` : `turns ${first} to ${low} are`;
  const space = needed <= capacity ? ` with room for the answer (${count(room)})` : "";
  const problem = `${size(needed, capacity)} do not fit in the context of ${count(capacity)}${space}`;
  turn.note = `${problem}: ${which} no longer sent to the model`;
  turn.dropped = low;
}

/**
 * Return an upper bound of the tokens of a prompt, because counting them delays the first token. A UTF-16 unit has at
 * most three bytes, a token has at least one, and the template adds fewer than 256 tokens.
 */
function upperBound({system}, turn, earlier) {
  const used = earlier.length ? earlier.at(-1).used ?? Infinity : 0;
  return used + 3 * (content(turn).length + system.length) + 256;
}

const size = (tokens, capacity) => tokens === Infinity ? `more than ${count(capacity)} tokens` : count(tokens, "token");

function tooLong({system}, isNew, tokens, capacity) {
  const parts = ["this message", ...isNew ? [] : ["its answer"], ...system.trim() ? ["the system prompt"] : []];
  const [need, object] = parts.length > 1 ? ["need", "them"] : ["needs", "it"];
  const needed = `${parts.join(" and ")} alone ${need} ${size(tokens, capacity)}`;
  return `${needed}, the context holds ${count(capacity)}; shorten ${object}`;
}

/** Return the reason why an answer was cut. */
function cutNote(usage, {max_tokens}, capacity) {
  const isFull = usage && usage.prompt_tokens + usage.completion_tokens >= capacity;
  if (isFull) return `the answer was cut: the context of ${count(capacity)} tokens is full`;
  if (max_tokens.trim()) return `the answer was cut: the maximum length (${count(Number(max_tokens))}) was reached`;
  return "the answer was cut: the context is full, or the server has a limit";
}

/** Return the line below an answer: its length, speed, time to the first token, reused tokens, and the used context. */
function statistics({started, first, last}, usage, isStopped, capacity) {
  const parts = isStopped ? ["stopped"] : [];
  if (usage) {
    const tokens = usage.completion_tokens, rate = (tokens - 1) / (last - first) * 1000;
    parts.push(count(tokens, "token"));
    if (isFinite(rate) && rate > 0) parts.push(`${rate >= 100 ? count(Math.round(rate)) : rate.toFixed(1)} tok/s`);
  }
  if (first !== null) parts.push(`first token ${((first - started) / 1000).toFixed(2)} s`);
  if (usage) {
    const used = Math.min(usage.prompt_tokens + usage.completion_tokens, capacity ?? Infinity);
    parts.push(`${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${count(usage.prompt_tokens)} reused`);
    parts.push(`context ${count(used)}${capacity ? ` / ${count(capacity)}` : ""}`);
  }
  return parts.join(" · ");
}
