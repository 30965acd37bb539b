// A panel: a heading with its help, and what it holds.

import { make } from "./words.js";

const HELP = {
  accuracy: "Accuracy, or error, of each client's model on its own test data: the mean, each " +
    "cluster, and the worst tenth, which is the mean of the tenth of the clients that score worst.",
  clusters: "Each stream is a cluster, its height the number of its clients. Purity is the share " +
    "of clients whose true group is the most frequent one in their cluster.",
  map: "Each dot is a client; clients with similar models lie close to each other.",
  devices: "Each row is a device and each bar a task, from dispatch to reply.",
  happenings: "Changes of clusters and data, offline devices, rejected updates, warnings, versions of models " +
    "that were held back, and crashes, newest first; a click shows that moment.",
  staleness: "Staleness is the number of aggregations into a model between its dispatch to a " +
    "client and the arrival of the client's update.",
  measures: "Values that only this method reports.",
  trust: "Updates that were rejected, by reason, and verdicts on those that others do not bear out.",
  clients: "One row per client at the moment shown; a heading sorts, a name opens the history.",
  curves: "Accuracy, or error, of the runs selected below, or the mean per method with a band of one " +
    "standard deviation over its runs (seeds).",
  means: "Mean ± standard deviation over the finished runs (seeds) of each method, over all until " +
    "one has finished: at the last evaluation, and the bytes of all updates, down and up.",
  runs: "Select the runs to compare; a name opens the run, a heading sorts. The columns between " +
    "seed and updates are the settings that differ between these runs.",
};

/** Make a panel. Its id stands in the address, so that one can link to it. */
export function panel(id, title, kind, ...children) {
  return make(
    "section",
    { class: `panel ${kind}`, id: `panel-${id}`, "aria-labelledby": `title-${id}` },
    make("h2", { id: `title-${id}` }, title),
    ...(id in HELP ? [make("details", { class: "help" },
      make("summary", { "aria-label": `Help: ${title}` }, "?"), make("p", {}, HELP[id]))] : []),
    ...children,
  );
}

/** Make a note below a drawing. */
export function note(text) {
  return make("p", { class: "note" }, text);
}
