package main

import (
	"errors"
	"net/url"
	"slices"
	"strconv"
)

// checkURL parses a URL that must have one of these schemes and a host. The error does not quote
// the URL, which may contain a credential.
func checkURL(text string, schemes ...string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("it is not a URL")
	}
	if !slices.Contains(schemes, u.Scheme) {
		return nil, errors.New("its scheme is " + strconv.Quote(u.Scheme))
	}
	if u.Hostname() == "" {
		return nil, errors.New("it has no host")
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return nil, errors.New("its port is not a number from 1 to 65535")
		}
	}
	return u, nil
}
