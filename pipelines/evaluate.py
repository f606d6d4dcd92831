#!/usr/bin/env python
"""Measure the head on real vLLM, after whatever stage before it is not done yet."""

from pipelines.cli import guarded, pipeline_app
from pipelines.full import define_stages

app = pipeline_app(__doc__ or "", define_stages, last="speed")

if __name__ == "__main__":
    guarded(app)
