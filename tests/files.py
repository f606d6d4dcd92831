"""What lies in a storage and when it was written, on a folder as on S3."""

from pyarrow.fs import FileSelector, FileSystem

from components.storage import Location


def stamps(folder: Location) -> dict[str, tuple[int, int]]:
    """{path below the folder: (bytes, ns of its last change)} of every file."""
    system, base = FileSystem.from_uri(folder.uri)
    found = system.get_file_info(FileSelector(base, recursive=True))
    return {info.path.removeprefix(f"{base}/"): (info.size, info.mtime_ns) for info in found if info.is_file}
