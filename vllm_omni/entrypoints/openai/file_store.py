# SPDX-License-Identifier: Apache-2.0
"""Files of answers that name them by URL: each is kept for a time, for whoever knows its name.

Limited in number, bytes and time, for each API key by itself, and in bytes for all keys. A name is random and cannot be
guessed, so that a file is downloaded without a key. Does not know what the files are. For use from one event loop.
"""

import asyncio
import re
import secrets
import socket
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Generic, TypeVar

from vllm.exceptions import VLLMNotFoundError

from vllm_omni.distributed.locked_folder import LockedFolder
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.server_args import ServerLimits, flag

_NUM_RANDOM_BYTES = 24
FILES_PATH = "/v1/images/files"
_URL_PATH = re.compile(FILES_PATH + r"/[A-Za-z0-9_-]{32}\.[a-z]{2,5}")  # The random bytes in base64, a suffix.


@dataclass(eq=False, kw_only=True)
class StoredFile:
    """
    Attributes:
        owner: The hash of the API key that it was made for.
        path: Of the file.
        num_bytes: Of the file; 0 until it is written.
    """

    owner: bytes
    path: Path
    num_bytes: int = 0

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self.path.name


File = TypeVar("File", bound=StoredFile)


class OwnedFiles(Generic[File]):
    """Files by name, oldest first, in a private folder."""

    def __init__(
        self, limits: ServerLimits, kind: str, *, max_files: int, max_bytes: int, max_total_bytes: int, keep_s: float
    ) -> None:
        """
        Args:
            kind: In the folder's name. The folders that killed servers of this host have left are removed, but not
                those of other hosts, since a file system that hosts share need not share its locks.
            max_files, max_bytes: Of one owner.
            max_total_bytes: Of all owners.
            keep_s: Seconds that a file is kept.

        Raises:
            OSError: No folder can be made in the directory for files.
        """
        self._max_files, self._max_bytes, self._max_total_bytes = max_files, max_bytes, max_total_bytes
        self._keep_s = keep_s
        self._files: dict[str, File] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        parent = Path(limits.video_dir or tempfile.gettempdir())
        self._folder = LockedFolder(parent, f"vllm-omni-{kind}-{socket.gethostname()}-")
        self._remove_folder = weakref.finalize(self, self._folder.remove)

    async def close(self) -> None:
        """Removes all files."""
        for file in list(self._files.values()):
            self._remove(file)
        await asyncio.to_thread(self._remove_folder)

    def _of(self, owner: bytes) -> list[File]:
        return [file for file in self._files.values() if file.owner == owner]

    def _make_room(self, owner: bytes, num_bytes: int, num_files: int = 0) -> bool:
        """Removes an owner's oldest files for new ones, if needed; false: all of them would not be enough."""
        own = self._of(owner)
        num_own = sum(file.num_bytes for file in own)
        num_of_others = sum(file.num_bytes for file in self._files.values()) - num_own
        max_bytes = min(self._max_bytes, self._max_total_bytes - num_of_others)
        if num_bytes > max_bytes:
            return False
        num_files, num_bytes = len(own) + num_files, num_own + num_bytes
        for file in own:
            if num_files > self._max_files or (num_bytes > max_bytes and file.num_bytes):
                num_files, num_bytes = num_files - 1, num_bytes - file.num_bytes
                self._remove(file)
        return True

    def _expire_later(self, file: File) -> None:
        self._expiries[file.name] = asyncio.get_running_loop().call_later(self._keep_s, self._remove, file)

    def _remove(self, file: File) -> None:
        self._files.pop(file.name, None)
        if (expiry := self._expiries.pop(file.name, None)) is not None:
            expiry.cancel()
        file.path.unlink(missing_ok=True)


async def write_files(contents: Mapping[Path, bytes]) -> None:
    """Writes files. If this fails or is cancelled, none of them is there."""

    def write() -> None:
        for path, content in contents.items():
            path.write_bytes(content)

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    except BaseException:  # The end of the request does not stop the thread, nor does another cancellation.
        while not writing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([writing])
        for path in contents:
            path.unlink(missing_ok=True)
        raise


class FileStore(OwnedFiles[StoredFile]):
    """All files of answers."""

    def __init__(self, limits: ServerLimits) -> None:
        """Raises as the base."""
        super().__init__(
            limits,
            "images",
            max_files=limits.max_stored_images,
            max_bytes=limits.max_stored_image_bytes,
            max_total_bytes=limits.max_total_stored_image_bytes,
            keep_s=limits.image_expires_after_s,
        )

    async def add(self, contents: Sequence[bytes], suffix: str, owner: bytes) -> list[str]:
        """Keeps the files of one answer, and removes the owner's oldest ones where there are too many.

        Args:
            suffix: What the files are, such as `png`.

        Returns:
            Their names.

        Raises:
            OmniHTTPError: They are more than are kept of one owner, or those of others leave no room.
            OSError: They cannot be written.
        """
        num_bytes = sum(map(len, contents))
        if len(contents) > self._max_files or num_bytes > self._max_bytes:
            raise OmniHTTPError(
                f"the answer has {len(contents)} files of {num_bytes} bytes; the server keeps {self._max_files} "
                f"({flag('max_stored_images')}) of {self._max_bytes} bytes ({flag('max_stored_image_bytes')}); request "
                "response_format b64_json",
                HTTPStatus.INSUFFICIENT_STORAGE,
            )
        by_path = {
            self._folder.path / f"{secrets.token_urlsafe(_NUM_RANDOM_BYTES)}.{suffix}": content for content in contents
        }
        await write_files(by_path)
        if not self._make_room(owner, num_bytes, len(contents)):
            for path in by_path:
                path.unlink(missing_ok=True)
            raise OmniHTTPError(
                f"the server keeps {self._max_total_bytes} bytes of images ({flag('max_total_stored_image_bytes')}), "
                "which those of other clients take; try again later, or request response_format b64_json",
                HTTPStatus.INSUFFICIENT_STORAGE,
            )
        for path, content in by_path.items():
            file = StoredFile(owner=owner, path=path, num_bytes=len(content))
            self._files[file.name] = file
            self._expire_later(file)
        return [path.name for path in by_path]

    def path(self, name: str) -> Path:
        """The file of a name.

        Raises:
            VLLMNotFoundError: There is none, or it has expired.
        """
        file = self._files.get(name)
        if file is None:
            raise VLLMNotFoundError("there is no such file; it may have expired")
        return file.path


def is_file_path(path: str) -> bool:
    """Whether a path of a URL has a file's name."""
    return _URL_PATH.fullmatch(path) is not None
