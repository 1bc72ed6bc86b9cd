// Small helpers for elements, text and the clipboard.

export const $ = id => document.getElementById(id);

/** Return a new element. Strings in `children` become text nodes. */
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function button(label, onclick, properties = {}) {
  return make("button", {type: "button", onclick, ...properties}, label);
}

export const count = (n, unit = "") => `${n.toLocaleString("en")}${unit && ` ${unit}${n === 1 ? "" : "s"}`}`;

/** Return the beginning of a text, not more than `length` UTF-16 units. No character outside the BMP is split. */
export const beginning = (text, length) => text.slice(0, length).replace(/[\ud800-\udbff]$/, "");

const C0 = /[\x00-\x08\x0b-\x1f]/g, OTHERS = /[\x80-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** Replace control characters, and those that change the direction of text, by symbols, as the terminal does. */
export function visible(text) {
  const symbols = text.replaceAll("\r\n", "\n").replace(C0, char => String.fromCharCode(0x2400 + char.charCodeAt(0)));
  return symbols.replaceAll("\x7f", "\u2421").replace(OTHERS, "\ufffd");
}

/** Copy a text and show the result on the button. */
export async function copy(text, label) {
  const before = label.textContent;
  label.textContent = await written(text) ? "Copied" : "Not copied";
  setTimeout(() => { label.textContent = before; }, 1500);
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // Browsers provide the clipboard only over https and on localhost.
    const area = make("textarea", {value: text, className: "unseen"});
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Start a download of a text. */
export function download(name, text) {
  const link = make("a", {href: URL.createObjectURL(new Blob([text])), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Show a modal dialog with a text, and a field if `value` is a string. Return the value or true, null if cancelled. */
export function ask(title, action, value = null) {
  const field = make("input", {value: value ?? "", autocomplete: "off", dir: "auto", hidden: value === null});
  field.setAttribute("aria-label", title);
  const dialog = make("dialog", {}, make("form", {method: "dialog"}, make("p", {}, title), field,
    make("div", {className: "row end"}, button("Cancel", () => dialog.close()),
      make("button", {value: "yes"}, action))));
  dialog.setAttribute("aria-label", title);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise(resolve => {
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue !== "yes" ? null : value === null ? true : field.value);
    };
  });
}
