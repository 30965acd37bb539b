// All clients in a table that sorts and searches. Only the rows in sight exist.

import { clusterColour } from "../colours.js";
import { panel } from "../panel.js";
import { make, number, plural, rename, timeText } from "../words.js";

const ROW = 34;
const EXTRA = 3;
const SETTLED = 150; // Milliseconds.
const COLUMNS = [
  { key: "name", head: "client", word: true },
  { key: "cluster", head: "cluster" },
  { key: "group", head: "true group" },
  { key: "state", head: "state", word: true },
  { key: "examples", head: "examples" },
  { key: "updates", head: "updates" },
  { key: "rejected", head: "rejected" },
  { key: "staleness", head: "mean staleness" },
  { key: "heard", head: "last update" },
  { key: "accuracy", head: "accuracy" },
];

export class ClientsPanel {
  constructor(board) {
    this.board = board;
    this.by = "name";
    this.down = false;
    this.search = make("input", { type: "search", placeholder: "Search clients",
      "aria-label": "Search clients, by name, label or cluster", oninput: () => this.again() });
    this.count = make("span", { class: "note", role: "status" });
    this.heads = COLUMNS.map((column) => {
      const button = make("button", { type: "button", onclick: () => this.sortBy(column.key) },
        column.head);
      return make("th", { scope: "col", role: "columnheader", class: column.word ? "word" : "" },
        button);
    });
    this.body = make("tbody", { role: "rowgroup" });
    this.held = new Map(); // The rows that exist, by client.
    // Rows have places of their own, so that one that changes moves no other; what that takes from
    // the elements of a table, their roles give back.
    this.table = make("table", { class: "clients", role: "table" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...this.heads)), this.body);
    this.scroll = make("div", { class: "scroll tall", tabindex: "0", role: "region",
      "aria-label": "Clients", onscroll: () => this.fill() }, this.table);
    this.element = panel("clients", "Clients", "wide",
      make("div", { class: "options" }, this.search, this.count), this.scroll);
  }

  draw(moment) {
    this.moment = moment;
    const label = this.board.run.measure.label;
    const head = this.heads.at(-1).firstChild;
    if (head.textContent !== label) head.textContent = label;
    this.again();
  }

  sortBy(key) {
    this.down = this.by === key ? !this.down : !["name", "cluster", "state"].includes(key);
    this.by = key;
    this.again();
  }

  /** Choose and sort the rows, and fill in those in sight. */
  again() {
    if (!this.moment) return;
    const { run } = this.board;
    const wanted = this.search.value.trim().toLowerCase();
    const names = run.tables.clients.name ?? [];
    this.rows = wanted ? this.found(names, wanted) : [...names.keys()];
    this.sort(names);
    COLUMNS.forEach(({ key }, index) => {
      const sorted = key === this.by ? (this.down ? "descending" : "ascending") : "none";
      this.heads[index].setAttribute("aria-sort", sorted);
    });
    this.count.textContent = wanted
      ? `${number(this.rows.length)} of ${plural(names.length, "client")}`
      : plural(names.length, "client");
    this.table.setAttribute("aria-rowcount", String(this.rows.length + 1));
    for (const row of this.held.values()) row.filled = false;
    this.fill();
  }

  found(names, wanted) {
    const found = [];
    names.forEach((name, client) => {
      const is = name.toLowerCase().includes(wanted) ||
        this.board.run.labels.get(client)?.toLowerCase().includes(wanted) ||
        `cluster ${this.moment.cluster[client]}` === wanted;
      if (is) found.push(client);
    });
    return found;
  }

  /** Sort the rows; those whose value is not known are last, however it is sorted. */
  sort(names) {
    const sign = this.down ? -1 : 1;
    const keys = new Float64Array(names.length);
    if (this.by === "name") keys.set(this.ranks(names));
    else {
      for (const client of this.rows) {
        const value = this.value(client, this.by);
        keys[client] = typeof value === "string" ? STATES.indexOf(value) : (value ?? NaN);
      }
    }
    const unknown = (client) => Number(Number.isNaN(keys[client]));
    this.rows.sort((one, other) =>
      sign * (keys[one] - keys[other]) || unknown(one) - unknown(other) || one - other);
  }

  /** Return each client's place in the order of names, which is found once for all. */
  ranks(names) {
    if (this.ranked?.length !== names.length) {
      const order = [...names.keys()].sort((one, other) =>
        collator.compare(names[one], names[other]));
      this.ranked = new Int32Array(names.length);
      order.forEach((client, rank) => (this.ranked[client] = rank));
    }
    return this.ranked;
  }

  value(client, key) {
    const { moment } = this;
    if (key === "name") return this.board.run.nameOf(client);
    if (key === "state") return this.state(client);
    if (key === "accuracy") return moment.accuracyOf(client);
    if (key === "staleness") {
      return moment.updates[client] ? moment.staleness[client] / moment.updates[client] : null;
    }
    const value = moment[key][client];
    return value < 0 ? null : value;
  }

  state(client) {
    if (this.moment.excluded[client]) return "excluded";
    if (!this.moment.known[client]) return "–";
    return this.moment.online[client] ? "online" : "offline";
  }

  /** Fill in the rows in sight; the room of the others is empty. */
  fill() {
    if (!this.rows) return;
    const height = `${this.rows.length * ROW}px`;
    if (this.body.style.height !== height) this.body.style.height = height;
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - EXTRA);
    const seen = Math.ceil(this.scroll.clientHeight / ROW) + 2 * EXTRA;
    const shown = this.rows.slice(first, first + seen);
    const wanted = new Set(shown);
    // Rows that went out of sight are used for those that came, but never one with the focus.
    const spare = [];
    for (const [client, row] of this.held) {
      if (wanted.has(client)) continue;
      this.held.delete(client);
      if (row.element.contains(document.activeElement)) row.element.remove();
      else spare.push(row);
    }
    shown.forEach((client, index) => {
      const row = this.held.get(client) ?? spare.shift() ?? this.makeRow();
      this.held.set(client, row);
      if (!row.element.isConnected) this.body.append(row.element);
      this.fillRow(row, client, first + index);
    });
    for (const row of spare) row.element.remove();
    // Where rows stand does not depend on their order, but how one goes through them with Tab does.
    clearTimeout(this.ordering);
    this.ordering = setTimeout(() => this.order(), SETTLED);
  }

  /** Put the rows in order, once nothing moves any more. */
  order() {
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    let place = this.body.firstChild;
    const rows = [...this.held.values()].sort((one, other) => one.index - other.index);
    for (const { element } of rows) {
      if (element === place) place = place.nextSibling;
      else this.body.insertBefore(element, place);
    }
    // An element that is moved loses the focus.
    if (document.activeElement !== focused) focused?.focus({ preventScroll: true });
  }

  /** Make an empty row: its cells and what of them changes. */
  makeRow() {
    const name = make("bdi", {});
    const link = make("button", { type: "button", class: "link" }, name);
    const labels = document.createTextNode("");
    const note = make("bdi", { class: "note" }, labels);
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    const texts = COLUMNS.map(() => document.createTextNode(""));
    const cells = COLUMNS.map(({ key, word }, index) => {
      const children = { name: [link, note], cluster: [dot, texts[index]] }[key] ?? [texts[index]];
      return make(index ? "td" : "th", { class: word ? "word" : "", scope: index ? null : "row",
        role: index ? "cell" : "rowheader" }, ...children);
    });
    const row = { element: make("tr", { role: "row" }, ...cells), link, name,
      labels, dot, texts, client: -1, filled: false };
    link.addEventListener("click", () => this.board.select({ client: row.client }));
    return row;
  }

  fillRow(row, client, index) {
    const is = this.board.selection?.client === client;
    if (row.selected !== is) row.element.classList.toggle("selected", (row.selected = is));
    if (row.index !== index) {
      row.index = index;
      row.element.setAttribute("aria-rowindex", index + 2);
      row.element.style.top = `${index * ROW}px`;
    }
    if (row.client === client && row.filled) return;
    if (row.client !== client) {
      row.client = client;
      row.link.dataset.client = client;
      rename(row.name, this.board.run.nameOf(client));
    }
    const labels = this.board.run.labels.get(client);
    row.labels.data = labels ? ` ${labels}` : "";
    row.filled = true;
    const cluster = this.value(client, "cluster");
    const colour = cluster === null ? "transparent" : clusterColour(cluster);
    if (row.colour !== colour) row.dot.style.setProperty("--colour", (row.colour = colour));
    COLUMNS.forEach(({ key }, column) => {
      if (key === "name") return;
      const text = this.text(client, key);
      if (row.texts[column].data !== text) row.texts[column].data = text;
    });
  }

  text(client, key) {
    const value = this.value(client, key);
    if (key === "state") return value;
    if (key === "heard") return value === null ? "–" : timeText(value, this.board.run.end);
    if (key === "accuracy") return number(value, 3);
    if (key === "staleness") return number(value, 1);
    return number(value);
  }
}

const STATES = ["–", "excluded", "offline", "online"];
const collator = new Intl.Collator("en", { numeric: true });
