// The frame: addresses, header, keys, and the page that is open.

import { ServerError, get } from "./api.js";
import { badge } from "./badge.js";
import { fill, h, link } from "./dom.js";
import { address } from "./format.js";

const PAGES = {
  overview: ["Overview", () => import("./overview.js")],
  rollouts: ["Rollouts", () => import("./rollouts.js")],
  distributions: ["Distributions", () => import("./distributions.js")],
  evaluations: ["Evaluations", () => import("./evaluations.js")],
  travel: ["Time travel", () => import("./travel.js")],
  settings: ["Settings", () => import("./settings.js")],
  log: ["Log", () => import("./log.js")],
};
/** Reached from a table, not from the header. */
const INNER = {
  group: ["Group", () => import("./group.js"), "rollouts"],
  read: ["Answers", () => import("./read.js"), "rollouts"],
  sample: ["Sample", () => import("./sample.js"), "rollouts"],
};
const EVERY = 3000; // milliseconds between two looks at a running run,
const SLOWER = 3; // and at most this many times as long while nothing changes

let open = null; // the page that is open: {controller, keys}
let state = null; // the run in the header

/** #/run/stage/page/a/b?x=1 -> {run, stage, page, args, params} */
function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const [run, stage, page, ...args] = parts;
  return { run, stage, page, args, params: new URLSearchParams(query ?? "") };
}

async function show() {
  open?.controller.abort();
  const controller = new AbortController();
  open = { controller, keys: {} };
  notice("page", null);
  const here = open;
  const where = parse();
  const main = document.getElementById("main");
  try {
    if (!where.run) {
      const shelf = await get("/api/runs", controller.signal);
      if (shelf.only) return location.replace(await front(shelf.only, controller.signal));
      header(null, where);
      return (await import("./runs.js")).page(context(where, main, here), shelf);
    }
    if (!where.page) return location.replace(await front(where.run, controller.signal, where.stage));
    const entry = PAGES[where.page] ?? INNER[where.page];
    if (!entry) throw new Error(`there is no page ${where.page}`);
    if (state?.name !== where.run) state = await get(`/api/run/${encodeURIComponent(where.run)}`, controller.signal);
    header(state, where);
    document.title = `${entry[0]} · ${where.run} · hone`;
    const module = await entry[1]();
    if (here === open) await module.page(context(where, main, here));
  } catch (error) {
    if (error.name !== "AbortError" && here === open) failed(main, error);
  }
}

function failed(main, error) {
  fill(main, h("section.empty", null, h("h1", null, "Nothing to show"), h("p", null, lost(error)),
    h("p", null, link("All runs", "#/"))));
}

/** The address that a run opens at: the overview of its last stage that has begun. */
async function front(run, signal, stage) {
  state = await get(`/api/run/${encodeURIComponent(run)}`, signal);
  const begun = state.stages.filter((one) => one.done > 0);
  const reinforced = begun.filter((one) => one.rollouts);
  const chosen = state.stages.find((one) => one.name === stage) ?? reinforced.at(-1) ?? begun.at(-1) ?? state.stages[0];
  return address(run, chosen.name, "overview");
}

/** What a page gets to work with. */
function context(where, main, here) {
  const signal = here.controller.signal;
  return {
    ...where,
    main,
    signal,
    get state() { return state; }, // the latest known: stages begin while a page is open
    alive: () => here === open,
    keys: (keys) => Object.assign(here.keys, keys),
    every: (work, wait = () => EVERY) => repeat(work, wait, signal),
    replace: (hash) => history.replaceState(null, "", hash),
  };
}

/** Runs `work` again and again while the page is open and visible, less often while it returns false: nothing is new. */
function repeat(work, wait, signal) {
  let idle = 0;
  const again = async () => {
    if (signal.aborted) return;
    try {
      if (document.visibilityState === "visible") idle = (await work()) === false ? idle + 1 : 0;
      notice("page", null);
    } catch (error) {
      if (error.name === "AbortError") return;
      notice("page", error);
      if (error.answered) refreshHeader(); // the run has other stages now?
    }
    setTimeout(again, wait() * Math.min(SLOWER, 1.3 ** idle));
  };
  setTimeout(again, wait());
}

// --- header ------------------------------------------------------------------------------------------------------

function header(run, where) {
  const head = document.getElementById("head");
  const home = h("a.brand", { href: "#/", "aria-label": "hone: all runs" }, "hone");
  const help = h("button.key", { type: "button", onclick: toggleHelp, "aria-label": "Keyboard shortcuts" }, "?");
  if (!run) {
    document.title = "Runs · hone";
    return fill(head, h("div.bar", null, home, h("span.grow"), help));
  }
  const stages = run.stages.length > 1 ? h("nav.stages", { "aria-label": "Stages" },
    run.stages.map((one) => link(one.name, address(run.name, one.name, where.stage === one.name ? where.page : "overview"),
      { "aria-current": one.name === where.stage ? "true" : null, class: one.started ? "" : "later" }))) : null;
  const active = INNER[where.page]?.[2] ?? where.page;
  const tabs = Object.entries(PAGES).map(([key, [title]]) =>
    link(title, address(run.name, where.stage, key), { "aria-current": key === active ? "page" : null }));
  fill(head,
    h("div.bar", null, home, h("span.slash", { "aria-hidden": "true" }, "/"), h("strong.run", null, run.name), stages,
      h("span.grow"), h("span", { id: "badge" }, badge(run)), help),
    h("nav.tabs", { "aria-label": "Pages" }, tabs));
  const current = head.querySelector(".tabs [aria-current]");
  if (current) head.querySelector(".tabs").scrollLeft = current.offsetLeft - 24;
}

async function refreshHeader() {
  const { run } = parse();
  if (!run || document.visibilityState !== "visible" || state?.name !== run) return;
  try {
    const latest = await get(`/api/run/${encodeURIComponent(run)}`);
    const where = parse();
    if (where.run !== run || state?.name !== run) return; // another run was opened meanwhile
    const begun = (one) => JSON.stringify(one.stages.map((stage) => [stage.name, stage.started]));
    const changed = begun(latest) !== begun(state);
    state = latest;
    if (!state.stages.some((one) => one.name === where.stage)) return location.replace(await front(run)); // opened before the run had begun
    const place = document.getElementById("badge");
    if (changed || !place) header(state, where);
    else fill(place, badge(state));
    notice("header", null);
  } catch (error) {
    notice("header", error);
  }
}

const troubles = { header: "", page: "" };

/** Says why what is shown is no longer kept up to date; "" if it is. The page goes on when a server answers here. */
function notice(who, error) {
  if (error && !(error instanceof ServerError)) console.error(error); // a fault of the page itself
  troubles[who] = error ? lost(error) : "";
  const text = troubles.page || troubles.header;
  const place = document.getElementById("notice");
  if (place.textContent === text) return;
  place.hidden = !text;
  place.textContent = text;
}

const lost = (error) => error.answered === false ?
  "The server of this page has ended: this is the last state it showed. “hone view” and the folder of the run start it again." : error.message;

// --- keys --------------------------------------------------------------------------------------------------------

const FRAME_KEYS = {
  "?": ["this help", toggleHelp],
  Escape: ["back", () => (document.getElementById("help").open ? toggleHelp() : history.back())],
  h: ["all runs", () => (location.hash = "#/")],
};
Object.entries(PAGES).forEach(([key, [title]], i) => {
  FRAME_KEYS[String(i + 1)] = [title.toLowerCase(), () => {
    const { run, stage } = parse();
    if (run && stage) location.hash = address(run, stage, key);
  }];
});

function toggleHelp() {
  const dialog = document.getElementById("help");
  if (dialog.open) return dialog.close();
  const list = (keys) => h("dl.keys", null, Object.entries(keys).filter(([, [text]]) => text).map(([key, [text]]) =>
    [h("dt", null, h("kbd", null, key)), h("dd", null, text)]));
  const page = open?.keys ?? {};
  fill(dialog, h("h2", { id: "help-title" }, "Keys"),
    Object.keys(page).length ? [h("h3", null, "On this page"), list(page)] : null,
    h("h3", null, "Everywhere"), list(FRAME_KEYS),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (typing && event.key === "Escape") return typing.blur();
  if (typing || (document.getElementById("help").open && event.key !== "?")) return;
  const action = open?.keys[event.key] ?? FRAME_KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action[1](event);
});

window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#/") || !location.hash) show();
});
setInterval(refreshHeader, 5000);
show();

