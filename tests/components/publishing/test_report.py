"""What people read: the report stands alone, the card's command parses as vLLM's own arguments, every arm is named."""

import json
import re
import shlex
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from mlflow.tracking import MlflowClient
from rich.console import Console
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from components.config import Settings
from components.evaluation.gate import Verdict
from components.pipeline import Pipeline, Selection
from components.publishing.evidence import Evidence
from components.publishing.summary import print_diagnosis
from components.section import ConfigError
from components.stage import Artifact
from components.storage import Location
from tests.components.publishing.rehearsal import rehearse

LOADING = {"src", "srcset", "data", "poster", "background", "action", "formaction"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> Pipeline:
    """Two heads, the second against the first as champion."""
    folder = tmp_path_factory.mktemp("report")
    rehearse(folder, mlflow_server, "publish.name=report-head", quality=0.4).run(Selection())
    better = rehearse(folder, mlflow_server, "publish.name=report-head", quality=0.8)
    better.run(Selection())
    return better


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.images = 0
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.images += tag == "img"
        self.loads += [value or "" for name, value in attributes if name in LOADING]


def test_the_report_loads_nothing_and_has_its_plots_inside(published: Pipeline, mlflow_server: str) -> None:
    plots = MlflowClient(mlflow_server).list_artifacts(published.artifacts["publish"].facts["run_id"], "plots")
    html = published.artifacts["publish"].join("report.html").read_bytes().decode()
    reader = Reader()
    reader.feed(html)
    assert reader.images == len(plots) >= 8
    assert all(load.startswith("data:image/png;base64,") for load in reader.loads)
    assert not {"script", "link", "iframe", "object", "base"} & reader.tags
    assert "@import" not in html
    assert "url(" not in html


def test_the_report_says_the_verdict_and_every_arm(published: Pipeline) -> None:
    html = published.artifacts["publish"].join("report.html").read_bytes().decode()
    assert (
        "Version 2 of report-head may serve in place of version 1. Version 2 is the champion; no endpoint is up."
        in html
    )
    for text in ("<td>none</td>", "<td>ngram</td>", "<td>candidate</td>", "<td>champion</td>", "bigram table (walked)"):
        assert text in html
    assert "<td>tie</td>" in html  # prompt-0's last token differs at a gap of 0.125
    assert "dropped[empty] 2" in html
    assert "{{" not in html


def test_text_from_outside_is_escaped(tmp_path: Path, mlflow_server: str) -> None:
    name = "<img src=x>"
    pipeline = rehearse(tmp_path, mlflow_server, f"publish.name={name}")
    pipeline.run(Selection())
    html = pipeline.artifacts["publish"].join("report.html").read_bytes().decode()
    assert "<img src=x" not in html
    assert "&lt;img src=x&gt;" in html


def test_the_cards_command_is_one_that_vllm_parses(published: Pipeline) -> None:
    card = published.artifacts["publish"].join("bundle", "README.md").read_bytes().decode()
    [command] = re.findall(r"```bash\n(.*?)\n```", card, flags=re.DOTALL)
    program, subcommand, model, *arguments = shlex.split(command)
    assert (program, subcommand, model) == ("vllm", "serve", "/models/rehearsal")
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments)
    expected = {"method": "eagle3", "model": ".", "num_speculative_tokens": 3, "parallel_drafting": True}
    assert parsed.speculative_config == expected


def test_the_card_has_the_tables_and_a_readable_header(published: Pipeline) -> None:
    bundle = published.artifacts["publish"].join("bundle").path
    metadata = metadata_load(bundle / "README.md")
    assert metadata["license"] == "apache-2.0"
    card = (bundle / "README.md").read_text()
    evaluation = json.loads((bundle / "evaluation.json").read_text())
    candidate = evaluation["arms"]["candidate"]
    bounds = candidate["intervals"]["al"]
    assert f"| candidate | 3 | {candidate['al']:.3f} [{bounds['low']:.3f}, {bounds['high']:.3f}] |" in card
    for line in card.splitlines():
        assert "None" not in line
        assert "{{" not in line


def test_mlflows_pages_say_the_verdict_first(published: Pipeline) -> None:
    facts, client = published.artifacts["publish"].facts, published.tracker.client
    run, version = client.get_run(facts["run_id"]), client.get_model_version("report-head", facts["version"])
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**Better than what is served.**")
    assert f"AL at K=3 {published.artifacts['evaluation'].facts['arms']['candidate']['al']:.3f}" in note
    assert version.description == note


def test_a_diagnosis_is_read_from_finished_outputs(published: Pipeline, tmp_path: Path, mlflow_server: str) -> None:
    folder, text = Path(published.settings.storage.uri), StringIO()
    overrides = ("publish.name=report-head", "publish.promote=false")
    print_diagnosis(rehearse(folder, mlflow_server, *overrides, quality=0.8), Console(file=text, width=120))
    assert "Nothing stands out" in text.getvalue()
    with pytest.raises(
        ConfigError, match=r"--diagnose: there is no finished evaluation .*\(target is the first that is missing\)"
    ):
        print_diagnosis(rehearse(tmp_path, mlflow_server))


def test_a_head_that_drafts_badly_has_its_diagnosis_in_report_and_note(tmp_path: Path, mlflow_server: str) -> None:
    pipeline = rehearse(tmp_path, mlflow_server, "publish.name=weak-head", quality=0.05)
    pipeline.run(Selection())
    facts, text = pipeline.artifacts["publish"].facts, StringIO()
    print_diagnosis(pipeline, Console(file=text, width=200))
    symptom = f"AL is {pipeline.artifacts['evaluation'].facts['arms']['candidate']['al']:.3f} at K=3"
    note = pipeline.tracker.client.get_run(facts["run_id"]).data.tags["mlflow.note.content"]
    html = pipeline.artifacts["publish"].join("report.html").read_bytes().decode()
    assert symptom in text.getvalue()
    assert f"\n\n{symptom}" in note
    assert symptom in html


def test_provenance_leads_back_to_every_output(published: Pipeline) -> None:
    provenance = json.loads(published.artifacts["publish"].join("bundle", "provenance.json").read_bytes())
    for name in ("target", "prompts", "responses", "features", "vocabulary", "head", "evaluation", "ab"):
        assert provenance["stages"][name]["digest"] == published.artifacts[name].digest
    assert provenance["stages"]["prompts"]["rows"]["dropped"] == {"empty": 2}
    assert "argv" not in json.dumps(provenance)


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("bundled:smollm2-135m-instruct", "/storage/target/model"),
        (str(Path(__file__).parent), "/storage/target/model"),
        ("lab/model-1b", "lab/model-1b --revision c0ffee"),
    ],
    ids=["bundled", "folder", "hub"],
)
def test_the_command_serves_the_very_target_that_was_measured(model: str, served: str) -> None:
    target = {"model": model, "path": "/storage/target/model", "revision": "c0ffee"}
    evaluation = {"candidate": {"num_speculative_tokens": 5}}
    artifacts = {
        name: Artifact(name, Location("/nowhere"), "f", {"facts": facts})
        for name, facts in {"target": target, "evaluation": evaluation}.items()
    }
    command = Evidence(Settings(), artifacts, Verdict(True, ())).serve_command("/heads/one")
    assert command.startswith(f"vllm serve {served} --dtype bfloat16 ")
    assert '"num_speculative_tokens": 5' in command
    assert " --tokenizer-mode hf " in command
    assert "chat-template" not in command


def test_the_command_has_the_switches_of_the_chat_template() -> None:
    facts = {
        "target": {"model": "lab/m", "path": "p", "revision": "c"},
        "evaluation": {"candidate": {"num_speculative_tokens": 5}},
    }
    artifacts = {name: Artifact(name, Location("/nowhere"), "f", {"facts": value}) for name, value in facts.items()}
    switches = {"enable_thinking": False, "tone": 'it\'s "plain"'}
    settings = Settings.model_validate({"target": {"chat_template_kwargs": switches}})
    words = shlex.split(Evidence(settings, artifacts, Verdict(True, ())).serve_command("."))
    assert json.loads(words[words.index("--default-chat-template-kwargs") + 1]) == switches
