"""What report, card and MLflow make of every fact, and that each is drawn only where it was measured."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from components.publishing import tables
from components.publishing.card import model_card
from components.publishing.evidence import Evidence, metrics_of
from components.publishing.plots import draw_plots
from components.publishing.publication import PROMPTS, build_bundle
from components.publishing.report import render_report
from components.publishing.speed_plots import over_concurrency, over_k
from components.publishing.speed_tables import recommended_table, speed_tables
from components.publishing.summary import traffic
from components.publishing.task_tables import task_table, task_tables
from tests.components.publishing.by_hand import evidence_by_hand, point, speed_facts, write
from tests.components.publishing.rehearsal import write_head

BOUNDED = {
    "accepted.png",
    "family_al.png",
    "tokens_per_s.png",
    "tokens_per_step.png",
    "loss.png",
    "accuracy.png",
    "walked_al.png",
}
FURTHER = {
    "task_al.png",
    "ab_al.png",
    *(f"speed_chat_{figure}_over_{along}.png" for figure in ("tokens_per_s", "al") for along in ("concurrency", "k")),
}


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    return evidence_by_hand(tmp_path)


def test_every_plot_is_drawn_and_each_only_where_it_has_figures(evidence: Evidence, tmp_path: Path) -> None:
    drawn = draw_plots(evidence, tmp_path / "plots")
    assert {path.name for path in drawn} == BOUNDED | FURTHER
    assert all(imread(path).std() > 0.05 for path in drawn)  # not blank

    bare = evidence_by_hand(tmp_path / "bare", speed=False, tasks=False)
    del bare.artifacts["ab"].facts["over_time"]
    assert {path.name for path in draw_plots(bare, tmp_path / "few")} == BOUNDED


def test_intervals_stand_beside_the_figures(evidence: Evidence) -> None:
    [row] = [row for row in tables.arms_table(evidence.evaluation).rows if row[0] == "candidate"]
    assert row[2] == "2.200 [2.100, 2.300]"
    [row] = [row for row in tables.position_table(evidence.evaluation).rows if row[0] == "candidate"]
    assert row[1:] == ("60.0% [55.0%, 65.0%]", "40.0% [35.0%, 45.0%]", "20.0% [15.0%, 25.0%]")
    [row] = [row for row in tables.ab_table(evidence.ab).rows if row[0] == "challenger"]
    assert row[7] == "2.100 [2.000, 2.200]"


def test_an_evaluation_from_before_the_intervals_shows_its_figures_alone(evidence: Evidence) -> None:
    for arm in evidence.evaluation["arms"].values():
        del arm["intervals"]
    [row] = [row for row in tables.arms_table(evidence.evaluation).rows if row[0] == "candidate"]
    assert row[2] == "2.200"
    assert tables.position_table(evidence.evaluation).rows[1][1:] == ("60.0%", "40.0%", "20.0%")


def test_every_task_has_its_own_tables(evidence: Evidence) -> None:
    found = {table.title: table for table in task_tables(evidence.evaluation)}
    task = found["Task code_editing (16 prompts)"]
    assert task.rows[2] == (
        "candidate",
        "2.200 [2.100, 2.300]",
        "2.200",
        "100.0%",
        "pass@1 45.0% [40.0%, 50.0%]",
        "12.5%",
        "stop 12, length 4",
    )
    assert found["chat & more: AL by prompt tokens"].rows[1] == (
        "candidate",
        "2.200 [2.100, 2.300]",
        "2.150 [2.050, 2.250]",
    )
    assert "Sampled at temperature 1.0" in found
    assert list(task_tables({"arms": {}})) == []


def test_the_recommended_k_names_off(evidence: Evidence) -> None:
    assert evidence.speed is not None
    table = recommended_table(evidence.speed)
    assert table.headers == ("task", "c=1", "c=16")
    assert table.rows == [("chat", "K=3 (candidate) +80.0% [+70.0%, +90.0%]", "off")]


def test_points_show_their_gain_and_an_invalid_one_its_reason(evidence: Evidence) -> None:
    found = {table.title: table for table in speed_tables(evidence.speed)}
    rows = {row[:4]: row for row in found["Speed: chat"].rows}
    assert rows["candidate", "3", "16", "inf"][4:7] == ("1200.0", "+50.0%", "2.200")
    assert rows["none", "off", "1", "inf"][5] == "–"
    assert rows["candidate", "3", "16", "2.0"][5] == "–"  # nothing to compare a limited rate with
    [invalid] = found["Speed: code"].rows
    assert invalid[4] == "invalid: 2 of 32 answers: empty"
    assert found["Dynamic K"].rows[1] == ("ngram", "1-4: K=3, 5-16: off", "+5.0% [+1.0%, +9.0%] (K=1)", "yes")
    assert ("candidate", "3", "100000", "4") in found["Engines of the speed pass"].rows
    assert all(len(row) == len(table.headers) for table in found.values() for row in table.rows)


def test_a_measured_ratio_goes_before_that_of_two_rates() -> None:
    ratio = {"estimate": 1.25, "low": 1.2, "high": 1.3}
    speed = {"points": [point("none", None, 1, 100.0), point("candidate", 3, 1, 130.0, against_off=ratio)]}
    table = next(table for table in speed_tables(speed) if table.title == "Speed: chat")
    assert table.rows[1][5] == "+25.0% [+20.0%, +30.0%]"


def test_curves_have_a_line_an_arm_and_k_and_a_line_a_concurrency() -> None:
    points = [p for p in speed_facts()["points"] if p["request_rate"] == "inf" and p["task"] == "chat"]
    lines = over_concurrency(points, "output_tokens_per_s")
    assert {name: [(x, p.value) for x, p in line] for name, line in lines.items()} == {
        "none": [(1, 100.0), (16, 800.0)],
        "candidate K=1": [(1, 130.0), (16, 900.0)],
        "candidate K=3": [(1, 180.0), (16, 1200.0)],
    }
    by_k = over_k(points, "al")
    assert {name: [x for x, _ in line] for name, line in by_k.items()} == {
        "candidate c=1": [1, 3],
        "candidate c=16": [1, 3],
    }
    assert "none" not in over_concurrency(points, "al")


def test_a_speed_pass_that_was_left_out_is_no_speed_pass(tmp_path: Path) -> None:
    evidence = evidence_by_hand(tmp_path, speed=False)
    left_out = evidence.artifacts["ab"].manifest | {
        "facts": {"left_out": True, "points": [], "arms": {}, "recommended": {}}
    }
    artifacts = dict(evidence.artifacts)
    artifacts["speed"] = type(artifacts["ab"])("speed", artifacts["ab"].location, "f", left_out)
    assert Evidence(evidence.settings, artifacts, evidence.verdict).speed is None


def test_report_and_card_hold_all_of_it(evidence: Evidence, tmp_path: Path) -> None:
    html = render_report(
        evidence, draw_plots(evidence, tmp_path / "plots"), "Refused.", [("run", "http://127.0.0.1/#/runs/1")]
    )
    card = model_card(evidence)
    for title in (
        "Recommended K by concurrency",
        "Speed: chat",
        "Task code_editing (16 prompts)",
        "Accepted by position",
    ):
        assert title in html
        assert title in card
    assert "chat &amp; more" in html
    assert '<span class="bounds">[2.100, 2.300]</span>' in html
    assert "| chat | K=3 (candidate) +80.0% [+70.0%, +90.0%] | off |" in card
    assert "Nothing stands out" in html
    assert "None" not in html.replace("none", "")
    assert "None" not in card


def test_the_bundle_holds_the_figures_of_its_card(evidence: Evidence, tmp_path: Path) -> None:
    write_head(evidence.artifacts["head"].join("head").path, 0.5)
    for stage in ("evaluation", "speed", "ab"):
        write(
            evidence.artifacts[stage],
            f"{stage}.json",
            json.dumps(dict(evidence.artifacts[stage].facts) | {"differences": {}}),
        )
    write(evidence.artifacts["evaluation"], PROMPTS, "")
    build_bundle(evidence, tmp_path / "bundle")
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert "`evaluation.json`, `speed.json` and `ab.json` hold every figure above" in card
    assert json.loads((tmp_path / "bundle" / "speed.json").read_text())["recommended"]["chat"]["16"]["arm"] == "none"


def test_metric_names_hold_nothing_of_the_run_and_invalid_points_no_figures(evidence: Evidence) -> None:
    figures = metrics_of(evidence)
    assert figures["eval/candidate/al_low"] == pytest.approx(2.1)
    assert figures["eval/candidate/chat & more/al_high"] == pytest.approx(2.3)
    assert figures["speed/candidate/k3/chat/c16/tokens_per_s"] == 1200.0
    assert figures["speed/none/k0/chat/c1/ttft_ms_p95"] == 20.0
    assert figures["speed/candidate/k3/chat/c16_rate2/tokens_per_s"] == 50.0
    assert not [name for name in figures if name.startswith("speed/candidate/k3/code/")]
    assert not [name for name in figures if "d" * 8 in name or "0123456" in name]


def test_an_arm_that_is_not_valid_has_no_bounds_in_mlflow(evidence: Evidence) -> None:
    evidence.evaluation["arms"]["candidate"]["problems"] = ["3 of 32 answers: empty answer"]
    assert not [
        name
        for name in metrics_of(evidence)
        if name.endswith(("candidate/al_low", "code_editing/al_low")) and "candidate" in name
    ]


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"champion": (1.0, "v2-0123")}, "all traffic to champion v2-0123"),
        ({"none": (1.0, "none"), "challenger": (0.0, "4567")}, "all traffic to none"),
        (
            {"champion": (0.6, "v1-89ab"), "challenger": (0.2, "4567")},
            "75% to champion v1-89ab, 25% to challenger 4567",
        ),
        ({"none": (0.0, "none")}, "no arm takes sessions"),
    ],
)
def test_the_summary_says_who_has_the_traffic_now(arms: dict[str, tuple[float, str]], said: str) -> None:
    told = {name: {"weight": weight, "head": head, "state": "serving"} for name, (weight, head) in arms.items()}
    assert traffic({"arms": told}) == said


def test_a_paused_arm_has_no_traffic() -> None:
    told = {"weight": 0.5, "head": "v1-89ab"}
    health = {"arms": {"champion": told | {"state": "serving"}, "challenger": told | {"state": "paused"}}}
    assert traffic(health) == "all traffic to champion v1-89ab"


def test_a_score_stands_beside_what_was_kept_of_plain_decodings_answers() -> None:
    share = {"estimate": 0.5, "low": None, "high": None}
    figures = {"al": None, "tokens_per_step": 1.0, "coverage": None, "looped": None, "finish_reasons": {}}
    scores = [
        {"score": {"name": "pass@1"} | share, "kept": share},
        {"score": None, "kept": share},
        {"score": {"name": "pass@1"} | share},
        {"score": None, "kept": None},
    ]
    arms = {str(number): figures | found for number, found in enumerate(scores)}
    shown = [row[4] for row in task_table("sums", {"num_prompts": 2, "arms": arms}).rows]
    assert shown == ["pass@1 50.0%; as plain decoding 50.0%", "as plain decoding 50.0%", "pass@1 50.0%", "–"]
