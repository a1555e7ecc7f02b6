"""The committed stubs are what protoc makes of the proto."""

from pathlib import Path

from castline.server.proto import castline_pb2, regenerate


def test_stubs_are_what_the_proto_says(tmp_path: Path) -> None:
    """Prevents a proto that was edited without its stubs, or stubs that were edited by hand."""
    regenerate.generate(tmp_path)
    for name in regenerate.STUBS:
        committed = (regenerate.HERE / name).read_bytes()
        assert (tmp_path / name).read_bytes() == committed, f"{name}: run python -m castline.server.proto.regenerate"


def test_the_proto_has_one_full_name() -> None:
    """Prevents stubs that import each other by a bare name, which would need a changed sys.path."""
    assert castline_pb2.DESCRIPTOR.name == "castline/server/proto/castline.proto"
    assert castline_pb2.DESCRIPTOR.package == "castline.v1"
