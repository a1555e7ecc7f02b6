"""Regenerates the stubs beside ``castline.proto``: ``python -m castline.server.proto.regenerate [DIRECTORY]``.

The proto is compiled under the virtual path ``castline/server/proto/castline.proto``, so that the stubs import each
other by the package's full name. A test compares the committed stubs with a fresh run, byte for byte.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
VIRTUAL_PATH = Path("castline/server/proto")
STUBS = ("castline_pb2.py", "castline_pb2.pyi", "castline_pb2_grpc.py")


def generate(directory: Path) -> None:
    """Writes STUBS into *directory*. Needs grpcio-tools (the `dev` extra). Raises RuntimeError where protoc refuses."""
    from grpc_tools import protoc

    with TemporaryDirectory() as output:
        arguments = [
            "protoc",
            f"--proto_path={VIRTUAL_PATH}={HERE}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            str(VIRTUAL_PATH / "castline.proto"),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused castline.proto; its message is above")
        for name in STUBS:
            (directory / name).write_bytes((Path(output) / VIRTUAL_PATH / name).read_bytes())


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
