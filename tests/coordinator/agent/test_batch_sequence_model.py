"""The order of an engine's batches, whatever happens between engine and reader. No sockets: the network is a list."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordinator.agent.batch_sequence import BatchSequence, Item, Lost, Received, Restarted
from coordinator.agent.kv_events import Batch

FATES = ["arrives", "arrives", "arrives", "is dropped", "comes twice", "comes late", "comes again later"]
EVENTS = st.lists(st.sampled_from([*FATES, "idle"]), max_size=40)
LIVES = st.lists(EVENTS, min_size=1, max_size=4)


@dataclass
class World:
    """An engine, the network to a sequence, and the items that come out. Hypothesis draws the order of arrivals and
    reads."""

    draw: st.DataObject
    ring: int
    replies: str = "all"
    """Replays are complete ("all"), "with holes" in the middle, "cut" at any point, or absent ("none")."""
    sequence: BatchSequence = field(default_factory=BatchSequence)
    items: list[Item] = field(default_factory=list)
    lives: list[list[Batch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.way: deque[tuple[int, int]] = deque()
        self.late: deque[tuple[int, int]] = deque()
        self.answers: deque[int | None] | None = None
        self.connected_to = 0

    def live(self, events: list[str], clock: float) -> None:
        """One life of the engine."""
        self.lives.append([])
        self.answers = deque([None]) if self.answers is not None else None  # the replay that was under way is cut
        self.late.clear()
        for event in events:
            if event == "idle":
                self.settle()
            else:
                self.publish(event, clock)
                if self.draw.draw(st.booleans()):
                    self.step()

    def publish(self, fate: str, clock: float) -> None:
        life, seq = len(self.lives) - 1, len(self.lives[-1])
        self.lives[-1].append(Batch(clock + seq, []))
        copies = {"is dropped": 0, "comes late": 0, "comes twice": 2}.get(fate, 1)
        self.way.extend([(life, seq)] * copies)
        if fate == "arrives" and self.late:
            self.way.append(self.late.popleft())
        if fate in {"comes late", "comes again later"}:
            self.late.append((life, seq))

    def settle(self) -> None:
        """Everything on the network arrives, and the feed becomes idle."""
        while self.way or self.late or self.answers is not None or self.sequence.asking:
            self.step()
        self.ask()
        while self.answers is not None or self.sequence.asking:
            self.step()

    def have_answers(self) -> None:
        """Waits for the replay. Otherwise an engine dies during a replay, and held batches may belong to any life."""
        while self.lives and (self.answers is not None or self.sequence.asking):
            self.step()

    def step(self) -> None:
        self.way.extend(self.late if not self.way else ())
        if self.way and self.late and self.way[-1] == self.late[-1]:
            self.late.clear()
        can_read = bool(self.way) and not self.sequence.holding
        if self.sequence.asking:
            self.ask()
        elif self.answers is not None and not (can_read and self.draw.draw(st.booleans())):
            self.take_answer()
        elif can_read:
            life, seq = self.way.popleft()
            reconnected, self.connected_to = life > self.connected_to, max(life, self.connected_to)
            self.items += self.sequence.live(seq, self.lives[life][seq], reconnected=reconnected)

    def ask(self) -> None:
        start_seq = self.sequence.ask()
        published = len(self.lives[-1])
        answer: list[int | None] = [*range(max(start_seq, published - self.ring), published)]
        if self.replies == "with holes" and len(answer) > 3:
            left_out = self.draw.draw(st.sets(st.integers(2, len(answer) - 2), max_size=3))
            answer = [seq for place, seq in enumerate(answer) if place not in left_out]
        if self.replies == "cut":
            answer = answer[: self.draw.draw(st.integers(0, len(answer)))]
        self.answers = deque([] if self.replies == "none" else answer)
        self.answers.append(None if self.replies in {"cut", "none"} else -1)

    def take_answer(self) -> None:
        assert self.answers is not None
        seq = self.answers.popleft()
        if seq is None or seq == -1:
            self.answers = None
            items = self.sequence.ended(complete=seq == -1)
        else:
            items = self.sequence.replayed(seq, self.lives[-1][seq])
        if Restarted() in items and seq is not None:
            self.way.clear()  # the feed subscribes again
            self.late.clear()
        self.items += items

    def segments(self) -> list[list[Item]]:
        """The items between restarts, one list per life."""
        found: list[list[Item]] = [[]]
        for item in self.items:
            if isinstance(item, Restarted):
                found.append([])
            else:
                found[-1].append(item)
        return found


def bounds(item: Item) -> tuple[int, int]:
    if isinstance(item, Received):
        return item.seq, item.seq + 1
    assert isinstance(item, Lost)
    return item.first_seq, item.next_seq


def assert_tiles(items: list[Item], upto_seq: int | None = None) -> None:
    """Each number from 0 on is in exactly one item, in order."""
    limits = [bounds(item) for item in items]
    assert all(first < after for first, after in limits)
    assert all(before[1] == after[0] for before, after in pairwise([(0, 0), *limits]))
    assert upto_seq is None or (limits[-1][1] if limits else 0) == upto_seq


@given(EVENTS, st.data(), st.sampled_from(["all", "with holes"]))
def test_with_a_large_ring_everything_published_is_delivered_once_and_in_order(
    events: list[str], draw: st.DataObject, replies: str
) -> None:
    world = World(draw, ring=1000, replies=replies)
    world.live(events, clock=1.0)
    world.settle()
    world.replies = "all"
    world.settle()
    assert world.items == [Received(seq, published) for seq, published in enumerate(world.lives[0])]


@given(EVENTS, st.data(), st.integers(1, 5), st.sampled_from(["all", "with holes", "cut", "none"]))
def test_with_a_small_ring_each_batch_is_delivered_or_lost_exactly_once_and_in_order(
    events: list[str], draw: st.DataObject, ring: int, replies: str
) -> None:
    world = World(draw, ring, replies)
    world.live(events, clock=1.0)
    world.settle()
    world.replies = "all"
    world.settle()
    assert_tiles(world.items, upto_seq=len(world.lives[0]))
    assert all(item.batch == world.lives[0][item.seq] for item in world.items if isinstance(item, Received))


@given(LIVES, st.data(), st.sampled_from(["all", "with holes"]), st.booleans())
def test_each_life_is_told_apart_from_the_one_before_whatever_its_clock(
    lives: list[list[str]], draw: st.DataObject, replies: str, is_clock_set_back: bool
) -> None:
    world = World(draw, ring=1000, replies=replies)
    for number, events in enumerate(lives):
        world.have_answers()
        if is_clock_set_back:  # then only a batch that was received in each life can reveal the restart
            world.live(["arrives", "idle", *events], clock=-1000.5 * number)
        else:
            world.live(events, clock=1000.5 * number)
    world.replies = "all"
    world.settle()
    world.settle()
    lived = 0
    for segment in world.segments():
        assert_tiles(segment)
        batches = [item.batch for item in segment if isinstance(item, Received)]
        if batches:
            lived = next(life for life in range(lived, len(lives)) if batches[0] in world.lives[life])
            assert all(each in world.lives[lived] for each in batches)
    assert world.segments()[-1] == [Received(seq, each) for seq, each in enumerate(world.lives[-1])]


@given(LIVES, st.data(), st.integers(1, 3), st.sampled_from(["all", "with holes", "cut", "none"]))
def test_whatever_happens_each_number_of_a_life_is_told_once_and_in_order(
    lives: list[list[str]], draw: st.DataObject, ring: int, replies: str
) -> None:
    world = World(draw, ring, replies)
    for number, events in enumerate(lives):
        world.live(events, clock=1000.5 * number)
    world.settle()
    for segment in world.segments():
        assert_tiles(segment)
