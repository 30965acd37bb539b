// When devices work: a row per device, the fastest on top, a bar per task.

import { Canvas, pictureButton, timeAxis } from "../canvas.js";
import { clusterColour, named } from "../colours.js";
import { note, panel } from "../panel.js";
import { countUntil } from "../run.js";
import { make, number } from "../words.js";

const MOST_ROWS = 40;
const MOST_BARS = 1500; // The stretch of time is chosen so that bars can be told apart.
const LATE = 3; // A task is late if it takes more than so many times the fleet's median.
const BOTTOM = 36;
const NAME = 11; // Height of a name.
const SAMPLE = 4001; // Of more tasks the median is that of some.

export class DevicesPanel {
  constructor(board) {
    this.board = board;
    this.canvas = new Canvas(320, "Devices at work", () => board.changed());
    this.legend = make(
      "ul", { class: "legend words" },
      key("busy", "at work, in the colour of its cluster"), key("late", "late"),
      key("rejected", "rejected"), key("offline", "offline"),
    );
    this.note = note("");
    this.element = panel("devices", "Devices at work", "",
      make("div", { class: "options" },
        pictureButton(this.canvas, "Devices at work", () => board.run.clusters)),
      this.canvas.element, this.legend, this.note);
    this.canvas.element.addEventListener("click", (event) => {
      const row = Math.floor((this.canvas.at(event)[1] - 6) / this.rowHeight);
      if (this.rows?.[row] !== undefined) board.select({ client: this.rows[row] });
    });
  }

  draw(moment) {
    const { run } = this.board;
    const { updates, rejections } = run.tables;
    if (this.revision !== run.revision) {
      this.revision = run.revision;
      this.measure(run);
    }
    const rows = this.chosen();
    this.rows = rows;
    const context = this.canvas.begin(Math.max(140, Math.min(480, rows.length * 18)) + BOTTOM);
    const { width, height } = this.canvas;
    this.rowHeight = (height - BOTTOM - 6) / Math.max(1, rows.length);
    const place = new Map(rows.map((client, row) => [client, row]));
    const stop = moment.time || 1;
    // Only some of the devices are shown, so that the stretch may hold more bars.
    const share = run.size / Math.max(1, rows.length);
    const first = Math.max(0, moment.applied - Math.floor(MOST_BARS * share));
    const start = first ? updates.time[first - 1] : 0;
    const left = this.drawNames(context, rows);
    const toX = (time) => left + ((time - start) / (stop - start || 1)) * (width - left - 4);
    timeAxis(context, run, [start, stop], toX, [2, height - BOTTOM + 4]);
    const bar = (client, from, to, fill) => {
      const row = place.get(client);
      if (row === undefined || to < start || from > stop) return;
      const [x, end] = [toX(Math.max(from, start)), toX(Math.min(to, stop))];
      const y = 6 + row * this.rowHeight;
      fill(x, y + this.rowHeight * 0.12, Math.max(end - x, 1), this.rowHeight * 0.76);
    };
    this.drawOffline(moment, bar, context, start, stop);
    for (let row = first; row < updates.rows && updates.sent[row] <= stop; row += 1) {
      if (updates.time[row] > stop + this.longest) break;
      const late = updates.time[row] - updates.sent[row] > LATE * this.median;
      bar(updates.client[row], updates.sent[row], updates.time[row], (x, y, wide, high) => {
        context.fillStyle = clusterColour(updates.cluster[row]);
        context.fillRect(x, y, Math.max(wide - 1, 0.8), high);
        if (late) {
          context.fillStyle = named("ink");
          context.fillRect(x, y + high - 2, Math.max(wide - 1, 0.8), 2);
        }
      });
    }
    for (let row = 0; row < rejections.rows; row += 1) {
      bar(rejections.client[row], rejections.sent[row], rejections.time[row], (x, y, wide, high) => {
        context.strokeStyle = named("alarm");
        context.lineWidth = 1.5;
        context.strokeRect(x + 1, y + 1, Math.max(wide - 2, 1), Math.max(high - 2, 1));
        context.beginPath();
        context.moveTo(x + 1, y + high - 1);
        context.lineTo(x + Math.max(wide - 1, 1), y + 1);
        context.stroke();
      });
    }
    const shown = rows.length < run.size ? `${rows.length} of ${number(run.size)} devices` :
      `${rows.length} devices`;
    this.note.textContent = `${shown}, fastest first. Late: more than ${LATE} times the fleet's ` +
      "median task. Gaps between bars are waiting time, or work without a reply yet.";
  }

  /** Draw the names of the devices, of every second if rows are low; return where bars begin. */
  drawNames(context, rows) {
    const names = rows.map((client) => this.board.run.nameOf(client));
    const most = this.canvas.width < 420 ? 11 : 18;
    const short = names.map((name) => (name.length > most ? `${name.slice(0, most - 1)}…` : name));
    const every = Math.ceil(NAME / this.rowHeight);
    context.font = `${NAME}px system-ui, sans-serif`;
    context.fillStyle = named("muted");
    context.textAlign = "left";
    context.textBaseline = "middle";
    short.forEach((name, row) => {
      if (row % every === 0) context.fillText(name, 2, 6 + (row + 0.5) * this.rowHeight);
    });
    return 10 + Math.max(...short.map((name) => context.measureText(name).width), 0);
  }

  drawOffline(moment, bar, context, start, stop) {
    const { presence } = this.board.run.tables;
    const since = new Map();
    const fill = (x, y, wide, high) => {
      context.fillStyle = named("hatch");
      context.fillRect(x, y + high * 0.36, wide, high * 0.28);
    };
    for (let row = 0; row < presence.rows && presence.time[row] <= stop; row += 1) {
      const client = presence.client[row];
      if (!presence.online[row]) since.set(client, presence.time[row]);
      else if (since.has(client)) {
        bar(client, since.get(client), presence.time[row], fill);
        since.delete(client);
      }
    }
    for (const [client, from] of since) bar(client, from, stop, fill);
  }

  /** Measure how long each device's tasks take. */
  measure(run) {
    const { updates } = run.tables;
    const took = Array.from({ length: run.size }, () => []);
    const all = [];
    const stride = Math.ceil(updates.rows / SAMPLE) || 1;
    this.longest = 0;
    for (let row = 0; row < updates.rows; row += 1) {
      const seconds = updates.time[row] - updates.sent[row];
      took[updates.client[row]].push(seconds);
      if (row % stride === 0) all.push(seconds);
      this.longest = Math.max(this.longest, seconds);
    }
    this.median = medianOf(all);
    this.typical = took.map(medianOf);
    this.order = [...took.keys()].sort((one, other) =>
      this.typical[one] - this.typical[other] || one - other);
  }

  /** Return the devices that are shown, spread from the fastest to the slowest. */
  chosen() {
    const { order } = this;
    if (order.length <= MOST_ROWS) return order;
    const step = (order.length - 1) / (MOST_ROWS - 1);
    const rows = Array.from({ length: MOST_ROWS }, (_, row) => order[Math.round(row * step)]);
    const client = this.board.selection?.client;
    if (client !== undefined && !rows.includes(client)) {
      rows[Math.min(MOST_ROWS - 1, Math.round(order.indexOf(client) / step))] = client;
    }
    return rows;
  }
}

function key(kind, text) {
  return make("li", {}, make("span", { class: `bar ${kind}`, "aria-hidden": "true" }), text);
}

function medianOf(values) {
  if (!values.length) return Infinity;
  const sorted = Float64Array.from(values).sort();
  return sorted[sorted.length >> 1];
}

/** Return the number of updates of a client until a time, for its own history. */
export function updatesOf(run, client, time) {
  const { updates } = run.tables;
  const rows = [];
  for (let row = 0; row < countUntil(updates.time, time); row += 1) {
    if (updates.client[row] === client) rows.push(row);
  }
  return rows;
}
