"""Weight sync from a trainer to rollout engines: in buckets, with versions, verified by the receiver."""
