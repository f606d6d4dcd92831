"""The router's figures in Prometheus' text format, a label an arm. Sums only: shares are made where they are read."""

from collections.abc import Iterable
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from components.serving.meter import Meter

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TPOT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)


NO_ARM = "no_arm"
"""Code of a request that came while no arm took it."""
OVERLOADED = "overloaded"
"""Code of a request that came while too many were here."""


class Outcome(Enum):
    ANSWERED = "answered"
    REFUSED = "refused"
    """By the arm, for the client's mistake."""
    LEFT = "left"
    """By the client, before the end."""
    FAILED = "failed"
    """By the arm's fault, an empty answer included."""


class Metrics:
    """Counters since this router process began: they start at 0 with a new one, as Prometheus' `rate` expects."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"aerie_{name}", text, ["arm", *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"aerie_{name}", text, ["arm"], registry=registry)

        self._requests = counter("requests", "Requests that ended, without shadows' copies.")
        self._errors = counter("errors", "Requests that failed by the arm's fault, empty answers included.", "code")
        self._refused = counter("refused", "Requests that the arm refused as the client's mistake.")
        self._left = counter("client_closed", "Requests whose client left before the end.")
        self._rejected = Counter("aerie_rejected", "Requests that no arm was asked for.", ["code"], registry=registry)
        for code in (NO_ARM, OVERLOADED):
            self._rejected.labels(code)  # a rate needs the zero
        self._shadowed = counter("shadow_requests", "Copies that a shadow took, however they ended.")
        self._shadow_errors = counter("shadow_errors", "Copies that the shadow refused, or failed at.", "code")
        self._dropped = counter("shadow_dropped", "Copies that a shadow could not take: it was too busy, or out.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._output = counter("output_tokens", "Output tokens of answered requests.")
        self._rounds = counter(
            "rounds", "Verification rounds that had a proposal. AL = 1 + accepted / rounds, of sums."
        )
        self._drafted = counter("drafted_tokens", "Draft tokens proposed.")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter("accepted_at", "Rounds that accepted at least `position` draft tokens.", "position")
        self._ttft = Histogram(
            "aerie_ttft_seconds", "Streams: until the first text.", ["arm"], buckets=TTFT_BUCKETS_S, registry=registry
        )
        self._tpot = Histogram(
            "aerie_tpot_seconds",
            "Streams: mean time of a token after the first.",
            ["arm"],
            buckets=TPOT_BUCKETS_S,
            registry=registry,
        )
        self.weight = gauge("arm_weight", "Weight of an arm that takes new sessions, else 0.")
        self.ejected = gauge("arm_ejected", "1 while the arm is out because it failed.")
        self.running = gauge("arm_running", "Requests that run now, shadows' copies included.")
        self._info = Gauge(
            "aerie_arm_info", "1; the arm's head and state.", ["arm", "head", "state"], registry=registry
        )
        self.lost = Counter("aerie_records_lost", "Live records that could not be written.", registry=registry)
        self._epoch = Gauge("aerie_weight_epoch", "Changes with every change of arms or weights.", registry=registry)

    def set_arms(self, arms: Iterable[tuple[str, str, str, float]], epoch: int) -> None:
        """(name, head, state, weight) of every arm. All counters of an arm exist from here on, at 0."""
        self._epoch.set(epoch)
        self._info.clear()
        for gauge in (self.weight, self.ejected, self.running):
            gauge.clear()
        for name, head, state, weight in arms:
            self._info.labels(name, head, state).set(1)
            self.weight.labels(name).set(weight)
            for plain in self._plain:
                plain.labels(name)

    def ended(self, arm: str, meter: Meter, outcome: Outcome, code: str | None, shadow: bool) -> None:
        """One request's end. A shadow's drafts and times count as any arm's, its failures apart: nobody sees them."""
        if shadow:
            self._count_copy(arm, outcome, code)
        else:
            self._count_request(arm, outcome, code)
        if meter.ttft_s is not None:
            self._ttft.labels(arm).observe(meter.ttft_s)
        if meter.tpot_s is not None:
            self._tpot.labels(arm).observe(meter.tpot_s)
        self._count_tokens(arm, meter)

    def rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def dropped(self, arm: str) -> None:
        self._dropped.labels(arm).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @property
    def _plain(self) -> list[Counter]:
        counts = [self._requests, self._refused, self._left, self._shadowed, self._dropped, self._prompt, self._output]
        return [*counts, self._rounds, self._drafted, self._accepted]

    def _count_copy(self, arm: str, outcome: Outcome, code: str | None) -> None:
        self._shadowed.labels(arm).inc()
        if outcome in (Outcome.FAILED, Outcome.REFUSED):
            self._shadow_errors.labels(arm, code).inc()

    def _count_request(self, arm: str, outcome: Outcome, code: str | None) -> None:
        self._requests.labels(arm).inc()
        if outcome == Outcome.FAILED:
            self._errors.labels(arm, code).inc()
        elif outcome == Outcome.REFUSED:
            self._refused.labels(arm).inc()
        elif outcome == Outcome.LEFT:
            self._left.labels(arm).inc()

    def _count_tokens(self, arm: str, meter: Meter) -> None:
        self._prompt.labels(arm).inc(meter.usage.get("prompt_tokens") or 0)
        self._output.labels(arm).inc(meter.output_tokens)
        self._rounds.labels(arm).inc(meter.speculation.get("num_spec_steps") or 0)
        self._drafted.labels(arm).inc(meter.speculation.get("num_draft_tokens") or 0)
        self._accepted.labels(arm).inc(meter.speculation.get("num_accepted_draft_tokens") or 0)
        for position, rounds in enumerate(meter.accepted_at, start=1):
            self._accepted_at.labels(arm, str(position)).inc(rounds)
