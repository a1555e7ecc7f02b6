"""What a server is told, and where it then is. Imports nothing heavy: the command line shows these defaults."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = "127.0.0.1"
    http_port: int = 8000
    """0: any free port."""
    grpc_port: int = 8001
    model_name: str | None = None
    """None: the name in the manifest."""
    drain_timeout_s: float = 30.0
    stream_interval: int | None = None
    """Tokens of a streamed message; the first and the last may have fewer. None: one, and more under load."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    http: str
    """URL."""
    grpc: str
    """``grpc://host:port``; clients take the part after the slashes."""
