// What was not used, and why: rejections by reason, and the verdicts on updates.

import { note, panel } from "../panel.js";
import { make, nameElement, number, reasonText, refill } from "../words.js";

const MOST = 12;
const KINDS = ["scaled", "refused", "excluded", "readmitted"];

export class TrustPanel {
  constructor(board) {
    this.board = board;
    this.body = make("div", {});
    this.element = panel("trust", "Rejections and verdicts", "wide", this.body);
  }

  draw(moment) {
    const { run } = this.board;
    const key = [run.revision, moment.refused, moment.verdicts, moment.time].join();
    if (key === this.key) return;
    this.key = key;
    const { rejections, reasons } = run.tables;
    const counts = new Map();
    for (let row = 0; row < moment.refused; row += 1) {
      const reason = rejections.reason[row];
      counts.set(reason, (counts.get(reason) ?? 0) + 1);
    }
    const parts = [];
    if (counts.size) {
      const rows = [...counts].sort((one, other) => other[1] - one[1]).slice(0, MOST);
      parts.push(tableOf(["reason", "replies"], rows.map(([reason, count]) =>
        [nameElement(reasonText(reasons.text[reason])), number(count)])));
      if (counts.size > MOST) parts.push(note(`And ${counts.size - MOST} further reasons.`));
    } else {
      parts.push(note("No replies were rejected so far."));
    }
    if (moment.verdicts) parts.push(this.verdicts(moment));
    refill(this.body, ...parts);
  }

  verdicts(moment) {
    const { verdicts } = this.board.run.tables;
    const { text: reasons } = this.board.run.tables.reasons;
    const [counts, said] = [new Map(), new Map()];
    for (let row = 0; row < moment.verdicts; row += 1) {
      const { measured, bound, verdict, reason } = verdicts;
      const key = `${verdict[row]}: ${reasons[reason[row]]}`;
      said.set(key, [(said.get(key)?.[0] ?? 0) + 1, measured[row], bound[row]]);
      const client = verdicts.client[row];
      const found = counts.get(client) ?? Object.fromEntries(KINDS.map((kind) => [kind, 0]));
      found[verdicts.verdict[row]] += 1;
      counts.set(client, found);
    }
    const total = (found) => found.scaled + found.refused + found.excluded;
    const rows = [...counts]
      .sort((one, other) => total(other[1]) - total(one[1]))
      .slice(0, MOST)
      .map(([client, found]) => [
        make("button", { type: "button", class: "link",
          onclick: () => this.board.select({ client }) }, nameElement(this.board.run.nameOf(client))),
        ...["scaled", "refused"].map((kind) => number(found[kind])),
        moment.excluded[client] ? "excluded" : "–",
      ]);
    const kinds = [...said].slice(0, MOST).map(([key, [count, measured, bound]]) =>
      [nameElement(key), number(count), number(measured, 3), number(bound, 3)]);
    return make("div", {}, make("h3", {}, "Verdicts on updates"),
      tableOf(["verdict", "updates", "last measured", "bound"], kinds),
      tableOf(["client", "scaled", "refused", "now"], rows));
  }
}

const MOST_LETTERS = 24; // A longer text is a sentence, which goes on in the next line.

/** Make a table of cells that are elements (names and reasons) or texts; the first has words. */
export function tableOf(heads, rows) {
  const head = (text, index) => make("th", { scope: "col", class: index ? "" : "word" }, text);
  const cell = (content, index) => {
    const isWord = !index || content instanceof Element || content.length > MOST_LETTERS;
    return make(index ? "td" : "th", { scope: index ? null : "row", class: isWord ? "word" : null },
      content);
  };
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads[0] },
    make("table", {},
      make("thead", {}, make("tr", {}, ...heads.map(head))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell))))));
}
