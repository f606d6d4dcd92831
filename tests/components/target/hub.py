"""A server that speaks as much of the Hugging Face Hub's HTTP API as a download needs, over a folder of models or data sets."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "5e1f" * 10
GATED = "gated/model"


@contextmanager
def serve_hub(root: Path) -> Iterator[str]:
    """Address of a hub with the repositories below `root`; `HubHandler.requests` has what it was asked for."""
    HubHandler.root, HubHandler.requests = root, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class HubHandler(BaseHTTPRequestHandler):
    """Serves the repositories under `root` (folders named `owner/name`) at branch `main` and its commit."""

    root: Path
    requests: list[str] = []

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: object) -> None:
        """Silent: requests are kept in `requests`."""

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.requests.append(path)
        kind, repo, revision, rest = _parse(path)
        if repo == GATED:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        if not (self.root / repo).is_dir():
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        if revision not in ("main", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
        if kind == "resolve":
            data = (self.root / repo / rest).read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self._send(200, data, headers, with_body)
        files = {file.relative_to(self.root / repo).as_posix(): file for file in (self.root / repo).rglob("*.*")}
        if kind == "tree":
            body = [_tree_entry(name, files[name]) for name in sorted(files)]
        else:
            body = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in sorted(files)]}
        return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


def _parse(path: str) -> tuple[str, str, str, str]:
    """(kind, repo, revision, rest) of /api/models/R, /api/models/R/revision/V, /api/models/R/tree/V, /R/resolve/V/F,
    and of the same under /api/datasets and /datasets."""
    parts = path.removeprefix("/api").removeprefix("/models").removeprefix("/datasets").strip("/").split("/")
    repo, kind = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "revision"
    return kind, repo, parts[3] if len(parts) > 3 else "main", "/".join(parts[4:])


def _tree_entry(name: str, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
