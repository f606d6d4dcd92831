"""Ray's dashboard that goes away while others are asked too: its absence is told as its own."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from components.publishing.run_log import mlflow_errors
from components.serving.listing import Dashboard, DashboardAway

VERSION = {"ray_version": "2.60.0"}


class Greeting(BaseHTTPRequestHandler):
    """What a client asks for before all else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(VERSION).encode())

    def log_message(self, *about: Any) -> None:
        pass


@pytest.fixture
def gone() -> Dashboard:
    """Of a dashboard that answered once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Greeting)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        return Dashboard(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "ask",
    [
        Dashboard.get_serve_details,
        Dashboard.delete_applications,
        lambda dashboard: dashboard.deploy_applications({"applications": []}),
    ],
)
def test_a_dashboard_that_goes_away_under_a_publication_is_not_told_as_mlflows_fault(
    gone: Dashboard, ask: Callable[[Dashboard], Any]
) -> None:
    with pytest.raises(DashboardAway, match=r"Ray's dashboard went away .*repeat"), mlflow_errors("http://mlflow"):
        ask(gone)
