// The clients as dots: close together in a cluster, or as alike as their models are.

import { Canvas } from "../canvas.js";
import { clusterColour, groupColour, named } from "../colours.js";
import { calm } from "../motion.js";
import { note, panel } from "../panel.js";
import { countUntil } from "../run.js";
import { make, nameElement, plural, timeText } from "../words.js";

const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const MILLISECONDS = 700; // A dot that moves takes so long.
const MARGIN = 16;

export class MapPanel {
  constructor(board) {
    this.board = board;
    this.canvas = new Canvas(340, "Map of the clients", () => board.changed());
    this.groups = make("input", { type: "checkbox", onchange: () => board.changed() });
    this.alike = make("input", { type: "checkbox", checked: true,
      onchange: () => board.changed() });
    this.groupsLabel = make("label", {}, this.groups, " true groups");
    this.alikeLabel = make("label", {}, this.alike, " by similarity");
    this.tip = make("p", { class: "tip", "aria-hidden": "true" });
    this.note = note("");
    this.element = panel(
      "map", "Map of the clients", "",
      make("div", { class: "options" }, this.groupsLabel, this.alikeLabel),
      make("div", { class: "held" }, this.canvas.element, this.tip),
      this.note,
    );
    this.places = new Map();
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
      "A disc is a cluster; dots go over when their clients do.";
    this.aim(moment, byLikeness ? this.likeness(frame) : this.discs(moment));
    this.paint(moment);
  }

  /** Return the snapshot that was the latest at a moment; null if there was none. */
  frameAt(moment) {
    const { frames } = this.board.run;
    const index = countUntil(frames.map(({ time }) => time), moment.time) - 1;
    return frames[index] ?? frames.find(({ lasting }) => lasting) ?? null;
  }

  said({ time, lasting, names }) {
    if (lasting) return "Close together: models that were alike at the end, as the method says.";
    const missing = this.board.run.size - names.length;
    const when = timeText(time, this.board.run.end);
    return `Close together: clients whose models are alike, at the evaluation at ${when}.` +
      (missing > 0 ? ` ${plural(missing, "client")} had not been heard by then.` : "");
  }

  likeness(frame) {
    if (this.shownFrame !== frame || this.shownSize !== this.board.run.size) {
      const { numbers, size } = this.board.run;
      [this.shownFrame, this.shownSize, this.found] = [frame, size, new Map()];
      frame.names.forEach((name, index) => {
        if (numbers.has(name)) this.found.set(numbers.get(name), [frame.x[index], frame.y[index]]);
      });
    }
    return this.found;
  }

  /** Return each client's place in the disc of its cluster. */
  discs(moment) {
    const members = moment.members();
    const centres = this.centres(members);
    const found = new Map();
    for (const [cluster, clients] of members) {
      const [x, y] = centres.get(cluster);
      clients.forEach((client, index) => {
        const radius = Math.sqrt(index + 0.5);
        found.set(client, [
          x + radius * Math.cos(index * GOLDEN), y + radius * Math.sin(index * GOLDEN),
        ]);
      });
    }
    return found;
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

  /** Let the dots go to new places, from where they are. */
  aim(moment, targets) {
    const now = performance.now();
    const box = bounds(targets);
    const jump = calm() || this.places.size === 0 || targets.size > 3000;
    if (!this.box || jump || this.boxOf !== String(box)) {
      this.from = this.box ?? box;
      this.boxAt = jump ? -Infinity : now;
      this.boxOf = String(box);
      this.aimed = box;
    }
    for (const [client, [x, y]] of targets) {
      const place = this.places.get(client);
      if (!place || jump) this.places.set(client, { x, y, fromX: x, fromY: y, at: -Infinity });
      else if (place.x !== x || place.y !== y) {
        const [nowX, nowY] = where(place, now);
        this.places.set(client, { x, y, fromX: nowX, fromY: nowY, at: now });
      }
    }
    for (const client of this.places.keys()) if (!targets.has(client)) this.places.delete(client);
  }

  paint(moment) {
    const context = this.canvas.begin();
    const { width, height } = this.canvas;
    const now = performance.now();
    const share = eased((now - this.boxAt) / MILLISECONDS);
    this.box = this.aimed.map((value, index) => this.from[index] + share * (value - this.from[index]));
    const [left, top, right, bottom] = this.box;
    const scale = Math.min(
      (width - 2 * MARGIN) / (right - left), (height - 2 * MARGIN) / (bottom - top),
    );
    const toX = (x) => width / 2 + (x - (left + right) / 2) * scale;
    const toY = (y) => height / 2 + (y - (top + bottom) / 2) * scale;
    const radius = Math.max(1.2, Math.min(7, 60 / Math.sqrt(this.places.size + 1)));
    const byGroup = this.groups.checked && !this.groupsLabel.hidden;
    this.drawn = [];
    let moves = share < 1;
    for (const [client, place] of this.places) {
      const [x, y] = where(place, now).map((value, axis) => (axis ? toY(value) : toX(value)));
      moves ||= now - place.at < MILLISECONDS;
      this.drawn.push([client, x, y]);
      context.globalAlpha = moment.online[client] ? 1 : 0.3;
      context.fillStyle = byGroup
        ? groupColour(moment.group[client])
        : clusterColour(moment.cluster[client]);
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.fill();
      if (byGroup) {
        context.strokeStyle = clusterColour(moment.cluster[client]);
        context.lineWidth = Math.min(2, radius / 2);
        context.stroke();
      }
      if (this.board.selection?.client === client) {
        context.strokeStyle = named("ink");
        context.lineWidth = 2;
        context.beginPath();
        context.arc(x, y, radius + 3, 0, 2 * Math.PI);
        context.stroke();
      }
    }
    context.globalAlpha = 1;
    if (moves) requestAnimationFrame(() => this.board.redraw(this));
  }

  nearest([x, y]) {
    let [best, least] = [null, 14 ** 2];
    for (const [client, atX, atY] of this.drawn ?? []) {
      const distance = (atX - x) ** 2 + (atY - y) ** 2;
      if (distance < least) [best, least] = [client, distance];
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

function bounds(places) {
  let [left, top, right, bottom] = [-1, -1, 1, 1];
  if (places.size) [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [x, y] of places.values()) {
    [left, right] = [Math.min(left, x), Math.max(right, x)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
  }
  const least = 1e-6;
  return [left - least, top - least, right + least, bottom + least];
}

function where(place, now) {
  const share = eased((now - place.at) / MILLISECONDS);
  return [
    place.fromX + share * (place.x - place.fromX), place.fromY + share * (place.y - place.fromY),
  ];
}

function eased(share) {
  const held = Math.max(0, Math.min(1, share));
  return held * held * (3 - 2 * held);
}
