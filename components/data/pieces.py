"""Pieces of a part whose worker died: which rows are done, which ones may be to blame, what to try next.

All of it is told by the names of files in `_pieces/<part>/`, so any process goes on where another one ended:

    00008-00016.try-0      rows 8 to 15 were begun; it holds by whom, and what they are blamed for once they failed
    00008-00016.parquet    they are done, with their account
    00008-00009.draft      what there was of row 8 when it was last tried

A piece that was begun and not done is cut into `FAN_OUT`; a row alone is tried `max_attempts` times and then lost. So
every death narrows the search, and costs a part with one deadly row about log(rows) / log(`FAN_OUT`) + `max_attempts` of them.
A try without blame is judged by whoever finds it: a process that ended alone died of its rows; one that ended with its run, with
its node or for want of storage did not, and its try is forgotten.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import pyarrow as pa

from components.data.blame import Life
from components.data.parts import PartAccount, damage_named, open_part, part_writer, read_account
from components.data.verdict import SILENT_DEATH, Verdict
from components.storage import Location

PIECES = "_pieces"
FAN_OUT = 8
NAME = re.compile(r"(\d+)-(\d+)\.(parquet|try)(?:-(\d+))?")


class Pieces:
    """The state of one part, read once; one process at a time works on a part."""

    def __init__(
        self, output: Location, number: int, num_rows: int, max_attempts: int, life: Life, died: Callable[[Life], bool]
    ) -> None:
        """Reads what there is, and judges the tries that nobody has judged.

        Args:
            output: Of the stage.
            number: Of the part.
            num_rows: Of the part.
            max_attempts: Tries of a row alone.
            life: Who is at work now.
            died: Whether a process ended alone, while its run, its node and the storage went on.
        """
        self._folder = output.join(PIECES, str(number))
        self._rows = range(num_rows)
        self._max_attempts = max_attempts
        self._life = life
        self._done: set[range] = set()
        self._tries: defaultdict[range, list[int]] = defaultdict(list)
        """Numbers of the tries of each piece, ascending."""
        for found in map(NAME.match, self._folder.files()):
            if found:
                rows = range(int(found[1]), int(found[2]))
                if found[3] == "parquet":
                    self._done.add(rows)
                elif self._is_blamed(self._place(rows, f"try-{found[4]}"), died):
                    self._tries[rows] = sorted([*self._tries[rows], int(found[4])])

    def left(self) -> list[range]:
        """The pieces to try, the least suspicious first: never tried, and cut off a death the fewest times."""
        left = [rows for rows in self._leaves(self._rows) if rows not in self._done]
        return sorted(left, key=lambda rows: (len(self._tries[rows]), -len(rows), rows.start))

    def is_lost(self, rows: range) -> bool:
        """Whether this is a row that has had its tries."""
        return len(rows) == 1 and len(self._tries[rows]) >= self._max_attempts

    def begin(self, rows: range) -> None:
        """Note that these rows are being tried; if the process ends now, they are what ended it."""
        self._tries[rows].append(max(self._tries[rows], default=-1) + 1)
        self._last_try(rows).write_bytes(_line(self._life))

    def end(self, rows: range) -> None:
        """Note that their file is written."""
        self._done.add(rows)

    def fail(self, rows: range, verdict: Verdict) -> None:
        """Note that it is these rows that failed, and why."""
        self._last_try(rows).write_bytes(_line(self._life, verdict))

    def verdict(self, rows: range) -> Verdict:
        """Why these rows last failed."""
        _, verdict = _read(self._last_try(rows))
        return verdict or SILENT_DEATH

    def file(self, rows: range) -> Location:
        return self._place(rows, "parquet")

    def draft(self, rows: range) -> Location | None:
        """Where the beginning of a row that may turn out to be deadly is kept; None for several rows."""
        return self._place(rows, "draft") if len(rows) == 1 else None

    def join(self, part: Location, schema: pa.Schema) -> None:
        """Make the part of its pieces, in the order of its rows and with the sum of their accounts, and forget them."""
        account = PartAccount()
        with part_writer(part, schema, account) as writer:
            for file in map(self.file, self._leaves(self._rows)):
                account.add(read_account(file))
                for table in _row_groups(file):
                    writer.write_table(table)
        self._folder.delete()

    def _leaves(self, rows: range) -> Iterator[range]:
        """The cut so far, in the order of the rows."""
        if rows in self._done or len(rows) == 1 or (len(rows) > 1 and not self._tries[rows]):
            yield rows
            return
        step = -(-len(rows) // FAN_OUT)
        for start in range(rows.start, rows.stop, step or 1):
            yield from self._leaves(range(start, min(start + step, rows.stop)))

    def _is_blamed(self, tried: Location, died: Callable[[Life], bool]) -> bool:
        """Whether the rows of a try are what ended it; says so for good, or forgets the try."""
        life, verdict = _read(tried)
        if verdict is None and died(life):
            verdict = SILENT_DEATH
            tried.write_bytes(_line(life, verdict))
        if verdict is None:
            tried.delete()
        return verdict is not None

    def _last_try(self, rows: range) -> Location:
        return self._place(rows, f"try-{self._tries[rows][-1]}")

    def _place(self, rows: range, kind: str) -> Location:
        return self._folder.join(f"{rows.start:05d}-{rows.stop:05d}.{kind}")


def parts_in_pieces(names: list[str]) -> set[int]:
    """Numbers of the parts that an earlier run left in pieces, from the names of all files of an output."""
    return {int(name.split("/")[1]) for name in names if name.startswith(f"{PIECES}/")}


def _line(life: Life, verdict: Verdict | None = None) -> bytes:
    return json.dumps({"life": life, "verdict": verdict}).encode()


def _read(tried: Location) -> tuple[Life, Verdict | None]:
    stored = json.loads(tried.read_bytes())
    return Life(*stored["life"]), Verdict(*stored["verdict"]) if stored["verdict"] else None


def _row_groups(file: Location) -> Iterator[pa.Table]:
    with open_part(file) as parquet, damage_named(file, None, "cannot be read"):
        for index in range(parquet.num_row_groups):
            yield parquet.read_row_group(index)
