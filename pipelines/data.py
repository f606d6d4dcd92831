#!/usr/bin/env python
"""The data stages: prompts, the target's answers, hidden states and the draft vocabulary."""

from pipelines.cli import guarded, pipeline_app
from pipelines.full import define_stages

app = pipeline_app(__doc__ or "", define_stages, last="vocabulary")

if __name__ == "__main__":
    guarded(app)
