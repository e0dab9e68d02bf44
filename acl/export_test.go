package acl

// WithSnapshots returns a policy that knows further snapshot topics, as a Verifier makes it.
func WithSnapshots(p *Policy, snapshots map[string]string) *Policy { return p.with(snapshots) }
