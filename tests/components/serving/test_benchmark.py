"""The benchmark of the router's cost: its arithmetic, and what it refuses to take for a measurement."""

import asyncio

import httpx
import numpy as np
import pytest

from components.serving import benchmark
from components.serving.benchmark import summarize
from tests.components.serving.faulty import Faulty
from tests.components.serving.local import local_router, routing_to


def test_the_added_time_is_the_median_of_paired_rounds_with_its_interval():
    random = np.random.default_rng(0)
    weather = random.exponential(50, 400)  # what both ways share cancels
    cost = summarize("request", 1, weather, weather + 2 + random.normal(0, 0.1, 400), seed=0)
    assert cost.added_ms == pytest.approx(2, abs=0.03)
    assert cost.low_ms < cost.added_ms < cost.high_ms
    assert cost.high_ms - cost.low_ms < 0.05
    assert cost.rounds == 400


def test_a_stream_that_lost_its_chunks_is_no_measurement():
    async def time_one(address):
        async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
            return await benchmark.time_chunks(client, "", {"do": "good", "chunks": 3})

    with (
        local_router({"a": Faulty()}, routing_to("a")) as router,
        pytest.raises(RuntimeError, match="0 of 3"),
    ):
        asyncio.run(time_one(str(router.client.base_url)))
