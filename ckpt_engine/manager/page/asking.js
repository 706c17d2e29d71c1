// Asks the manager. The token lies in a variable of this module and nowhere else.

let token = "";

export const WAIT_MS = 10_000;

export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export function useToken(text) {
  token = text.trim();
}

export function hasToken() {
  return token !== "";
}

/** The JSON of an answer. Throws Refusal with the manager's own words, or TypeError if nobody answers. */
export async function ask(path, body) {
  const headers = { accept: "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  const options = { headers, cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, { ...options, signal: AbortSignal.timeout(WAIT_MS) });
  if (answer.ok) return answer.json();
  let detail = `the manager answered ${answer.status}`;
  try {
    detail = (await answer.json()).detail || detail;
  } catch {
    // Somebody between us and the manager answered, in words of its own.
  }
  throw new Refusal(answer.status, detail);
}
