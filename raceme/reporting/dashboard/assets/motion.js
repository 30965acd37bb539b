// Whether the person wants nothing to move.

const reduced = window.matchMedia("(prefers-reduced-motion: reduce)");

export function calm() {
  return reduced.matches;
}
