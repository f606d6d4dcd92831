"""Who may ask: optional keys for clients and a token for operators, each in a file of its own that nobody prints."""

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from components.serving.protocol import ApiError

log = logging.getLogger("ray.serve")


@dataclass
class SecretFile:
    """The secrets in a file, one a line (`#` begins a comment), read again when the file changes.

    A file that cannot be read admits nobody.
    """

    path: str
    _stamp: tuple[int, int] | None = field(default=None, init=False)
    _digests: list[bytes] = field(default_factory=list, init=False)

    def admits(self, secret: str) -> bool:
        self._refresh()
        digest = _digest(secret)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # all of them: in constant time

    def _refresh(self) -> None:
        try:
            found = os.stat(self.path)
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self._digests = [_digest(secret) for secret in read_secrets(Path(self.path))]
                self._stamp = stamp
        except OSError as error:
            log.error("%s cannot be read (%s): nobody is admitted by it", self.path, error.strerror)
            self._stamp, self._digests = None, []


def read_secrets(path: Path) -> list[str]:
    """The secrets of a file; OSError when it cannot be read."""
    lines = [line.strip() for line in path.read_text(errors="surrogateescape").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def check_bearer(headers: Mapping[str, str], secrets: SecretFile | None) -> None:
    """Raises ApiError 401 unless the request carries one of the secrets; without a file everybody may."""
    if secrets is None:
        return
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.admits(secret.strip()):
        raise ApiError(401, "the request needs `Authorization: Bearer` with a valid key", "invalid_api_key")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
