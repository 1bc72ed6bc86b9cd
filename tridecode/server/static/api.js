// Requests to the page's own server.

// Milliseconds without data after which a connection counts as lost. The server sends a comment every 5 s.
const SILENCE = 60_000;
const LOST = "the server is not reachable, or the connection was lost";

export class ServerError extends Error {
  constructor(message, {status = 0, code = null} = {}) { Object.assign(super(message), {status, code}); }
}

/** The API key, which is stored for this tab only. */
export const key = {
  get() { try { return sessionStorage.getItem("tridecode.key") ?? ""; } catch { return ""; } },
  set(value) {
    try { sessionStorage.setItem("tridecode.key", value.trim()); } catch { /* The storage is disabled. */ }
  },
};

/** Send a request and return its response. Raises ServerError unless its status is 200. */
async function request(path, body, signal) {
  if (/[^ -~]/.test(key.get())) {
    document.dispatchEvent(new Event("unauthorized"));
    throw new ServerError("the API key contains a character that is not printable ASCII");
  }
  const headers = key.get() ? {Authorization: `Bearer ${key.get()}`} : {};
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, {method, headers, body: body && JSON.stringify(body), signal});
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error, wait = response.headers.get("Retry-After");
  if (response.status === 401) document.dispatchEvent(new Event("unauthorized"));
  const message = `${error?.message || response.statusText || "an error"}${wait ? `; retry after ${wait} s` : ""}`;
  throw new ServerError(`${message} (${response.status})`, {status: response.status, code: error?.code});
}

/** Return the message of an error of a request. */
export function explained(error) {
  if (error instanceof SyntaxError) return "the answer of the server is not valid";  // from JSON.parse
  const isLost = error instanceof TypeError || ["AbortError", "TimeoutError"].includes(error.name);
  return isLost ? LOST : error.message;
}

/** Return the cards of the models: [{id, max_model_len, ...}, ...]. */
export async function models() {
  const {data} = await (await request("v1/models", null, AbortSignal.timeout(SILENCE))).json();
  if (!data?.[0]?.id) throw new ServerError("the server lists no model");
  return data;
}

/** Return the number of tokens of a prompt, Infinity if it exceeds the context, null if the server cannot count. */
export async function countTokens(body, signal) {
  try {
    const either = AbortSignal.any([signal, AbortSignal.timeout(SILENCE)]);
    return (await (await request("tokenize", body, either)).json()).count;
  } catch (error) {
    if (error.code === "context_length_exceeded") return Infinity;
    if (error.status === 404) return null;
    throw error;
  }
}

/** Yield the events of a chat completion. Raises an error if the stream ends early, or sends nothing for a minute. */
export async function* chat(body, signal) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE);
  try {
    const response = await request("v1/chat/completions", body, AbortSignal.any([signal, silence.signal]));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "";;) {
      const {done, value} = await reader.read();
      if (done) throw new ServerError("the answer is incomplete: its stream ended early");
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: [DONE]")) return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new ServerError(event.error.message);
        yield event;
      }
    }
  } finally { clearTimeout(timer); }
}
