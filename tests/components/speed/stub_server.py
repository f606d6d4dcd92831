"""A server that streams completions of a fixed length, and answers some with a 200 and nothing in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Thread

TOKENS = 4


@contextmanager
def stub_server(empty_every: int) -> Iterator[str]:
    """Address of a server whose every `empty_every`-th answer is empty."""
    numbers = count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            is_empty = next(numbers) % empty_every == 0
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            texts = [""] if is_empty else ["word "] * TOKENS
            chunks = [json.dumps({"choices": [{"text": text}]}) for text in texts]
            if not is_empty:
                chunks.append(json.dumps({"choices": [], "usage": {"completion_tokens": TOKENS, "prompt_tokens": 3}}))
            self.wfile.write("".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode())

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
