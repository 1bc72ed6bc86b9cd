// The field for a message and its attached files. The draft of each conversation is saved while it is typed.

import {content} from "./conversation.js";
import {$, button, count, make, visible} from "./dom.js";
import {coalesced, saveDraft} from "./store.js";

const LARGEST = 4 << 20;  // Bytes of an attached file.
// {id of the conversation, text, files, edits: id of the turn that it replaces, held: text and files before the edit}
let draft = null;
let save = () => {};
let report = () => {};

/** Set up the field. `fail` shows a message; `send` is called to send the draft. */
export function setUp(send, fail) {
  report = fail;
  $("form").onsubmit = event => { event.preventDefault(); send(); };
  $("input").onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  };
  $("input").oninput = changed;
  $("cancel").onclick = cancelEdit;
  $("attach").onclick = () => $("chosen").click();
  $("chosen").onchange = async () => {
    await attach([...$("chosen").files]);
    $("chosen").value = "";
  };
  for (const name of ["dragover", "drop"]) document.addEventListener(name, event => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}

function changed() {
  draft.text = $("input").value;
  return save();
}

/** Save the draft again, because another tab has deleted or replaced it. */
export function keep() {
  if (draft.text || draft.files.length) save();
}

/** Show the saved draft of a conversation. */
export function open(id, saved) {
  const opened = draft = {text: "", files: [], edits: null, held: null, ...saved, id};
  save = coalesced(() => saveDraft(opened).catch(error => report(`the draft is not saved: ${error.message}`)));
  redraw();
}

function redraw() {
  $("input").value = draft.text;
  $("editing").hidden = !draft.edits;
  $("files").replaceChildren(...draft.files.map((file, i) => make("li", {},
    make("bdi", {}, visible(file.name)), `, ${count(file.text.length, "character")} `,
    button("Remove", () => { draft.files.splice(i, 1); redraw(); save(); $("input").focus(); },
      {ariaLabel: `Remove ${visible(file.name)}`}))));
}

/** Add text files to the draft. */
async function attach(files) {
  const opened = draft;
  for (const file of files) {
    try {
      if (file.size > LARGEST) throw new RangeError("too large");
      const bytes = new Uint8Array(await file.arrayBuffer()), mark = bytes[0] << 8 | bytes[1];
      const encoding = {0xfffe: "utf-16le", 0xfeff: "utf-16be"}[mark] ?? "utf-8";
      const text = new TextDecoder(encoding, {fatal: true}).decode(bytes);
      if (text.includes("\0")) throw new Error("not text");
      opened.files.push({name: file.name.replace(/\s+/g, " "), text: text.replaceAll("\r\n", "\n")});
    } catch (error) {
      const isLarge = error instanceof RangeError;
      const reason = isLarge ? `it has more than ${count(LARGEST)} bytes` : "it is not a text file";
      report(`${visible(file.name)} cannot be attached: ${reason}`);
    }
  }
  if (draft !== opened) return;
  redraw();
  save();
  $("input").focus();
}

/** Put the message of a turn into the field. The draft returns after it was sent, or with Cancel. */
export function edit(turn) {
  const held = draft.edits ? draft.held : {text: draft.text, files: draft.files};
  Object.assign(draft, {text: turn.question, files: [...turn.files], edits: turn.id, held});
  redraw();
  save();
  $("input").focus();
}

function cancelEdit() {
  Object.assign(draft, {text: "", files: [], ...draft.held, edits: null, held: null});
  redraw();
  save();
  $("input").focus();
}

/** Return the message {question, files, edits}, null if it is empty. Leading spaces of its first line are kept. */
export function message() {
  const question = $("input").value.replace(/^(\s*\n)+/, "").trimEnd();
  return content({question, files: draft.files}) ? {question, files: draft.files, edits: draft.edits} : null;
}

/** Empty the field after the message of a conversation was saved as a turn. */
export function clear(id) {
  if (draft.id === id) cancelEdit();
}
