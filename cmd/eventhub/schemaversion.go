package main

import (
	"errors"
	"strconv"

	eventhub "eventhub/sdk/go"
)

// versionFlag is a version of a schema on the command line: 0 for none, a number from 1 on, or
// eventhub.LatestVersion.
type versionFlag eventhub.SchemaVersion

// latestVersion is how people write eventhub.LatestVersion.
const latestVersion = "latest"

// UnmarshalText reads the flag.
func (v *versionFlag) UnmarshalText(text []byte) error {
	if string(text) == latestVersion {
		*v = versionFlag(eventhub.LatestVersion)
		return nil
	}
	n, err := strconv.Atoi(string(text))
	if err != nil || n < 1 {
		return errors.New("a version is a number from 1 on, or latest")
	}
	*v = versionFlag(n)
	return nil
}

// String is the version as the query of a request has it.
func (v versionFlag) String() string {
	if v == versionFlag(eventhub.LatestVersion) {
		return latestVersion
	}
	return strconv.Itoa(int(v))
}
