#!/usr/bin/env python
"""Print docs/targets.md: which targets can be given a head, read from the code that refuses the others."""

from collections.abc import Iterable, Sequence

from components.target.refusals import ACCEPTED, OTHER_TARGET, RULES, Rule
from components.target.template_check import FAULTS, FIXES, OTHER_FIX
from components.target.vllm_versions import TESTED_VLLM

HEAD = """# Targets

*Written by `make docs` from `components/target/`; a test fails when the two differ.*

A target is judged before anything expensive: its `config.json` before the rest is downloaded, its chat template before the weights.
What is refused ends with exit code 2 and one line that names `target.model`, the reason and what to do.
"""

ACCEPTED_TEXT = f"""## Accepted

vLLM {TESTED_VLLM} must hand the target's hidden states to a draft head (its class implements `SupportsEagle3`), and transformers
must record the same states. For every architecture below the tests make a tiny random target and compare, in transformers: documents that
are packed into one pass with each document alone, and `lm_head(norm(hidden))` with the logits. Whole runs on vLLM are tested with Llama.
"""

REFUSED_TEXT = """## Refused

The first line that applies is the one that is named.
"""

QUANTISED_TEXT = """### What a quantised target would need

With `data.extractor: vllm` the states come from the weights that are served, quantised or not; the refusal is about what transformers runs or reads
beside that. Targets stored with compressed-tensors or as fp8 could be taken when

- the rule knows the extractor: it sees the target's config alone, and would pass such a target with `vllm` only;
- `teacher_weights` (`components/target/layers.py`) reads them: norm, embedding and lm_head that the checkpoint leaves in bfloat16 or float16, as most do, are read already;
  quantised ones would be multiplied with their scales where they are refused now;
- preflight and walked AL (`components/evaluation/tasks.py`) do without the target in transformers: they would take states that vLLM recorded;
- the states are tested against transformers with the weights multiplied out, as the parity of the two extractors has no second side there.
"""

TEMPLATE_TEXT = """## Chat templates

The target answers every user turn itself. What an engine was given and what it generated are kept as token ids, and the loss mask
marks the generated ones: never the text that is tokenised again, never what a template writes. The end token is supervised where it was
generated. Turns of a conversation become one document only where the next prompt's ids begin with all ids so far; where the template
strips a thought or moves the system turn, each turn is a document of its own. `{% generation %}` marks are neither needed nor read.

That is right only where a prompt ends in the opening of the assistant's turn and an answer ends in a token at which the engine stops. Both
are tried on probe conversations, and a template is refused that
"""

SWITCHES_TEXT = """A system turn, tools or a question that the template rejects or hides cost that row only (see `quarantine.jsonl`).

## Switches of the template

`target.chat_template_kwargs` holds them, for example `--set target.chat_template_kwargs.enable_thinking=false`, or
`date_string` for a template that writes today's date. They are the same for answering, for evaluation (which asks with the recorded ids),
for every arm behind the endpoint (a request's own `chat_template_kwargs` go before them) and in the command of the bundle's card. A switch
that the template does not read is refused.
"""


def page() -> str:
    accepted = table(["architecture", "kind"], ((f"`{name}`", kind) for name, kind in ACCEPTED.items()))
    refused = table(
        ["kind", "shown by", "a target of this kind", "do"], ((r.kind, r.sign, r.reason, _instead(r)) for r in RULES)
    )
    faults = table(["that", "do"], ((text, FIXES.get(name, OTHER_FIX)) for name, text in FAULTS.items()))
    parts = [HEAD, ACCEPTED_TEXT, accepted, REFUSED_TEXT, refused, QUANTISED_TEXT, TEMPLATE_TEXT, faults, SWITCHES_TEXT]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _instead(rule: Rule) -> str:
    return "choose another target" if rule.fix == OTHER_TARGET else rule.fix


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
