// All clients in a table that sorts and searches. Only the rows in sight exist.

import { clusterColour } from "../colours.js";
import { panel } from "../panel.js";
import { make, nameElement, number, plural, refill, timeText } from "../words.js";

const ROW = 34;
const EXTRA = 3;
const COLUMNS = [
  { key: "name", head: "client", word: true },
  { key: "cluster", head: "cluster" },
  { key: "group", head: "true group" },
  { key: "state", head: "state", word: true },
  { key: "examples", head: "examples" },
  { key: "updates", head: "updates" },
  { key: "rejected", head: "rejected" },
  { key: "staleness", head: "mean staleness" },
  { key: "lastUpdate", head: "last update" },
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
    this.body.style.height = `${this.rows.length * ROW}px`;
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - EXTRA);
    const seen = Math.ceil(this.scroll.clientHeight / ROW) + 2 * EXTRA;
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const { held } = this;
    this.held = new Map(this.rows.slice(first, first + seen).map((client, index) =>
      [client, this.rowOf(client, first + index, held.get(client))]));
    for (const [client, row] of held) if (!this.held.has(client)) row.remove();
    // In order, as one goes through them with Tab; one that stays in its place keeps the focus.
    let place = this.body.firstChild;
    for (const row of this.held.values()) {
      if (row === place) place = place.nextSibling;
      else this.body.insertBefore(row, place);
    }
    if (focused?.isConnected) focused.focus({ preventScroll: true });
  }

  /** Make a client's row, or fill the one that there is: what is as it was stays. */
  rowOf(client, index, held) {
    const row = held ?? make("tr", { role: "row" });
    row.style.top = `${index * ROW}px`;
    row.setAttribute("aria-rowindex", index + 2);
    row.classList.toggle("selected", this.board.selection?.client === client);
    refill(row, ...COLUMNS.map(({ key, word }, column) =>
      make(column ? "td" : "th", { class: word ? "word" : "", scope: column ? null : "row",
        role: column ? "cell" : "rowheader" }, ...this.cell(client, key))));
    return row;
  }

  cell(client, key) {
    if (key === "name") {
      const link = make("button", { type: "button", class: "link", "data-client": client,
        onclick: () => this.board.select({ client }) }, nameElement(this.board.run.nameOf(client)));
      const labels = this.board.run.labels.get(client);
      return labels ? [link, make("bdi", { class: "note" }, ` ${labels}`)] : [link];
    }
    const text = this.text(client, key);
    const cluster = key === "cluster" ? this.value(client, key) : null;
    if (cluster === null) return [text];
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    dot.style.setProperty("--colour", clusterColour(cluster));
    return [dot, text];
  }

  text(client, key) {
    const value = this.value(client, key);
    if (key === "state") return value;
    if (key === "lastUpdate") return value === null ? "–" : timeText(value, this.board.run.end);
    if (key === "accuracy") return number(value, 3);
    if (key === "staleness") return number(value, 1);
    return number(value);
  }
}

const STATES = ["–", "excluded", "offline", "online"];
const collator = new Intl.Collator("en", { numeric: true });
