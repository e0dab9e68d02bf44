package facade

import "time"

// SetCastPatience changes castPatience for this Server, before its first broadcast.
func (s *Server) SetCastPatience(d time.Duration) { s.castPatience = d }

// SetPullCasts changes pullCasts for this Server, before its first pull.
func (s *Server) SetPullCasts(d time.Duration) { s.pullCasts = d }
