// The moment that is shown: it follows a run that goes on, or plays one that is over.

const SECONDS = 24; // A whole run is played in so many.

export class Clock {
  constructor(run, changed) {
    this.run = run;
    this.changed = changed;
    this.follows = true;
    this.playing = false;
    this.chosen = 0;
  }

  get time() {
    return this.follows ? this.run.end : Math.min(this.chosen, this.run.end);
  }

  /** Show a time; the last one follows the run. */
  show(time) {
    this.follows = time >= this.run.end;
    this.chosen = time;
    this.changed();
  }

  follow() {
    this.playing = false;
    this.follows = true;
    this.changed();
  }

  toggle() {
    if (this.playing) {
      this.playing = false;
    } else {
      if (this.time >= this.run.end) this.chosen = 0;
      else this.chosen = this.time;
      this.follows = false;
      this.playing = true;
      this.last = null;
      requestAnimationFrame((now) => this.step(now));
    }
    this.changed();
  }

  step(now) {
    if (!this.playing) return;
    const passed = this.last === null ? 0 : Math.min(now - this.last, 200) / 1000;
    this.last = now;
    this.chosen += (passed / SECONDS) * this.run.end;
    if (this.chosen >= this.run.end) {
      this.playing = false;
      this.follows = true;
    } else {
      requestAnimationFrame((next) => this.step(next));
    }
    this.changed();
  }
}
