// A drawing that is as sharp as the screen and as wide as its panel, and its picture as a file.

import { clusterColour, named } from "./colours.js";
import { make, number, timeUnit } from "./words.js";

export const FONT = "12px system-ui, sans-serif";

const ROW = 18; // Height of a line of a picture's legend.
const MOST_NAMED = 40; // Clusters in the legend.

export class Canvas {
  constructor(height, label, redraw) {
    this.element = document.createElement("canvas");
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", label);
    this.element.className = "drawing";
    this.height = height;
    this.width = 0;
    new ResizeObserver(() => this.fit(redraw)).observe(this.element);
  }

  fit(redraw) {
    if (Math.abs(this.element.clientWidth - this.width) >= 1) redraw();
  }

  /** Make it ready for a new drawing, in pixels of the page; return its context. */
  begin(height = this.height) {
    const scale = window.devicePixelRatio || 1;
    this.width = this.element.clientWidth;
    this.height = height;
    const [wide, high] = [Math.round(this.width * scale), Math.round(height * scale)];
    if (this.element.width !== wide || this.element.height !== high) {
      this.element.width = wide;
      this.element.height = high;
      this.element.style.height = `${height}px`;
    }
    const context = this.element.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, height);
    return context;
  }

  /** Return where an event of the mouse is. */
  at(event) {
    const box = this.element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

/** Return steps of 1, 2 or 5 times a power of ten between two numbers, about so many. */
function ticks(low, high, about) {
  const rough = (high - low) / Math.max(1, about);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

/** Return the texts of such steps, with as many decimals as all of them need. */
function tickTexts(found) {
  const decimals = found.map((value) => String(value).split(".")[1]?.length ?? 0);
  return found.map((value) => number(value, Math.max(0, ...decimals)));
}

/** Draw an axis of time: a line from top to bottom at each tick, its text below, and the label. */
export function timeAxis(context, run, [start, stop], toX, [top, bottom]) {
  const width = context.canvas.clientWidth;
  const [seconds, symbol] = timeUnit(run.end);
  context.font = FONT;
  context.fillStyle = named("muted");
  context.strokeStyle = named("line");
  context.textBaseline = "top";
  const found = ticks(start / seconds, stop / seconds, width / 90);
  const texts = tickTexts(found);
  for (const [index, tick] of found.entries()) {
    const x = toX(tick * seconds);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, bottom);
    context.stroke();
    context.textAlign = x < 30 ? "left" : x > width - 30 ? "right" : "center";
    context.fillText(texts[index], x, bottom + 2);
  }
  context.textAlign = "right";
  context.fillText(`${run.clock} (${symbol})`, width - 4, bottom + 17);
}

/** Make a button that saves a drawing as PNG; its colours are clusters. */
export function pictureButton(canvas, label, clusters) {
  const legend = () => clusters().slice(0, MOST_NAMED).map((cluster) =>
    ({ name: `cluster ${cluster}`, colour: clusterColour(cluster), width: 6 }));
  return make("button", { type: "button", class: "small", title: `Save "${label}" as PNG`,
    onclick: () => savePicture(canvas.element, label, legend()) }, "PNG");
}

/** Save a drawing as PNG with its legend below: [{ name, colour, dash, width }]. */
export function savePicture(source, label, legend) {
  const scale = window.devicePixelRatio || 1;
  const canvas = make("canvas", { width: source.width,
    height: source.height + (legend.length + 1) * ROW * scale });
  const context = canvas.getContext("2d");
  context.fillStyle = named("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, 0);
  context.scale(scale, scale);
  context.font = FONT;
  legend.forEach(({ name, colour, dash, width }, index) => {
    const y = source.height / scale + (index + 0.5) * ROW;
    context.strokeStyle = colour ?? named("ink");
    context.lineWidth = width ?? 1.6;
    context.setLineDash(dash ?? []);
    context.beginPath();
    context.moveTo(56, y);
    context.lineTo(84, y);
    context.stroke();
    context.fillStyle = named("ink");
    context.fillText(name, 92, y + 4);
  });
  canvas.toBlob((blob) => save(blob, `${label}.png`));
}

/** Have the browser download a file. */
export function save(blob, name) {
  const href = URL.createObjectURL(blob);
  make("a", { href, download: name.replace(/[^\w.-]+/g, "-").toLowerCase() }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}
