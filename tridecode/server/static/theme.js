"use strict";
// The color theme. This script runs before the page is drawn, so that no other theme flashes up.

const theme = {
  get() { try { return localStorage.getItem("tridecode.theme") ?? ""; } catch { return ""; } },
  set(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("tridecode.theme", name); } catch { /* The storage is disabled. */ }
  },
};
document.documentElement.dataset.theme = theme.get();
addEventListener("storage", () => { document.documentElement.dataset.theme = theme.get(); });
