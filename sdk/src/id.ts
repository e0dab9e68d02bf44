/**
 * Makes UUIDv7s that rise. The random half is drawn once: time and counter make ids of one maker
 * differ, and 62 random bits tell makers apart.
 */
export function newIdMaker(now: () => number = Date.now): () => string {
  const random = crypto.getRandomValues(new Uint8Array(8));
  random[0] = (random[0]! & 0x3f) | 0x80; // the variant
  const hex = Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
  const tail = `-${hex.slice(0, 4)}-${hex.slice(4)}`;
  const counters = Array.from({ length: 4096 }, (_, i) => i.toString(16).padStart(3, "0"));
  let ms = -1;
  let count = 0;
  let head = "";
  return () => {
    const at = now();
    if (at > ms || ++count === 4096) {
      // A full millisecond borrows from the next; a clock set back changes nothing.
      ms = Math.max(at, ms + 1);
      count = 0;
      const time = ms.toString(16).padStart(12, "0");
      head = `${time.slice(0, 8)}-${time.slice(8)}-7`;
    }
    return head + counters[count] + tail;
  };
}
