package inbox

// KVKey is the key of an event in the bucket.
var KVKey = kvKey
