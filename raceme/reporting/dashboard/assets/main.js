// Where the page begins: a run that is told piece by piece, or one that is frozen into the file.

import { Board } from "./board.js";
import { clusterColour, themeChoice } from "./colours.js";
import { ComparisonBoard } from "./comparison.js";
import { Run } from "./run.js";
import { make } from "./words.js";

const place = document.getElementById("dashboard");
const frozen = document.getElementById("run-data");

document.querySelector("header")?.append(themeChoice());
if (frozen) showFrozen(JSON.parse(frozen.textContent));
else follow(new URLSearchParams(location.search).get("run") ?? "");

/** Show a run that is over, with all its pieces. */
function showFrozen(pieces) {
  const run = new Run();
  const board = pieces.some((piece) => piece.comparison)
    ? new ComparisonBoard(run, false)
    : new Board(run);
  for (const piece of pieces) {
    run.add(piece);
    if (piece.comparison) board.add(piece.comparison);
  }
  place.replaceChildren(board.element);
  board.changed();
  window.raceme = { run, board, clusterColour };
}

/** Show what the server tells, a run or a comparison, as long as it does. */
function follow(name) {
  const status = make("p", { class: "status", role: "status" }, "Connecting …");
  const trouble = make("p", { class: "alarm", role: "alert", hidden: true });
  const holder = make("div", {});
  place.replaceChildren(status, trouble, holder);
  const run = new Run();
  let board = null;
  let over = false;
  const events = new EventSource(`events?run=${encodeURIComponent(name)}`);
  const say = (text, kind) => {
    status.textContent = text;
    status.className = `status ${kind}`;
  };
  const tell = () => {
    head(run, name);
    if (over) return;
    if (board instanceof ComparisonBoard) say(board.said, board.isOver ? "over" : "live");
    else if (run.about && run.loading) say("Loading the run …", "live");
    else if (run.crash) say(run.crash, "lost");
    else if (run.isOver) say("The run has ended.", "over");
    else if (run.size) say("Live", "live");
    else if (!run.about) say("Waiting for the run to begin: it loads its data.", "live");
    else if (run.clock === "time") say("Waiting for the first client to join.", "live");
    else say("Waiting for the first client: all evaluate the initial model.", "live");
  };
  events.addEventListener("restart", () => {
    run.clear();
    tell();
    board?.changed();
  });
  events.addEventListener("piece", ({ data }) => {
    const piece = JSON.parse(data);
    if (!board) {
      board = piece.comparison ? new ComparisonBoard(run) : new Board(run);
      holder.replaceChildren(board.element);
      window.raceme = { run, board, clusterColour };
    }
    if (piece.comparison) board.add(piece.comparison);
    run.add(piece);
    tell();
    board.changed();
  });
  events.addEventListener("trouble", ({ data }) => {
    const { text } = JSON.parse(data);
    trouble.hidden = !text;
    trouble.textContent = text;
  });
  events.addEventListener("closed", () => {
    over = true;
    events.close();
    say("The dashboard was closed; this page keeps its data.", "over");
  });
  events.onerror = () => {
    if (!over) say("The dashboard does not answer; this page keeps its data.", "lost");
  };
  events.onopen = tell;
}

/** Say in the head of the page whose run it is. */
function head(run, name) {
  const { about } = run;
  if (!about) return;
  const title = about.title ?? `${about.strategy} on ${about.dataset}`;
  document.title = `${title} · Raceme`;
  document.querySelector("h1").textContent = title;
  const parts = about.title ? [] : [about.name, `seed ${about.seed}`];
  if (run.summary?.reason) parts.push(run.summary.reason);
  const lead = document.querySelector(".lead");
  lead.replaceChildren(...parts.flatMap((text, index) =>
    [...(index ? [" · "] : []), make("bdi", {}, String(text))]));
  if (name) lead.append(" · ", make("a", { href: "./" }, "all runs"));
}
