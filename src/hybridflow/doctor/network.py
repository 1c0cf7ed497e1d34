"""The host name, through which collectives find this machine, and ports of the loopback interface."""

import os
import socket

import psutil

from hybridflow.doctor.finding import Finding

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface of gloo's collectives instead."""


def check_host_name(name: str | None = None) -> Finding:
    """Report the interface that collectives use: that of VARIABLE, or of the address of the host name."""
    interfaces = psutil.net_if_addrs()
    if chosen := os.environ.get(VARIABLE):
        if chosen not in interfaces:
            fix = f"set it to one of {', '.join(sorted(interfaces))}, or unset it"
            return Finding("host name", "error", f"{VARIABLE}='{chosen}' names no interface of this machine", fix)
        return Finding("host name", "ok", f"{VARIABLE}='{chosen}' chooses the interface")
    name = name or socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = f"add '{name}' to /etc/hosts, or set {VARIABLE} to the interface of this machine"
        return Finding("host name", "warning", f"'{name}' has no address: {error}", fix)
    by_address = {entry.address: interface for interface, entries in interfaces.items() for entry in entries}
    own = [f"{address} ({by_address[address]})" for address in addresses if address in by_address]
    if not own:
        fix = f"correct '{name}' in /etc/hosts, or set {VARIABLE} to the interface of this machine"
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
