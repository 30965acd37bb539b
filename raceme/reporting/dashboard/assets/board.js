// The page of a run: its panels, the moment that they show, and what is selected.

import { AXES } from "./axis.js";
import { Clock } from "./clock.js";
import { onTheme } from "./colours.js";
import { Moment } from "./moment.js";
import { AccuracyPanel } from "./panels/accuracy.js";
import { ClientsPanel } from "./panels/clients.js";
import { DetailPanel } from "./panels/detail.js";
import { DevicesPanel } from "./panels/devices.js";
import { HappeningsPanel } from "./panels/happenings.js";
import { MapPanel } from "./panels/map.js";
import { MeasuresPanel } from "./panels/measures.js";
import { StalenessPanel } from "./panels/staleness.js";
import { StreamPanel } from "./panels/stream.js";
import { TilesPanel } from "./panels/tiles.js";
import { TrustPanel } from "./panels/trust.js";
import { make, timeText } from "./words.js";

const STEPS = 1000; // Places of the slider.
const BUDGET = 5; // Milliseconds of a frame after which panels wait for the next one.

export class Board {
  constructor(run) {
    this.run = run;
    this.clock = new Clock(run, () => this.changed());
    this.axis = "time";
    this.selection = null;
    this.moment = new Moment(run, 0);
    this.planned = false;
    this.stale = new Set();
    this.visible = new Set();
    this.detail = new DetailPanel(this);
    this.tiles = new TilesPanel(this);
    const wide = [new AccuracyPanel(this), new StreamPanel(this)];
    // Two columns side by side: panels of different heights leave no holes.
    const columns = [[new MapPanel(this), new StalenessPanel(this)],
      [new DevicesPanel(this), new HappeningsPanel(this)]];
    const below = [new MeasuresPanel(this), new TrustPanel(this), new ClientsPanel(this)];
    this.panels = [...wide, ...columns.flat(), ...below];
    const elements = (panels) => panels.map((one) => one.element);
    this.element = make("div", { class: "board" }, this.tiles.element, this.controls(),
      make("div", { class: "panels" }, ...elements(wide),
        ...columns.map((found) => make("div", { class: "column" }, ...elements(found))),
        ...elements(below)),
      this.detail.element);
    this.watchSight();
    onTheme(() => this.changed());
    // On paper all of them are in sight.
    window.addEventListener("beforeprint", () =>
      this.panels.filter(({ element }) => !element.hidden).forEach((one) => one.draw(this.moment)));
  }

  controls() {
    this.play = make("button", { type: "button", class: "play",
      onclick: () => this.clock.toggle() });
    this.slider = make("input", { type: "range", min: 0, max: STEPS, value: STEPS,
      "aria-label": "Moment of the run", oninput: () => {
        this.clock.playing = false;
        this.clock.show((Number(this.slider.value) / STEPS) * this.run.end);
      } });
    this.readout = make("output", { class: "readout" });
    this.latest = make("button", { type: "button", class: "latest",
      onclick: () => this.clock.follow() }, "Latest");
    this.choice = make("select", { "aria-label": "Axis of the charts", onchange: () => {
      this.axis = this.choice.value;
      this.changed();
    } }, ...Object.keys(AXES).map((key) => make("option", { value: key }, AXES[key])));
    return make("div", { class: "controls", role: "group", "aria-label": "Moment" }, this.play,
      this.slider, this.readout, this.latest, make("label", {}, "over ", this.choice));
  }

  /** Have panels drawn only while they are in sight. */
  watchSight() {
    const found = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.visible.add(target);
        else this.visible.delete(target);
      }
      this.plan();
    }, { rootMargin: "200px" });
    for (const one of this.panels) found.observe(one.element);
  }

  /** Have everything drawn with the next frames. */
  changed() {
    // What has waited longest stays first.
    for (const one of this.panels) this.stale.add(one);
    this.plan();
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    const { run, clock } = this;
    if (this.moment.time !== clock.time || this.revision !== run.revision) {
      this.moment = new Moment(run, clock.time);
      this.revision = run.revision;
    }
    this.drawControls();
    // Before the first client there is nothing to draw.
    for (const one of this.panels) one.element.hidden = !run.size || (one.isEmpty ?? false);
    this.tiles.draw(this.moment);
    this.detail.draw(this.moment);
    this.drawPanels();
  }

  /** Draw panels that are in sight, one at least; what takes too long waits for the next frame. */
  drawPanels() {
    const begun = performance.now();
    for (const one of this.stale) {
      if (!this.visible.has(one.element)) continue;
      this.stale.delete(one);
      one.draw(this.moment);
      if (performance.now() - begun > BUDGET) break;
    }
    if ([...this.stale].some((one) => this.visible.has(one.element))) this.plan();
  }

  drawControls() {
    const { run, clock } = this;
    const word = clock.playing ? "Pause" : "Play";
    if (this.play.textContent !== word) this.play.textContent = word;
    this.latest.textContent = run.isOver ? "End" : "Live";
    this.latest.setAttribute("aria-pressed", String(clock.follows));
    const place = run.end ? Math.round((clock.time / run.end) * STEPS) : STEPS;
    if (document.activeElement !== this.slider || clock.playing) this.slider.value = place;
    const text = timeText(clock.time, run.end);
    this.slider.setAttribute("aria-valuetext", text);
    this.readout.textContent = `${text} of ${timeText(run.end, run.end)}`;
    const time = run.clock;
    const option = this.choice.querySelector("[value=time]");
    if (option.textContent !== time) option.textContent = time;
  }

  /** Select a client or a cluster, or nothing. */
  select(selection) {
    this.selection = selection;
    this.detail.open(selection);
    this.changed();
  }
}
