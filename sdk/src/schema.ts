import { EventHubError } from "./errors.js";

/**
 * A schema of any library that follows https://standardschema.dev, such as Zod, Valibot or ArkType.
 */
export interface StandardSchema<Output = unknown> {
  readonly "~standard": {
    readonly version: 1;
    readonly vendor: string;
    readonly validate: (value: unknown) => SchemaResult<Output> | Promise<SchemaResult<Output>>;
    readonly types?: { readonly input: unknown; readonly output: Output } | undefined;
  };
}

export type SchemaResult<Output> =
  | { readonly value: Output; readonly issues?: undefined }
  | { readonly issues: readonly { readonly message: string; readonly path?: readonly unknown[] | undefined }[] };

/** Gives the checked payload to use. Stays synchronous where the schema is. */
export function checked<R>(schema: StandardSchema, payload: unknown, use: (payload: unknown) => R | Promise<R>): R | Promise<R> {
  const judge = (result: SchemaResult<unknown>): R | Promise<R> => {
    if (!result.issues) return use(result.value);
    const why = result.issues.map(({ message, path }) => (path?.length ? `${path.map(segment).join(".")}: ${message}` : message));
    throw new EventHubError("invalid", `invalid payload: ${why.join("; ")}`, false, { cause: result.issues });
  };
  const result = schema["~standard"].validate(payload);
  return result instanceof Promise ? result.then(judge) : judge(result);
}

function segment(part: unknown): string {
  return String(typeof part === "object" && part !== null && "key" in part ? part.key : part);
}
