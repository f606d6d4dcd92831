"""Alert rules and dashboard ask for figures that the router has, by labels that they have."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from components.serving.meter import Meter
from components.serving.metrics import Metrics, Outcome

FOLDER = Path(__file__).resolve().parents[2] / "clusters" / "monitoring"
RULES = yaml.safe_load((FOLDER / "aerie-alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = json.loads((FOLDER / "aerie-dashboard.json").read_text())["panels"]
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
STREAM = [
    *({"choices": [{"delta": {"content": text}}]} for text in ("a", "b")),
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 4},
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": 2,
                "num_draft_tokens": 6,
                "num_accepted_draft_tokens": 3,
                "acceptance_histogram": [0, 1, 1, 0],
            }
        },
    },
]


@pytest.fixture(scope="module")
def exposed():
    """Labels by name of every sample that the router exposes once each kind of request has ended."""
    metrics = Metrics()
    metrics.set_arms([("challenger", "v2", "serving", 0.5)], 1)
    meter = Meter()
    for event in STREAM:
        meter.read_event(f"data: {json.dumps(event)}\n\n")
    for outcome in Outcome:
        metrics.ended("challenger", meter, outcome, "502" if outcome == Outcome.FAILED else None, shadow=False)
        metrics.ended("challenger", meter, outcome, "502" if outcome == Outcome.FAILED else "400", shadow=True)
    for gauge in (metrics.ejected, metrics.running):
        gauge.labels("challenger").set(1)
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_figure_exists_with_the_labels_it_is_grouped_by(exposed, name):
    asked = re.findall(r"(?:by \(([^)]*)\) \()?(?:rate|changes)?\(?\b(aerie_\w+)", EXPRESSIONS[name])
    assert asked
    for labels, figure in asked:
        assert figure in exposed
        assert {label.strip() for label in labels.split(",") if label} <= exposed[figure]


def test_the_parser_of_this_test_sees_a_name_that_is_wrong(exposed):
    assert "aerie_request_total" not in exposed
    assert {"aerie_requests_total", "aerie_ttft_seconds_bucket", "aerie_accepted_at_total"} <= exposed.keys()


def test_every_alert_says_what_happened_and_what_to_do():
    for rule in RULES:
        assert rule["for"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_panels_do_not_cover_each_other():
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in PANELS]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in PANELS)
