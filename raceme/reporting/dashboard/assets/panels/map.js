// The clients as dots: close together in a cluster, or as alike as their models are.

import { Canvas, pictureButton } from "../canvas.js";
import { clusterColour, groupColour, named } from "../colours.js";
import { note, panel } from "../panel.js";
import { countUntil } from "../run.js";
import { make, nameElement, plural, timeText } from "../words.js";

const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const LEAST = 1.5; // Smaller dots are drawn as squares, which look the same.
const LEAST_APART = 0.14; // Where 1 is the root of the mean square distance from the middle.
const MARGIN = 16;

export class MapPanel {
  constructor(board) {
    this.board = board;
    this.canvas = new Canvas(430, "Map of the clients", () => board.changed());
    this.groups = make("input", { type: "checkbox", onchange: () => board.changed() });
    this.alike = make("input", { type: "checkbox", checked: true,
      onchange: () => board.changed() });
    this.groupsLabel = make("label", {}, this.groups, " true groups");
    this.alikeLabel = make("label", {}, this.alike, " by similarity");
    this.tip = make("p", { class: "tip", "aria-hidden": "true" });
    this.note = note("");
    this.element = panel(
      "map", "Map of the clients", "",
      make("div", { class: "options" }, this.groupsLabel, this.alikeLabel,
        pictureButton(this.canvas, "Map of the clients",
          () => [...board.moment.members().keys()])),
      make("div", { class: "held" }, this.canvas.element, this.tip),
      this.note,
    );
    this.canvas.element.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.element.addEventListener("mouseleave", () => this.tip.classList.remove("shown"));
    this.canvas.element.addEventListener("click", (event) => {
      const client = this.nearest(this.canvas.at(event));
      if (client !== null) board.select({ client });
    });
  }

  draw(moment) {
    const frame = this.frameAt(moment);
    this.alikeLabel.hidden = !frame;
    const byLikeness = Boolean(frame) && this.alike.checked;
    this.groupsLabel.hidden = !moment.group.some((group) => group >= 0);
    this.note.textContent = byLikeness ? this.said(frame) :
      "Each disc is a cluster.";
    const places = byLikeness ? this.likeness(frame) : this.discs(moment);
    this.paint(places, moment);
  }

  /** Return the snapshot that was the latest at a moment; null if there was none. */
  frameAt(moment) {
    const { frames } = this.board.run;
    const index = countUntil(frames.map(({ time }) => time), moment.time) - 1;
    return frames[index] ?? null;
  }

  said({ time, names }) {
    const missing = this.board.run.size - names.length;
    const when = timeText(time, this.board.run.end);
    return `Close together: clients with similar models, at the evaluation at ${when}.` +
      (missing > 0 ? ` ${plural(missing, "client")} had sent no update by then.` : "");
  }

  likeness(frame) {
    const { run } = this.board;
    if (this.shownFrame !== frame || this.shownSize !== run.size) {
      const { numbers } = run;
      const places = { dots: [], x: [], y: [] };
      frame.names.forEach((name, index) => {
        if (numbers.has(name)) place(places, numbers.get(name), frame.x[index], frame.y[index]);
      });
      [this.shownFrame, this.shownSize] = [frame, run.size];
      this.found = apart(places, LEAST_APART);
    }
    return this.found;
  }

  /** Return each client's place in the disc of its cluster. */
  discs(moment) {
    const members = moment.members();
    const centres = this.centres(members);
    const places = { dots: [], x: [], y: [] };
    for (const [cluster, clients] of members) {
      const [x, y] = centres.get(cluster);
      clients.forEach((client, index) => {
        const radius = Math.sqrt(index + 0.5);
        place(places, client, x + radius * Math.cos(index * GOLDEN),
          y + radius * Math.sin(index * GOLDEN));
      });
    }
    return places;
  }

  /** Return where discs are: on a ring in the order of the streams, as wide as they need. */
  centres(members) {
    const sizes = [...members].map(([cluster, clients]) => [cluster, Math.sqrt(clients.length) + 1]);
    if (sizes.length === 1) return new Map([[sizes[0][0], [0, 0]]]);
    const total = sizes.reduce((sum, [, radius]) => sum + radius, 0);
    const largest = Math.max(...sizes.map(([, radius]) => radius));
    const ring = Math.max(total / Math.PI, largest * 1.15);
    let angle = -Math.PI / 2;
    const found = new Map();
    for (const [cluster, radius] of sizes) {
      const turn = (radius / total) * Math.PI;
      angle += turn;
      found.set(cluster, [ring * Math.cos(angle), ring * Math.sin(angle)]);
      angle += turn;
    }
    return found;
  }

  paint({ dots, x, y }, moment) {
    const context = this.canvas.begin();
    const { width, height } = this.canvas;
    const [left, right, top, bottom] = [...bounds(x), ...bounds(y)];
    const scale = Math.min(
      (width - 2 * MARGIN) / (right - left), (height - 2 * MARGIN) / (bottom - top),
    );
    const radius = Math.max(1.2, Math.min(7, 60 / Math.sqrt(dots.length + 1)));
    const byGroup = this.groups.checked && !this.groupsLabel.hidden;
    const labels = byGroup ? moment.group : moment.cluster;
    const looks = new Map(); // Those that look the same are drawn together.
    this.drawn = [dots, Array.from(x, (at) => width / 2 + (at - (left + right) / 2) * scale),
      Array.from(y, (at) => height / 2 + (at - (top + bottom) / 2) * scale)];
    dots.forEach((client, index) => {
      const look = 2 * labels[client] + moment.online[client];
      if (!looks.has(look)) looks.set(look, []);
      looks.get(look).push(client, this.drawn[1][index], this.drawn[2][index]);
    });
    for (const [look, found] of looks) {
      const label = Math.floor(look / 2);
      context.globalAlpha = look % 2 ? 1 : 0.3;
      context.fillStyle = byGroup ? groupColour(label) : clusterColour(label);
      for (let at = 0; at < found.length; at += 3) {
        if (radius < LEAST) {
          context.fillRect(found[at + 1] - radius, found[at + 2] - radius, 2 * radius, 2 * radius);
          continue;
        }
        context.beginPath();
        context.arc(found[at + 1], found[at + 2], radius, 0, 2 * Math.PI);
        context.fill();
        if (!byGroup) continue;
        context.strokeStyle = clusterColour(moment.cluster[found[at]]);
        context.lineWidth = Math.min(2, radius / 2);
        context.stroke();
      }
    }
    context.globalAlpha = 1;
    this.ring(context, radius);
  }

  /** Draw a ring around the client that is selected. */
  ring(context, radius) {
    const at = this.drawn[0].indexOf(this.board.selection?.client ?? -1);
    if (at < 0) return;
    context.strokeStyle = named("ink");
    context.lineWidth = 2;
    context.beginPath();
    context.arc(this.drawn[1][at], this.drawn[2][at], radius + 3, 0, 2 * Math.PI);
    context.stroke();
  }

  nearest([x, y]) {
    let [best, least] = [null, 14 ** 2];
    const [clients, xs, ys] = this.drawn ?? [[], [], []];
    for (let index = 0; index < clients.length; index += 1) {
      const distance = (xs[index] - x) ** 2 + (ys[index] - y) ** 2;
      if (distance < least) [best, least] = [clients[index], distance];
    }
    return best;
  }

  point(event) {
    const [x, y] = this.canvas.at(event);
    const client = this.nearest([x, y]);
    this.tip.classList.toggle("shown", client !== null);
    if (client === null) return;
    const cluster = this.board.moment.cluster[client];
    this.tip.replaceChildren(nameElement(this.board.run.nameOf(client)), ` · cluster ${cluster}`);
    this.tip.style.left = `${Math.min(x + 12, this.canvas.width - 150)}px`;
    this.tip.style.top = `${y + 12}px`;
  }
}

function place(places, client, x, y) {
  places.dots.push(client);
  places.x.push(x);
  places.y.push(y);
}

/** Return the least and the largest of some positions, apart from each other. */
function bounds(values) {
  let [low, high] = values.length ? [Infinity, -Infinity] : [-1, 1];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low - 1e-6, high + 1e-6];
}

const MOST_APART = 300; // Of more dots, so many cover each other that a missing one is not seen.
const TURNS = 40;

/** Move dots that cover each other apart, so that each can be seen; others stay where they are. */
function apart({ dots, x, y }, least) {
  const [freeX, freeY] = [Float64Array.from(x), Float64Array.from(y)];
  for (let turn = 0; turn < TURNS && dots.length <= MOST_APART; turn += 1) {
    let moved = false;
    for (let one = 0; one < dots.length; one += 1) {
      for (let other = 0; other < one; other += 1) {
        let [dx, dy] = [freeX[one] - freeX[other], freeY[one] - freeY[other]];
        const distance = Math.hypot(dx, dy);
        if (distance >= least) continue;
        // Two at the same place go anywhere, but always to the same.
        if (distance < 1e-9) [dx, dy] = [Math.cos(one), Math.sin(one)];
        const push = (least - distance) / 2 / (distance < 1e-9 ? 1 : distance);
        freeX[one] += dx * push;
        freeY[one] += dy * push;
        freeX[other] -= dx * push;
        freeY[other] -= dy * push;
        moved = true;
      }
    }
    if (!moved) break;
  }
  return { dots, x: freeX, y: freeY };
}
