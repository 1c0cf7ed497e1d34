"""A socket that listens on one address, not on every interface."""

import socket


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on `address` (IPv4 or IPv6); port 0 chooses a free port. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen()
    return sock
