// Conversations and drafts in the browser's IndexedDB. A conversation is one record, and each of its turns another one.
// A tab writes only the turns that it changed, so tabs with the same conversation do not overwrite each other's turns.

import {beginning} from "./dom.js";

const STORES = ["conversations", "turns", "drafts"];
const channel = new BroadcastChannel("tridecode");
const database = new Promise((resolve, reject) => {
  const request = indexedDB.open("tridecode", 1);
  request.onupgradeneeded = () => {
    const listed = request.result.createObjectStore("conversations", {keyPath: "id"});
    listed.createIndex("listed", ["updated", "title"]);
    request.result.createObjectStore("turns", {keyPath: ["conversation", "id"]});
    request.result.createObjectStore("drafts", {keyPath: "id"});
  };
  request.onsuccess = () => {
    request.result.onversionchange = () => request.result.close();
    resolve(request.result);
  };
  request.onerror = () => reject(request.error);
});

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Run `work` with the stores in one transaction. The promise resolves when the transaction is written. */
async function transact(mode, work) {
  const transaction = (await database).transaction(STORES, mode);
  const written = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error ?? new Error("the transaction was aborted"));
  });
  const stores = Object.fromEntries(STORES.map(name => [name, transaction.objectStore(name)]));
  const [value] = await Promise.all([work(stores), written]);
  return value;
}

const turnsOf = id => IDBKeyRange.bound([id], [id, []]);

/** Return {id, title, updated} of all conversations, the newest first, and of drafts without a conversation. */
export function list() {
  return transact("readonly", async ({conversations, drafts}) => {
    const cards = [], others = result(drafts.getAll());
    await new Promise((resolve, reject) => {
      const request = conversations.index("listed").openKeyCursor(null, "prev");  // This reads no conversation.
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve();
        cards.push({id: cursor.primaryKey, updated: cursor.key[0], title: cursor.key[1]});
        cursor.continue();
      };
    });
    const known = new Set(cards.map(card => card.id));
    const unsent = (await others).filter(({id}) => !known.has(id));
    const title = ({text, files}) => `Draft: ${beginning(text, 60) || files[0]?.name}`;
    return [...unsent.map(draft => ({id: draft.id, title: title(draft)})), ...cards];
  });
}

/** Return a conversation with its turns in the order of their creation, or undefined. */
export function load(id) {
  return transact("readonly", async ({conversations, turns}) => {
    const [conversation, own] = await Promise.all([result(conversations.get(id)), result(turns.getAll(turnsOf(id)))]);
    return conversation && {...conversation, turns: own.sort((a, b) => a.created - b.created)};
  });
}

/** Save a conversation and the turns that changed; all turns if another tab has deleted it. */
export function save({turns: all, ...conversation}, changed) {
  return transact("readwrite", async ({conversations, turns}) => {
    const exists = await result(conversations.getKey(conversation.id)) !== undefined;
    conversations.put(conversation);
    for (const turn of exists ? changed : [...all, ...changed]) turns.put(turn);
  });
}

export function remove(id) {
  return transact("readwrite", async ({conversations, turns, drafts}) => {
    conversations.delete(id);
    turns.delete(turnsOf(id));
    drafts.delete(id);
  });
}

export const loadDraft = id => transact("readonly", ({drafts}) => result(drafts.get(id)));

/** Save the draft of a conversation, {id, text, files, ...}; delete it if it is empty. */
export function saveDraft(draft) {
  const isEmpty = !draft.text && !draft.files.length && !draft.edits;
  return transact("readwrite", async ({drafts}) => { isEmpty ? drafts.delete(draft.id) : drafts.put(draft); });
}

/** Tell the other tabs that a conversation has changed; `listen` calls `changed` with its id. */
export const announce = id => channel.postMessage(id);
export const listen = changed => { channel.onmessage = event => changed(event.data); };

/** Return a function that runs `work`, never twice at a time. A call during a run makes it run once more afterwards. */
export function coalesced(work) {
  let running = null, again = false;
  return () => {
    again = Boolean(running);
    return running ??= (async () => {
      try {
        do { again = false; await work(); } while (again);
      } finally { running = null; }
    })();
  };
}
