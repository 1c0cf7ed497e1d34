"""A socket that listens at one address, never on every interface."""

import socket


def listen(address: str, port: int = 0) -> socket.socket:
    """Listening at `address` (IPv4 or IPv6), on a free port unless one is given. Raises OSError if it cannot."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen()
    return sock
