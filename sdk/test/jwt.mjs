import { createHmac } from "node:crypto";

export const secret = "a secret of more than thirty-two bytes";

/** A JWT of these scopes that lives for some seconds. */
export function jwt(scopes, seconds = 3600, more = {}) {
  const part = (value) => Buffer.from(JSON.stringify(value)).toString("base64url");
  const now = Math.floor(Date.now() / 1000);
  const body = `${part({ alg: "HS256", typ: "JWT" })}.${part({ sub: "tester", iat: now, exp: now + seconds, scopes, ...more })}`;
  return `${body}.${createHmac("sha256", secret).update(body).digest("base64url")}`;
}
