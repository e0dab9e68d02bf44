// Package reading reads what streams store.
//
// [Messages] reads the messages of any stream: [Messages.Through] to its end, [Messages.All] until
// the reader has caught up with those who write, [Messages.Windows] a range, a bounded number of
// bytes ahead. What is cut off goes on where it was. [Reads] reads the events of topics, for the
// History and the Keys of the bus. Nothing here joins a group.
package reading
