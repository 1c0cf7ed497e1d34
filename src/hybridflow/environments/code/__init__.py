"""The judge of programs that a model writes: tests, and a sandbox of processes, system calls and limits."""
