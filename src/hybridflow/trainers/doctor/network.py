"""The host name, through which collectives find this machine, and ports of the loopback interface."""

import socket

import psutil

from hybridflow.trainers.doctor.finding import Finding


def check_host_name(name: str | None = None) -> Finding:
    """Report whether the host name is that of an address of this machine, and of which interface."""
    name = name or socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = f"add '{name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface of this machine"
        return Finding("host name", "warning", f"'{name}' has no address: {error}", fix)
    interfaces = {entry.address: interface for interface, entries in psutil.net_if_addrs().items() for entry in entries}
    own = [f"{address} ({interfaces[address]})" for address in addresses if address in interfaces]
    if not own:
        fix = f"correct '{name}' in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface of this machine"
        return Finding("host name", "warning", f"'{name}' is {', '.join(addresses)}, not this machine", fix)
    return Finding("host name", "ok", f"'{name}' is {', '.join(own)}")


def check_ports() -> Finding:
    """Open a port of the loopback interface and connect to it."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=5):
                server.accept()[0].close()
    except OSError as error:
        return Finding("ports", "error", f"127.0.0.1 cannot be used: {error}", "allow connections within this machine")
    return Finding("ports", "ok", "a free port of 127.0.0.1 opens and answers")
