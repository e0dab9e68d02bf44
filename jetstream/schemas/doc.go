// Package schemas has the schemas that the events of topics must match: versions that all hubs of a
// NATS share, registered, compared with earlier ones, and cast into one another.
//
// A [Registry], from Bus.Schemas, registers a [Draft], which becomes a [Version], and says in a
// [Report] what it found. A [View] shows events in one version. What a schema may say is in package
// schema, what compatible means in schema/compat, and what casts do in schema/upcast.
package schemas
