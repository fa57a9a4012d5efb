// One answer as it is shown everywhere: its text with what the parser read, its verdict, why it got its reward.

import { h } from "./dom.js";
import { duration, number, signed, whole, words } from "./format.js";

const SIGNS = { correct: "✓", wrong: "✕", malformed: "≠", truncated: "…", ungraded: "·" };
const ENDS = { max_turns: "at the limit of turns", max_tokens: "at the token limit", malformed_call: "by an unreadable call", environment_error: "by an error of the environment", environment_timeout: "by a time-out of the environment" };
const BRIEF = 40; // characters of arguments and results in the line of a turn
const LONG = 2400; // characters shown of the prompt before it is folded

export function verdict(name) {
  return h("span.verdict", { class: SIGNS[name] ? name : "failed" }, h("span", { "aria-hidden": "true" }, SIGNS[name] ?? "!"), " ", words(name ?? "?"));
}

/** The text, cut where the parser cut it: [[text, kind], ...]. */
export function text(pieces) {
  return h("pre.answer", null, pieces.map(([part, kind]) => (kind ? h(kind === "answer" ? "mark" : "span", { class: `p-${kind}` }, part) : part)));
}

/** An episode: every turn with its calls and what came back, folded but for the last, which holds the answer. */
export function turns(answer) {
  const last = answer.turns.length - 1;
  return h("ol.turns", null, answer.turns.map((turn, i) => h("li", null, h("details", { open: i === last },
    h("summary", null, `Turn ${i + 1}`, h("span.quiet", null, ` ${about(turn)}`)),
    i === last && !turn.calls.length ? text(answer.pieces) : turn.text ? h("pre.answer", null, turn.text) : null,
    turn.calls.map((call) => h("div.call", null, h("h4", null, `Calls ${call.name}`), h("pre", null, call.arguments))),
    turn.error ? h("p.failed", null, `The call could not be read: ${turn.error}`) : null,
    turn.replies.map((reply) => h("div.reply", { class: reply.failed ? "failed" : "" },
      h("h4", null, reply.role === "tool" ? `Result${reply.name ? ` of ${reply.name}` : ""}` : `Reply (${reply.role})`), h("pre", null, reply.text)))))));
}

function about(turn) {
  const failed = turn.replies.filter((reply) => reply.failed).length;
  return [
    turn.calls.length ? `calls ${turn.calls.map((call, i) => brief(call, turn.replies[i])).join(", ")}` : "",
    turn.error ? "unreadable call" : "", failed ? `${failed === 1 ? "an error" : `${failed} errors`} came back` : "",
    typeof turn.reward === "number" ? `reward ${number(turn.reward)}` : "", ...seconds(turn.seconds)].filter(Boolean).join(" · ");
}

/** A call and what came back, if both are short: "calculator (3 + 4) → 7". */
function brief(call, reply) {
  const given = short(call.arguments);
  const back = reply?.role === "tool" && !reply.failed ? short(reply.text) : null;
  return `${call.name}${given === null ? "" : ` (${given})`}${back === null ? "" : ` → ${back}`}`;
}

const short = (text) => (text && text.length <= BRIEF && !text.includes("\n") ? text : null);

/** Times of a turn, a number or numbers by name. */
function seconds(value) {
  if (typeof value === "number") return [duration(value)];
  return Object.entries(value ?? {}).filter(([, one]) => typeof one === "number").map(([name, one]) => `${words(name)} ${duration(one)}`);
}

export function prompt(value) {
  const body = h("pre.prompt", null, value || "(no prompt was recorded)");
  if ((value ?? "").length <= LONG) return body;
  body.textContent = `${value.slice(0, LONG)}…`;
  const more = h("button", { type: "button", onclick: () => { body.textContent = value; more.remove(); } }, `Show all ${whole(value.length)} characters`);
  return [body, more];
}

/** "Why this reward": the parts, their weights, and the reasons in words. */
export function why(answer) {
  const rows = answer.parts.map((part) => h("tr", null,
    h("th", { scope: "row" }, words(part.name)),
    h("td.num", null, part.value === null ? "–" : number(part.value)),
    h("td.num", null, part.weight === null ? "" : `× ${number(part.weight)}`),
    h("td.num", null, part.points === null ? h("span.quiet", null, part.weight === null ? "recorded only" : "not applied") : number(part.points))));
  return h("div.why", null,
    h("h3", null, "Why this reward"),
    h("ul", null, answer.why.map((sentence) => h("li", null, sentence))),
    h("dl.readings", null, reading("Read as the answer", answer.extracted, "extracted"), right(answer)),
    rows.length ? h("table", null,
      h("thead", null, h("tr", null, ["Part", "Score", "Weight", "Points"].map((title, i) => h("th", { scope: "col", class: i ? "num" : null }, title)))),
      h("tbody", null, rows),
      h("tfoot", null, h("tr", null, h("th", { scope: "row", colspan: 3 }, "Reward"), h("td.num", null, number(answer.total))))) : null);
}

/** The right answer of an answer or a group, or nothing if it was not recorded. */
export const right = ({ gold, verdict: name }) => reading(name === "ungraded" ? "Reference answer" : "Right answer", gold, "gold");

function reading(title, value, kind) {
  return value === null || value === undefined ? null : [h("dt", null, title), h("dd", null, h("code", { class: kind }, String(value)))];
}

/** Reward, advantage, length in one line. */
export function facts(answer) {
  return h("dl.facts", null,
    [["Reward", number(answer.total)], ["Advantage", signed(answer.advantage)], ["Tokens", whole(answer.tokens)],
      answer.turns.length ? ["Turns", whole(answer.turns.length)] : null,
      answer.end && answer.end !== "done" ? ["Ended", ENDS[answer.end] ?? words(answer.end)] : null,
      answer.finish === "length" && answer.end !== "max_tokens" ? ["Ended", "at the token limit"] : null,
      answer.repetition > 0.2 ? ["Repeated", `${Math.round(100 * answer.repetition)}%`] : null,
      answer.mismatch > 1e-3 ? ["Mismatch", number(answer.mismatch)] : null,
    ].filter(Boolean).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

export function advantageBar(value, most) {
  const bar = h("span.advantage", { class: value < 0 ? "down" : "up", title: `advantage ${signed(value)}` });
  bar.style.setProperty("--size", `${Math.min(50, (50 * Math.abs(value ?? 0)) / (most || 1))}%`);
  return bar;
}

export const plain = (answer) => answer.pieces.map(([part]) => part).join("");

