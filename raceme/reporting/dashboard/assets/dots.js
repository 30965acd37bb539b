// Dots that have places, and go over to new ones in their time.

import { calm } from "./motion.js";

const MILLISECONDS = 700; // A dot that moves takes so long.
const MOST = 3000; // More dots than this jump.

/** Dots by number: a dot is where `aim` sent it last, or on its way there. */
export class Dots {
  constructor() {
    this.shown = [];
    this.make(0);
  }

  make(size) {
    const grown = (old) => {
      const array = new Float64Array(size);
      if (old) array.set(old);
      return array;
    };
    for (const name of ["x", "y", "fromX", "fromY", "begun"]) this[name] = grown(this[name]);
    const has = new Uint8Array(size);
    if (this.has) has.set(this.has);
    this.has = has;
  }

  /** Send dots to new places; those that are not among them disappear. */
  aim({ dots, x, y }, size, now) {
    if (size > this.has.length) this.make(Math.max(size, 2 * this.has.length));
    const jumps = calm() || this.shown.length === 0 || dots.length > MOST;
    const had = this.has;
    this.has = new Uint8Array(had.length);
    for (let index = 0; index < dots.length; index += 1) {
      const dot = dots[index];
      this.has[dot] = 1;
      if (jumps || !had[dot]) {
        this.fromX[dot] = x[index];
        this.fromY[dot] = y[index];
        this.begun[dot] = -Infinity;
      } else if (this.x[dot] !== x[index] || this.y[dot] !== y[index]) {
        const share = shareAt(this.begun[dot], now);
        this.fromX[dot] += share * (this.x[dot] - this.fromX[dot]);
        this.fromY[dot] += share * (this.y[dot] - this.fromY[dot]);
        this.begun[dot] = now;
      }
      this.x[dot] = x[index];
      this.y[dot] = y[index];
    }
    this.shown = dots;
    this.aimBox(now, jumps);
  }

  /** Let what is shown of the plane go over, too. */
  aimBox(now, jumps) {
    const box = this.bounds();
    if (this.aimed && box.every((value, side) => value === this.aimed[side])) return;
    this.boxFrom = jumps || !this.aimed ? box : this.box(now);
    this.boxBegun = jumps || !this.aimed ? -Infinity : now;
    this.aimed = box;
  }

  bounds() {
    if (!this.shown.length) return [-1, -1, 1, 1];
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    for (const dot of this.shown) {
      left = Math.min(left, this.x[dot]);
      right = Math.max(right, this.x[dot]);
      top = Math.min(top, this.y[dot]);
      bottom = Math.max(bottom, this.y[dot]);
    }
    const least = 1e-6;
    return [left - least, top - least, right + least, bottom + least];
  }

  /** Return what of the plane is shown: left, top, right, bottom. */
  box(now) {
    const share = shareAt(this.boxBegun, now);
    return this.aimed.map((value, side) => this.boxFrom[side] + share * (value - this.boxFrom[side]));
  }

  /** Call a function with each dot and where it is; return whether any is on its way. */
  each(now, call) {
    let moves = shareAt(this.boxBegun, now) < 1;
    for (const dot of this.shown) {
      const share = shareAt(this.begun[dot], now);
      moves ||= share < 1;
      call(dot, this.fromX[dot] + share * (this.x[dot] - this.fromX[dot]),
        this.fromY[dot] + share * (this.y[dot] - this.fromY[dot]));
    }
    return moves;
  }
}

const MOST_APART = 300; // Of more dots, so many cover each other that a missing one is not seen.
const TURNS = 40;

/** Move dots that cover each other apart, so that each can be seen; others stay where they are. */
export function apart({ dots, x, y }, least) {
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

function shareAt(begun, now) {
  const held = Math.max(0, Math.min(1, (now - begun) / MILLISECONDS));
  return held * held * (3 - 2 * held);
}
