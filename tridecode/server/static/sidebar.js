// The list of conversations.

import {asMarkdown, asSession} from "./conversation.js";
import {$, ask, beginning, button, download, make, visible} from "./dom.js";

/** Set up the buttons that show and hide the list on a narrow window. */
export function setUp() {
  const set = isOpen => {
    document.body.classList.toggle("listed", isOpen);
    $("chats").ariaExpanded = String(isOpen);
    (isOpen ? $("new") : $("chats")).focus();
  };
  $("chats").onclick = () => set(!document.body.classList.contains("listed"));
  $("hide").onclick = () => set(false);
  $("side").onkeydown = event => {
    if (event.key !== "Escape" || !document.body.classList.contains("listed")) return;
    event.stopPropagation();  // Escape also stops an answer.
    set(false);
  };
  $("list").addEventListener("click", event => { if (event.target.closest("[aria-current]")) set(false); });
  document.addEventListener("click", event => {
    const menu = document.querySelector("#list details[open]");
    if (menu && !menu.contains(event.target)) menu.open = false;
  });
}

export function close() {
  document.body.classList.remove("listed");
  $("chats").ariaExpanded = "false";
}

/**
 * Draw the list. An open menu stays open, and the focus stays at the same control of the same conversation.
 * `actions` has the functions load (a conversation by its id), rename and remove.
 */
export function draw(cards, current, actions) {
  const controls = made => [...made?.querySelectorAll("a, summary, button") ?? []];
  const focused = document.activeElement.closest?.("#list li");
  const position = controls(focused).indexOf(document.activeElement);
  const opened = document.querySelector("#list details[open]")?.closest("li").dataset.id;
  $("list").replaceChildren(...cards.map(card => item(card, card.id === current, actions)));
  if (opened && inList(opened)) inList(opened).querySelector("details").open = true;
  if (!focused) return;
  const found = controls(inList(focused.dataset.id));
  (found[position] ?? found[0] ?? $("new")).focus();
}

const inList = id => document.querySelector(`#list li[data-id="${CSS.escape(id)}"]`);

function item({id, title, updated}, isCurrent, actions) {
  const name = visible(title) || "Untitled";
  const date = updated ? `\n${new Date(updated).toLocaleString()}` : "";
  const link = make("a", {href: `#${id}`, title: name + date, dir: "auto"}, name);
  if (isCurrent) link.ariaCurrent = "page";
  const summary = make("summary", {ariaLabel: `Actions for ${name}`}, "⋯");
  const action = (label, work) => button(label, () => {
    menu.open = false;
    summary.focus();
    return work();
  });
  const asked = async (...question) => {
    const chosen = await ask(...question);
    // The list may have been drawn again meanwhile. Then the browser cannot return the focus to `summary`.
    (inList(id)?.querySelector("summary") ?? $("new")).focus();
    return chosen;
  };
  const menu = make("details", {name: "actions"}, summary, make("div", {className: "menu"},
    ...updated ? [
      action("Rename", async () => {
        const chosen = await asked("Title of this conversation", "Rename", title);
        if (chosen?.trim()) await actions.rename(id, chosen.trim());
      }),
      action("Export as Markdown", () => exported(id, ".md", asMarkdown, actions)),
      action("Export for the terminal chat", () => exported(id, ".json", asSession, actions)),
    ] : [],
    action("Delete", async () => {
      if (await asked(`Delete “${name}”? It cannot be restored.`, "Delete")) await actions.remove(id);
    })));
  menu.ontoggle = () => { if (menu.open) menu.lastChild.scrollIntoView({block: "nearest"}); };
  menu.onkeydown = event => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    summary.focus();
  };
  const made = make("li", {}, link, menu);
  made.dataset.id = id;
  return made;
}

async function exported(id, suffix, convert, actions) {
  const conversation = await actions.load(id);
  const name = beginning(conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, ""), 60);
  download((name || "conversation") + suffix, convert(conversation));
}
