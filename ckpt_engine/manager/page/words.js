// Numbers with their units, times, names and commands, for people.

const THIN = "\u202f";

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count === 0) return `0${THIN}s`;
  if (count < 0.00005) return `<0.1${THIN}ms`;
  if (count < 0.01) return `${(count * 1000).toFixed(1)}${THIN}ms`;
  if (count < 1) return `${(count * 1000).toFixed(0)}${THIN}ms`;
  if (count < 60) return `${count.toFixed(2)}${THIN}s`;
  const whole = Math.round(count);
  return `${Math.floor(whole / 60)}${THIN}min ${whole % 60}${THIN}s`;
}

export function percent(part) {
  return `${Math.floor(100 * part)}${THIN}%`;
}

export function bytes(count) {
  let size = Number(count);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${unit === "B" ? size.toFixed(0) : size.toFixed(1)}${THIN}${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)}${THIN}TB`;
}

export function rate(count, time) {
  return time > 0 && Number(count) > 0 ? `${bytes(Number(count) / time)}/s` : "–";
}

export function ago(then, now) {
  const passed = Math.max(0, now - then);
  if (passed < 90) return `${Math.round(passed)}${THIN}s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)}${THIN}min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)}${THIN}h ago`;
  return `${Math.round(passed / 86400)}${THIN}days ago`;
}

export function moment(time) {
  return new Date(time * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString(undefined, { timeStyle: "medium" });
}

/** "1 replica", "3 replicas". */
export function counted(count, thing) {
  return `${count}${THIN}${thing}${count === 1 ? "" : "s"}`;
}

/** A name with what cannot be seen, or turns the writing around, made visible. */
export function named(text) {
  return text.replace(/\p{C}/gu, (letter) => `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** One word of a command for a POSIX shell; what cannot be seen is escaped, as bash and zsh read it. */
export function quoted(word) {
  if (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word)) return word;
  if (!/\p{C}/u.test(word)) return `'${word.replaceAll("'", "'\\''")}'`;
  const escaped = word.replace(/[\\']/g, "\\$&").replace(/\p{C}/gu, (letter) => {
    const code = letter.codePointAt(0);
    return `\\U${code.toString(16).padStart(8, "0")}`;
  });
  return `$'${escaped}'`;
}

export function command(what, manager, name) {
  return `ckpt-engine replica ${what} --manager ${quoted(manager)} -- ${quoted(name)}`;
}

const OUTCOMES = {
  OUTCOME_NEW_SERVING: "new and serving",
  OUTCOME_OLD_SERVING: "old and serving",
  OUTCOME_QUARANTINED: "quarantined",
  OUTCOME_NOT_REACHED: "not reached",
  OUTCOME_PLANNED: "planned",
};

export const outcome = (name) => OUTCOMES[name] ?? `outcome ${name}`;

/** The first 12 hexadecimal digits of bytes, which JSON has in base64; people and logs have roots so. */
export function digits(base64) {
  return Array.from(atob(base64).slice(0, 6), (letter) => letter.charCodeAt(0).toString(16).padStart(2, "0")).join("");
}
