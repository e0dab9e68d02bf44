// Written by `go test ./jetstream/schema/typescript -update`.
export type Topics = {
  "7.things": T7Things;
  "carts-paid": CartsPaid;
  "carts.paid": CartsPaid2;
  "hosts": Hosts;
  "open": Open;
};
export type T7Things = Array<string | Array<null>>;
export type CartsPaid = {
  a: string;
} & ({
  b?: null | number;
  [name: string]: unknown;
});
export type CartsPaid2 = {
  by: CartsPaid2Payer;
  cart: number;
  cents?: number;
  parent?: CartsPaid2;
};
export type CartsPaid2Payer = {
  card: string;
  kind: "card";
} | {
  kind: "cash";
};
/**
 * What a host says
 * of itself. *\/
 */
export type Hosts = {
  "a-b"?: "x\"y";
  any?: unknown;
  empty?: Record<string, never>;
  /** The name. */
  host: string;
  labels?: Record<string, string>;
  none?: never;
  pair?: [(string)?, (boolean)?];
  port?: number;
  state: "up" | "down" | null | 7 | true;
  tags?: Array<string | number>;
};
export type Open = unknown;
