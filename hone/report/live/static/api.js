// Requests to the server, and files of rows that grow.

/** What the server answered instead, or that nothing answers at its address (`answered` is false). */
export class ServerError extends Error {
  constructor(message, answered) {
    super(message);
    this.answered = answered;
  }
}

/** The JSON at a path. Throws a ServerError. */
export function get(path, signal) {
  return request(path, { signal, headers: { Accept: "application/json" } });
}

/** The JSON that a POST without a body gives. Throws a ServerError. */
export function post(path, signal) {
  return request(path, { method: "POST", signal });
}

async function request(path, options) {
  let response, body;
  try {
    response = await fetch(path, options);
    body = await response.json();
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError(error.message, false); // so fetch() says it
    throw error;
  }
  if (!response.ok) throw new ServerError(body.error ?? `${response.status}`, true);
  return body;
}

export function base(run, stage) {
  return `/api/run/${encodeURIComponent(run)}/${encodeURIComponent(stage)}`;
}

/** A file of rows, read from where the last reading ended. */
export class Rows {
  constructor(run, stage, name) {
    this.path = `${base(run, stage)}/rows/${name}`;
    this.rows = [];
    this.offset = 0;
    this.mark = 0;
  }

  /** Whether there was anything new. */
  async refresh(signal) {
    let changed = false;
    for (;;) {
      const piece = await get(`${this.path}?from=${this.offset}&mark=${this.mark}`, signal);
      if (piece.again) this.rows = [];
      this.rows.push(...piece.rows);
      changed ||= piece.again || piece.rows.length > 0;
      this.offset = piece.offset;
      this.mark = piece.mark;
      if (!piece.more) return changed;
    }
  }

  /** One row per step in order, the later one of each, whatever a damaged file holds: charts need rising positions. */
  get bySteps() {
    const rows = this.rows.filter((row) => Number.isInteger(row.step) && row.step >= 0);
    if (rows.every((row, i) => i === 0 || row.step > rows[i - 1].step)) return rows;
    return [...new Map(rows.map((row) => [row.step, row])).values()].sort((a, b) => a.step - b.step);
  }
}
