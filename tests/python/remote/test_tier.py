"""A remote that fails is tried again a little, then left alone, then asked once more."""

from __future__ import annotations

import logging

import pytest
from eagercache.remote.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker
from eagercache.remote.place import Denied, PlaceError, TooLarge
from eagercache.remote.tier import ATTEMPTS, LONGEST_DELAY, Tier

pytestmark = pytest.mark.once


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A place that answers what it is told, one after the other; the last for ever."""

    def __init__(self, *answers: bytes | Exception | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def size(self, name: str, seconds: float) -> int | None:
        raise NotImplementedError

    def put(self, name: str, content: bytes, seconds: float) -> None:
        self.get(name, 0, seconds)


def tier_of(place: Scripted, clock: Clock | None = None, slept: list[float] | None = None) -> Tier:
    slept = slept if slept is not None else []
    return Tier(
        "http://me:secret@host/cache",
        place=place,
        sleep=slept.append,
        breaker=Breaker(clock or Clock()),
    )


def test_trouble_that_passes_is_tried_again_after_a_delay_that_grows() -> None:
    slept: list[float] = []
    busy = PlaceError("503", retry_after=0.1)
    place = Scripted(busy, busy, b"answer")
    assert tier_of(place, slept=slept).get("name", 10) == b"answer"
    assert place.asked == ATTEMPTS == 3
    assert 0.05 <= slept[0] <= 0.15 and 0.1 <= slept[1] <= 0.3
    assert all(delay <= LONGEST_DELAY for delay in slept)


@pytest.mark.parametrize("wish", [None, 60.0])
def test_what_hangs_or_wants_to_be_left_alone_is_not_tried_again(wish: float | None) -> None:
    place = Scripted(PlaceError("no", retry_after=wish))
    with pytest.raises(PlaceError):
        tier_of(place).get("name", 10)
    assert place.asked == 1


def test_a_silent_remote_is_left_alone_and_asked_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, place = Clock(), Scripted(PlaceError("silence"))
    tier = tier_of(place, clock)
    with caplog.at_level(logging.WARNING, "eagercache"):
        for _ in range(FAILURES + 5):
            with pytest.raises(PlaceError):
                tier.get("name", 10)
    assert place.asked == FAILURES
    assert [r.getMessage().split()[0] for r in caplog.records] == ["event=remote_silent"]
    assert "secret" not in caplog.text

    clock.now += FIRST_PAUSE + 1
    for _ in range(3):  # one is let through; its failure doubles the pause
        with pytest.raises(PlaceError):
            tier.get("name", 10)
    assert place.asked == FAILURES + 1
    clock.now += FIRST_PAUSE + 1
    with pytest.raises(PlaceError):
        tier.get("name", 10)
    assert place.asked == FAILURES + 1

    place.answers = [b"answer"]
    clock.now += FIRST_PAUSE
    assert [tier.get("name", 10) for _ in range(3)] == [b"answer"] * 3


def test_the_pause_has_an_end() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(30):
        assert breaker.allows()
        breaker.failed()
        clock.now += LONGEST_PAUSE + 1
    assert breaker.allows()


def test_only_one_request_tries_a_remote_that_was_silent() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        assert breaker.allows()
        breaker.failed()
    clock.now += FIRST_PAUSE + 1
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()


@pytest.mark.parametrize("answer", [Denied("403"), TooLarge("1000 bytes")])
def test_a_refusal_is_an_answer(answer: PlaceError) -> None:
    place = Scripted(answer)
    tier = tier_of(place)
    for _ in range(FAILURES + 3):
        with pytest.raises(type(answer)):
            tier.get("name", 10)
    assert place.asked == FAILURES + 3
    assert tier.writable


def test_a_remote_that_takes_nothing_is_only_read() -> None:
    tier = tier_of(Scripted(Denied("405"), b"answer"))
    with pytest.raises(Denied):
        tier.put("name", b"bytes")
    assert not tier.writable and tier.bytes_sent == 0
    assert tier.get("name", 10) == b"answer" and tier.bytes_read == len(b"answer")
