"""Show the page of a run, or of several, while they go on; to this machine only, until Ctrl-C.

The page is that of `hybridflow report`; it follows the files of the run. From another machine, forward the port:
`ssh -L 8000:127.0.0.1:8000 HOST`.
"""

import argparse
from pathlib import Path

from hybridflow.cli.arguments import port_number
from hybridflow.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run directories and the port."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--port", type=port_number, default=0, metavar="PORT", help="port of 127.0.0.1 (default: a free one)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    from hybridflow.cli.inspect.report.live import LiveServer
    from hybridflow.runtime.observe.run_files import RunFiles, printable

    for path in args.runs:
        RunFiles(path)  # a directory that is not a run is an error now, not in the browser
    try:
        server = LiveServer(args.runs, args.port)
    except OSError as error:
        raise ConfigError(f"--port={args.port} cannot be used: {error}; choose another one.") from error
    with server:
        print(f"watching {', '.join(map(printable, args.runs))} at {server.address} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
    return 0
