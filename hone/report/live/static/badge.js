// The state of a run, as a small label.

import { h } from "./dom.js";
import { duration } from "./format.js";

export function badge(run) {
  const stage = [...run.stages].reverse().find((one) => one.started) ?? run.stages[0];
  const ago = duration(Math.max(0, Math.round(run.now - run.since)));
  const text = { running: "running", finished: "finished", stopped: `stopped ${ago} ago`, died: `died ${ago} ago`, waiting: "waiting" }[run.state];
  return h("span.state", { class: run.state, title: `last written ${ago} ago` }, text ?? run.state,
    run.state === "running" && stage?.seconds_left ? ` · ${duration(stage.seconds_left)} left` : null);
}
