// Members of groups: each has a connection of its own, and shows what it is given.

import { $, el, short, showState, write } from "./dom.js";
import { open } from "./hub.js";

const MEMBERS = 6; // at most, at a time
const LINES = 20; // of a member
const HELD = 10; // events that a member without automatic acknowledgements holds
const LEASE_MS = 15_000;
const GROUP_TTL_MS = 60_000; // groups of a page that is closed disappear

const members = new Set();
let made = 0;

/** join adds a member of a group, and says why it did not. */
export function join(topic, group, auto) {
  if (members.size >= MEMBERS) return `This page has ${MEMBERS} members at most: let one leave first.`;
  const member = new Member(topic, group, auto);
  members.add(member);
  $("members").append(member.card);
  return "";
}

/** draw shows what has come since, and how long leases last. */
export function draw() {
  for (const member of members) member.draw();
}

class Member {
  #client = open();
  #topic;
  #state = el("span", { class: "mark", role: "status" });
  #count = el("span", { class: "soft" });
  #note = el("p", { class: "bad", role: "alert" });
  #list = el("ol", { class: "log" });
  #empty = el("p", { class: "soft" }, "Nothing yet: publish something.");
  #auto;
  #came = 0;
  #fresh = []; // not drawn yet
  #waiting = new Set(); // lines that wait for the visitor

  constructor(topic, group, auto) {
    const name = `Member ${++made}`;
    this.#topic = topic;
    this.#auto = el("input", { type: "checkbox", checked: auto });
    this.card = el("article", { class: "card", "aria-label": `${name} of ${group}`, tabindex: "-1" },
      el("div", { class: "row" }, el("h3", {}, name), this.#state, el("button", { type: "button", "aria-label": `Leave as ${name}`, onclick: () => this.leave() }, "Leave")),
      el("p", { class: "soft" }, "group ", el("code", {}, group), " of ", el("code", {}, topic)),
      el("div", { class: "row" }, el("label", { class: "check" }, this.#auto, " acknowledge at once"), this.#count),
      this.#note, this.#empty, this.#list);
    this.#auto.addEventListener("change", () => this.#auto.checked && this.#settleAll());
    this.#client.on("state", (state) => {
      showState(this.#state, state);
      if (state !== "ready") for (const line of this.#waiting) line.end("the connection broke");
    });
    this.#client.on("notice", ({ message }) => write(this.#note, message));
    showState(this.#state, this.#client.state);
    this.#subscribe(group);
    this.draw();
  }

  async #subscribe(group) {
    try {
      const subscription = await this.#client.subscribe(this.#topic, group, (event, delivery) => this.#take(event, delivery), { ack: "manual", maxInFlight: HELD, ackTimeoutMs: LEASE_MS, groupTtlMs: GROUP_TTL_MS });
      const error = await subscription.closed;
      if (error) write(this.#note, error.message);
    } catch (error) {
      if (members.has(this)) write(this.#note, error.message);
    }
  }

  #take(event, delivery) {
    this.#came++;
    for (const held of this.#waiting) held.tick(); // a hidden page seldom draws
    const line = new Line(event, delivery, this);
    if (this.#auto.checked) line.ack();
    else this.#waiting.add(line);
    this.#fresh.push(line);
    // Of many, only the last are drawn, and those that wait: HELD is less than LINES.
    if (this.#fresh.length > LINES) this.#fresh.splice(this.#fresh.findIndex((l) => l.over), 1);
  }

  #settleAll() {
    for (const line of [...this.#waiting]) line.ack();
  }

  /** settled is told when a line waits no more. */
  settled(line) {
    this.#waiting.delete(line);
    if (!line.row?.contains(document.activeElement)) return;
    // The button that has the focus goes away: the next one gets it.
    const next = [...this.#waiting].find((l) => l.row);
    (next?.button ?? this.card).focus();
  }

  draw() {
    write(this.#count, `${this.#came} event${this.#came === 1 ? "" : "s"}`);
    for (const line of this.#fresh) this.#list.prepend(line.make());
    this.#fresh = [];
    for (const line of this.#waiting) line.tick();
    this.#empty.hidden = this.#came > 0;
    // Lines that are over go first, the oldest before the others.
    for (let row = this.#list.lastElementChild; row && this.#list.children.length > LINES; ) {
      const above = row.previousElementSibling;
      if (!row.querySelector("button")) row.remove();
      row = above;
    }
  }

  leave() {
    members.delete(this);
    this.card.remove();
    $("members").focus();
    void this.#client.close({ timeoutMs: 1_000 });
  }
}

/** A line of a member: an event, and what becomes of it. */
class Line {
  over = false;
  row;
  button;
  #buttons;
  #status = el("span", { class: "mark" }, "waits for you");
  #end;

  constructor(event, delivery, member) {
    this.event = event;
    this.delivery = delivery;
    this.member = member;
    this.#end = performance.now() + delivery.ack_deadline_ms;
  }

  ack() {
    if (this.over) return;
    this.end(this.delivery.ack() ? "acknowledged" : "too late", "good");
  }

  nack() {
    if (this.over) return;
    this.delivery.nack("refused in the demo", 1_000);
    this.end("refused: comes again", "bad");
  }

  /** end says what became of the event here. */
  end(status, kind = "") {
    if (this.over) return;
    this.over = true;
    write(this.#status, status);
    this.#status.className = `mark ${kind}`;
    this.member.settled(this);
    this.#buttons?.remove();
  }

  tick() {
    const left = Math.ceil((this.#end - performance.now()) / 1000);
    if (left > 0) write(this.#status, `${left} s left`);
    else this.end("not acknowledged in time", "bad");
  }

  /** make makes the row. */
  make() {
    const { payload, key } = this.event;
    const text = short(payload);
    const { attempt } = this.delivery;
    if (!this.over) {
      this.button = el("button", { type: "button", "aria-label": `Ack ${text}`, onclick: () => this.ack() }, "Ack");
      this.#buttons = el("span", { class: "do" }, this.button, el("button", { type: "button", "aria-label": `Nack ${text}`, onclick: () => this.nack() }, "Nack"));
    }
    this.row = el("li", {}, el("code", {}, text), key === undefined ? undefined : el("span", { class: "soft" }, "key ", el("code", {}, key)),
      attempt > 1 ? el("span", { class: "mark bad" }, `attempt ${attempt}`) : undefined, this.#status, this.#buttons);
    return this.row;
  }
}
