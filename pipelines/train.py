#!/usr/bin/env python
"""Train the draft head, after whatever data stage is not done yet."""

from pipelines.cli import guarded, pipeline_app
from pipelines.full import define_stages

app = pipeline_app(__doc__ or "", define_stages, last="head")

if __name__ == "__main__":
    guarded(app)
