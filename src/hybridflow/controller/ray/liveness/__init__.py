"""What notices that a worker, a node or the cluster has died, is stopped or hangs, and reports why."""
