"""Process-level services: random streams, threads, stop signals, atomic files, reports. torch is imported on use."""
