// All clients in a table that sorts and searches. Only the rows in sight exist.

import { clusterColour } from "../colours.js";
import { panel } from "../panel.js";
import { make, nameElement, number, plural, refill, timeText } from "../words.js";

const ROW = 34;
const EXTRA = 6;
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
      "aria-label": "Search clients, by name or cluster", oninput: () => this.again() });
    this.count = make("span", { class: "note", role: "status" });
    this.heads = COLUMNS.map((column) => {
      const button = make("button", { type: "button", onclick: () => this.sortBy(column.key) },
        column.head);
      return make("th", { scope: "col", class: column.word ? "word" : "" }, button);
    });
    this.body = make("tbody", {});
    this.table = make("table", { class: "clients" },
      make("thead", {}, make("tr", {}, ...this.heads)), this.body);
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
    const all = [...names.keys()];
    this.rows = wanted
      ? all.filter((client) => names[client].toLowerCase().includes(wanted) ||
          `cluster ${this.moment.cluster[client]}` === wanted)
      : all;
    const ranks = this.by === "name" ? this.ranks(names) : null;
    const value = (client) => (ranks ? ranks[client] : this.value(client, this.by));
    const order = (one, other) => compare(value(one), value(other)) * (this.down ? -1 : 1);
    this.rows.sort((one, other) => order(one, other) || one - other);
    COLUMNS.forEach(({ key }, index) => {
      const sorted = key === this.by ? (this.down ? "descending" : "ascending") : "none";
      this.heads[index].setAttribute("aria-sort", sorted);
    });
    this.count.textContent = wanted
      ? `${number(this.rows.length)} of ${plural(all.length, "client")}`
      : plural(all.length, "client");
    this.table.setAttribute("aria-rowcount", String(this.rows.length + 1));
    this.fill();
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

  /** Fill in the rows in sight; what is above and below them is empty room. */
  fill() {
    if (!this.rows) return;
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - EXTRA);
    const seen = Math.ceil((this.scroll.clientHeight || 400) / ROW) + 2 * EXTRA;
    const shown = this.rows.slice(first, first + seen);
    const kept = document.activeElement?.dataset?.client;
    refill(
      this.body,
      room(first * ROW),
      ...shown.map((client, index) => this.row(client, first + index)),
      room((this.rows.length - first - shown.length) * ROW),
    );
    if (kept !== undefined) this.body.querySelector(`[data-client="${kept}"]`)?.focus();
  }

  row(client, index) {
    const selected = this.board.selection?.client === client;
    const cells = COLUMNS.map((column, position) => {
      const content = this.content(client, column.key);
      return make(position ? "td" : "th",
        { class: column.word ? "word" : "", ...(position ? {} : { scope: "row" }) }, content);
    });
    return make("tr", { "aria-rowindex": index + 2, class: selected ? "selected" : "" }, ...cells);
  }

  content(client, key) {
    const value = this.value(client, key);
    if (key === "name") {
      return make("button", { type: "button", class: "link", "data-client": client,
        onclick: () => this.board.select({ client }) }, nameElement(value));
    }
    if (key === "cluster") {
      if (value === null) return "–";
      const dot = make("span", { class: "dot", "aria-hidden": "true" });
      dot.style.setProperty("--colour", clusterColour(value));
      return make("span", {}, dot, String(value));
    }
    if (key === "state") return value;
    if (key === "heard") return value === null ? "–" : timeText(value, this.board.run.end);
    if (key === "accuracy") return number(value, 3);
    if (key === "staleness") return number(value, 1);
    return value === null ? "–" : number(value);
  }
}

function room(height) {
  const cell = make("td", { colspan: COLUMNS.length, class: "room" });
  cell.style.height = `${height}px`;
  return make("tr", { "aria-hidden": "true" }, cell);
}

const collator = new Intl.Collator("en", { numeric: true });

function compare(one, other) {
  if (one === null || other === null) return (one === null) - (other === null);
  return typeof one === "string" ? collator.compare(one, other) : one - other;
}
