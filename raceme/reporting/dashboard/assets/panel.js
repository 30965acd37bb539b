// A panel: a heading, and what it holds.

import { make } from "./words.js";

/** Make a panel. Its id stands in the address, so that one can link to it. */
export function panel(id, title, kind, ...children) {
  return make(
    "section",
    { class: `panel ${kind}`, id: `panel-${id}`, "aria-labelledby": `title-${id}` },
    make("h2", { id: `title-${id}` }, title),
    ...children,
  );
}

/** Make a note below a drawing. */
export function note(text) {
  return make("p", { class: "note" }, text);
}
