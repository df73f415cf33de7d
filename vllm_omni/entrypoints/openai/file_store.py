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
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from vllm.exceptions import VLLMNotFoundError

from vllm_omni.distributed.locked_folder import LockedFolder
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.server_args import ServerLimits, flag

_NUM_RANDOM_BYTES = 24
FILES_PATH = "/v1/images/files"
_URL_PATH = re.compile(FILES_PATH + r"/[A-Za-z0-9_-]{32}\.[a-z]{2,5}")  # The random bytes in base64, a suffix.


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredFile:
    """
    Attributes:
        owner: The hash of the API key that it was made for.
        path: Of the file, whose name is the stored file's.
        num_bytes: Of the file.
    """

    owner: bytes
    path: Path
    num_bytes: int

    @property
    def name(self) -> str:
        return self.path.name


class FileStore:
    """All files, oldest first, in a private folder."""

    def __init__(self, limits: ServerLimits) -> None:
        """
        Raises:
            OSError: No folder can be made in the directory for files.
        """
        self._max_files = limits.max_stored_images
        self._max_bytes = limits.max_stored_image_bytes
        self._max_total_bytes = limits.max_total_stored_image_bytes
        self._keep_s = limits.image_expires_after_s
        self._files: dict[str, StoredFile] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._folder = private_folder(limits, "images")
        self._remove_folder = weakref.finalize(self, self._folder.remove)

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
        self._check_size(contents)
        files = [
            StoredFile(owner=owner, path=self._folder.path / _new_name(suffix), num_bytes=len(content))
            for content in contents
        ]
        writing = asyncio.ensure_future(asyncio.to_thread(_write, files, contents))
        try:
            await asyncio.shield(writing)
        except BaseException:  # The end of the request does not stop the thread.
            await asyncio.wait([writing])
            for file in files:
                file.path.unlink(missing_ok=True)
            raise
        if not self._make_room(files, owner):
            for file in files:
                file.path.unlink(missing_ok=True)
            raise OmniHTTPError(
                f"the server keeps {self._max_total_bytes} bytes of images ({flag('max_total_stored_image_bytes')}), "
                "which those of other clients take; try again later, or request response_format b64_json",
                HTTPStatus.INSUFFICIENT_STORAGE,
            )
        loop = asyncio.get_running_loop()
        for file in files:
            self._files[file.name] = file
            self._expiries[file.name] = loop.call_later(self._keep_s, self._remove, file)
        return [file.name for file in files]

    def path(self, name: str) -> Path:
        """The file of a name.

        Raises:
            VLLMNotFoundError: There is none, or it has expired.
        """
        file = self._files.get(name)
        if file is None:
            raise VLLMNotFoundError("there is no such file; it may have expired")
        return file.path

    async def close(self) -> None:
        """Removes all files."""
        for file in list(self._files.values()):
            self._remove(file)
        await asyncio.to_thread(self._remove_folder)

    def _check_size(self, contents: Sequence[bytes]) -> None:
        num_bytes = sum(map(len, contents))
        if len(contents) > self._max_files or num_bytes > self._max_bytes:
            raise OmniHTTPError(
                f"the answer has {len(contents)} files of {num_bytes} bytes; the server keeps {self._max_files} "
                f"({flag('max_stored_images')}) of {self._max_bytes} bytes ({flag('max_stored_image_bytes')}); request "
                "response_format b64_json",
                HTTPStatus.INSUFFICIENT_STORAGE,
            )

    def _make_room(self, files: Sequence[StoredFile], owner: bytes) -> bool:
        """Removes an owner's oldest files for new ones, if needed; false: all of them would not be enough."""
        own = [file for file in self._files.values() if file.owner == owner]
        num_own = sum(file.num_bytes for file in own)
        num_of_others = sum(file.num_bytes for file in self._files.values()) - num_own
        num_new = sum(file.num_bytes for file in files)
        max_bytes = min(self._max_bytes, self._max_total_bytes - num_of_others)
        if num_new > max_bytes:
            return False
        num_files, num_bytes = len(own) + len(files), num_own + num_new
        for file in own:
            if num_files > self._max_files or num_bytes > max_bytes:
                num_files, num_bytes = num_files - 1, num_bytes - file.num_bytes
                self._remove(file)
        return True

    def _remove(self, file: StoredFile) -> None:
        del self._files[file.name]
        self._expiries.pop(file.name).cancel()
        file.path.unlink(missing_ok=True)


def private_folder(limits: ServerLimits, kind: str) -> LockedFolder:
    """A new folder for files of one kind; those that killed servers of this host have left are removed.

    Not those of other hosts, since a file system that hosts share need not share its locks.

    Raises:
        OSError: It cannot be made.
    """
    parent = Path(limits.video_dir or tempfile.gettempdir())
    return LockedFolder(parent, f"vllm-omni-{kind}-{socket.gethostname()}-")


def is_file_path(path: str) -> bool:
    """Whether a path of a URL has a file's name."""
    return _URL_PATH.fullmatch(path) is not None


def _new_name(suffix: str) -> str:
    return f"{secrets.token_urlsafe(_NUM_RANDOM_BYTES)}.{suffix}"


def _write(files: Sequence[StoredFile], contents: Sequence[bytes]) -> None:
    for file, content in zip(files, contents, strict=True):
        file.path.write_bytes(content)
