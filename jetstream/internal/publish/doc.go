// Package publish stores events in the streams of topics: at once, by a [Publisher] for each
// client, and later, by message schedules of the server. It admits what clients publish: by the
// options of the event, the schema and the keys of its topic, and the rations of the client.
package publish
