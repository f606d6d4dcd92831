"""The speed pass as tables: every point, and the K that pays at each concurrency."""

from collections.abc import Iterator, Mapping
from typing import Any

from components.publishing.tables import UNDEFINED, Table, estimate, number, text

OFF = "off"
UNLIMITED = "inf"
PERCENTILES = ("p50", "p95", "p99")


def speed_tables(speed: Mapping[str, Any] | None) -> Iterator[Table]:
    """What to serve with, every point by task, and the engines; nothing where speed was not measured."""
    if speed is None:
        return
    yield recommended_table(speed)
    for task in tasks_of(speed):
        yield points_table(speed, task)
    yield dynamic_table(speed)
    yield capacity_table(speed)


def tasks_of(speed: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(point["task"] for point in speed["points"]))


def recommended_table(speed: Mapping[str, Any]) -> Table:
    """A column a concurrency: the arm and K that gave the most tokens/s, or off where none gave more than plain decoding."""
    found = speed.get("recommended") or {}
    concurrencies = sorted({int(c) for by_concurrency in found.values() for c in by_concurrency})
    rows = [
        (task, *[_choice(by_concurrency.get(str(c))) for c in concurrencies]) for task, by_concurrency in found.items()
    ]
    return Table(
        "Recommended K by concurrency",
        ("task", *[f"c={c}" for c in concurrencies]),
        rows,
        "Gain in output tokens/s over plain decoding [95% interval]; off: no K was faster beyond doubt.",
    )


def points_table(speed: Mapping[str, Any], task: str) -> Table:
    """Every measured point of a task; an invalid one says why and has no figures."""
    plain = {_load(p): p["output_tokens_per_s"] for p in speed["points"] if p["task"] == task and is_plain(p)}
    rows = [_point(point, plain.get(_load(point))) for point in speed["points"] if point["task"] == task]
    return Table(
        f"Speed: {task}",
        ("arm", "K", "c", "rate", "tokens/s", "gain", "AL", "TTFT ms", "TPOT ms", "ITL ms", "done", "errors"),
        rows,
        "c: requests at once; rate: requests a second, inf: as soon as there is room. Times are p50 / p95 / p99. Gain: tokens/s against "
        "plain decoding at the same load.",
    )


def dynamic_table(speed: Mapping[str, Any]) -> Table:
    """vLLM's dynamic K against the arm's best single K over all loads."""
    rows = [(name, *_dynamic(found)) for name, found in (speed.get("dynamic") or {}).items()]
    return Table(
        "Dynamic K",
        ("arm", "schedule", "gain", "use it"),
        rows,
        "K by the number of running requests (num_speculative_tokens_per_batch_size); gain over the arm's best single K, all loads "
        "together [95% interval].",
    )


def capacity_table(speed: Mapping[str, Any]) -> Table:
    rows = []
    for name, arm in (speed.get("arms") or {}).items():
        for k, engine in arm.get("by_k", {"": arm}).items():
            rows.append((name, k, text(engine["kv_capacity_tokens"]), text(engine["preemptions"])))
    return Table("Engines of the speed pass", ("arm", "K", "KV capacity (tokens)", "preemptions"), rows)


def is_plain(point: Mapping[str, Any]) -> bool:
    """Whether nothing speculates at this point."""
    return point["num_speculative_tokens"] is None and point["invalid"] is None


def arm_label(point: Mapping[str, Any]) -> str:
    """`candidate K=3`; the arm alone where nothing speculates."""
    k = point["num_speculative_tokens"]
    return point["arm"] if k is None else f"{point['arm']} K={k}"


def _load(point: Mapping[str, Any]) -> tuple[int, str]:
    return point["concurrency"], str(point["request_rate"])


def _point(point: Mapping[str, Any], plain: float | None) -> tuple[str, ...]:
    k = OFF if point["num_speculative_tokens"] is None else str(point["num_speculative_tokens"])
    where = (point["arm"], k, str(point["concurrency"]), str(point["request_rate"]))
    if point["invalid"] is not None:
        return (*where, f"invalid: {point['invalid']}", *[UNDEFINED] * 5, str(point["completed"]), str(point["errors"]))
    rate = point["output_tokens_per_s"]
    gain = UNDEFINED if is_plain(point) else _gain(rate, plain, point.get("against_off"))
    times = [_times(point[key]) for key in ("ttft_ms", "tpot_ms", "itl_ms")]
    return (*where, number(rate, 1), gain, number(point["al"]), *times, str(point["completed"]), str(point["errors"]))


def _times(percentiles: Mapping[str, float | None] | None) -> str:
    if percentiles is None:
        return UNDEFINED
    return " / ".join(number(percentiles.get(p), 1) for p in PERCENTILES)


def _choice(choice: Mapping[str, Any] | None) -> str:
    if choice is None:
        return UNDEFINED
    if choice["num_speculative_tokens"] is None:
        return OFF
    return f"K={choice['num_speculative_tokens']} ({choice['arm']}) {estimate({**choice, 'estimate': choice['gain']}, change)}"


def _gain(rate: float, plain: float | None, ratio: Mapping[str, float] | None) -> str:
    """The measured one with its interval, else that of the two rates."""
    if ratio is not None:
        return estimate({key: value - 1 for key, value in ratio.items()}, change)
    return UNDEFINED if not plain else change(rate / plain - 1)


def _dynamic(found: Mapping[str, Any]) -> tuple[str, str, str]:
    if "refused" in found:
        return UNDEFINED, UNDEFINED, f"no: {found['refused']}"
    schedule = ", ".join(f"{first}-{last}: {'off' if k == 0 else f'K={k}'}" for first, last, k in found["schedule"])
    gain = UNDEFINED if found["gain"] is None else estimate({**found, "estimate": found["gain"]}, change)
    return schedule, f"{gain} (K={found['against']})", "yes" if found["wins"] else "no: not faster beyond doubt"


def change(value: float | None) -> str:
    """`+12.3%`."""
    return UNDEFINED if value is None else f"{value:+.1%}"
