// The dialog with the settings.

import {$, make} from "./dom.js";
import {problem, SAMPLING} from "./settings.js";

const NAMES = ["system", "think", "overflow", "stop", ...Object.keys(SAMPLING)];
const field = name => $({stop: "stop-strings"}[name] ?? name);

/** Set up the dialog. `changed` receives the name and the value of a setting that was changed and is valid. */
export function setUp(changed) {
  for (const [name, {label, integer, min}] of Object.entries(SAMPLING)) {
    // The keyboards for numbers of some phones have no minus sign.
    const inputMode = min < 0 ? "text" : integer ? "numeric" : "decimal";
    const input = make("input", {id: name, inputMode, autocomplete: "off"});
    $("sampling").append(make("label", {}, label, input));
  }
  for (const name of NAMES) {
    const wrong = make("span", {className: "error", id: `${name}-problem`});
    wrong.setAttribute("role", "status");
    field(name).parentNode.append(wrong);
    field(name).setAttribute("aria-describedby", wrong.id);
    field(name).oninput = () => { check(name); changed(name, field(name).value); };
  }
  $("theme").value = theme.get();
  $("theme").onchange = () => theme.set($("theme").value);
  $("open-settings").onclick = () => $("settings").showModal();
}

/** Show the settings of a conversation. */
export function fill(settings) {
  for (const name of NAMES) {
    field(name).value = settings[name];
    check(name);
  }
}

function check(name) {
  const reason = problem(name, field(name).value);
  field(name).ariaInvalid = String(Boolean(reason));
  $(`${name}-problem`).textContent = reason;
}

/** Return whether all values are valid. Otherwise show the dialog at the first one that is not. */
export function isValid(settings) {
  const wrong = NAMES.find(name => problem(name, settings[name]));
  if (!wrong) return true;
  $("settings").showModal();
  field(wrong).focus();
  return false;
}
