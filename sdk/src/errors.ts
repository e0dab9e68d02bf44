/** The codes of the hub, and whether the same request may succeed later. */
export const hubCodes = {
  ack_failed: true,
  already_subscribed: false,
  bad_frame: false,
  bad_group: false,
  bad_handle: false,
  bad_json: false,
  bad_options: false,
  bad_token: false,
  bad_topic: false,
  events_lost: false,
  forbidden: false,
  group_reset: false,
  internal: true,
  jwt_invalid: false,
  lease_over: false,
  no_token: false,
  not_found: false,
  not_subscribed: false,
  overloaded: true,
  publish_failed: true, // unless the hub says otherwise
  rate_limited: true,
  schema_conflict: false,
  schema_invalid: false,
  storage_low: true,
  subscribe_failed: true, // likewise
  token_expired: false,
  topic_full: true,
  unauthorized: false,
  unknown_id: false,
  unknown_op: false,
} as const;

/** The codes of the client itself, and whether the same call may succeed later. */
export const clientCodes = {
  /** An AbortSignal ended the call. */
  aborted: false,
  /** The client holds as many publishes as it may. */
  buffer_full: true,
  /** The client is closed. */
  closed: false,
  /** The hub gave no answer in time. */
  connect_timeout: true,
  /** The connection ended before the answer came. */
  connection_lost: true,
  /** The hub closed the connection with a code that says to give up. */
  gave_up: false,
  /** A schema refused the payload. */
  invalid: false,
  /** There is no WebSocket in this environment. */
  no_websocket: false,
  /** The event may or may not be stored, and sending it again could store it twice. */
  outcome_unknown: false,
} as const;

export type HubCode = keyof typeof hubCodes;
export type ClientCode = keyof typeof clientCodes;
/** A code of the hub, of the client, or one that a newer hub has. */
export type Code = HubCode | ClientCode | (string & {});

/** Every failure of this package. Decide by `code` and `retryable`; the message is for people. */
export class EventHubError extends Error {
  override readonly name = "EventHubError";

  constructor(
    readonly code: Code,
    message: string,
    /** Whether the same call may succeed later. */
    readonly retryable: boolean = ({ ...hubCodes, ...clientCodes } as Record<string, boolean>)[code] ?? false,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** After these close codes, somebody has to change the client or its token first. */
export function givesUp(closeCode: number): boolean {
  return closeCode >= 4100 && closeCode <= 4199;
}

export function aborted(signal: AbortSignal): EventHubError {
  return new EventHubError("aborted", "The call was aborted.", false, { cause: signal.reason });
}
