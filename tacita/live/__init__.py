"""Live mode: the same round on real nodes, with Flower as the engine that carries bytes between them.

The server runs Flower's SuperLink on loopback behind a gateway that nodes dial over TLS. A node is a daemon that owns
its store and a small client that fetches messages and hands them to the daemon over a Unix socket.
"""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before anything here loads flwr, which reads them
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
