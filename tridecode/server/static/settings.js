// The settings of a conversation, and the check of their values. Empty values leave the choice to the server.

const TOP = 2 ** 31 - 1;

/** Sampling options: label and range, as tridecode/sampling.py declares them. `above`: the minimum is excluded. */
export const SAMPLING = {
  temperature: {label: "Temperature (0: greedy)", min: 0, max: 100},
  top_p: {label: "Top-p (1: off)", min: 0, max: 1, above: true},
  top_k: {label: "Top-k (0: off)", min: 0, max: TOP, integer: true},
  min_p: {label: "Min-p (0: off)", min: 0, max: 1},
  repetition_penalty: {label: "Repetition penalty (1: off)", min: 0.001, max: 100},
  presence_penalty: {label: "Presence penalty (0: off)", min: -2, max: 2},
  frequency_penalty: {label: "Frequency penalty (0: off)", min: -2, max: 2},
  max_tokens: {label: "Maximum tokens of an answer", min: 1, max: TOP, integer: true},
  seed: {label: "Seed", min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, integer: true},
};
const MAX_STOPS = 16, MAX_STOP_LENGTH = 256;
const DEFAULTS = {system: "", stop: "", think: "on", overflow: "drop-oldest"};

export function completed(settings = {}) {
  return {...DEFAULTS, ...Object.fromEntries(Object.keys(SAMPLING).map(name => [name, ""])), ...settings};
}

export const stops = settings => settings.stop.split("\n").filter(Boolean);

/** Return the reason why a value is not valid, or "". */
export function problem(name, value) {
  if (name === "stop") {
    const all = stops({stop: value});
    const isValid = all.length <= MAX_STOPS && all.every(stop => stop.length <= MAX_STOP_LENGTH);
    return isValid ? "" : `expected at most ${MAX_STOPS} lines of at most ${MAX_STOP_LENGTH} characters`;
  }
  if (!(name in SAMPLING) || !value.trim()) return "";
  const {min, max, above, integer} = SAMPLING[name], number = Number(value.trim());
  const inRange = number <= max && (above ? number > min : number >= min);
  if (inRange && (!integer || Number.isInteger(number))) return "";
  if (integer) return min < 0 ? "expected an integer" : `expected an integer of at least ${min}`;
  return above ? `expected a number above ${min} and at most ${max}` : `expected a number from ${min} to ${max}`;
}

/** Return the sampling options that are set, with the names and types of OpenAI's API. */
export function sampling(settings) {
  const body = {};
  for (const name of Object.keys(SAMPLING)) {
    if (settings[name].trim() && !problem(name, settings[name])) body[name] = Number(settings[name]);
  }
  if (stops(settings).length) body.stop = stops(settings);
  return body;
}
