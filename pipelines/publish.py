#!/usr/bin/env python
"""Gate, register and, if it is better beyond doubt, promote the head."""

from pipelines.cli import guarded, pipeline_app
from pipelines.full import define_stages

app = pipeline_app(__doc__ or "", define_stages, last="publish")

if __name__ == "__main__":
    guarded(app)
