// Numbers, times and addresses as text.

const COUNT = new Intl.NumberFormat("en-US");

export const whole = (value) => (value === null || value === undefined ? "–" : COUNT.format(value));

/** Three significant digits or so; a true minus sign. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size >= 1000) text = COUNT.format(Math.round(value));
  else if (size !== 0 && (size < 1e-3 || size >= 1e6)) text = value.toExponential(1);
  else text = String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

export const signed = (value) => (value > 0 ? "+" : "") + number(value);

export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`;

export function interval(value) {
  if (!value || value.value === undefined) return "–";
  return `${percent(value.value, 1)} (${percent(value.low)}–${percent(value.high)})`;
}

/** A mean with its interval. A mean reward is no share, so it has no percent. */
export function mean(value) {
  if (!value || typeof value.value !== "number") return "–";
  const [middle, low, high] = ["value", "low", "high"].map((name) => value[name]?.toFixed(3).replace("-", "−") ?? "–");
  return `${middle} (${low} to ${high})`;
}

/** What an evaluation measured: the accuracy, or the mean reward where the task does not grade. */
export const measure = (row) => (row.accuracy ? interval(row.accuracy) : mean(row.reward));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds, 2)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

/** "no_signal" -> "no signal" */
export const words = (name) => String(name).replaceAll("_", " ");

/** How an evaluation is called on a page: "before" and "after" are those of the test problems. */
export const evaluation = (label) => ({ before: "test before training", after: "test after training" })[label] ?? words(label);

/** #/run/stage/page/arguments?parameters */
export function address(run, stage, page, args = [], parameters = {}) {
  const path = [run, stage, page, ...args].map((part) => encodeURIComponent(part)).join("/");
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined),
  ).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}
