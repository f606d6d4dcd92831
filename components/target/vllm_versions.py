"""The vLLM that this project was tested with."""

TESTED_VLLM = "0.32.0"


def warn_if_untested(installed: str) -> str | None:
    """The warning to print when another vLLM is installed, naming both versions; None for the tested one.

    Local parts (`0.32.0+cpu`) do not count.
    """
    if installed.partition("+")[0] == TESTED_VLLM:
        return None
    return (
        f"vLLM {installed} is installed; this project was tested with vLLM {TESTED_VLLM}: "
        "head layout, metrics and acceptance may differ"
    )
