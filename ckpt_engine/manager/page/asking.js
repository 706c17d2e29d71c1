// Asks the manager. The token lies in a variable of this module and nowhere else.

import { make } from "./dom.js";

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
  return (await answerOf(path, body)).json();
}

/** Has the browser save an answer as a file of the name that the answer has. Throws as `ask`. */
export async function save(path) {
  const answer = await answerOf(path);
  const name = /filename="([\w.-]+)"/.exec(answer.headers.get("content-disposition"))?.[1] ?? "answer.json";
  const url = URL.createObjectURL(await answer.blob());
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), WAIT_MS);
}

async function answerOf(path, body) {
  const headers = { accept: "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  const options = { headers, cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, { ...options, signal: AbortSignal.timeout(WAIT_MS) });
  if (answer.ok) return answer;
  let detail = `the manager answered ${answer.status}`;
  try {
    detail = (await answer.json()).detail || detail;
  } catch {
    // Somebody between us and the manager answered, in words of its own.
  }
  throw new Refusal(answer.status, detail);
}
