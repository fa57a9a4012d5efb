// Requests to the server, and files of rows that grow.

/** The JSON at a path. Throws an Error with the server's message. */
export async function get(path, signal) {
  const response = await fetch(path, { signal, headers: { Accept: "application/json" } });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `${response.status}`);
  return body;
}

/** The JSON that a POST without a body gives. Throws an Error with the server's message. */
export async function post(path, signal) {
  const response = await fetch(path, { method: "POST", signal });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `${response.status}`);
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
