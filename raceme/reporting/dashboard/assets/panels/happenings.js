// Events of clusters, data and devices, one line each; a click shows that moment.

import { panel } from "../panel.js";
import { countUntil } from "../run.js";
import { make, plural, reasonText, refill, timeText } from "../words.js";

const MOST = 200;
const STRETCHES = 100; // Devices' events of one kind within a stretch of the run are one line.
const MOST_NAMES = 3;

export class HappeningsPanel {
  constructor(board) {
    this.board = board;
    this.list = make("ol", { class: "happenings", tabindex: "0", "aria-label": "What happened" });
    this.element = panel("happenings", "What happened", "", this.list);
  }

  draw(moment) {
    const { run } = this.board;
    if (this.revision !== run.revision) {
      this.revision = run.revision;
      this.events = eventsOf(run);
      const shown = this.events.slice(-MOST);
      const lines = shown.reverse().map((one) => this.line(one, moment));
      if (!lines.length) lines.push(make("li", { class: "note" }, "Nothing yet."));
      refill(this.list, ...lines);
    }
    for (const element of this.list.children) {
      element.classList.toggle("later", Number(element.dataset.time) > moment.time);
    }
  }

  line({ time, kind, text }, moment) {
    const { run } = this.board;
    const element = make("li", { class: time > moment.time ? "later" : "" },
      make("button", { type: "button", onclick: () => this.board.clock.show(time) },
        make("span", { class: "when" }, timeText(time, run.end)),
        make("span", { class: `kind ${kind}` }, kind), make("bdi", {}, text)));
    element.dataset.time = time;
    return element;
  }
}

/** Return what happened, in order of time: drifts, and changes of clusters but for the first. */
function eventsOf(run) {
  const { drifts, changes } = run.tables;
  const found = [];
  for (let row = 0; row < drifts.rows; ) {
    const time = drifts.time[row];
    let [clients, steps, everybody] = [0, new Set(), false];
    for (; row < drifts.rows && drifts.time[row] === time; row += 1) {
      everybody ||= drifts.client[row] < 0;
      clients += 1;
      steps.add(drifts.step[row]);
    }
    const who = everybody ? "all clients" : plural(clients, "client");
    found.push({ time, kind: "drift", text: `${who}: step ${[...steps].join(", ")}` });
  }
  let moves = null;
  for (let row = 0; row < changes.rows; row += 1) {
    const [kind, time, moved] = [changes.kind[row], changes.time[row], changes.moved[row]];
    if (kind === "assign" || !time) continue;
    if (kind === "move") {
      // Moves at one moment are one line.
      if (moves?.time === time) moves.clients += moved;
      else found.push((moves = { time, kind: "move", clients: moved }));
      continue;
    }
    found.push({ time, kind, text: changed(changes.gone[row], changes.made[row], moved) });
  }
  for (const one of found) one.text ??= movedText(run, one);
  const { warnings } = run.tables;
  for (let row = 0; row < warnings.rows; row += 1) {
    found.push({ time: warnings.time[row], kind: "warning", text: warnings.text[row] });
  }
  found.push(...ofVersions(run), ...ofDevices(run));
  if (run.crash) found.push({ time: run.end, kind: "crash", text: run.crash });
  else if (run.ended) found.push({ time: run.end, kind: "end", text: run.ended.reason });
  return found.sort((one, other) => one.time - other.time);
}

/** Return how many clients moved at a time, or where to if it is one. */
function movedText(run, { time, clients }) {
  const { placements } = run.tables;
  const row = countUntil(placements.time, time) - 1;
  if (clients !== 1 || placements.time[row] !== time || placements.time[row - 1] === time) {
    return `${plural(clients, "client")} moved`;
  }
  return `${namesOf(run, [placements.client[row]])} → cluster ${placements.cluster[row]}`;
}

/** Return which versions of models were held back, or chosen by an operator. */
function ofVersions({ tables: { versions, reasons } }) {
  const lines = new Map();
  for (let row = 0; row < versions.rows; row += 1) {
    const [cluster, version] = [versions.cluster[row], versions.version[row]];
    const last = lines.get(cluster)?.at(-1);
    // Versions that are held for one reason are one line, such as those after an operator's choice.
    const line = { time: versions.time[row], kind: versions.outcome[row], first: version,
      version, reason: reasons.text[versions.reason[row]] };
    if (last?.kind === line.kind && last.reason === line.reason) last.version = version;
    else lines.set(cluster, [...(lines.get(cluster) ?? []), line]);
  }
  return [...lines].flatMap(([cluster, found]) => found.filter((line) => line.reason).map(
    ({ time, kind, first, version, reason }) => {
      const range = first === version ? `version ${version}` : `versions ${first}–${version}`;
      return { time, kind, text: `${range} of cluster ${cluster}: ${reason}` };
    }));
}

/** Return which devices went offline or came back, and which updates were rejected. */
function ofDevices(run) {
  const { presence, rejections, reasons } = run.tables;
  const lines = new Map();
  const least = run.end / STRETCHES;
  const add = (time, kind, client, reason = "") => {
    const key = `${kind} ${reason}`;
    const last = lines.get(key)?.at(-1);
    if (last && time - last.time <= least) last.clients.push(client);
    else lines.set(key, [...(lines.get(key) ?? []), { time, kind, reason, clients: [client] }]);
  };
  const left = new Set();
  for (let row = 0; row < presence.rows; row += 1) {
    const client = presence.client[row];
    if (!presence.online[row]) {
      left.add(client);
      add(presence.time[row], "offline", client);
    } else if (left.delete(client)) add(presence.time[row], "online", client);
  }
  for (let row = 0; row < rejections.rows; row += 1) {
    const reason = reasonText(reasons.text[rejections.reason[row]]);
    add(rejections.time[row], "rejected", rejections.client[row], reason);
  }
  return [...lines.values()].flat().map(({ time, kind, reason, clients }) => ({
    time, kind, text: [namesOf(run, clients), reason].filter(Boolean).join(": ") }));
}

function namesOf(run, clients) {
  const names = [...new Set(clients)].map((client) => run.nameOf(client));
  const more = names.length - MOST_NAMES;
  const times = clients.length > names.length ? ` (${plural(clients.length, "time")})` : "";
  const shown = names.slice(0, MOST_NAMES).map((name) => name.slice(0, 80)).join(", ");
  return `${shown}${more > 0 ? ` and ${plural(more, "other")}` : ""}${times}`;
}

function changed(gone, made, moved) {
  const name = (clusters) => `cluster${clusters.length === 1 ? "" : "s"} ${clusters.join(", ")}`;
  const who = moved ? ` (${plural(moved, "client")})` : "";
  if (gone.length && made.length) return `${name(gone)} → ${name(made)}${who}`;
  return made.length ? `new ${name(made)}${who}` : `${name(gone)} ended`;
}
