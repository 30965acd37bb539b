// A drawing that is as sharp as the screen and as wide as its panel.

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
export function ticks(low, high, about) {
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
