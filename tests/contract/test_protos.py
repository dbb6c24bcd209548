"""The .proto files: everything is explained, and zero never means something."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

PROTO_ROOT = Path(__file__).parents[2] / "proto"
PROTOS = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("octavo/**/*.proto"))

_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # field numbers of FileDescriptorProto
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4  # of DescriptorProto
_VALUES = _METHODS = 2  # of EnumDescriptorProto and ServiceDescriptorProto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set.binpb"
    include = importlib.resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"--proto_path={PROTO_ROOT}", f"--proto_path={include}", "--include_source_info"]
    assert protoc.main([*arguments, f"--descriptor_set_out={out}", *PROTOS]) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def things_of(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """(path in the descriptor, name) of every service, method, message, field, enum and enum value."""
    for index, service in enumerate(file.service):
        yield (_SERVICES, index), service.name
        for number, method in enumerate(service.method):
            yield (_SERVICES, index, _METHODS, number), f"{service.name}.{method.name}"
    for index, message in enumerate(file.message_type):
        yield from _things_of_message((_MESSAGES, index), message)
    for index, enum in enumerate(file.enum_type):
        yield (_ENUMS, index), enum.name
        for number, value in enumerate(enum.value):
            yield (_ENUMS, index, _VALUES, number), value.name


def _things_of_message(path: tuple[int, ...], message: DescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    yield path, message.name
    for number, field in enumerate(message.field):
        yield (*path, _FIELDS, number), f"{message.name}.{field.name}"
    for number, nested in enumerate(message.nested_type):
        yield from _things_of_message((*path, _NESTED, number), nested)
    for number, enum in enumerate(message.enum_type):
        yield (*path, _NESTED_ENUMS, number), enum.name


def test_everything_is_explained(files: list[FileDescriptorProto]) -> None:
    assert len(files) >= 4
    unexplained = []
    for file in files:
        comments = {
            tuple(location.path): (location.leading_comments or location.trailing_comments).strip()
            for location in file.source_code_info.location
        }
        unexplained += [f"{file.name}: {name}" for path, name in things_of(file) if not comments.get(path)]
    assert unexplained == []


def test_first_value_of_an_enum_means_nothing(files: list[FileDescriptorProto]) -> None:
    enums = [enum for file in files for enum in file.enum_type]
    assert enums
    assert [enum.value[0].name for enum in enums if not enum.value[0].name.endswith("_UNSPECIFIED")] == []


def test_package_is_the_folder_and_each_call_has_its_own_messages(files: list[FileDescriptorProto]) -> None:
    used: list[str] = []
    for file in files:
        assert file.package == str(Path(file.name).parent).replace("/", ".")
        used += [kind for service in file.service for method in service.method for kind in _types_of(method)]
    assert len(used) == len(set(used))


def _types_of(method: MethodDescriptorProto) -> list[str]:
    return [method.input_type, method.output_type]


def test_lists_of_numbers_are_packed_into_bytes(files: list[FileDescriptorProto]) -> None:
    numbers = {
        FieldDescriptorProto.TYPE_INT32,
        FieldDescriptorProto.TYPE_UINT32,
        FieldDescriptorProto.TYPE_SINT32,
        FieldDescriptorProto.TYPE_FIXED32,
    }
    repeated = [
        f"{message.name}.{field.name}"
        for file in files
        for message in file.message_type
        for field in message.field
        if field.label == FieldDescriptorProto.LABEL_REPEATED and field.type in numbers
    ]
    assert repeated == []
