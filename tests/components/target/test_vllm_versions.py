import pytest

from components.target.vllm_versions import TESTED_VLLM, warn_if_untested


@pytest.mark.parametrize("installed", [TESTED_VLLM, f"{TESTED_VLLM}+cpu"])
def test_tested_version_is_silent(installed: str) -> None:
    assert warn_if_untested(installed) is None


@pytest.mark.parametrize("installed", ["0.31.0", "0.32.1", "0.33.0rc1+cu130"])
def test_warning_names_both_versions(installed: str) -> None:
    warning = warn_if_untested(installed)
    assert warning is not None
    assert installed in warning
    assert TESTED_VLLM in warning
