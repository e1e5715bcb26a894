"""Room of one receiver, with a clock held by hand."""

from math import inf

from mainspring.engine.flow import Flow, FlowLimit, FlowOptions, Why
from mainspring.model.clock import ManualClock
from mainspring.model.flow import Breaker, BreakerPolicy, Limit, Rate
from mainspring.model.lane import HoldRecord, Pause, Pauses, Scope
from mainspring.roles import Loops
from mainspring.store.limits import Granted

MOST = 800


def make_flow(options: FlowOptions | None = None, most: int = MOST) -> tuple[Flow, ManualClock, Loops]:
    clock, loops = ManualClock(), Loops(1.0)
    return Flow(options or FlowOptions(), clock, loops, {}, concurrency=most), clock, loops


def closed(made: Flow) -> bool:
    """Does it hold up anybody?"""
    return made.closed


def admitted(made: Flow, target: str, wanted: int = 1) -> tuple[int, str]:
    return made.admit(target, None, wanted)


# -- the slow -----------------------------------------------------------------------------------------------------


def test_a_receiver_that_does_not_answer_gets_a_small_share() -> None:
    made, clock, _ = make_flow()
    assert made.free(0) == 600, "a quarter is kept free"
    made.left("http://slow.example/", 600)
    assert made.free(600) == 0
    for _ in range(2):
        made.look()
        clock.advance(seconds=1)
    made.look()
    assert admitted(made, "http://slow.example/other", 3) == (0, "valve:http://slow.example")
    assert admitted(made, "http://fast.example/", 3) == (3, "")
    assert made.free(600) == 150, "three quarters of what is left: the next may be slow as well"
    assert made.why("valve:http://slow.example").code == "slow"


def test_a_quick_receiver_with_much_under_way_is_not_slow() -> None:
    made, clock, _ = make_flow()
    made.left("kafka:ticks", 600)
    for _ in range(5):
        made.landed("kafka:ticks", 500, 500, 0)
        made.left("kafka:ticks", 500)
        made.look()
        clock.advance(seconds=1)
    assert not closed(made)


def test_a_receiver_that_becomes_quick_again_is_no_longer_slow() -> None:
    made, clock, loops = make_flow()
    made.left("kafka:ticks", 600)
    for _ in range(3):
        made.look()
        clock.advance(seconds=1)
    assert closed(made)
    made.landed("kafka:ticks", 590, 590, 0)
    made.look()
    assert not closed(made)
    assert loops.fire._wake.is_set(), "what was held may go on"


def test_a_node_with_little_room_does_not_divide_it() -> None:
    made, clock, _ = make_flow(most=10)
    assert made.free(0) == 10
    made.left("kafka:ticks", 10)
    for _ in range(4):
        made.look()
        clock.advance(seconds=5)
    assert not closed(made)


# -- breaker, limits ------------------------------------------------------------------------------------------------


def test_only_failures_that_say_that_the_receiver_is_not_well_open_its_breaker() -> None:
    made, _, _ = make_flow(FlowOptions(BreakerPolicy(min_calls=10)))
    made.left("http://a.example/", 100)
    made.landed("http://a.example/", 100, done=0, failed=0)  # dead letters, put off: neither well nor ill
    assert not closed(made)
    made.left("http://a.example/x", 10)
    made.landed("http://a.example/x", 10, done=0, failed=10)
    assert closed(made)
    assert admitted(made, "http://a.example/y") == (0, "valve:http://a.example")
    assert admitted(made, "https://a.example/y") == (1, ""), "another port, another server"


def test_queues_have_no_breaker_and_named_targets_may_have_their_own() -> None:
    never, soon = BreakerPolicy(off=True), BreakerPolicy(min_calls=1)
    made, _, _ = make_flow(FlowOptions(never, {"target:shop": soon}))
    made.landed("queue:mail/send", 10, 0, 10)
    made.landed("http://a.example/", 10, 0, 10)
    assert not closed(made)
    made.landed("target:shop", 1, 0, 1)
    assert closed(made)


def test_receivers_that_are_idle_are_forgotten() -> None:
    made, _, _ = make_flow()
    for number in range(5_000):
        made.left(f"http://host-{number}.example/", 1)
        made.landed(f"http://host-{number}.example/", 1, 1, 0)
    assert len(made._flow_limits) <= 2_048


def test_permits_are_used_up_and_asked_for() -> None:
    made, clock, loops = make_flow(FlowOptions(limits={"target:shop": Limit(Rate(100))}))
    assert admitted(made, "target:shop") == (0, "valve:target:shop")
    assert loops.permit._wake.is_set()
    [flow_limit] = made.bounded
    assert flow_limit.want() == 10, "a tenth of a second's worth"
    assert flow_limit.granted(10, Granted(2, 10, 100), clock.now_ms())
    assert admitted(made, "target:shop", 3) == (2, "valve:target:shop")


def test_slots_in_use_are_not_given_twice() -> None:
    flow_limit = FlowLimit("target:shop", None, Limit(concurrency=3))
    assert flow_limit.room(0, MOST) == 0
    assert flow_limit.want() == 3
    flow_limit.granted(3, Granted(3, 3, 0), 0)
    for left in (3, 2, 1, 0):
        assert flow_limit.room(0, MOST) == left
        flow_limit.take(1, 0)
    flow_limit.in_flight, flow_limit.reserved = 3, 0
    assert flow_limit.room(0, MOST) == 0
    flow_limit.landed(2)
    assert flow_limit.room(0, MOST) == 2
    flow_limit.granted(0, Granted(0, 1, 50), 0)
    assert flow_limit.room(0, MOST) == 0, "others want their share"


def test_a_permit_in_hand_does_not_keep_it_from_asking_for_a_slot() -> None:
    flow_limit = FlowLimit("target:shop", None, Limit(Rate(2), concurrency=1))
    assert flow_limit.room(0, MOST) == 0
    flow_limit.granted(flow_limit.want(), Granted(1, 1, 0), 0)
    assert flow_limit.room(0, MOST) == 1
    flow_limit.granted(0, Granted(0, 0, 0), 0)  # no task came: the slot is given back, the permit stays
    assert flow_limit.room(0, MOST) == 0
    assert (flow_limit.starved, flow_limit.want(), flow_limit.permits) == (True, 1, 1)
    flow_limit.granted(1, Granted(0, 0, 50), 0)
    assert flow_limit.starved, "others have it"
    flow_limit.granted(1, Granted(0, 1, 0), 0)
    assert (flow_limit.starved, flow_limit.room(0, MOST)) == (False, 1)


def test_only_as_many_lanes_are_reopened_as_there_is_room() -> None:
    made, _, _ = make_flow(FlowOptions(limits={"target:shop": Limit(Rate(100))}))
    [flow_limit] = made.bounded
    flow_limit.permits = 2
    assert [made.may_open(flow_limit.key) for _ in range(3)] == [True, True, False]
    made.tick()
    assert made.may_open(flow_limit.key)
    assert made.may_open("valve:unknown"), "nothing holds these up any more"


def test_tasks_that_a_former_owner_held_by_a_breaker_are_probed_first() -> None:
    made, clock, _ = make_flow(FlowOptions(BreakerPolicy(probes=2), limits={"target:shop": Limit(Rate(100))}))
    made.inherited(HoldRecord("valve:target:shop", "valve:target:shop", 1, code="rate-limited"))
    made.inherited(HoldRecord("pause:all", "pause:all", 1))
    made.inherited(HoldRecord("valve:queue:mail", "valve:queue:mail", 1, code="breaker"))
    assert [one.receiver for one in made.bounded] == ["target:shop"], "nothing is known against any of these"
    made.inherited(HoldRecord("lane:a", "valve:http://a.example", 1, code="breaker"))
    assert made.room("valve:http://a.example") == 2
    assert admitted(made, "http://a.example/", 3) == (2, "valve:http://a.example")
    made.landed("http://a.example/", 2, done=2, failed=0)
    assert made.room("valve:http://a.example") == 0, "and then it goes out at a growing rate"
    clock.advance(seconds=31)
    assert made.room("valve:http://a.example") == 1 << 30
    made.look()
    assert made.room("valve:http://a.example") == inf


def test_an_open_breaker_says_so_until_it_has_closed() -> None:
    flow_limit = FlowLimit("http://a.example", Breaker(BreakerPolicy(min_calls=1, probes=1, ramp_ms=1_000)), Limit())
    breaker = flow_limit.breaker
    assert breaker is not None
    breaker.record(0, 1, 1_000)
    since = "the circuit breaker of http://a.example has been open since 1970-01-01T00:00:01.000Z"
    assert flow_limit.why() == Why(f"{since}, and it is probed until it responds", "", 6_000, "breaker")
    assert flow_limit.room(6_000, MOST) == 1
    flow_limit.take(1, 6_000)
    assert flow_limit.why() == Why(f"{since}, and probes are in flight", code="breaker")
    breaker.record(1, 0, 6_010)
    assert "growing rate" in flow_limit.why().reason
    flow_limit.room(7_010, MOST)
    assert not flow_limit.bounded


def test_permits_of_those_that_did_not_leave_after_all_are_for_others() -> None:
    made, clock, _ = make_flow(FlowOptions(limits={"queue:mail": Limit(Rate(10))}))
    flow_limit = made.of("queue:mail")
    flow_limit.granted(2, Granted(2, 0, 0), clock.now_ms())
    assert admitted(made, "queue:mail/send", 3) == (2, flow_limit.key)
    made.begun("queue:mail/send", 1)
    made.tick()
    assert flow_limit.permits == 1, "one has begun, the other was over by then, or was taken back"


def test_overdue_tasks_need_room_from_the_catch_up_rate_and_their_receiver() -> None:
    limits = {"target:shop": Limit(Rate(100))}
    made, _, _ = make_flow(FlowOptions(limits=limits, catch_up=Rate(100)))
    [shop, catch_up] = made.bounded
    shop.permits, catch_up.permits = 5, 3
    assert made.admit("target:shop", None, 10, overdue=True) == (3, catch_up.key)
    assert (shop.permits, catch_up.permits) == (2, 0), "none is used up by a task that stays"
    assert made.admit("target:shop", None, 10) == (2, shop.key)
    assert made.admit("log:", None, 10) == (10, ""), "on time, and without a limit of its own"
    assert made.admit("log:", None, 10, overdue=True) == (0, catch_up.key)


def test_a_pause_goes_before_every_limit_and_uses_up_no_permit() -> None:
    made, clock, _ = make_flow(FlowOptions(limits={"target:shop": Limit(Rate(100))}))
    [shop] = made.bounded
    shop.permits = 5
    made.pauses = Pauses([Pause(Scope("lane", "a"))], clock.now_ms())
    assert made.admit("target:shop", "a", 3) == (0, "pause:lane a")
    assert (made.room("pause:lane a"), made.room("pause:lane b")) == (0, inf)
    assert made.admit("target:shop", "b", 3) == (3, "")
    assert shop.permits == 2
